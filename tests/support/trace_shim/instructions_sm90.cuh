/* The functions of kernels_cuda/instructions_sm90.cuh, noted: see trace.h. */
#pragma once
#include "instructions.cuh"

typedef unsigned long long u64;

struct alignas(64) TensorMap {
    u8 bytes[128];
};
/* As tests/support/host_kernels.py writes it. */
static int bytes_of_box(const TensorMap& map) {
    int box[3];
    std::memcpy(box, map.bytes + 32, sizeof(box));
    return box[0] * box[1] * box[2];
}

static inline u32 shared_address() { return 0; }
static inline void store_shared(u32, float) {}
static inline void store_shared_pair(u32, float, float) {}
static inline float2 load_shared_pair(u32) { return {0, 0}; }
static inline void store_matrices(u32, u32, u32, u32, u32) {}

static inline void barrier_init(u32 barrier, u32 arrivals) { note('I', here(), 0, arrivals, barrier); }
static inline void barrier_init_fence() { note('F'); }
static inline void barrier_expect(u32 barrier, u32 bytes) { note('E', here(), 0, bytes, barrier); }
static inline void barrier_arrive(u32 barrier, u32 block) { note('A', block, 0, 0, barrier); }
static inline void barrier_wait(u32 barrier, u32 parity) { note('W', here(), 0, parity, barrier); }
static inline void warpgroup_sync(int) {}
static inline u32 block_in_cluster() { return here(); }
template <bool RELAXED>
static inline void cluster_sync() { note('S'); }

static inline void prefetch_map(const TensorMap&) {}
static inline void load_box_for(u16 blocks, u32 target, const TensorMap& map, u32 barrier, int, int) {
    for (u32 block = 0; block < host::blocks; ++block)
        if (blocks >> block & 1) note('L', block, target, bytes_of_box(map), barrier);
}
static inline void load_box(u32 target, const TensorMap& map, u32 barrier, int row, int column) {
    load_box_for(1 << here(), target, map, barrier, row, column);
}
static inline void store_box(const TensorMap&, u32, int, int) {}
static inline void store_commit() {}
template <int PENDING>
static inline void store_wait_read() {}
static inline void store_wait() {}
static inline void fence_for_copy_engine() {}
template <int COUNT>
static inline void give_registers() {}
template <int COUNT>
static inline void take_registers() {}

/* The first 32 bytes of an operand's rows, which are 128 bytes apart. */
static inline u64 operand(u32 address) { return address; }
static inline u64 operand_at(u64 operand, u32 bytes) { return operand + bytes; }
static inline void mma_fence() {}
static inline void mma_commit() { note('C'); }
template <int COUNT>
static inline void pin(float (&)[COUNT]) {}
template <int COUNT>
static inline void mma(float (&)[COUNT], u64 a, u64 b, bool) {
    note('R', here(), a & ~127, 64 * 128);
    note('R', here(), b & ~127, 2 * COUNT * 128);
}
template <int PENDING>
static inline void mma_wait() { note('D', 0, 0, PENDING); }
