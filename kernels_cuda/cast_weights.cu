/* cast_weights: all weights of a model into E4M3, by rows and by columns, with their amaxes, in one launch.

maths       as cast_transpose for each weight. Two launches: `measure` finds each current_amax, and the other scales by
            it; amax and scale of each weight are written to the arenas
tensors     weights [count] Weight; first_tile [count + 1] int32, the running sum of tiles
grid        first_tile[count] blocks of 256 threads; a block finds its weight by bisection
bytes       fp32 4 an element to measure and 6 to cast, bf16 and fp16 2 and 4
ceiling     memory bandwidth
reference   lightning_fp8.ops.reference.cast, weight by weight
*/
#include "cast_tile.cuh"

struct Weight {
    Tensors tensors;
    long long index;
    float* current_amax;
    float* scale_inv;
    long long input;   // 0 fp32, 1 bf16, 2 fp16
};

struct Arguments {
    const Weight* weights;
    const int* first_tile;
    float* scale;
    float* amax;
    int count, measure;
};

/* The last weight whose first tile is not after `tile`. */
__device__ __forceinline__ int weight_of(const int* first_tile, int count, int tile) {
    int low = 0, high = count - 1;
    while (low < high) {
        const int middle = (low + high + 1) >> 1;
        if (first_tile[middle] <= tile) low = middle;
        else high = middle - 1;
    }
    return low;
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) cast_weights(const __grid_constant__ Arguments arguments) {
    __shared__ __align__(16) TileMemory memory;
    const int number = weight_of(arguments.first_tile, arguments.count, blockIdx.x);
    const Weight& weight = arguments.weights[number];
    const float scale = arguments.measure ? 1.0f : scale_of_current(*weight.current_amax, E4M3::max());
    Tensors tensors = weight.tensors;
    if (arguments.measure) tensors.out.y = tensors.out.y_t = nullptr;
    const int tiles_across = (tensors.columns + TILE_COLUMNS - 1) / TILE_COLUMNS;
    const int tile = blockIdx.x - arguments.first_tile[number];
    const int tile_row = tile / tiles_across, tile_column = tile % tiles_across;
    u32 amax = 0;
    if (weight.input == 0) amax = cast_tile<Fp32, E4M3, Identity, false>(tensors, scale, memory, tile_row, tile_column);
    else if (weight.input == 1)
        amax = cast_tile<Bf16, E4M3, Identity, false>(tensors, scale, memory, tile_row, tile_column);
    else amax = cast_tile<Fp16, E4M3, Identity, false>(tensors, scale, memory, tile_row, tile_column);
    if (arguments.measure) {
        amax = block_max(amax, memory);
        if (threadIdx.x == 0) record_amax(weight.current_amax, amax);
    } else if (tile == 0 && threadIdx.x == 0) {
        *weight.scale_inv = 1.0f / scale;
        note_weight(arguments.amax, arguments.scale, weight.index, *weight.current_amax, scale);
    }
}
