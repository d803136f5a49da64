/* Hopper's GEMM: its arguments, its place in shared memory, the order of its tiles. */
#pragma once
#include "gemm.cuh"
#include "instructions_sm90.cuh"

constexpr int BLOCK_K = 128, MMA_K = 32, CONSUMERS = 2, THREADS = 384;
static_assert(BLOCK_N == 128 && BLOCK_M <= 256, "a thread's registers have room for two sets of sums");
static_assert(!GROUPED || (BLOCK_M == GROUP_ROWS && BLOCK_K == GROUP_ROWS && CLUSTER == 1), "tiles are in one group");
static_assert(PROMOTE || BY_ROWS, "cuBLASLt is as fast; only promoted sums may have no steps");
// rows of a wgmma, rows of a warpgroup, and how many wgmmas make up a warpgroup's rows
constexpr int PIECE_ROWS = 64, CONSUMER_ROWS = BLOCK_M / CONSUMERS, PIECES = CONSUMER_ROWS / PIECE_ROWS;
constexpr u32 A_BYTES = BLOCK_M * BLOCK_K, B_BYTES = BLOCK_N * BLOCK_K, STAGE_BYTES = A_BYTES + B_BYTES;
// what is staged and stored at a time: 64 rows x 128 bytes; two of them a warpgroup
constexpr u32 BOX_BYTES = 8192, STAGING_BYTES = 2 * BOX_BYTES, BIAS_BYTES = 4 * BLOCK_N, BARRIER_BYTES = 8;
// rows of tiles in a band, whose tiles follow each other
constexpr int RASTER_ROWS = 16;

#if CLUSTER > 1
#define CLUSTER_DIMENSIONS __cluster_dims__(CLUSTER, 1, 1)
#else
#define CLUSTER_DIMENSIONS
#endif

struct Arguments {
    TensorMap a, b, out;
    Gemm gemm;
#if B_SCALE_ROWS
    ScaleStrides strides;
#endif
#if GROUPED
    const int* groups;
#endif
};

/* The sums of a warpgroup's 64 x BLOCK_N piece that one thread holds: see `mma`. */
struct Sums {
    float values[BLOCK_N / 2];
};

struct SharedMemory {
    u32 start;
    __device__ explicit SharedMemory(u32 start) : start(start) {}
    __device__ u32 stage(int index) const { return start + index * STAGE_BYTES; }
    __device__ u32 staging(int consumer) const { return stage(STAGES) + consumer * STAGING_BYTES; }
    __device__ u32 bias(int consumer) const { return staging(CONSUMERS) + consumer * BIAS_BYTES; }
    __device__ u32 full(int index) const { return bias(CONSUMERS) + index * BARRIER_BYTES; }
    __device__ u32 empty(int index) const { return full(STAGES + index); }
};

/* Which stage is next, and the parity of its barriers' phase. */
struct Stage {
    int index = 0;
    u32 parity = 0;
    __device__ void advance() {
        if (++index == STAGES) {
            index = 0;
            parity ^= 1;
        }
    }
};

/* Where a block works: its tile's first element, the steps of K, and the group, below 0 where there is nothing to do. */
struct Tile {
    int row, column, first_step, end_step, group;
};

/* The tiles of a cluster, all CLUSTER blocks in step: every n-th, n being the number of clusters. */
struct Work {
    const Arguments& arguments;
    const Gemm& gemm;
    int rows, columns, steps, unit, units, stride;

    __device__ explicit Work(const Arguments& arguments)
        : arguments(arguments), gemm(arguments.gemm), rows((gemm.m + BLOCK_M * CLUSTER - 1) / (BLOCK_M * CLUSTER)),
          columns((gemm.n + BLOCK_N - 1) / BLOCK_N), steps((gemm.k + BLOCK_K - 1) / BLOCK_K),
          unit(blockIdx.x / CLUSTER), units(rows * columns * gemm.parts), stride(gridDim.x / CLUSTER) {}
    __device__ bool left() const { return unit < units; }
    __device__ void next() { unit += stride; }

    __device__ Tile tile(u32 block) const {
        const int part = BY_DEPTH ? unit / (rows * columns) : 0, at = unit - part * rows * columns;
        const int band = at / (RASTER_ROWS * columns), inside = at - band * RASTER_ROWS * columns;
        const int height = min(rows - band * RASTER_ROWS, RASTER_ROWS);
        const int row = band * RASTER_ROWS + inside % height, column = inside / height;
        Tile tile = {(int)(row * CLUSTER + block) * BLOCK_M, column * BLOCK_N, 0, steps, 0};
#if GROUPED
        const int* groups = arguments.groups;
        tile.group = BY_DEPTH ? part : groups[tile.row / GROUP_ROWS];
        if (BY_DEPTH) {
            tile.first_step = groups[part] / BLOCK_K;
            tile.end_step = groups[part + 1] / BLOCK_K;
        }
#endif
        return tile;
    }
};

/* Tells every block of the cluster that this warpgroup has read a stage: one thread for each. */
__device__ __forceinline__ void release(const SharedMemory& memory, int stage) {
    const int thread = threadIdx.x & 127;
    if (thread < CLUSTER) barrier_arrive(memory.empty(stage), thread);
}

/* Which of the sums a thread holds: for the 8 columns from 8 j on, sums[4 j + 2 h + e] is row() + 8 h, column() + e. */
struct Lane {
    int warp, lane;
    __device__ Lane() : warp((threadIdx.x >> 5) & 3), lane(threadIdx.x & 31) {}
    __device__ int row() const { return warp * 16 + (lane >> 2); }
    __device__ int column() const { return 2 * (lane & 3); }
};

/* The offset of 16 bytes in rows of 128 bytes, swizzled by 128. */
__device__ __forceinline__ u32 swizzled_128(int row, int chunk) { return row * 128 + ((chunk ^ (row & 7)) << 4); }
