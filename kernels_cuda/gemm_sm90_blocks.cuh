/* What a step of 128 along K adds to the sums of Hopper's GEMM: its partial sums, with blocks times their scales.

A thread of a warpgroup needs the scales of 2 PIECES rows of a: it loads those of the next step from global memory while
the products of this one run. For b
    B_SCALE_ROWS 128   a tile's 128 columns share one scale, loaded the same way: a factor for each row of a thread
    B_SCALE_ROWS 1     each thread loads the scale of one column and writes it, also while the products run, to the
                       memory where the bias will be; all threads read their scales from there when they add. Two
                       barriers of the warpgroup a step

cost        registers: 2 PIECES + 1 scales of this step, as many of the next one, and the pointers. Bytes from L2: 4 a row
            and step, 4 BLOCK_M + 512 where b has them by columns, beside 128 (BLOCK_M + BLOCK_N) of codes. Instructions a
            step and 64 x 128 sums: a multiply-add for each sum, which without scales is an addition; where b has scales
            by columns also a product of both scales for each sum, and a load of shared memory for each two
tiles       of 128 columns, 256 or 128 rows. Not 256 columns, which do not fit with promotion at all
*/
#pragma once
#include "gemm_sm90.cuh"

#if !B_SCALE_ROWS
struct StepScales {
    __device__ __forceinline__ StepScales(const Arguments&, const SharedMemory&, const Tile&, int, int) {}
    __device__ __forceinline__ void advance(bool) const {}
    __device__ __forceinline__ void end() const {}
    __device__ __forceinline__ void add(Sums& sums, const Sums& of_step, int) const {
#pragma unroll
        for (int i = 0; i < BLOCK_N / 2; ++i) sums.values[i] += of_step.values[i];
    }
};
#else
static_assert(BLOCK_N == SCALED_TOGETHER && BLOCK_K == SCALED_TOGETHER && PROMOTE, "see above");

struct StepScales {
    static constexpr int ROWS = 2 * PIECES;
    const ScaleStrides& strides;
    const float *a, *b;       // of the step after the next advance(), at this thread's first row and its column
    int a_offsets[ROWS];
    float a_next[ROWS], b_next, a_now[ROWS], b_now;
    const u32 columns;        // in shared memory, 4 bytes for each column of the tile
    const int consumer;
    const Lane at;

    /* Starts to load the scales of the tile's first step. `row` is the warpgroup's first one. Rows and columns outside
       of a and b take the last one's: what they are multiplied with is not stored. */
    __device__ __forceinline__ StepScales(const Arguments& arguments, const SharedMemory& memory, const Tile& tile,
                                          int consumer, int row)
        : strides(arguments.strides), columns(memory.bias(consumer)), consumer(consumer) {
        const Gemm& gemm = arguments.gemm;
        const int column = B_SCALE_ROWS == 1 ? min(tile.column + (int)(threadIdx.x & 127), gemm.n - 1)
                                             : tile.column / SCALED_TOGETHER;
        a = gemm.a_scale_inv + (long long)tile.first_step * strides.a_step;
        b = gemm.b_scale_inv + (long long)tile.first_step * strides.b_step + (long long)column * strides.b_row;
#pragma unroll
        for (int i = 0; i < ROWS; ++i)
            a_offsets[i] = min(row + i / 2 * PIECE_ROWS + at.row() + i % 2 * 8, gemm.m - 1) * strides.a_row;
        load();
    }

    __device__ __forceinline__ void load() {
#pragma unroll
        for (int i = 0; i < ROWS; ++i) a_next[i] = a[a_offsets[i]];
        b_next = *b;
        a += strides.a_step;
        b += strides.b_step;
    }

    /* Makes the next step's scales this one's, and starts to load those after it. */
    __device__ __forceinline__ void advance(bool more) {
#pragma unroll
        for (int i = 0; i < ROWS; ++i) a_now[i] = a_next[i];
        b_now = b_next;
        if (more) load();
        if constexpr (B_SCALE_ROWS == 1) {
            // all threads have read the scales of the step before
            warpgroup_sync(consumer);
            store_shared(columns + 4 * (threadIdx.x & 127), b_now);
            warpgroup_sync(consumer);
        }
    }

    __device__ __forceinline__ void add(Sums& sums, const Sums& of_step, int piece) const {
#pragma unroll
        for (int j = 0; j < BLOCK_N / 8; ++j) {
            const float2 of_b = B_SCALE_ROWS == 1 ? load_shared_pair(columns + 4 * (8 * j + at.column()))
                                                  : float2{b_now, b_now};
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const int i = 4 * j + 2 * h;
                const float of_a = a_now[2 * piece + h];
                sums.values[i] += of_step.values[i] * (of_a * of_b.x);
                sums.values[i + 1] += of_step.values[i + 1] * (of_a * of_b.y);
            }
        }
    }

    /* Waits until the bias may overwrite b's scales. */
    __device__ __forceinline__ void end() const {
        if constexpr (B_SCALE_ROWS == 1) warpgroup_sync(consumer);
    }
};
#endif
