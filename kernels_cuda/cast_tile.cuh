/* One tile of a cast: TILE_ROWS x TILE_COLUMNS elements in, their FP8 codes out, by rows, by columns, or both.

maths       v = activation(x), or with BACKWARD the gradient of x from that of the activation's output, rounded to the
            input's format; code = sat(v * scale) in fp32, rounded to nearest even; amax = max |v|
tensors     x        [rows, columns] fp32, bf16 or fp16, rows `x_stride` elements apart
            dy       [rows, columns] like x, rows `dy_stride` apart; BACKWARD only
            y        [rows, columns] u8, contiguous, or null
            y_t      [columns, pitch] u8, contiguous, or null; pitch is rows rounded up to 16, and codes beyond rows are 0
            column_sums  [ceil(rows / TILE_ROWS), columns] fp32, or null: sums of v over the rows of each tile; not with a
                     forward activation, as its output is no gradient
            Gated: x is the gate, `up` another tensor with its shape and stride; with BACKWARD the gradient of up has
                     outputs of its own, and rows of both y and both column_sums are `width` elements apart, so that
                     gate and up may also be halves of one tensor
            `aligned`: LOADS if groups of 8 elements of a row of x (and dy, and up) are aligned to 16 bytes, ROWS if
            those of y are aligned to 8 bytes, COLUMNS if y_t is aligned to 16 bytes
tile        128 rows x 64 columns, 256 threads; thread t holds rows 4 (t / 8) + 0..3, columns 8 (t % 8) + 0..7. With
            TILE_WIDTH 128 twice as wide, 512 threads:

               columns   0..7  8..15  ...  56..63
            rows 0..3     t0    t1    ...    t7
            rows 4..7     t8    t9    ...   t15
            ...
            rows 124..127 t248                t255

shared      the codes by columns, 64 x 128 bytes, and 8 x 64 column sums: 10 KB. A thread's four codes of a column make
            a word; words are swizzled in groups of four by the thread's column, so that both the writes (lanes with 8
            different columns) and the 16-byte reads touch every bank once. A tile of 128 columns takes 24 KB, and two
            lanes write to a bank
bytes       read once, written once: for bf16 2 in, 1 out by rows, 1 out by columns
*/
#pragma once
#include "activations.cuh"
#include "scales.cuh"

#ifndef TILE_WIDTH
#define TILE_WIDTH 64
#endif
constexpr int TILE_ROWS = 128, TILE_COLUMNS = TILE_WIDTH, THREAD_ROWS = 4, THREAD_COLUMNS = 8;
constexpr int ACROSS_BITS = TILE_COLUMNS == 64 ? 3 : 4, THREADS_ACROSS = 1 << ACROSS_BITS;
constexpr int THREADS = THREADS_ACROSS * TILE_ROWS / THREAD_ROWS;
static_assert(THREADS_ACROSS * THREAD_COLUMNS == TILE_COLUMNS, "64 columns or 128");
constexpr int WARPS = THREADS / 32, WORDS_PER_COLUMN = TILE_ROWS / 4;
enum Alignment { LOADS = 1, ROWS = 2, COLUMNS = 4 };

struct Outputs {
    u8* y;
    u8* y_t;
    float* column_sums;
};

struct Tensors {
    const void* x;
    const void* dy;
    Outputs out;
    long long x_stride, dy_stride;
    int rows, columns, aligned;
};

/* The additional tensors of a gated variant. */
struct Gated {
    const void* up;
    Outputs out;
    int width;
};

struct TileMemory {
    u32 codes[TILE_COLUMNS * WORDS_PER_COLUMN];
    float sums[WARPS * TILE_COLUMNS];
    u32 amax[WARPS];
};

/* Where this thread's 4 x 8 elements lie. */
struct Place {
    long long row, column;
    bool inside;   // whether the whole tile is
    __device__ Place(const Tensors& tensors, int tile_row, int tile_column) {
        const int t = threadIdx.x;
        row = (long long)tile_row * TILE_ROWS + (t >> ACROSS_BITS) * THREAD_ROWS;
        column = (long long)tile_column * TILE_COLUMNS + (t & (THREADS_ACROSS - 1)) * THREAD_COLUMNS;
        inside = (tile_row + 1) * (long long)TILE_ROWS <= tensors.rows &&
                 (tile_column + 1) * (long long)TILE_COLUMNS <= tensors.columns;
    }
};

/* A thread's elements as they lie in memory; those outside the matrix are 0, which changes neither amax nor sums. */
template <class Input>
struct Loaded {
    typename Input::Eight rows[THREAD_ROWS];

    __device__ __forceinline__ Loaded(const void* tensor, long long stride, const Place& place,
                                      const Tensors& tensors) {
        const typename Input::Element* x = static_cast<const typename Input::Element*>(tensor);
        if (place.inside && (tensors.aligned & LOADS)) {
#pragma unroll
            for (int i = 0; i < THREAD_ROWS; ++i) rows[i] = Input::load(x + (place.row + i) * stride + place.column);
            return;
        }
#pragma unroll
        for (int i = 0; i < THREAD_ROWS; ++i) {
            rows[i] = {};
#pragma unroll
            for (int j = 0; j < THREAD_COLUMNS; ++j)
                if (place.row + i < tensors.rows && place.column + j < tensors.columns)
                    Input::put(rows[i], j, x[(place.row + i) * stride + place.column + j]);
        }
    }
    __device__ __forceinline__ float get(int row, int column) const { return Input::get(rows[row], column); }
};

/* A thread's results. */
template <class Format>
struct Encoded {
    u32 codes[THREAD_ROWS][2], amax = 0;
    float sums[THREAD_COLUMNS] = {};

    __device__ __forceinline__ void put(int row, const float (&v)[THREAD_COLUMNS], float scale) {
#pragma unroll
        for (int j = 0; j < THREAD_COLUMNS; ++j) {
            amax = larger_amax(amax, v[j]);
            sums[j] += v[j];
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float* four = &v[4 * half];
            codes[row][half] = Format::codes(four[0] * scale, four[1] * scale) |
                               (Format::codes(four[2] * scale, four[3] * scale) << 16);
        }
    }
};

/* Sums of each column over the tile's rows, always in one order: the rows of a thread, the threads of a warp, warps. */
__device__ __forceinline__ void sum_columns(const float (&sums)[THREAD_COLUMNS], float* column_sums, TileMemory& memory,
                                            int tile_column, int columns) {
    const int t = threadIdx.x, lane = t & 31, warp = t >> 5;
#pragma unroll
    for (int j = 0; j < THREAD_COLUMNS; ++j) {
        float sum = sums[j];
#pragma unroll
        for (int apart = THREADS_ACROSS; apart < 32; apart *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, apart);
        if (lane < THREADS_ACROSS) memory.sums[warp * TILE_COLUMNS + lane * THREAD_COLUMNS + j] = sum;
    }
    __syncthreads();
    const int column = tile_column * TILE_COLUMNS + t;
    if (t < TILE_COLUMNS && column < columns) {
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < WARPS; ++i) sum += memory.sums[i * TILE_COLUMNS + t];
        column_sums[column] = sum;
    }
}

/* Four bytes of each of four words -> the words' bytes 0, 1, 2 and 3. */
__device__ __forceinline__ void transpose_bytes(u32 (&words)[4]) {
    const u32 low01 = __byte_perm(words[0], words[1], 0x5140), low23 = __byte_perm(words[2], words[3], 0x5140);
    const u32 high01 = __byte_perm(words[0], words[1], 0x7362), high23 = __byte_perm(words[2], words[3], 0x7362);
    words[0] = __byte_perm(low01, low23, 0x5410);
    words[1] = __byte_perm(low01, low23, 0x7632);
    words[2] = __byte_perm(high01, high23, 0x5410);
    words[3] = __byte_perm(high01, high23, 0x7632);
}

__device__ __forceinline__ void store_rows(const u32 (&codes)[THREAD_ROWS][2], const Outputs& out,
                                           const Tensors& tensors, long long width, const Place& place) {
    if (place.inside && (tensors.aligned & ROWS)) {
#pragma unroll
        for (int i = 0; i < THREAD_ROWS; ++i)
            *reinterpret_cast<uint2*>(out.y + (place.row + i) * width + place.column) =
                make_uint2(codes[i][0], codes[i][1]);
        return;
    }
#pragma unroll
    for (int i = 0; i < THREAD_ROWS; ++i) {
#pragma unroll
        for (int j = 0; j < THREAD_COLUMNS; ++j) {
            if (place.row + i < tensors.rows && place.column + j < tensors.columns)
                out.y[(place.row + i) * width + place.column + j] = (u8)(codes[i][j >> 2] >> (8 * (j & 3)));
        }
    }
}

__device__ __forceinline__ void store_columns(const u32 (&codes)[THREAD_ROWS][2], const Outputs& out,
                                              const Tensors& tensors, TileMemory& memory, int tile_row,
                                              int tile_column) {
    const int t = threadIdx.x, across = t & (THREADS_ACROSS - 1), down = t >> ACROSS_BITS;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        u32 words[4] = {codes[0][half], codes[1][half], codes[2][half], codes[3][half]};
        transpose_bytes(words);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const int column = across * THREAD_COLUMNS + half * 4 + j;
            memory.codes[column * WORDS_PER_COLUMN + ((((down >> 2) ^ (across & 7)) << 2) | (down & 3))] = words[j];
        }
    }
    __syncthreads();
    // eight threads write the 128 bytes of a column, 16 each; those beyond the last row are the codes of zeros
    const int sixteen = t & 7;
    const long long pitch = (tensors.rows + 15ll) & ~15ll, row = (long long)tile_row * TILE_ROWS + sixteen * 16;
    if (row >= pitch) return;
#pragma unroll
    for (int first = 0; first < TILE_COLUMNS; first += THREADS / 8) {
        const int column = first + (t >> 3);
        const uint4 chunk = *reinterpret_cast<const uint4*>(
            &memory.codes[column * WORDS_PER_COLUMN + ((sixteen ^ ((column >> 3) & 7)) << 2)]);
        const long long at_column = (long long)tile_column * TILE_COLUMNS + column;
        if (at_column >= tensors.columns) return;
        u8* target = out.y_t + at_column * pitch + row;
        if (tensors.aligned & COLUMNS) {
            *reinterpret_cast<uint4*>(target) = chunk;
        } else {
            const u32 words[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
#pragma unroll
            for (int j = 0; j < 16; ++j) target[j] = (u8)(words[j >> 2] >> (8 * (j & 3)));
        }
    }
}

/* Writes a tile's results, whose rows are `width` elements apart. SUMS: whether it may have column sums. */
template <bool SUMS, class Format>
__device__ __forceinline__ void store_tile(const Encoded<Format>& encoded, const Outputs& out, const Tensors& tensors,
                                           long long width, const Place& place, TileMemory& memory, int tile_row,
                                           int tile_column) {
    if (out.y) store_rows(encoded.codes, out, tensors, width, place);
    if (out.y_t) store_columns(encoded.codes, out, tensors, memory, tile_row, tile_column);
    if (SUMS && out.column_sums) {
        float* sums = out.column_sums + tile_row * width;
        sum_columns(encoded.sums, sums, memory, tile_column, tensors.columns);
    }
}

/* The |v| maximum over the block's threads; only thread 0 has it. */
__device__ __forceinline__ u32 block_max(u32 bits, TileMemory& memory) {
    bits = __reduce_max_sync(0xffffffffu, bits);
    if ((threadIdx.x & 31) == 0) memory.amax[threadIdx.x >> 5] = bits;
    __syncthreads();
    if (threadIdx.x != 0) return 0;
#pragma unroll
    for (int i = 0; i < WARPS; ++i) bits = max(bits, memory.amax[i]);
    return bits;
}

/* A tile from its elements to all its outputs. Returns the |v| maximum of this thread, as bits. */
template <class Input, class Format, class Activation, bool Backward>
__device__ __forceinline__ u32 cast_tile(const Tensors& tensors, float scale, TileMemory& memory, int tile_row,
                                         int tile_column) {
    const Place place(tensors, tile_row, tile_column);
    const Loaded<Input> x(tensors.x, tensors.x_stride, place, tensors);
    Encoded<Format> encoded;
    float v[THREAD_COLUMNS];
    if constexpr (!Backward) {
#pragma unroll
        for (int i = 0; i < THREAD_ROWS; ++i) {
#pragma unroll
            for (int j = 0; j < THREAD_COLUMNS; ++j)
                v[j] = rounded<Input, Activation>(Activation::forward(x.get(i, j)));
            encoded.put(i, v, scale);
        }
    } else {
        const Loaded<Input> dy(tensors.dy, tensors.dy_stride, place, tensors);
#pragma unroll
        for (int i = 0; i < THREAD_ROWS; ++i) {
#pragma unroll
            for (int j = 0; j < THREAD_COLUMNS; ++j)
                v[j] = rounded<Input, Activation>(Activation::template backward<Input>(x.get(i, j), dy.get(i, j)));
            encoded.put(i, v, scale);
        }
    }
    constexpr bool sums = Backward || is_identity<Activation>;
    store_tile<sums>(encoded, tensors.out, tensors, tensors.columns, place, memory, tile_row, tile_column);
    return encoded.amax;
}

/* The same for silu(gate) * up, or for the gradients of both, each with a scale of its own. The second maximum is that of
   the gradient of up. */
template <class Input, class Format, bool Backward>
__device__ __forceinline__ uint2 cast_gated_tile(const Tensors& tensors, const Gated& gated, float scale,
                                                 float scale_up, TileMemory& memory, int tile_row, int tile_column) {
    const Place place(tensors, tile_row, tile_column);
    const Loaded<Input> gate(tensors.x, tensors.x_stride, place, tensors);
    const Loaded<Input> up(gated.up, tensors.x_stride, place, tensors);
    if constexpr (!Backward) {
        Encoded<Format> encoded;
        float v[THREAD_COLUMNS];
#pragma unroll
        for (int i = 0; i < THREAD_ROWS; ++i) {
#pragma unroll
            for (int j = 0; j < THREAD_COLUMNS; ++j)
                v[j] = Input::round(Input::round(Silu::forward(gate.get(i, j))) * up.get(i, j));
            encoded.put(i, v, scale);
        }
        store_tile<false>(encoded, tensors.out, tensors, tensors.columns, place, memory, tile_row, tile_column);
        return make_uint2(encoded.amax, 0);
    } else {
        const Loaded<Input> dy(tensors.dy, tensors.dy_stride, place, tensors);
        Encoded<Format> of_gate, of_up;
        float d_gate[THREAD_COLUMNS], d_up[THREAD_COLUMNS];
#pragma unroll
        for (int i = 0; i < THREAD_ROWS; ++i) {
#pragma unroll
            for (int j = 0; j < THREAD_COLUMNS; ++j) {
                const float g = gate.get(i, j), d = dy.get(i, j);
                d_gate[j] = Input::round(Silu::template backward<Input>(g, Input::round(d * up.get(i, j))));
                d_up[j] = Input::round(d * Input::round(Silu::forward(g)));
            }
            of_gate.put(i, d_gate, scale);
            of_up.put(i, d_up, scale_up);
        }
        store_tile<true>(of_gate, tensors.out, tensors, gated.width, place, memory, tile_row, tile_column);
        __syncthreads();   // the first half's codes and sums have been read
        store_tile<true>(of_up, gated.out, tensors, gated.width, place, memory, tile_row, tile_column);
        return make_uint2(of_gate.amax, of_up.amax);
    }
}
