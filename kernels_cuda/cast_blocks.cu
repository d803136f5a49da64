/* cast_blocks: a tensor into E4M3, by rows, by columns, or both, each block with its own scale, in one pass.

maths       v is that of block_cast.cuh; blocks of 1 x 128 along the rows of y and along those of y_t, so the two have
            different codes. scale = FP8_MAX / max |v| over the block, at most the largest finite fp32, and 1 where the maximum is inf or NaN; with
            `power_of_two` rounded down to a power of two. code = sat(v * scale) in fp32, rounded to nearest even;
            scale_inv = 1 / scale; amax[index] = max(amax[index], max |v|) as bits
tensors     those of cast_tile.cuh, and
            by_rows     scale_inv of y, [tiles across, rows] fp32: a column of blocks is contiguous
            by_columns  scale_inv of y_t, [tiles down, columns] fp32
variants    those of block_cast.cuh
tile        128 x 128, 512 threads: a tile holds whole blocks of both shapes. A thread keeps its 4 x 8 elements in
            registers while the maxima go through shared memory:

            1 x 128 along rows       the 16 threads of half a warp hold four rows: shuffles
            1 x 128 along columns    two threads of a warp by a shuffle, 16 warps through shared memory
            then one thread for each of the 128 + 128 scales divides, and stores its scale_inv
grid        ceil(rows / 128) * ceil(columns / 128) blocks of 512 threads, tiles by rows; 26 KB of shared memory
bytes       as for cast_transpose, bf16 in both layouts 4 an element, and 4 / 128 for each layout's scales; an activation's
            gradient 6, those of gate and up 10
ceiling     memory bandwidth: 63 us for 8192 x 8192 at a measured 4.3 TB/s
reference   a scale for each block, and lightning_fp8.ops.arithmetic.saturated_blocks with it
*/
#include "block_cast.cuh"

/* The maxima of rows, then all scales, those of columns first. */
struct BlockMemory : TileMemory {
    float of_rows[TILE_ROWS];
    float scales[TILE_COLUMNS + TILE_ROWS];
};

/* The maxima of this thread's rows over the tile, and of its columns over the warp, to shared memory. */
__device__ __forceinline__ void leave_maxima(const Loaded<INPUT>& x, BlockMemory& memory) {
    float of_rows[THREAD_ROWS];
    find_maxima<THREADS_ACROSS>(of_rows, x, memory);
    const u32 t = threadIdx.x;
    if (t % THREADS_ACROSS == 0)
        *reinterpret_cast<float4*>(&memory.of_rows[t / THREADS_ACROSS * THREAD_ROWS]) = {of_rows[0], of_rows[1],
                                                                                         of_rows[2], of_rows[3]};
}

/* One scale a thread: of column t, or of row t - TILE_COLUMNS. The rows' maxima also give the tile's. */
__device__ __forceinline__ void make_scale(const Arguments& arguments, const Target& target, BlockMemory& memory,
                                           int tile_row, int tile_column) {
    const int t = threadIdx.x, rows = arguments.tensors.rows, columns = arguments.tensors.columns;
    if (t >= TILE_COLUMNS + TILE_ROWS) return;
    const Scales& scales = target.scales;
    float amax = 0.0f;
    float* scale_inv;
    if (t < TILE_COLUMNS) {
#pragma unroll
        for (int warp = 0; warp < WARPS; ++warp) amax = max_magnitude(amax, memory.sums[warp * TILE_COLUMNS + t]);
        const long long column = (long long)tile_column * TILE_COLUMNS + t;
        scale_inv = scales.by_columns == nullptr || column >= columns
                        ? nullptr
                        : static_cast<float*>(scales.by_columns) + (long long)tile_row * target.width + column;
    } else {
        amax = memory.of_rows[t - TILE_COLUMNS];
        const long long row = (long long)tile_row * TILE_ROWS + t - TILE_COLUMNS;
        scale_inv = scales.by_rows == nullptr || row >= rows
                        ? nullptr
                        : static_cast<float*>(scales.by_rows) + (long long)tile_column * rows + row;
        const u32 of_warp = __reduce_max_sync(0xffffffffu, __float_as_uint(amax));
        if (t % 32 == 0) memory.amax[t / 32] = of_warp;
    }
    const float scale = block_scale(amax, E4M3::max(), (int)arguments.power_of_two);
    memory.scales[t] = scale;
    if (scale_inv != nullptr) *scale_inv = 1.0f / scale;
}

__device__ __forceinline__ void cast_tile_of_blocks(const Arguments& arguments, const Target& target,
                                                    const Place& place, Loaded<INPUT>& x, BlockMemory& memory,
                                                    int tile_row, int tile_column) {
    const Tensors& tensors = arguments.tensors;
    const u32 t = threadIdx.x;
    leave_maxima(x, memory);
    __syncthreads();
    make_scale(arguments, target, memory, tile_row, tile_column);
    __syncthreads();
    if (t == 0 && target.scales.amax != nullptr) {
        u32 amax = 0;
        for (int warp = TILE_COLUMNS / 32; warp < (TILE_COLUMNS + TILE_ROWS) / 32; ++warp)
            amax = max(amax, memory.amax[warp]);
        record_amax(target.scales.amax + *target.scales.index, amax);
    }
    u32 codes[THREAD_ROWS][2];
    if (target.out.y) {
        const float* of_rows = &memory.scales[TILE_COLUMNS + t / THREADS_ACROSS * THREAD_ROWS];
        encode(codes, x, [&](int i, int) { return of_rows[i]; });
        store_rows(codes, target.out, tensors, target.width, place);
    }
    keep_packed(x);
    if (target.out.y_t) {
        const float* of_columns = &memory.scales[t % THREADS_ACROSS * THREAD_COLUMNS];
        encode(codes, x, [&](int, int j) { return of_columns[j]; });
        store_columns(codes, target.out, tensors, memory, tile_row, tile_column);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    cast_blocks(const __grid_constant__ Arguments arguments) {
    __shared__ __align__(16) BlockMemory memory;
    cast_in_blocks(arguments, memory,
                   [&](Loaded<INPUT>& x, const Target& target, const Place& place, BlockMemory& memory, int tile_row,
                       int tile_column) {
                       cast_tile_of_blocks(arguments, target, place, x, memory, tile_row, tile_column);
                   });
}
