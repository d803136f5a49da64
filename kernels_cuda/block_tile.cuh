/* What the casts in blocks share: a tile of 128 x 128 in 512 threads, maxima of parts of it, and codes of which each row
   or each column has its own scale.

            1 x n along rows         the threads of a row, by shuffles
            n x 1 along columns      two threads of a warp by a shuffle, then warps through shared memory
*/
#pragma once
#define TILE_WIDTH 128
#include "cast_tile.cuh"

/* Codes of a thread's elements; `scale(i, j)` is that of row i, column j. */
template <class Input, class Scale>
__device__ __forceinline__ void encode(u32 (&codes)[THREAD_ROWS][2], const Loaded<Input>& x, const Scale& scale) {
#pragma unroll
    for (int i = 0; i < THREAD_ROWS; ++i)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const auto scaled = [&](int j) { return x.get(i, 4 * half + j) * scale(i, 4 * half + j); };
            codes[i][half] = E4M3::codes(scaled(0), scaled(1)) | (E4M3::codes(scaled(2), scaled(3)) << 16);
        }
}

/* Keeps the elements as they lie in memory until they are needed again: two codes of each would need 64 registers. */
template <class Input>
__device__ __forceinline__ void keep_packed(Loaded<Input>& x) {
#pragma unroll
    for (int i = 0; i < THREAD_ROWS; ++i)
#pragma unroll
        for (u32& word : x.rows[i].words) forget_origin(word);
}

/* The larger of the numbers in the first word, of which there are one or two. */
template <class Input>
__device__ __forceinline__ float largest_of_word(const typename Input::Eight& eight) {
    return max_magnitude(Input::get(eight, 0), Input::get(eight, 4 / sizeof(typename Input::Element) - 1));
}

/* Maxima of this thread's rows over ACROSS neighbouring threads, and of its columns over the warp, which go to the memory
   of the column sums, one row of it for each warp. */
template <int ACROSS, class Input>
__device__ __forceinline__ void find_maxima(float (&of_rows)[THREAD_ROWS], const Loaded<Input>& x, TileMemory& memory) {
    typename Input::Eight of_columns = {};
    constexpr int WORDS = sizeof(of_columns) / sizeof(u32);
#pragma unroll
    for (int i = 0; i < THREAD_ROWS; ++i) {
        typename Input::Eight of_row = {};
#pragma unroll
        for (int word = 0; word < WORDS; ++word) {
            of_row.words[0] = Input::larger(of_row.words[0], x.rows[i].words[word]);
            of_columns.words[word] = Input::larger(of_columns.words[word], x.rows[i].words[word]);
        }
        of_rows[i] = largest_of_word<Input>(of_row);
    }
#pragma unroll
    for (int apart = 1; apart < ACROSS; apart *= 2)
#pragma unroll
        for (int i = 0; i < THREAD_ROWS; ++i)
            of_rows[i] = max_magnitude(of_rows[i], __shfl_xor_sync(0xffffffffu, of_rows[i], apart));
#pragma unroll
    for (int apart = THREADS_ACROSS; apart < 32; apart *= 2)
#pragma unroll
        for (u32& word : of_columns.words) word = Input::larger(word, __shfl_xor_sync(0xffffffffu, word, apart));
    const u32 t = threadIdx.x, lane = t % 32;
    if (lane >= THREADS_ACROSS) return;
    float4* target = reinterpret_cast<float4*>(&memory.sums[t / 32 * TILE_COLUMNS + lane * THREAD_COLUMNS]);
    const auto of = [&](int j) { return Input::get(of_columns, j); };
    target[0] = {of(0), of(1), of(2), of(3)};
    target[1] = {of(4), of(5), of(6), of(7)};
}

/* Sums of each column over the tile's rows, if they are requested. */
template <class Input>
__device__ __forceinline__ void store_sums(const Loaded<Input>& x, const Outputs& out, int width,
                                           const Tensors& tensors, TileMemory& memory, int tile_row,
                                           int tile_column) {
    if (out.column_sums == nullptr) return;
    float sums[THREAD_COLUMNS] = {};
#pragma unroll
    for (int i = 0; i < THREAD_ROWS; ++i)
#pragma unroll
        for (int j = 0; j < THREAD_COLUMNS; ++j) sums[j] += x.get(i, j);
    float* of_tile = out.column_sums + (long long)tile_row * width;
    sum_columns(sums, of_tile, memory, tile_column, tensors.columns);
}
