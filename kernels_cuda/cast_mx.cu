/* cast_mx: a tensor into E4M3, by rows, by columns, or both, each 1 x 32 with a scale in E8M0, in one pass.

maths       that of mx_tile.cuh; amax[index] = max(amax[index], max |x|) as bits
tensors     those of cast_tile.cuh except dy, those of mx_tile.cuh, and those of Arguments
variants    INPUT Fp32|Bf16|Fp16
tile        128 x 128, 512 threads: a tile holds whole blocks of both shapes. A thread keeps its 4 x 8 elements in registers
            while the maxima of columns go through shared memory; it computes the scales of its four rows, and that of one
            column and block
grid        ceil(rows / 128) * ceil(columns / 128) blocks of 512 threads, tiles by rows; 28 KB of shared memory
bytes       as for cast_transpose, bf16 in both layouts 4 an element, and 1 / 32 for each layout's scales
ceiling     memory bandwidth: 63 us for 8192 x 8192 at a measured 4.3 TB/s
reference   lightning_fp8.ops.blocks.cast, whose codes and scales these are, bit for bit
*/
#include "mx_tile.cuh"

struct Arguments {
    Tensors tensors;
    MxScales scales;
    const long long* index;   // [1], of the tensor in the arena
    float* amax;              // [R], or null: record nothing
};

extern "C" __global__ void __launch_bounds__(THREADS, sizeof(INPUT::Element) == 2 ? 2 : 1)
    cast_mx(const __grid_constant__ Arguments arguments) {
    __shared__ __align__(16) MxMemory memory;
    const Tensors& tensors = arguments.tensors;
    const int tiles_across = (tensors.columns + TILE_COLUMNS - 1) / TILE_COLUMNS;
    const int tile_row = blockIdx.x / tiles_across, tile_column = blockIdx.x % tiles_across;
    const Place place(tensors, tile_row, tile_column);
    Loaded<INPUT> x(tensors.x, tensors.x_stride, place, tensors);
    const u32 amax = cast_mx_tile(tensors, arguments.scales, place, x, memory, tile_row, tile_column);
    if (threadIdx.x == 0 && arguments.amax != nullptr) record_amax(arguments.amax + *arguments.index, amax);
    keep_packed(x);
    store_sums(x, tensors, memory, tile_row, tile_column);
}
