/* The machine instructions of gemm_sm89.cu without a C++ name, one small function each. Shared memory is addressed
   only by 32-bit addresses. A_FORMAT and B_FORMAT, e4m3 or e5m2, are those of the operands. */
#pragma once
#include "instructions.cuh"

#define SPELLED(word) #word
#define QUOTED(word) SPELLED(word)

/* Where the block's dynamic shared memory begins. */
__device__ __forceinline__ u32 shared_address() {
    extern __shared__ __align__(128) u8 dynamic[];
    return (u32)__cvta_generic_to_shared(dynamic);
}

/* Starts a copy of 16 bytes that bypasses the registers: the first `bytes` of them are read, the others become zero. */
__device__ __forceinline__ void copy_async(u32 to, const void* from, int bytes) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}

/* Commits the copies that this thread has started since the last commit as a group, possibly empty. */
__device__ __forceinline__ void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

/* Waits until at most the newest PENDING of this thread's groups are in flight. */
template <int PENDING>
__device__ __forceinline__ void copy_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

/* Four matrices of 8 rows of 16 bytes. Lane 8 i + r brings the address of row r of matrix i; lane l gets the bytes
   4 (l % 4) + 0..3 of row l / 4 of each. */
__device__ __forceinline__ void load_matrices(u32& first, u32& second, u32& third, u32& fourth, u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(first), "=r"(second), "=r"(third), "=r"(fourth)
                 : "r"(address)
                 : "memory");
}

/* sums[16, 8] += a[16, 32] * b[8, 32]^T over a warp. Lane l has, of sums, rows l / 4 and 8 more, columns
   2 (l % 4) + 0..1. */
__device__ __forceinline__ void mma(float (&sums)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    asm("mma.sync.aligned.m16n8k32.row.col.f32." QUOTED(A_FORMAT) "." QUOTED(B_FORMAT) ".f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

/* The same on sm_120 where each row of a and of b has a scale, in E8M0: in byte `byte` of the word that lane
   4 (m % 8) + 2 a_thread + m / 8 brings for row m of a, and lane 4 n + b_thread for row n of b. All three are constants
   once loops are unrolled: a_thread is 0..1, the others are 0..3. */
__device__ __forceinline__ void mma_scaled(float (&sums)[4], const u32 (&a)[4], const u32 (&b)[2], u32 a_scales,
                                           u32 b_scales, int byte, int a_thread, int b_thread) {
    asm("mma.sync.aligned.m16n8k32.row.col.kind::mxf8f6f4.block_scale.scale_vec::1X.f32." QUOTED(A_FORMAT)
        "." QUOTED(B_FORMAT) ".f32.ue8m0 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3}, %10, {%12, %13}, %11, {%12, %14};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(a_scales), "r"(b_scales),
          "h"((u16)byte), "h"((u16)a_thread), "h"((u16)b_thread));
}
