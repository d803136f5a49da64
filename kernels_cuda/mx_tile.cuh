/* One tile of an MX cast: 128 x 128 elements in, codes and scales by rows, by columns, or both.

maths       each 1 x 32 along the rows of y and along those of y_t has a scale in E8M0, 2^(code - 127), FP8_MAX of which
            are at least the block's maximum; y = sat(x * 2^(127 - code)) in fp32, rounded to nearest even. A block with
            inf or NaN is NaN, scale and codes. In squares, y and y_t share the scale of each 32 x 32, and their codes
tensors     those of cast_tile.cuh, and
            scales    of y, [ceil(rows / 128), ceil(columns / 128)] tiles of 128 x 4 scales, in the order in which tensor
                      cores read them: that of row r, block c is byte 16 (r % 32) + 4 (r / 32) + c. Or null
            scales_t  of y_t, [ceil(columns / 128), ceil(rows / 128)] tiles. Or null
            A tile of elements makes one tile of scales of each; those of blocks outside the tensor are 0, as of zeros
shared      as for cast_tile.cuh, and 5 KB: multipliers, and both tiles of scales, which 32 threads each store
            in words of 16 bytes
*/
#pragma once
#include "block_tile.cuh"

constexpr int MX_BLOCK = 32, MX_BLOCKS = TILE_ROWS / MX_BLOCK, SCALE_TILE = TILE_ROWS * MX_BLOCKS;
constexpr int MX_THREADS = MX_BLOCK / THREAD_COLUMNS, MX_WARPS = WARPS / MX_BLOCKS;

/* Where codes and scales go, in a tensor of this width; a reference takes no register. */
struct MxResult {
    const Outputs& out;
    u8* scales;
    u8* scales_t;
    const int& width;
};

struct MxMemory : TileMemory {
    float of_rows[MX_BLOCKS][TILE_ROWS], of_columns[MX_BLOCKS][TILE_COLUMNS];
    u8 tile[SCALE_TILE], tile_t[SCALE_TILE];
};

/* The place of row r, block c in a tile of scales. */
__device__ __forceinline__ int scale_at(int row, int block) { return row % 32 * 16 + row / 32 * 4 + block; }

/* Stores the tiles of scales, which are in shared memory. */
__device__ __forceinline__ void store_scales(const MxResult& result, const Tensors& tensors, const MxMemory& memory,
                                             int tile_row, int tile_column) {
    const int t = threadIdx.x, chunk = t % 32 * 16;
    if (t >= 64) return;
    const long long down = (tensors.rows - 1) / TILE_ROWS + 1, across = (result.width - 1) / TILE_COLUMNS + 1;
    const long long number = t < 32 ? tile_row * across + tile_column : tile_column * down + tile_row;
    u8* target = t < 32 ? result.scales : result.scales_t;
    if (target == nullptr) return;
    *reinterpret_cast<uint4*>(target + number * SCALE_TILE + chunk) =
        *reinterpret_cast<const uint4*>((t < 32 ? memory.tile : memory.tile_t) + chunk);
}

/* Stores the codes by columns: those beyond the last row are zeros also where the block is NaN. */
__device__ __forceinline__ void store_mx_columns(u32 (&codes)[THREAD_ROWS][2], const Outputs& out,
                                                 const Tensors& tensors, const Place& place, TileMemory& memory,
                                                 int tile_row, int tile_column) {
    if (!place.inside) {
#pragma unroll
        for (int i = 0; i < THREAD_ROWS; ++i)
            if (place.row + i >= tensors.rows) codes[i][0] = codes[i][1] = 0;
    }
    store_columns(codes, out, tensors, memory, tile_row, tile_column);
}

/* A tile in blocks of 1 x 32. Returns the |x| maximum, as bits, to thread 0. */
template <class Input>
__device__ __forceinline__ u32 cast_mx_tile(const Tensors& tensors, const MxResult& result, const Place& place,
                                            Loaded<Input>& x, MxMemory& memory, int tile_row, int tile_column) {
    const int t = threadIdx.x, down = t / THREADS_ACROSS, across = t % THREADS_ACROSS;
    u32 amax;
    {
        float of_rows[THREAD_ROWS];
        find_maxima<MX_THREADS>(of_rows, x, memory);
        // the four threads of a block have the maxima of its four rows: each makes the scale of one
        static_assert(MX_THREADS == THREAD_ROWS, "a row for each thread");
        const int i = across % MX_THREADS, row = down * THREAD_ROWS + i, block = across / MX_THREADS;
        const float of_row = i < 2 ? (i ? of_rows[1] : of_rows[0]) : i == 2 ? of_rows[2] : of_rows[3];
        amax = __float_as_uint(of_row);
        const u32 scale = e8m0_scale(of_row, E4M3::max());
        memory.of_rows[block][row] = e8m0_multiplier(scale);
        memory.tile[scale_at(row, block)] = (u8)scale;
    }
    // its barrier is also that of the maxima of columns
    amax = block_max(amax, memory);
    const int block = t / TILE_COLUMNS;
    {
        const int column = t % TILE_COLUMNS;
        float of_column = 0.0f;
#pragma unroll
        for (int warp = 0; warp < MX_WARPS; ++warp)
            of_column = max_magnitude(of_column, memory.sums[(block * MX_WARPS + warp) * TILE_COLUMNS + column]);
        const u32 scale = e8m0_scale(of_column, E4M3::max());
        memory.of_columns[block][column] = e8m0_multiplier(scale);
        memory.tile_t[scale_at(column, block)] = (u8)scale;
    }
    __syncthreads();
    store_scales(result, tensors, memory, tile_row, tile_column);
    u32 codes[THREAD_ROWS][2];
    if (result.out.y) {
        const float* of_rows = &memory.of_rows[across / MX_THREADS][down * THREAD_ROWS];
        encode(codes, x, [&](int i, int) { return of_rows[i]; });
        store_rows(codes, result.out, tensors, result.width, place);
    }
    keep_packed(x);
    if (result.out.y_t) {
        const float* of_columns = &memory.of_columns[block][across * THREAD_COLUMNS];
        encode(codes, x, [&](int, int j) { return of_columns[j]; });
        store_mx_columns(codes, result.out, tensors, place, memory, tile_row, tile_column);
    }
    return amax;
}

/* The same in squares of 32 x 32. */
template <class Input>
__device__ __forceinline__ u32 cast_mx_squares(const Tensors& tensors, const MxResult& result, const Place& place,
                                               const Loaded<Input>& x, MxMemory& memory, int tile_row,
                                               int tile_column) {
    const int t = threadIdx.x, across = t % THREADS_ACROSS / MX_THREADS, down = t / TILE_COLUMNS;
    typename Input::Eight maxima = {};
#pragma unroll
    for (const auto& row : x.rows)
#pragma unroll
        for (u32 word : row.words) maxima.words[0] = Input::larger(maxima.words[0], word);
    float of_square = largest_of_word<Input>(maxima);
#pragma unroll
    for (int apart : {1, 2, THREADS_ACROSS})
        of_square = max_magnitude(of_square, __shfl_xor_sync(0xffffffffu, of_square, apart));
    if (t % 32 < THREADS_ACROSS) memory.sums[t / 32 * MX_BLOCKS + across] = of_square;
    const u32 amax = block_max(__float_as_uint(of_square), memory);
#pragma unroll
    for (int warp = 0; warp < MX_WARPS; ++warp)
        of_square = max_magnitude(of_square, memory.sums[(down * MX_WARPS + warp) * MX_BLOCKS + across]);
    const u32 scale = e8m0_scale(of_square, E4M3::max());
    // the 32 rows of a square are in 32 groups of 16 bytes: each of its threads writes to one
    const int row = t % TILE_COLUMNS / THREADS_ACROSS * MX_THREADS + t % MX_THREADS;
    memory.tile[scale_at(down * MX_BLOCK + row, across)] = (u8)scale;
    memory.tile_t[scale_at(across * MX_BLOCK + row, down)] = (u8)scale;
    __syncthreads();
    store_scales(result, tensors, memory, tile_row, tile_column);
    u32 codes[THREAD_ROWS][2];
    const float multiplier = e8m0_multiplier(scale);
    encode(codes, x, [&](int, int) { return multiplier; });
    if (result.out.y) store_rows(codes, result.out, tensors, result.width, place);
    if (result.out.y_t) store_mx_columns(codes, result.out, tensors, place, memory, tile_row, tile_column);
    return amax;
}
