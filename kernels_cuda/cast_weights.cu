/* cast_weights: weights into E4M3, by rows and by columns, each scaled by its own values.

maths       SQUARES 0: one scale, FP8_MAX / max |w|. Two launches: `measure` finds each current_amax, the other casts
            SQUARES 1: a scale for each block of 128 x 128, as in cast_blocks, the same for y and y_t
            MX 1: scales in E8M0 for each 1 x 32 of y and of y_t, with SQUARES for 32 x 32, see mx_tile.cuh
            With blocks there is one launch, in which the last thread block of a weight knows its maximum
            amax[index] = max |w|, and scale[index] that of the whole weight, for logs
tensors     weights [count] Weight, first_tile [count + 1] int32, the running sum of tiles; or null for a single weight,
            which is part of the arguments: a CUDA graph then needs no memory of the host
variants    SQUARES 0|1, MX 0|1
grid        first_tile[count] blocks of 256 threads, with SQUARES or MX 512; a block finds its weight by bisection
bytes       fp32 4 an element to measure and 6 to cast, bf16 and fp16 2 and 4; nothing is measured with SQUARES or MX
ceiling     memory bandwidth
reference   lightning_fp8.scalings.base.Scaling.quantized, weight by weight
*/
#ifndef SQUARES
#define SQUARES 0
#endif
#ifndef MX
#define MX 0
#endif
#if MX
#include "mx_tile.cuh"
typedef MxMemory Memory;
#else
#if SQUARES
#define TILE_WIDTH 128
#endif
#include "cast_tile.cuh"
typedef TileMemory Memory;
#endif

struct Weight {
    Tensors tensors;
    const long long* index;   // [1], of the tensor in the two arenas
    float* current_amax;      // zero; with SQUARES or MX the number of tiles that are done, u32, is `count` further
    void* scale_inv;          // fp32, [1], SQUARES [tiles down, tiles across]; MX `scales`
    void* scale_inv_t;        // MX `scales_t`; else unused
    long long input;          // 0 fp32, 1 bf16, 2 fp16
};

struct Arguments {
    const Weight* weights;
    const int* first_tile;
    float* scale;   // [R]
    float* amax;    // [R], or null: note nothing
    int count, measure, power_of_two;
    Weight one;
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

/* Writes what a weight was cast with; by one thread. */
__device__ __forceinline__ void note(const Arguments& arguments, const Weight& weight, float amax, float scale) {
    if (arguments.amax == nullptr) return;
    arguments.amax[*weight.index] = amax;
    arguments.scale[*weight.index] = scale;
}

#if SQUARES || MX
/* What the weight as a whole would be scaled by. */
__device__ __forceinline__ float scale_of_all(float amax, int power_of_two) {
#if MX
    return e8m0_multiplier(e8m0_scale(amax, E4M3::max()));
#else
    return block_scale(amax, E4M3::max(), power_of_two);
#endif
}

/* Counts a tile; the last one of a weight sees all maxima. By one thread. */
__device__ __forceinline__ void leave(const Arguments& arguments, const Weight& weight, u32 amax) {
    if (arguments.amax == nullptr) return;
    const Tensors& tensors = weight.tensors;
    const u32 tiles = ((tensors.rows - 1) / TILE_ROWS + 1) * ((tensors.columns - 1) / TILE_COLUMNS + 1);
    u32* whole = reinterpret_cast<u32*>(weight.current_amax);
    atomicMax(whole, amax);
    __threadfence();
    if (atomicAdd(whole + arguments.count, 1u) + 1 != tiles) return;
    const float current = __uint_as_float(atomicMax(whole, 0u));
    note(arguments, weight, current, scale_of_all(current, arguments.power_of_two));
}

#if MX
/* A tile in blocks of 32. */
template <class Input>
__device__ __forceinline__ void cast_in_blocks(const Arguments& arguments, const Weight& weight, Memory& memory,
                                               int tile_row, int tile_column, int) {
    const Tensors& tensors = weight.tensors;
    const MxResult result = {tensors.out, static_cast<u8*>(weight.scale_inv), static_cast<u8*>(weight.scale_inv_t),
                             tensors.columns};
    const Place place(tensors, tile_row, tile_column);
    Loaded<Input> x(tensors.x, tensors.x_stride, place, tensors);
#if SQUARES
    const u32 amax = cast_mx_squares(tensors, result, place, x, memory, tile_row, tile_column);
#else
    const u32 amax = cast_mx_tile(tensors, result, place, x, memory, tile_row, tile_column);
#endif
    if (threadIdx.x == 0) leave(arguments, weight, amax);
}
#else
/* A tile, which is one block. */
template <class Input>
__device__ __forceinline__ void cast_in_blocks(const Arguments& arguments, const Weight& weight, Memory& memory,
                                               int tile_row, int tile_column, int tile) {
    const Tensors& tensors = weight.tensors;
    const Place place(tensors, tile_row, tile_column);
    const Loaded<Input> x(tensors.x, tensors.x_stride, place, tensors);
    u32 amax = 0;
#pragma unroll
    for (int i = 0; i < THREAD_ROWS; ++i)
#pragma unroll
        for (int j = 0; j < THREAD_COLUMNS; ++j) amax = larger_amax(amax, x.get(i, j));
    amax = __reduce_max_sync(0xffffffffu, amax);
    if (threadIdx.x % 32 == 0) memory.amax[threadIdx.x / 32] = amax;
    __syncthreads();
    amax = __reduce_max_sync(0xffffffffu, memory.amax[threadIdx.x % WARPS]);
    const float scale = block_scale(__uint_as_float(amax), E4M3::max(), arguments.power_of_two);
    Encoded<E4M3> encoded;
#pragma unroll
    for (int i = 0; i < THREAD_ROWS; ++i) {
        float v[THREAD_COLUMNS];
#pragma unroll
        for (int j = 0; j < THREAD_COLUMNS; ++j) v[j] = x.get(i, j);
        encoded.put(i, v, scale);
    }
    store_tile<false>(encoded, tensors.out, tensors, tensors.columns, place, memory, tile_row, tile_column);
    if (threadIdx.x != 0) return;
    static_cast<float*>(weight.scale_inv)[tile] = 1.0f / scale;
    leave(arguments, weight, amax);
}
#endif
#endif

// two sets of codes of fp32 take more registers
extern "C" __global__ void __launch_bounds__(THREADS, MX && !SQUARES ? 1 : 2)
    cast_weights(const __grid_constant__ Arguments arguments) {
    __shared__ __align__(16) Memory memory;
    const Weight* given = &arguments.one;
    int tile = blockIdx.x;
    if (arguments.weights != nullptr) {
        const int number = weight_of(arguments.first_tile, arguments.count, tile);
        given = &arguments.weights[number];
        tile -= arguments.first_tile[number];
    }
    const Weight& weight = *given;
    const int tiles_across = (weight.tensors.columns + TILE_COLUMNS - 1) / TILE_COLUMNS;
    const int tile_row = tile / tiles_across, tile_column = tile % tiles_across;
#if SQUARES || MX
    if (weight.input == 0) cast_in_blocks<Fp32>(arguments, weight, memory, tile_row, tile_column, tile);
    else if (weight.input == 1) cast_in_blocks<Bf16>(arguments, weight, memory, tile_row, tile_column, tile);
    else cast_in_blocks<Fp16>(arguments, weight, memory, tile_row, tile_column, tile);
#else
    const float scale = arguments.measure ? 1.0f : scale_of_current(*weight.current_amax, E4M3::max());
    Tensors tensors = weight.tensors;
    if (arguments.measure) tensors.out.y = tensors.out.y_t = nullptr;
    u32 amax;
    if (weight.input == 0) amax = cast_tile<Fp32, E4M3, Identity, false>(tensors, scale, memory, tile_row, tile_column);
    else if (weight.input == 1)
        amax = cast_tile<Bf16, E4M3, Identity, false>(tensors, scale, memory, tile_row, tile_column);
    else amax = cast_tile<Fp16, E4M3, Identity, false>(tensors, scale, memory, tile_row, tile_column);
    if (arguments.measure) {
        amax = block_max(amax, memory);
        if (threadIdx.x == 0) record_amax(weight.current_amax, amax);
    } else if (tile == 0 && threadIdx.x == 0) {
        *static_cast<float*>(weight.scale_inv) = 1.0f / scale;
        note(arguments, weight, *weight.current_amax, scale);
    }
#endif
}
