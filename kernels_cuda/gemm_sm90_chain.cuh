/* The end of a tile that writes the next GEMM's operand: linear - activation - linear without a cast in between.

maths       FORWARD   h = round(sum * scale + bias), v = round(activation(h))
            BACKWARD  da = round(sum * scale),       v = round(gradient of activation at h, times da)
            code = sat(v * scale[index]) as cast_tile.cuh casts; amax[index] = max(amax[index], max |v|)
            `round` is to the output's format, as the separate operators round between them
tensors     h, m x n, contiguous: written by FORWARD through the map of out, if gemm.out is not null; read by BACKWARD
            y and y_t as in struct Chain; column_sums of BACKWARD: sums of v over 64 rows, always in the same order
piece       64 x 128 at a time. Codes of one row lie in a thread two by two, of one column 8 rows apart; stmatrix lays
            them down as 16-bit elements, by rows and transposed, and the threads that read them back in pieces of 16
            bytes put those in order:

            by rows      [j p0, j+1 p0, j p1, j+1 p1, ...]   p: pair of columns of an 8-column group j
            by columns   [row 0, row 8, row 1, row 9, ...]

bytes       2 (h) + 1 + 1 an element written (BACKWARD: 2 read, 1 + 1 written), where a cast on its own reads 2 (4) more
reference   lightning_fp8.ops.reference: scaled_mm, then cast of the activation, or of its gradient
*/
#pragma once
#include "gemm_sm90.cuh"

#define FORWARD 0
#define BACKWARD 1

enum Alignment { ROWS = 1, COLUMNS = 2 };

/* 16 codes as they were laid down, in their order. */
__device__ __forceinline__ uint4 in_row_order(uint4 w) {
    return {__byte_perm(w.x, w.y, 0x5410), __byte_perm(w.z, w.w, 0x5410), __byte_perm(w.x, w.y, 0x7632),
            __byte_perm(w.z, w.w, 0x7632)};
}
__device__ __forceinline__ uint4 in_column_order(uint4 w) {
    return {__byte_perm(w.x, w.y, 0x6420), __byte_perm(w.z, w.w, 0x6420), __byte_perm(w.x, w.y, 0x7531),
            __byte_perm(w.z, w.w, 0x7531)};
}

/* The first `count` of 16 codes to consecutive addresses; where they are aligned, all 16 are there. */
__device__ __forceinline__ void put_codes(u8* target, uint4 codes, int count, bool aligned) {
    if (aligned) {
        *reinterpret_cast<uint4*>(target) = codes;
        return;
    }
    const u32 words[4] = {codes.x, codes.y, codes.z, codes.w};
#pragma unroll
    for (int i = 0; i < 16; ++i)
        if (i < count) target[i] = (u8)(words[i >> 2] >> (8 * (i & 3)));
}

struct Epilogue {
    static constexpr int COLUMNS = 128;
    static_assert(OUTPUT::BYTES == 2, "what is rounded between the operators is in 16 bits");
    const Arguments& arguments;
    const Gemm& gemm;
    const Chain& chain;
    const u32 staging, bias;
    const int consumer;
    const float scale, code_scale;
    const Lane at;
    u32 amax = 0;

    __device__ __forceinline__ Epilogue(const Arguments& arguments, const SharedMemory& memory, int consumer)
        : arguments(arguments), gemm(arguments.gemm), chain(arguments.chain), staging(memory.staging(consumer)),
          bias(memory.bias(consumer)), consumer(consumer), scale(*gemm.a_scale_inv * *gemm.b_scale_inv),
          code_scale(chain.row.scale[*chain.row.index]) {}

    __device__ __forceinline__ void begin(const Tile& tile) {
        if constexpr (CHAIN == FORWARD) stage_bias(gemm, bias, tile.column);
    }

    /* h of FORWARD, or da of BACKWARD, rounded: takes the place of the sums. */
    __device__ __forceinline__ void finish_sums(float* sums, int part) const {
#pragma unroll
        for (int j = 0; j < 16; ++j) {
            float2 of_bias = {0.0f, 0.0f};
            if constexpr (CHAIN == FORWARD) of_bias = load_shared_pair(bias + 4 * (part + 8 * j + at.column()));
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                float* two = sums + 4 * j + 2 * h;
                const u32 rounded = OUTPUT::pack(two[0] * scale + of_bias.x, two[1] * scale + of_bias.y);
                two[0] = OUTPUT::low(rounded);
                two[1] = OUTPUT::high(rounded);
            }
        }
    }

    /* v at two neighbours; 0 outside of the matrix, which changes neither amax nor sums. */
    __device__ __forceinline__ float2 values(const float* two, int row, int column) const {
        if (row >= gemm.m || column >= gemm.n) return {0.0f, 0.0f};
        float2 v;
        if constexpr (CHAIN == FORWARD) {
            v = {ACTIVATION::forward(two[0]), ACTIVATION::forward(two[1])};
        } else {
            // n is a multiple of 8: both are inside, in one word
            const OUTPUT::Element* h = static_cast<const OUTPUT::Element*>(gemm.out) + row * gemm.out_stride + column;
            const float2 both = OUTPUT::load_pair(h);
            v = {ACTIVATION::backward(both.x, two[0]), ACTIVATION::backward(both.y, two[1])};
        }
        return {rounded<OUTPUT, ACTIVATION>(v.x), rounded<OUTPUT, ACTIVATION>(v.y)};
    }

    /* Codes of the 8 columns from 8 j on: of row() in the lower half of the word, of row() + 8 in the upper. */
    __device__ __forceinline__ u32 encode(float* sums, int j, int row, int column) {
        u32 codes = 0;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            float* two = sums + 4 * j + 2 * h;
            const float2 v = values(two, row + at.row() + 8 * h, column + 8 * j + at.column());
            amax = max(amax, max(magnitude_bits(v.x), magnitude_bits(v.y)));
            codes |= FORMAT::codes(v.x * code_scale, v.y * code_scale) << (16 * h);
            if constexpr (CHAIN == BACKWARD) two[0] = v.x, two[1] = v.y;   // for the column sums
        }
        return codes;
    }

    /* Where a chunk of 16 rows of a column lies, 64 bytes a column. */
    __device__ __forceinline__ u32 column_chunk(int column, int chunk) const {
        return staging + 8192 + column * 64 + ((chunk ^ ((column >> 1) & 3)) << 4);
    }

    __device__ __forceinline__ void stage_codes(float* sums, int row, int column) {
        const int stored_row = at.warp * 16 + (at.lane & 15);
#pragma unroll
        for (int j = 0; j < 16; j += 4) {
            u32 codes[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) codes[i] = encode(sums, j + i, row, column);
            // two groups of 8 columns make a chunk of 16 bytes of a row
            const int chunk = j / 2 + (at.lane >> 4);
            store_matrices(staging + swizzled_128(stored_row, chunk), __byte_perm(codes[0], codes[1], 0x5410),
                           __byte_perm(codes[0], codes[1], 0x7632), __byte_perm(codes[2], codes[3], 0x5410),
                           __byte_perm(codes[2], codes[3], 0x7632));
            if (chain.y_t == nullptr) continue;
            // rows 8 apart side by side: a 16-bit element of the transposed store
#pragma unroll
            for (int i = 0; i < 4; ++i) codes[i] = __byte_perm(codes[i], 0, 0x3120);
            store_matrices_transposed(column_chunk(8 * j + at.lane, at.warp), codes[0], codes[1], codes[2], codes[3]);
        }
    }

    __device__ __forceinline__ void store_codes(int row, int column) const {
        const int thread = threadIdx.x & 127;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int index = thread + 128 * i, m = index >> 3, chunk = index & 7, n = column + 16 * chunk;
            if (row + m >= gemm.m || n >= gemm.n) continue;
            const uint4 codes = in_row_order(load_shared_16_bytes(staging + swizzled_128(m, chunk)));
            put_codes(chain.y + (long long)(row + m) * gemm.n + n, codes, gemm.n - n, chain.aligned & ROWS);
        }
        if (chain.y_t == nullptr) return;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int index = thread + 128 * i, n = index >> 2, chunk = index & 3, m = row + 16 * chunk;
            if (m >= gemm.m || column + n >= gemm.n) continue;
            const uint4 codes = in_column_order(load_shared_16_bytes(column_chunk(n, chunk)));
            put_codes(chain.y_t + (long long)(column + n) * gemm.m + m, codes, gemm.m - m, chain.aligned & COLUMNS);
        }
    }

    /* Halves the columns that a lane sums, and doubles the rows, by what the lane `mask` further holds of them. */
    template <int COUNT>
    __device__ __forceinline__ void add_rows(float (&sums)[32], int mask) const {
        const bool upper = at.lane & mask;
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            const float kept = upper ? sums[COUNT + i] : sums[i], given = upper ? sums[i] : sums[COUNT + i];
            sums[i] = kept + __shfl_xor_sync(0xffffffffu, given, mask);
        }
    }

    /* Sums of v over the piece's 64 rows: 2 of a lane, 8 lanes of a warp, 4 warps. */
    __device__ __forceinline__ void sum_columns(const float* v, int row, int column) const {
        float sums[32];
#pragma unroll
        for (int i = 0; i < 32; ++i) sums[i] = v[4 * (i >> 1) + (i & 1)] + v[4 * (i >> 1) + 2 + (i & 1)];
        add_rows<16>(sums, 16);
        add_rows<8>(sums, 8);
        add_rows<4>(sums, 4);
        const int first = (at.lane & 16) + (at.lane & 8) + (at.lane & 4);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int n = 8 * ((first + i) >> 1) + at.column() + (i & 1);
            store_shared(staging + 4 * (at.warp * COLUMNS + n), sums[i]);
        }
        warpgroup_sync(consumer);
        const int n = threadIdx.x & 127;
        float sum = 0.0f;
#pragma unroll
        for (int warp = 0; warp < 4; ++warp) sum += load_shared(staging + 4 * (warp * COLUMNS + n));
        if (row < gemm.m && column + n < gemm.n)
            chain.column_sums[(long long)(row / PIECE_ROWS) * gemm.n + column + n] = sum;
    }

    __device__ __forceinline__ void store(float* sums, const Tile& tile, int row, int part) {
        const int column = tile.column + part;
        const bool stores_h = CHAIN == FORWARD && gemm.out != nullptr;
        if ((threadIdx.x & 127) == 0) store_wait_read();
        warpgroup_sync(consumer);
        finish_sums(sums, part);
        stage_codes(sums, row, column);
        warpgroup_sync(consumer);
        store_codes(row, column);
        if (!stores_h && chain.column_sums == nullptr) return;
        warpgroup_sync(consumer);
        if constexpr (CHAIN == BACKWARD) {
            sum_columns(sums, row, column);
        } else {
            stage_pairs(staging, at, [&](int j, int h) {
                return OUTPUT::pack(sums[4 * j + 2 * h], sums[4 * j + 2 * h + 1]);
            });
            fence_for_copy_engine();
            warpgroup_sync(consumer);
            if ((threadIdx.x & 127) == 0) {
                store_box(arguments.out, staging, row, column);
                store_box(arguments.out, staging + 8192, row, column + 64);
                store_commit();
            }
        }
    }

    __device__ __forceinline__ void end() {
        if ((threadIdx.x & 127) == 0) store_wait();
        amax = __reduce_max_sync(0xffffffffu, amax);
        if (at.lane == 0 && chain.row.amax != nullptr) record_amax(chain.row.amax + *chain.row.index, amax);
        if (blockIdx.x == 0 && consumer == 0 && (threadIdx.x & 127) == 0) *chain.row.scale_inv = 1.0f / code_scale;
    }
};
