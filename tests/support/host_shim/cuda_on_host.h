/* Runs a CUDA kernel as host C++: a fiber per thread of a block, blocks one after the other, the blocks of a cluster
   together. It checks arithmetic, indices, barriers and guards; not races, memory ordering or speed. */
#pragma once
#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#define __global__
#define __device__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __shared__ static /* one block at a time; the kernels with clusters have none */
#define __align__(n) __attribute__((aligned(n)))

using std::max;
using std::min;

struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
static inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
struct Dimensions { unsigned x = 1, y = 1, z = 1; };
static Dimensions threadIdx, blockIdx, blockDim, gridDim;

namespace host {
struct Barrier { unsigned arrived = 0, generation = 0; };
constexpr std::size_t STACK = 1 << 16;
struct Fiber {
    /* Where it begins; from then on it stops and goes on by jumps, which, unlike `swapcontext`, ask nothing of Linux. */
    ucontext_t context;
    jmp_buf place;
    bool begun = false;
    /* Not filled: what a thread does not touch takes no memory. */
    std::unique_ptr<char[]> stack{new char[STACK]};
    bool done = true;
};
static std::vector<Fiber> fibers;
static jmp_buf scheduler;
/* Which fiber runs; those of a cluster's blocks follow each other. */
static unsigned current;
/* Threads that have returned count as arrived at every later barrier of the block, as on the device. */
static std::vector<unsigned> alive;
static std::vector<Barrier> of_block, of_warp;
static std::vector<std::vector<unsigned>> exchanged;
static unsigned first_block;
/* Whether anything has happened since a warp's fibers were last asked, or one waits for the next round by choice; what
   is left to do where nothing has. */
static bool progress, by_choice;
static unsigned round;
static bool (*when_stuck)() = nullptr;
static void (*at_start)() = nullptr;
static void (*body)();

static void become(unsigned fiber) {
    current = fiber;
    threadIdx.x = fiber % blockDim.x;
    blockIdx.x = first_block + fiber / blockDim.x;
}

/* Lets the others run. */
static void yield() {
    const unsigned me = current;
    if (_setjmp(fibers[me].place) == 0) _longjmp(scheduler, 1);
    become(me);
}

/* Lets all others run as far as they can: what a thread may do late it does late. */
static void lag() {
    const unsigned now = round;
    while (round == now) {
        by_choice = true;
        yield();
    }
}

static void wait(Barrier& barrier, unsigned threads) {
    const unsigned generation = barrier.generation;
    progress = true;
    if (++barrier.arrived == threads) {
        barrier.arrived = 0;
        ++barrier.generation;
    }
    while (barrier.generation == generation) yield();
}

static void enter() {
    body();
    fibers[current].done = progress = true;
    --alive[current / blockDim.x];
    _longjmp(scheduler, 1);
}

/* Lets a fiber run until it yields or has returned. */
__attribute__((noinline)) static void resume(unsigned index) {
    Fiber& fiber = fibers[index];
    become(index);
    if (_setjmp(scheduler) != 0) return;
    if (fiber.begun) _longjmp(fiber.place, 1);
    fiber.begun = true;
    setcontext(&fiber.context);
}

static void fail(const char* what) {
    std::fprintf(stderr, "%s (block %u, thread %u)\n", what, blockIdx.x, threadIdx.x);
    std::abort();
}

/* Each warp in turn as far as it can go, so that one is ahead of the others where no barrier holds it. */
static void run_cluster() {
    unsigned left = fibers.size();
    while (left != 0) {
        bool moved = false;
        by_choice = false;
        for (unsigned first = 0; first < fibers.size(); first += 32) {
            do {
                progress = false;
                for (unsigned fiber = first; fiber < std::min(first + 32, (unsigned)fibers.size()); ++fiber) {
                    if (fibers[fiber].done) continue;
                    resume(fiber);
                    if (fibers[fiber].done) --left;
                }
                moved |= progress;
            } while (progress);
        }
        ++round;
        if (left != 0 && !moved && !by_choice && !(when_stuck != nullptr && when_stuck()))
            fail("a barrier that not all threads reach");
    }
}

static void launch(unsigned grid, unsigned block, void (*kernel)(), unsigned cluster = 1) {
    body = kernel;
    gridDim.x = grid;
    blockDim.x = block;
    if (grid % cluster != 0) fail("a grid that is not whole clusters");
    fibers.resize(cluster * block);
    of_warp.resize(cluster * block / 32);
    exchanged.assign(of_warp.size(), std::vector<unsigned>(32));
    for (first_block = 0; first_block < grid; first_block += cluster) {
        for (Fiber& fiber : fibers) {
            getcontext(&fiber.context);
            fiber.context.uc_stack.ss_sp = fiber.stack.get();
            fiber.context.uc_stack.ss_size = STACK;
            fiber.begun = fiber.done = false;
            makecontext(&fiber.context, enter, 0);
        }
        alive.assign(cluster, block);
        of_block.assign(cluster, Barrier());
        if (at_start != nullptr) at_start();
        run_cluster();
    }
    /* A process loads hundreds of variants, each with fibers of its own. */
    std::vector<Fiber>().swap(fibers);
}
}  // namespace host

static inline void __syncthreads() {
    const unsigned block = host::current / blockDim.x;
    host::wait(host::of_block[block], host::alive[block]);
}

/* What all 32 lanes of a warp bring, at once. */
static inline const unsigned* exchange(unsigned value) {
    const unsigned warp = host::current / 32, lane = host::current % 32;
    host::wait(host::of_warp[warp], 32);
    host::exchanged[warp][lane] = value;
    host::wait(host::of_warp[warp], 32);
    return host::exchanged[warp].data();
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
static inline unsigned __shfl_sync(unsigned, unsigned value, unsigned lane) { return exchange(value)[lane]; }
static inline unsigned atomicMax(unsigned* address, unsigned value) {
    const unsigned before = *address;
    *address = std::max(before, value);
    return before;
}
static inline unsigned atomicAdd(unsigned* address, unsigned value) {
    const unsigned before = *address;
    *address += value;
    return before;
}
static inline void __threadfence() {}
static inline unsigned __byte_perm(unsigned low, unsigned high, unsigned selector) {
    unsigned char bytes[8];
    std::memcpy(bytes, &low, 4);
    std::memcpy(bytes + 4, &high, 4);
    unsigned result = 0;
    for (int i = 0; i < 4; ++i) result |= (unsigned)bytes[(selector >> (4 * i)) & 7] << (8 * i);
    return result;
}
