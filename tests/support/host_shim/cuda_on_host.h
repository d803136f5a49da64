/* Runs a CUDA kernel as host C++: a fiber per thread of a block, blocks one after the other, the blocks of a cluster
   together. It checks arithmetic, indices, barriers and guards; not races, memory ordering or speed.

   What a variant of a kernel has no part in is in cuda_on_host.cpp, which is compiled once. */
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>

#define __global__
#define __device__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __shared__ static /* one block at a time; the kernels with clusters have none */
#define __align__(n) __attribute__((aligned(n)))
/* Marks the functions that the tests call in a library; all others stay internal. */
#define EXPORTED __attribute__((visibility("default")))
#define STRING_OF(word) #word
#define STRING(word) STRING_OF(word)

using std::max;
using std::min;

struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
static inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
struct Dimensions { unsigned x = 1, y = 1, z = 1; };
extern Dimensions threadIdx, blockIdx, blockDim, gridDim;

namespace host {
struct Barrier { unsigned arrived = 0, generation = 0; };
/* The index of the running fiber; the fibers of a cluster's blocks are numbered consecutively. */
extern unsigned current;
/* The number of blocks in a cluster, and the running fiber's block. */
extern unsigned blocks;
static inline unsigned block() { return current / blockDim.x; }
/* Whether any fiber has made progress since this was last reset. */
extern bool progress;
/* Called before each cluster; called when no fiber makes progress. */
extern void (*at_start)();
extern bool (*when_stuck)();

void launch(unsigned grid, unsigned block, void (*kernel)(), unsigned cluster);
/* Lets the other fibers run. */
void yield();
/* Lets all other fibers run as far as they can, so that this thread acts as late as it may. */
void lag();
void wait(Barrier& barrier, unsigned threads);
void wait_for_warp();
/* Whether all threads of a cluster's block have returned, so that its shared memory may be reused. */
bool has_ended(unsigned block);
[[noreturn]] void fail(const char* what);
}  // namespace host

void __syncthreads();
/* Gathers the values of a warp's 32 lanes. */
const unsigned* exchange(unsigned value);

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
/* For a mask, which all kernels fill: without it, what lanes get is undefined on the device. */
static inline const unsigned* exchange(unsigned mask, unsigned value) {
    if (mask != 0xffffffffu) host::fail("an exchange without some lanes of a warp");
    return exchange(value);
}
static inline unsigned __reduce_max_sync(unsigned mask, unsigned value) {
    const unsigned* values = exchange(mask, value);
    return *std::max_element(values, values + 32);
}
static inline int __any_sync(unsigned all, int predicate) { return (int)__reduce_max_sync(all, predicate != 0); }
static inline unsigned __shfl_xor_sync(unsigned all, unsigned value, unsigned mask) {
    return exchange(all, value)[(threadIdx.x % 32) ^ mask];
}
static inline float __shfl_xor_sync(unsigned all, float value, unsigned mask) {
    return __uint_as_float(__shfl_xor_sync(all, __float_as_uint(value), mask));
}
static inline unsigned __shfl_sync(unsigned all, unsigned value, unsigned lane) { return exchange(all, value)[lane]; }
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
