/* What cast_blocks and cast_mx share: arguments, and the values that are cast, of one tensor or of two gradients.

maths       v = activation(x), or with BACKWARD the gradient of x from that of the activation's output, rounded to the
            input's format, as in cast_tile.cuh. A thread's results take the place of its elements in registers, so that
            maxima, codes and sums are those of a tensor that was stored and read again
            GATED: x is the gate, v = silu(x) * up; with BACKWARD the gradients of both, one after the other
tensors     see cast_tile.cuh; scales as the kernel says
variants    INPUT Fp32|Bf16|Fp16, BACKWARD 0|1, and either ACTIVATION Identity|Relu|Gelu|GeluTanh|Silu or GATED 1
*/
#pragma once
#include "block_tile.cuh"

#ifdef GATED
#define ACTIVATION Silu
#else
#define GATED 0
#endif

struct Scales {
    void* by_rows;            // of y, or null
    void* by_columns;         // of y_t, or null
    const long long* index;   // [1], of the tensor in the arena
    float* amax;              // [R], or null: record nothing
};

struct Arguments {
    Tensors tensors;
    Scales scales;
    long long power_of_two;
#if GATED
    Gated gated;
    Scales of_up;   // of the gradient of up; elsewhere unused
#endif
};

/* Where one tensor's cast goes. */
struct Target {
    const Outputs& out;
    const Scales& scales;
    const int& width;   // of the tensor of which this is a part; a reference takes no register
};

/* Blocks on a multiprocessor at once, as many as the registers allow for the variant. */
constexpr int BLOCKS = sizeof(INPUT::Element) == 2 && !GATED && !BACKWARD ? 2 : 1;

/* The values of `v`, a function of the column, rounded to the format. */
template <class Input, class Value>
__device__ __forceinline__ typename Input::Eight rounded_eight(const Value& v) {
    typename Input::Eight eight;
    constexpr int WORDS = sizeof(eight) / sizeof(u32), IN_WORD = THREAD_COLUMNS / WORDS;
#pragma unroll
    for (int i = 0; i < WORDS; ++i) eight.words[i] = Input::word(v(IN_WORD * i), v(IN_WORD * i + IN_WORD - 1));
    return eight;
}

/* Replaces the elements by what is cast. Rows outside of the matrix stay zeros; to branch at each row also takes fewer
   registers, as the compiler then does not begin with all of them. */
__device__ __forceinline__ void activate(Loaded<INPUT>& x, const Arguments& arguments, const Place& place) {
    const Tensors& tensors = arguments.tensors;
    if constexpr (BACKWARD) {
        const Loaded<INPUT> dy(tensors.dy, tensors.dy_stride, place, tensors);
#pragma unroll
        for (int i = 0; i < THREAD_ROWS; ++i) {
            if (place.row + i >= tensors.rows) continue;
            x.rows[i] = rounded_eight<INPUT>(
                [&](int j) { return ACTIVATION::backward<INPUT>(x.get(i, j), dy.get(i, j)); });
        }
    } else if constexpr (!is_identity<ACTIVATION>) {
#pragma unroll
        for (int i = 0; i < THREAD_ROWS; ++i) {
            if (place.row + i >= tensors.rows) continue;
            x.rows[i] = rounded_eight<INPUT>([&](int j) { return ACTIVATION::forward(x.get(i, j)); });
        }
    }
}

#if GATED
/* Replaces the gate by silu(gate) * up; with BACKWARD both by their gradients. */
__device__ __forceinline__ void activate_gated(Loaded<INPUT>& gate, Loaded<INPUT>& up, const Arguments& arguments,
                                               const Place& place) {
    const Tensors& tensors = arguments.tensors;
    if constexpr (BACKWARD) {
        const Loaded<INPUT> dy(tensors.dy, tensors.dy_stride, place, tensors);
#pragma unroll
        for (int i = 0; i < THREAD_ROWS; ++i) {
            if (place.row + i >= tensors.rows) continue;
            const auto d_gate = rounded_eight<INPUT>([&](int j) {
                return Silu::backward<INPUT>(gate.get(i, j), INPUT::round(dy.get(i, j) * up.get(i, j)));
            });
            up.rows[i] = rounded_eight<INPUT>(
                [&](int j) { return dy.get(i, j) * INPUT::round(Silu::forward(gate.get(i, j))); });
            gate.rows[i] = d_gate;
        }
    } else {
#pragma unroll
        for (int i = 0; i < THREAD_ROWS; ++i) {
            if (place.row + i >= tensors.rows) continue;
            gate.rows[i] = rounded_eight<INPUT>(
                [&](int j) { return INPUT::round(Silu::forward(gate.get(i, j))) * up.get(i, j); });
        }
    }
}
#endif

/* One block of the grid. `cast_one(x, target, place, memory, tile_row, tile_column)` casts a tile of one tensor, and records
   the maximum of its |v|. */
template <class Memory, class CastOne>
__device__ __forceinline__ void cast_in_blocks(const Arguments& arguments, Memory& memory, const CastOne& cast_one) {
    const Tensors& tensors = arguments.tensors;
    const int tiles_across = (tensors.columns + TILE_COLUMNS - 1) / TILE_COLUMNS;
    const int tile_row = blockIdx.x / tiles_across, tile_column = blockIdx.x % tiles_across;
    const Place place(tensors, tile_row, tile_column);
    Loaded<INPUT> x(tensors.x, tensors.x_stride, place, tensors);
    const auto cast_to = [&](const Target& target) {
        cast_one(x, target, place, memory, tile_row, tile_column);
        keep_packed(x);
        store_sums(x, target.out, target.width, tensors, memory, tile_row, tile_column);
    };
#if GATED
    Loaded<INPUT> up(arguments.gated.up, tensors.x_stride, place, tensors);
    activate_gated(x, up, arguments, place);
    const int& width = BACKWARD ? arguments.gated.width : tensors.columns;
#pragma unroll
    for (int half = 0; half < 1 + BACKWARD; ++half) {
        if (half == 1) {
            __syncthreads();   // the first half's codes and sums have been read
            x = up;
        }
        cast_to({half ? arguments.gated.out : tensors.out, half ? arguments.of_up : arguments.scales, width});
    }
#else
    activate(x, arguments, place);
    cast_to({tensors.out, arguments.scales, tensors.columns});
#endif
}
