/* Hopper's GEMM: its arguments, its place in shared memory, the order of its tiles. */
#pragma once
#include "gemm.cuh"
#include "instructions_sm90.cuh"
#include "scales.cuh"

constexpr int BLOCK_K = 128, MMA_K = 32, CONSUMERS = 2, THREADS = 384;
// warpgroups that compute a tile: both together, or with PING_PONG one
constexpr int TILE_CONSUMERS = PING_PONG ? 1 : CONSUMERS;
static_assert(BLOCK_M * BLOCK_N <= TILE_CONSUMERS * 128 * 128, "a thread's registers have room for the sums");
// rows of a wgmma, rows of a warpgroup, and how many wgmmas make up a warpgroup's rows
constexpr int PIECE_ROWS = 64, CONSUMER_ROWS = BLOCK_M / TILE_CONSUMERS, PIECES = CONSUMER_ROWS / PIECE_ROWS;
constexpr u32 A_BYTES = BLOCK_M * BLOCK_K, B_BYTES = BLOCK_N * BLOCK_K, STAGE_BYTES = A_BYTES + B_BYTES;
// what is staged and stored at a time: 64 rows x 128 bytes; two of them a warpgroup
constexpr u32 BOX_BYTES = 8192, STAGING_BYTES = 2 * BOX_BYTES, BIAS_BYTES = 4 * BLOCK_N, BARRIER_BYTES = 8;
// rows of tiles in a group
constexpr int RASTER_ROWS = 16;

#if CLUSTER > 1
#define CLUSTER_DIMENSIONS __cluster_dims__(CLUSTER, 1, 1)
#else
#define CLUSTER_DIMENSIONS
#endif

/* The next GEMM's operand: m x n codes by rows and, where y_t is not null, by columns; their scale and amax.
   BACKWARD also column_sums, [ceil(m / 64), n]: sums of v over 64 rows each, or null. `aligned`: ALIGNED_ROWS if rows
   of y, and ALIGNED_COLUMNS if rows of y_t, can be written 16 bytes at a time. */
struct Chain {
    u8* y;
    u8* y_t;
    float* column_sums;
    ScalingRow row;
    int aligned;
};

struct Arguments {
    TensorMap a, b, out;
    Gemm gemm;
    Chain chain;
#if B_SCALE_ROWS
    ScaleStrides strides;
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
    __device__ u32 turn(int consumer) const { return empty(STAGES + consumer); }
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
    __device__ void skip(int stages) {
        index += stages;
        parity ^= index / STAGES & 1;
        index %= STAGES;
    }
};

/* With PING_PONG, which consumer may issue its products: they take turns, tile by tile. All threads of one consumer
   give the turn to the other. */
struct Turn {
    const u32 mine, others, block;
    // the first consumer's first turn needs no signal
    u32 parity;
    __device__ Turn(const SharedMemory& memory, int consumer, u32 block)
        : mine(memory.turn(consumer)), others(memory.turn(1 - consumer)), block(block), parity(consumer == 0) {}
    __device__ __forceinline__ void take() {
        if constexpr (PING_PONG) barrier_wait(mine, parity);
        parity ^= 1;
    }
    __device__ __forceinline__ void give() const {
        if constexpr (PING_PONG) barrier_arrive(others, block);
    }
};

/* Where a block works: its tile's first element, and the steps of K. */
struct Tile {
    int row, column, first_step, end_step, split;
};

/* The tiles of a cluster, all CLUSTER blocks in step: every n-th, n being the number of clusters. */
struct Work {
    int rows, columns, splits, steps, unit, units, stride;

    __device__ explicit Work(const Gemm& gemm)
        : rows((gemm.m + BLOCK_M * CLUSTER - 1) / (BLOCK_M * CLUSTER)), columns((gemm.n + BLOCK_N - 1) / BLOCK_N),
          splits(gemm.splits), steps((gemm.k + BLOCK_K - 1) / BLOCK_K), unit(blockIdx.x / CLUSTER),
          units(rows * columns * splits), stride(gridDim.x / CLUSTER) {}
    __device__ bool left() const { return unit < units; }
    __device__ void next() { unit += stride; }

    __device__ Tile tile(u32 block) const {
        const int split = unit % splits, at = unit / splits;
        const int group = at / (RASTER_ROWS * columns), inside = at - group * RASTER_ROWS * columns;
        const int height = min(rows - group * RASTER_ROWS, RASTER_ROWS);
        const int row = group * RASTER_ROWS + inside % height, column = inside / height;
        const int first = (int)((long long)steps * split / splits), end = (int)((long long)steps * (split + 1) / splits);
        return {(int)(row * CLUSTER + block) * BLOCK_M, column * BLOCK_N, first, end, split};
    }
    /* Rows of the output of one split. */
    __device__ int split_rows() const { return rows * CLUSTER * BLOCK_M; }
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

/* The beginning of both epilogues: the bias, rounded, for the columns of a tile; zeros where there is none. */
__device__ __forceinline__ void stage_bias(const Gemm& gemm, u32 memory, int first_column) {
    for (int i = threadIdx.x & 127; i < BLOCK_N; i += 128) {
        const int column = first_column + i;
        const bool some = gemm.bias_format != NO_BIAS && column < gemm.n;
        store_shared(memory + 4 * i, some ? OUTPUT::round(load_bias(gemm.bias, gemm.bias_format, column)) : 0.0f);
    }
}

/* The offset of 16 bytes in rows of 128 bytes, swizzled by 128. */
__device__ __forceinline__ u32 swizzled_128(int row, int chunk) { return row * 128 + ((chunk ^ (row & 7)) << 4); }

/* Writes 64 x 64 elements of 16 bits of a piece to shared memory, as a box. `word(j, h)` is the pair of columns
   8 j + column(), row() + 8 h. */
template <class Word>
__device__ __forceinline__ void stage_box(u32 box, const Lane& at, const Word& word) {
    const int row = at.warp * 16 + (at.lane & 15);
#pragma unroll
    for (int j = 0; j < 8; j += 2)
        store_matrices(box + swizzled_128(row, j + (at.lane >> 4)), word(j, 0), word(j, 1), word(j + 1, 0),
                       word(j + 1, 1));
}
