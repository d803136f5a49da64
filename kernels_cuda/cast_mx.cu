/* cast_mx: a tensor into E4M3, by rows, by columns, or both, each 1 x 32 with a scale in E8M0, in one pass.

maths       that of mx_tile.cuh, of v as in block_cast.cuh; amax[index] = max(amax[index], max |v|) as bits
tensors     those of cast_tile.cuh and of mx_tile.cuh
variants    those of block_cast.cuh
tile        128 x 128, 512 threads: a tile holds whole blocks of both shapes. A thread keeps its 4 x 8 elements in registers
            while the maxima of columns go through shared memory; it computes the scales of its four rows, and that of one
            column and block
grid        ceil(rows / 128) * ceil(columns / 128) blocks of 512 threads, tiles by rows; 28 KB of shared memory
bytes       as for cast_transpose, bf16 in both layouts 4 an element, and 1 / 32 for each layout's scales; an activation's
            gradient 6, those of gate and up 10
ceiling     memory bandwidth: 63 us for 8192 x 8192 at a measured 4.3 TB/s
reference   lightning_fp8.ops.blocks.cast, whose codes and scales these are, bit for bit
*/
#include "block_cast.cuh"
#include "mx_tile.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) cast_mx(const __grid_constant__ Arguments arguments) {
    __shared__ __align__(16) MxMemory memory;
    cast_in_blocks(arguments, memory,
                   [&](Loaded<INPUT>& x, const Target& target, const Place& place, MxMemory& memory, int tile_row,
                       int tile_column) {
                       const Scales& scales = target.scales;
                       const MxResult result = {target.out, static_cast<u8*>(scales.by_rows),
                                                static_cast<u8*>(scales.by_columns), target.width};
                       const u32 amax =
                           cast_mx_tile(arguments.tensors, result, place, x, memory, tile_row, tile_column);
                       if (threadIdx.x == 0 && scales.amax != nullptr)
                           record_amax(scales.amax + *scales.index, amax);
                   });
}
