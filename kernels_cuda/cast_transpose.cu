/* cast_transpose: a tensor into FP8, by rows, by columns, or both, with its amax and column sums, in one pass.

maths       code = sat(v * scale[index]) in fp32, rounded to nearest even; amax[index] = max(amax[index], max |v|);
            v = activation(x), or the gradient of x (BACKWARD). A tensor that uses no history, or has none, is scaled by
            current_amax, which the same kernel has measured before (`measure`: no output but current_amax)
tensors     see cast_tile.cuh and scales.cuh
groups      not with GATED: each 128 rows may belong to one of several groups of rows, which have places of their own
            in the scaling state. Nothing is written for rows without a group, nor scale_inv of a group without rows
variants    INPUT Fp32|Bf16|Fp16, FORMAT E4M3|E5M2, BACKWARD 0|1, and either
            ACTIVATION Identity|Relu|Gelu|GeluTanh|Silu or GATED 1, which is swiglu
grid        ceil(rows / 128) * ceil(columns / 64) blocks of 256 threads, tiles by rows; 10.3 KB of shared memory
bytes       bf16, both layouts: 4 an element; with an activation the same; its gradient 6
ceiling     memory bandwidth: 62 us for 8192 x 8192 at a measured 4.3 TB/s
reference   lightning_fp8.scalings.base.Scaling.by_reference, after lightning_fp8.ops.activations.activation_gradient with BACKWARD
*/
#include "cast_tile.cuh"

/* Blocks on a multiprocessor at once, as many as the registers allow for the variant. */
#if GATED || BACKWARD
constexpr int BLOCKS = 2;
#else
constexpr int BLOCKS = sizeof(INPUT::Element) == 2 && ACTIVATION::exact ? 4 : 3;
#endif

struct Arguments {
    Tensors tensors;
    ScalingRow row;
    int measure, scale_from;
#if GATED
    Gated gated;
    ScalingRow row_up;   // of the gradient of up; elsewhere the same as `row`
#endif
};

/* Records a block's maximum of one tensor or group and, by one thread of its `first` block, what it was cast with. */
__device__ __forceinline__ void leave(const ScalingRow& row, int group, long long index, int measure, float scale,
                                      u32 amax, TileMemory& memory, bool first) {
    float* recorded = row.amax == nullptr ? nullptr : row.amax + (measure ? group : index);
    if (recorded != nullptr) {
        amax = block_max(amax, memory);
        if (threadIdx.x == 0) record_amax(recorded, amax);
    }
    if (first && threadIdx.x == 0 && row.scale_inv != nullptr) row.scale_inv[group] = 1.0f / scale;
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    cast_transpose(const __grid_constant__ Arguments arguments) {
    __shared__ __align__(16) TileMemory memory;
    const ScalingRow& row = arguments.row;
    const int measure = arguments.measure, from = arguments.scale_from;
    const int tiles_across = (arguments.tensors.columns + TILE_COLUMNS - 1) / TILE_COLUMNS;
    const int tile_row = blockIdx.x / tiles_across, tile_column = blockIdx.x % tiles_across;
    // the device decides whether to measure: the host need not know which tensors have a history
#if GATED
    const long long index = *row.index;
    const ScalingRow& row_up = arguments.row_up;
    const long long index_up = *row_up.index;
    if (measure && has_history(row, index, from) && has_history(row_up, index_up, from)) return;
    const float scale = measure ? 1.0f : scale_to_use(row, 0, index, FORMAT::max(), from);
    const float scale_up = measure ? 1.0f : scale_to_use(row_up, 0, index_up, FORMAT::max(), from);
    const uint2 amax = cast_gated_tile<INPUT, FORMAT, BACKWARD>(arguments.tensors, arguments.gated, scale, scale_up,
                                                                memory, tile_row, tile_column);
    leave(row, 0, index, measure, scale, amax.x, memory, blockIdx.x == 0);
    if (BACKWARD) {
        __syncthreads();   // the first maximum has been read
        leave(row_up, 0, index_up, measure, scale_up, amax.y, memory, blockIdx.x == 0);
    }
#else
    const int* groups = row.group_of_tile;
    const int group = groups == nullptr ? 0 : groups[tile_row];
    if (group < 0) return;
    const long long index = row.index[group];
    if (measure && has_history(row, index, from)) return;
    const float scale = measure ? 1.0f : scale_to_use(row, group, index, FORMAT::max(), from);
    const u32 amax =
        cast_tile<INPUT, FORMAT, ACTIVATION, BACKWARD>(arguments.tensors, scale, memory, tile_row, tile_column);
    const bool first = tile_column == 0 && (tile_row == 0 || (groups != nullptr && groups[tile_row - 1] != group));
    leave(row, group, index, measure, scale, amax, memory, first);
#endif
}
