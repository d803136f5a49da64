/* Runs a CUDA kernel as host C++: a fiber per thread of a block, blocks one after the other. It checks arithmetic,
   indices, barriers and guards; not races, memory ordering or speed. */
#pragma once
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#define __global__
#define __device__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
#define __shared__ static /* one block at a time */
#define __align__(n) __attribute__((aligned(n)))

using std::max;
using std::min;

struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
static inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
struct Dimensions { unsigned x = 1, y = 1, z = 1; };
static Dimensions threadIdx, blockIdx, blockDim, gridDim;

namespace host {
struct Barrier { unsigned arrived = 0, generation = 0; };
struct Fiber {
    ucontext_t context;
    std::vector<char> stack = std::vector<char>(1 << 16);
    bool done = true;
};
static std::vector<Fiber> fibers;
static ucontext_t scheduler;
static unsigned current;
/* Threads that have returned count as arrived at every later barrier of the block, as on the device. */
static unsigned alive;
static Barrier of_block, of_warp[32];
static unsigned exchanged[32][32];
static void (*body)();

static void wait(Barrier& barrier, unsigned threads) {
    const unsigned generation = barrier.generation;
    if (++barrier.arrived == threads) {
        barrier.arrived = 0;
        ++barrier.generation;
    }
    while (barrier.generation == generation) {
        const unsigned me = current;
        swapcontext(&fibers[me].context, &scheduler);
        current = threadIdx.x = me;
    }
}

static void enter() {
    body();
    fibers[current].done = true;
    --alive;
    swapcontext(&fibers[current].context, &scheduler);
}

static void launch(unsigned grid, unsigned block, void (*kernel)()) {
    body = kernel;
    gridDim.x = grid;
    blockDim.x = block;
    fibers.resize(block);
    for (blockIdx.x = 0; blockIdx.x < grid; ++blockIdx.x) {
        for (Fiber& fiber : fibers) {
            getcontext(&fiber.context);
            fiber.context.uc_stack.ss_sp = fiber.stack.data();
            fiber.context.uc_stack.ss_size = fiber.stack.size();
            fiber.context.uc_link = &scheduler;
            fiber.done = false;
            makecontext(&fiber.context, enter, 0);
        }
        alive = block;
        for (unsigned rounds = 0; alive != 0; ++rounds) {
            if (rounds > 10000) {
                std::fprintf(stderr, "a barrier that not all threads of the block reach\n");
                std::abort();
            }
            for (unsigned t = 0; t < block; ++t) {
                if (fibers[t].done) continue;
                current = threadIdx.x = t;
                swapcontext(&scheduler, &fibers[t].context);
            }
        }
    }
}
}  // namespace host

static inline void __syncthreads() { host::wait(host::of_block, host::alive); }

/* What all 32 lanes of a warp bring, at once. */
static inline const unsigned* exchange(unsigned value) {
    const unsigned warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    host::wait(host::of_warp[warp], 32);
    host::exchanged[warp][lane] = value;
    host::wait(host::of_warp[warp], 32);
    return host::exchanged[warp];
}
static inline unsigned __float_as_uint(float value) {
    unsigned bits;
    std::memcpy(&bits, &value, 4);
    return bits;
}
static inline float __uint_as_float(unsigned bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}
static inline unsigned __reduce_max_sync(unsigned, unsigned value) {
    const unsigned* values = exchange(value);
    return *std::max_element(values, values + 32);
}
static inline float __shfl_xor_sync(unsigned, float value, unsigned mask) {
    return __uint_as_float(exchange(__float_as_uint(value))[(threadIdx.x % 32) ^ mask]);
}
static inline unsigned atomicMax(unsigned* address, unsigned value) {
    const unsigned before = *address;
    *address = std::max(before, value);
    return before;
}
static inline unsigned __byte_perm(unsigned low, unsigned high, unsigned selector) {
    unsigned char bytes[8];
    std::memcpy(bytes, &low, 4);
    std::memcpy(bytes + 4, &high, 4);
    unsigned result = 0;
    for (int i = 0; i < 4; ++i) result |= (unsigned)bytes[(selector >> (4 * i)) & 7] << (8 * i);
    return result;
}
