/* The functions of kernels_cuda/instructions_sm90.cuh in software.

   What runs on its own on the device is done here as early or as late as the device may do it, as `late` says: copies
   into shared memory when they are asked for, or only when all threads wait; copies out of it at once, or only when
   their thread waits for them; products always only when their warpgroup waits for them. So a stage that is read before
   it is full, or written before it is empty, shows in the result. Stores from shared memory that no fence has made
   visible to the copy engine are an error. Products are added up as the tensor cores do it, see
   `accumulate` in formats_on_host.h. */
#pragma once
#include "instructions.cuh"

typedef unsigned long long u64;

struct alignas(64) TensorMap {
    u8 bytes[128];
};

extern "C" {
EXPORTED extern int late;
/* the shared memory of a launch */
EXPORTED extern int dynamic_bytes;
}

namespace sm90 {
struct Product {
    float* sums;
    int columns;
    u64 a, b;
    bool fresh;
    const char *a_format, *b_format;
};
void multiply(const Product& product);
void wait_for_products(u32 pending);
void wait_for_stores(u32 pending);
void wait_for_cluster();
}  // namespace sm90

static inline u32 shared_address() { return 0; }

void store_shared(u32 address, float value);
void store_shared_pair(u32 address, float first, float second);
float2 load_shared_pair(u32 address);
void store_matrices(u32 address, u32 first, u32 second, u32 third, u32 fourth);

void barrier_init(u32 barrier, u32 arrivals);
static inline void barrier_init_fence() {}
void barrier_expect(u32 barrier, u32 bytes);
void barrier_arrive(u32 barrier, u32 block);
void barrier_wait(u32 barrier, u32 parity);
void warpgroup_sync(int consumer);
u32 block_in_cluster();
template <bool RELAXED>
static inline void cluster_sync() { sm90::wait_for_cluster(); }

static inline void prefetch_map(const TensorMap&) {}
void load_box(u32 target, const TensorMap& map, u32 barrier, int row, int column);
void load_box_for(u16 blocks, u32 target, const TensorMap& map, u32 barrier, int row, int column);
void store_box(const TensorMap& map, u32 source, int row, int column);
void store_commit();
template <int PENDING>
static inline void store_wait_read() { sm90::wait_for_stores(PENDING); }
static inline void store_wait() { store_wait_read<0>(); }
void fence_for_copy_engine();

template <int COUNT>
static inline void give_registers() {}
template <int COUNT>
static inline void take_registers() {}

static inline u64 operand(u32 address) { return (address & 0x3ffff) >> 4 | 1ull << 16 | 64ull << 32 | 1ull << 62; }
static inline u64 operand_at(u64 operand, u32 bytes) { return operand + (bytes >> 4); }
void mma_fence();
static inline void mma_commit() {}
template <int COUNT>
static inline void pin(float (&)[COUNT]) {}
template <int COUNT>
static inline void mma(float (&sums)[COUNT], u64 a, u64 b, bool fresh) {
    sm90::multiply({sums, 2 * COUNT, a, b, fresh, STRING(A_FORMAT), STRING(B_FORMAT)});
}
template <int PENDING>
static inline void mma_wait() { sm90::wait_for_products(PENDING); }
