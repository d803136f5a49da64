/* The building blocks of Hopper's GEMM, one small function each: barriers in shared memory, the tensor copy engine,
   wgmma, clusters. Shared memory is addressed by 32-bit addresses, so that all access to it goes through here.

   PTX's words: an mbarrier has a phase, a count of arrivals and of bytes that the current phase still waits for. When
   both are zero the phase is complete, its parity flips, and the next one begins. */
#pragma once
#include "instructions.cuh"

typedef unsigned long long u64;

/* An opaque CUtensorMap: see tensor_map.py. */
struct alignas(64) TensorMap {
    u8 bytes[128];
};

__device__ __forceinline__ u32 shared_address() {
    extern __shared__ __align__(1024) u8 dynamic_shared_memory[];
    return (u32)__cvta_generic_to_shared(dynamic_shared_memory);
}

/* ---- words in shared memory -------------------------------------------------------------------------------------- */

__device__ __forceinline__ void store_shared(u32 address, float value) {
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(value) : "memory");
}

__device__ __forceinline__ void store_shared_pair(u32 address, float first, float second) {
    asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(first), "f"(second) : "memory");
}

__device__ __forceinline__ float2 load_shared_pair(u32 address) {
    float2 values;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(values.x), "=f"(values.y) : "r"(address) : "memory");
    return values;
}

/* Stores four 8 x 8 matrices of 16-bit elements. Of each, a thread holds one word of two adjacent elements: thread l has
   row l / 4, columns 2 (l % 4) and the next. Row r of matrix i goes to the 16 bytes at the address that thread 8 i + r
   passes. */
__device__ __forceinline__ void store_matrices(u32 address, u32 first, u32 second, u32 third, u32 fourth) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(first),
                 "r"(second), "r"(third), "r"(fourth)
                 : "memory");
}

/* ---- barriers ---------------------------------------------------------------------------------------------------- */

__device__ __forceinline__ void barrier_init(u32 barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

/* Makes the initialised barriers visible to the other blocks of the cluster and to the copy engine. */
__device__ __forceinline__ void barrier_init_fence() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

/* Arrives once, and adds a number of bytes to those that the phase waits for. */
__device__ __forceinline__ void barrier_expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

/* Arrives once at the barrier of a block of the cluster. It has no qualifiers, as `.release.cluster` would put a
   device-wide fence into the main loop. */
__device__ __forceinline__ void barrier_arrive(u32 barrier, u32 block) {
    asm volatile(
        "{\n"
        ".reg .b32 remote;\n"
        "mapa.shared::cluster.u32 remote, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [remote];\n"
        "}" ::"r"(barrier),
        "r"(block)
        : "memory");
}

/* Waits until the phase of this parity is complete. */
__device__ __forceinline__ void barrier_wait(u32 barrier, u32 parity) {
    asm volatile(
        "{\n"
        ".reg .pred complete;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 complete, [%0], %1;\n"
        "@complete bra.uni done;\n"
        "bra.uni again;\n"
        "done:\n"
        "}" ::"r"(barrier),
        "r"(parity)
        : "memory");
}

/* Synchronises the threads of one computing warpgroup; 0 is __syncthreads. */
__device__ __forceinline__ void warpgroup_sync(int consumer) {
    asm volatile("bar.sync %0, 128;" ::"r"(consumer + 1) : "memory");
}

__device__ __forceinline__ u32 block_in_cluster() {
    u32 rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

/* Synchronises all threads of the cluster; __syncthreads in a launch without a cluster. RELAXED: orders no memory
   accesses, which is enough after `barrier_init_fence`. */
template <bool RELAXED>
__device__ __forceinline__ void cluster_sync() {
    if constexpr (CLUSTER == 1) {
        __syncthreads();
        return;
    }
    if constexpr (RELAXED) asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
    else asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

/* ---- the tensor copy engine -------------------------------------------------------------------------------------- */

/* Prefetches the map, so that its first use finds it in the cache. */
__device__ __forceinline__ void prefetch_map(const TensorMap& map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

/* Copies the box whose first element is (row, column) to shared memory; the barrier counts its bytes as they arrive. */
__device__ __forceinline__ void load_box(u32 target, const TensorMap& map, u32 barrier, int row, int column) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];"
        ::"r"(target), "l"(&map), "r"(barrier), "r"(column), "r"(row) : "memory");
}

/* The same, to the same address in several blocks of the cluster; the barrier of each counts its own bytes. */
__device__ __forceinline__ void load_box_for(u16 blocks, u32 target, const TensorMap& map, u32 barrier, int row,
                                             int column) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster"
        " [%0], [%1, {%3, %4}], [%2], %5;"
        ::"r"(target), "l"(&map), "r"(barrier), "r"(column), "r"(row), "h"(blocks) : "memory");
}

__device__ __forceinline__ void store_box(const TensorMap& map, u32 source, int row, int column) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%2, %3}], [%1];" ::"l"(&map),
                 "r"(source), "r"(column), "r"(row)
                 : "memory");
}

/* Ends a group of this thread's stores. */
__device__ __forceinline__ void store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

/* Waits until all but the newest PENDING groups of this thread's stores have read their sources, which may then be
   written again. */
template <int PENDING>
__device__ __forceinline__ void store_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}

/* Waits until all stores of this thread are in global memory. */
__device__ __forceinline__ void store_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

/* Makes this thread's writes to shared memory visible to the copy engine. */
__device__ __forceinline__ void fence_for_copy_engine() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

/* ---- registers --------------------------------------------------------------------------------------------------- */

template <int COUNT>
__device__ __forceinline__ void give_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}

template <int COUNT>
__device__ __forceinline__ void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}

/* ---- wgmma ------------------------------------------------------------------------------------------------------- */

/* An operand in shared memory: rows of 128 bytes, swizzled by 128, groups of 8 rows 1024 bytes apart. */
__device__ __forceinline__ u64 operand(u32 address) {
    const u64 leading_bytes_unused = 1ull << 16, group_bytes = (u64)(1024 >> 4) << 32, swizzle_128 = 1ull << 62;
    return (u64)((address & 0x3ffff) >> 4) | leading_bytes_unused | group_bytes | swizzle_128;
}

/* An operand, advanced by a number of bytes. */
__device__ __forceinline__ u64 operand_at(u64 operand, u32 bytes) { return operand + (bytes >> 4); }

__device__ __forceinline__ void mma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void mma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

/* Waits until all but the newest PENDING groups are done. */
template <int PENDING>
__device__ __forceinline__ void mma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

/* Keeps the compiler from moving the accumulators' other uses into the asynchronous products. */
template <int COUNT>
__device__ __forceinline__ void pin(float (&registers)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) asm volatile("" : "+f"(registers[i])::"memory");
}

#define STRING_OF(word) #word
#define STRING(word) STRING_OF(word)
#define EIGHT(d, i) \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
        "+f"(d[i + 7])
#define SIXTY_FOUR(d, i) \
    EIGHT(d, i), EIGHT(d, i + 8), EIGHT(d, i + 16), EIGHT(d, i + 24), EIGHT(d, i + 32), EIGHT(d, i + 40), \
        EIGHT(d, i + 48), EIGHT(d, i + 56)
#define NAMES_0_TO_63 \
    "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29," \
    "%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57," \
    "%58,%59,%60,%61,%62,%63"
#define NAMES_64_TO_127 \
    "%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91," \
    "%92,%93,%94,%95,%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,%112,%113,%114,%115," \
    "%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"

/* sums += a [64 rows, 32 bytes of K] * b [2 * COUNT rows, 32 bytes of K]^T, or with `fresh` without the +=. By a whole
   warpgroup: warp w computes rows 16 w ... 16 w + 15, its lane l has in sums[4 j + 2 h + e] row l / 4 + 8 h, column
   8 j + 2 (l % 4) + e. */
__device__ __forceinline__ void mma(float (&sums)[128], u64 a, u64 b, bool fresh) {
    asm volatile("{\n.reg .pred add;\nsetp.eq.b32 add, %130, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n256k32.f32." STRING(A_FORMAT) "." STRING(B_FORMAT)
                 " {" NAMES_0_TO_63 "," NAMES_64_TO_127 "}, %128, %129, add, 1, 1;\n}"
                 : SIXTY_FOUR(sums, 0), SIXTY_FOUR(sums, 64)
                 : "l"(a), "l"(b), "r"((int)fresh));
}

__device__ __forceinline__ void mma(float (&sums)[64], u64 a, u64 b, bool fresh) {
    asm volatile("{\n.reg .pred add;\nsetp.eq.b32 add, %66, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n128k32.f32." STRING(A_FORMAT) "." STRING(B_FORMAT)
                 " {" NAMES_0_TO_63 "}, %64, %65, add, 1, 1;\n}"
                 : SIXTY_FOUR(sums, 0)
                 : "l"(a), "l"(b), "r"((int)fresh));
}
