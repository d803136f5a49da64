/* An epilogue that writes the FP8 operand of the next GEMM: linear - activation - linear without a separate cast.

maths       FORWARD   h = round(sum * scale + bias), v = round(activation(h))
            BACKWARD  da = round(sum * scale),       v = round(gradient of activation at h, times da)
            code = sat(v * scale[index]) as cast_tile.cuh casts; amax[index] = max(amax[index], max |v|)
            `round` is to the output's format, as the separate operators would round their results
tensors     h, m x n, contiguous, through the tensor map of `out`: written by FORWARD, if gemm.out is not null; read by
            BACKWARD, in additional pipeline steps after those of K
            y and y_t as in struct Chain; column_sums of BACKWARD: sums of v over 64 rows, in a fixed order
piece       64 x 128 at a time. A thread holds two adjacent codes of a row, and codes of a column that are 8 rows apart.
            stmatrix stores pairs of codes as 16-bit elements, by rows and transposed. The threads that read them back
            as 16 bytes find them in this order, and permute them:

            by rows      [j p0, j+1 p0, j p1, j+1 p1, ...]   p: pair of columns of an 8-column group j
            by columns   [row 0, row 8, row 1, row 9, ...]

bytes       per element, 2 (h) + 1 + 1 written (BACKWARD: 2 read, 1 + 1 written); a separate cast reads 2 (4) more
reference   lightning_fp8.ops.reference: scaled_mm, then cast of the activation, or of its gradient
*/
#pragma once
#include "gemm_sm90.cuh"

#define FORWARD 0
#define BACKWARD 1

/* Named apart from members of structures, which would hide them: a tile has COLUMNS too. */
enum Alignment { ALIGNED_ROWS = 1, ALIGNED_COLUMNS = 2 };

/* 16 codes as stmatrix stored them -> in the order of the row, or of the column. */
__device__ __forceinline__ uint4 in_row_order(uint4 w) {
    return {__byte_perm(w.x, w.y, 0x5410), __byte_perm(w.z, w.w, 0x5410), __byte_perm(w.x, w.y, 0x7632),
            __byte_perm(w.z, w.w, 0x7632)};
}
__device__ __forceinline__ uint4 in_column_order(uint4 w) {
    return {__byte_perm(w.x, w.y, 0x6420), __byte_perm(w.z, w.w, 0x6420), __byte_perm(w.x, w.y, 0x7531),
            __byte_perm(w.z, w.w, 0x7531)};
}

/* Copies up to four chunks of 16 codes: 2048 bytes apart in shared memory, `apart` bytes apart in global memory. */
template <class Order>
__device__ __forceinline__ void put_chunks(u32 source, u8* target, long long apart, int chunks, const Order& in_order) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
        if (i < chunks)
            *reinterpret_cast<uint4*>(target + i * apart) = in_order(load_shared_16_bytes(source + 2048 * i));
}

/* The same for targets that are not aligned to 16 bytes: the first `count` codes of each chunk, one by one. */
template <class Order>
__device__ __forceinline__ void put_codes(u32 source, u8* target, long long apart, int chunks, int count,
                                          const Order& in_order) {
#pragma unroll 1
    for (; chunks > 0; --chunks, source += 2048, target += apart) {
        uint4 codes = in_order(load_shared_16_bytes(source));
#pragma unroll 1
        for (int i = 0; i < min(count, 16); ++i) {
            target[i] = (u8)codes.x;
            codes = {codes.x >> 8 | codes.y << 24, codes.y >> 8 | codes.z << 24, codes.z >> 8 | codes.w << 24, codes.w >> 8};
        }
    }
}

struct Epilogue {
    static constexpr int COLUMNS = 128;
    // pieces of h that BACKWARD reads for a tile. Each takes a stage: 64 rows x 128 columns, 16 KB, for each consumer
    static constexpr int INPUTS = CHAIN == BACKWARD ? PIECES * BLOCK_N / COLUMNS : 0;
    static constexpr u32 INPUT_BYTES = 16384;
    static_assert(CHAIN == FORWARD || TILE_CONSUMERS * INPUT_BYTES <= STAGE_BYTES, "a stage has room for h");
    static_assert(OUTPUT::BYTES == 2, "h and da are rounded to 16 bits");
    const Arguments& arguments;
    const Gemm& gemm;
    const Chain& chain;
    const SharedMemory& memory;
    const u32 staging, bias;
    const int consumer;
    const float scale, code_scale;
    const Lane at;
    u32 amax = 0;

    __device__ __forceinline__ Epilogue(const Arguments& arguments, const SharedMemory& memory, int consumer)
        : arguments(arguments), gemm(arguments.gemm), chain(arguments.chain), memory(memory), staging(memory.staging(consumer)),
          bias(memory.bias(consumer)), consumer(consumer), scale(*gemm.a_scale_inv * *gemm.b_scale_inv),
          code_scale(chain.row.scale[*chain.row.index]) {}

    __device__ __forceinline__ void begin(const Tile& tile) {
        if constexpr (CHAIN == FORWARD) stage_bias(gemm, bias, tile.column);
    }

    /* Starts the loads of the values that `store` of this part reads. */
    __device__ static __forceinline__ void load_input(const Arguments& arguments, u32 stage, u32 full, const Tile& tile,
                                                      int input) {
        constexpr int PARTS = BLOCK_N / COLUMNS;
        barrier_expect(full, TILE_CONSUMERS * INPUT_BYTES);
        for (int box = 0; box < 2 * TILE_CONSUMERS; ++box)
            load_box(stage + box * (INPUT_BYTES / 2), arguments.out, full,
                     tile.row + box / 2 * CONSUMER_ROWS + input / PARTS * PIECE_ROWS,
                     tile.column + input % PARTS * COLUMNS + box % 2 * 64);
    }

    /* Replaces the sums by h (FORWARD) or da (BACKWARD), rounded. */
    __device__ __forceinline__ void finish_sums(float* sums, int part) const {
#pragma unroll
        for (int j = 0; j < 16; ++j) {
            float2 of_bias = {0.0f, 0.0f};
            if constexpr (CHAIN == FORWARD) of_bias = load_shared_pair(bias + 4 * (part + 8 * j + at.column()));
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                float* two = sums + 4 * j + 2 * h;
                two[0] = OUTPUT::round(two[0] * scale + of_bias.x);
                two[1] = OUTPUT::round(two[1] * scale + of_bias.y);
            }
        }
    }

    /* Codes of the 8 columns from 8 j on: of row() in the lower half of the word, of row() + 8 in the upper. `pairs`: h of
       the same elements. Outside of the matrix the sums are 0, or NaN where the row or column also holds NaN inside of it,
       and h is 0. So these elements change neither amax nor column sums in BACKWARD; in FORWARD, where the bias is added
       to them, they are masked by row. */
    __device__ __forceinline__ u32 encode(float* sums, const u32 (&pairs)[2], u32 (&largest)[2]) const {
        u32 codes = 0;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            float v[2];
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                float& sum = sums[2 * h + e];
                if constexpr (CHAIN == FORWARD) v[e] = ACTIVATION::forward(sum);
                else v[e] = ACTIVATION::backward(e == 0 ? OUTPUT::low(pairs[h]) : OUTPUT::high(pairs[h]), sum);
                v[e] = rounded<OUTPUT, ACTIVATION>(v[e]);
                largest[h] = larger_amax(largest[h], v[e]);
                if constexpr (CHAIN == BACKWARD) sum = v[e];   // for the column sums
            }
            codes |= FORMAT::codes(v[0] * code_scale, v[1] * code_scale) << (16 * h);
        }
        return codes;
    }

    /* The offset of a chunk of 16 rows of a column; a column takes 64 bytes. */
    __device__ __forceinline__ u32 column_chunk(int column, int chunk) const {
        return staging + 8192 + column * 64 + ((chunk ^ ((column >> 1) & 3)) << 4);
    }

    /* `input`: h of this consumer, as two boxes of 64 rows x 128 bytes. */
    __device__ __forceinline__ void stage_codes(float* sums, int row, u32 input) {
        const int stored_row = at.warp * 16 + (at.lane & 15);
        u32 largest[2] = {};
#pragma unroll
        for (int j = 0; j < 16; j += 4) {
            u32 codes[4], pairs[4][2] = {};
            if constexpr (CHAIN == BACKWARD) {
                const int first = j + (at.lane >> 4);
#pragma unroll
                for (int i = 0; i < 4; i += 2)
                    load_matrices(input + (j >> 3) * 8192 + swizzled_128(stored_row, (first + i) & 7), pairs[i][0],
                                  pairs[i][1], pairs[i + 1][0], pairs[i + 1][1]);
            }
#pragma unroll
            for (int i = 0; i < 4; ++i) codes[i] = encode(sums + 4 * (j + i), pairs[i], largest);
            // two groups of 8 columns make a chunk of 16 bytes of a row
            const int chunk = j / 2 + (at.lane >> 4);
            store_matrices(staging + swizzled_128(stored_row, chunk), __byte_perm(codes[0], codes[1], 0x5410),
                           __byte_perm(codes[0], codes[1], 0x7632), __byte_perm(codes[2], codes[3], 0x5410),
                           __byte_perm(codes[2], codes[3], 0x7632));
            if (chain.y_t == nullptr) continue;
            // codes 8 rows apart become adjacent: one 16-bit element of the transposed store
#pragma unroll
            for (int i = 0; i < 4; ++i) codes[i] = __byte_perm(codes[i], 0, 0x3120);
            store_matrices_transposed(column_chunk(8 * j + at.lane, at.warp), codes[0], codes[1], codes[2], codes[3]);
        }
#pragma unroll
        for (int h = 0; h < 2; ++h)
            if (CHAIN == BACKWARD || row + at.row() + 8 * h < gemm.m) amax = max(amax, largest[h]);
    }

    __device__ __forceinline__ void store_codes(int row, int column) const {
        const int thread = threadIdx.x & 127;
        {
            const int m = thread >> 3, chunk = thread & 7, n = column + 16 * chunk;
            const int count = gemm.n - n, chunks = count > 0 ? (gemm.m - row - m + 15) >> 4 : 0;
            const u32 source = staging + swizzled_128(m, chunk);
            u8* target = chain.y + (long long)(row + m) * gemm.n + n;
            const long long apart = 16ll * gemm.n;
            if (chain.aligned & ALIGNED_ROWS) put_chunks(source, target, apart, chunks, in_row_order);
            else put_codes(source, target, apart, min(chunks, 4), count, in_row_order);
        }
        if (chain.y_t == nullptr) return;
        {
            const int n = thread >> 2, chunk = thread & 3, m = row + 16 * chunk;
            const int count = gemm.m - m, chunks = count > 0 ? (gemm.n - column - n + 31) >> 5 : 0;
            const u32 source = column_chunk(n, chunk);
            u8* target = chain.y_t + (long long)(column + n) * gemm.m + m;
            const long long apart = 32ll * gemm.m;
            if (chain.aligned & ALIGNED_COLUMNS) put_chunks(source, target, apart, chunks, in_column_order);
            else put_codes(source, target, apart, min(chunks, 4), count, in_column_order);
        }
    }

    /* Exchanges partial sums with the lane at distance `mask`: each keeps half of the columns, for twice the rows. */
    template <int COUNT>
    __device__ __forceinline__ void add_rows(float (&sums)[32], int mask) const {
        const bool upper = at.lane & mask;
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            const float kept = upper ? sums[COUNT + i] : sums[i], given = upper ? sums[i] : sums[COUNT + i];
            sums[i] = kept + __shfl_xor_sync(0xffffffffu, given, mask);
        }
    }

    /* Sums of v over the piece's 64 rows: 2 rows in a lane, 8 lanes in a warp, 4 warps. */
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

    __device__ __forceinline__ void store(float* sums, const Tile& tile, Stage& stage, int row, int part) {
        const int column = tile.column + part;
        const bool stores_h = CHAIN == FORWARD && gemm.out != nullptr;
        if (CHAIN == FORWARD && (threadIdx.x & 127) == 0) store_wait_read<0>();
        warpgroup_sync(consumer);
        finish_sums(sums, part);
        if constexpr (CHAIN == BACKWARD) barrier_wait(memory.full(stage.index), stage.parity);
        stage_codes(sums, row, memory.stage(stage.index) + consumer % TILE_CONSUMERS * INPUT_BYTES);
        warpgroup_sync(consumer);
        if constexpr (CHAIN == BACKWARD) {
            release(memory, stage.index);
            stage.advance();
        }
        store_codes(row, column);
        if (!stores_h && chain.column_sums == nullptr) return;
        warpgroup_sync(consumer);
        if constexpr (CHAIN == BACKWARD) {
            sum_columns(sums, row, column);
        } else {
#pragma unroll
            for (int box = 0; box < 2; ++box)
                stage_box(staging + box * BOX_BYTES, at, [&](int j, int h) {
                    const float* two = sums + 4 * (8 * box + j) + 2 * h;
                    return OUTPUT::pack(two[0], two[1]);
                });
            fence_for_copy_engine();
            warpgroup_sync(consumer);
            if ((threadIdx.x & 127) == 0) {
                store_box(arguments.out, staging, row, column);
                store_box(arguments.out, staging + BOX_BYTES, row, column + 64);
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
