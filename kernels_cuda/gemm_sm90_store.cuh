/* The epilogue of a tile: its sums are scaled, the bias is added, and the copy engine stores them. */
#pragma once
#include "gemm_sm90.cuh"

struct Epilogue {
    // columns of a part, which is 128 bytes of each of 64 rows
    static constexpr int COLUMNS = 128 / OUTPUT::BYTES;
    static_assert(BLOCK_N / COLUMNS % 2 == 0, "parts of a piece alternate between two halves");
    const Arguments& arguments;
    const Gemm& gemm;
    const u32 staging, bias;
    u32 bias_bits;   // of this thread's column
    const int consumer;
    float scale;
    float2 of_group;   // the scales of a and of b
    const Lane at;

    __device__ __forceinline__ Epilogue(const Arguments& arguments, const SharedMemory& memory, int consumer)
        : arguments(arguments), gemm(arguments.gemm), staging(memory.staging(consumer)), bias(memory.bias(consumer)),
          consumer(consumer), scale(GROUPED ? 0.0f : whole_scale(gemm, 0)) {}

    /* Starts to load the bias of a tile's columns, which takes as long as several products: before them. Also the scales
       of its group. */
    __device__ __forceinline__ void begin(const Tile& tile) {
        if (GROUPED) of_group = {gemm.a_scale_inv[tile.group], gemm.b_scale_inv[tile.group]};
        const int before = BY_ROWS ? tile.group * gemm.n : 0, column = tile.column + (threadIdx.x & 127);
        const bool some = gemm.bias_format != NO_BIAS && column < gemm.n;
        bias_bits = some ? load_bias_bits(gemm.bias, gemm.bias_format, before + column) : 0;
    }

    /* The bias, rounded, for all threads of the warpgroup; zeros where there is none. The previous tile has passed its
       last barrier: no thread still reads its bias. */
    __device__ __forceinline__ void share_bias() {
        if (GROUPED) scale = of_group.x * of_group.y;
        store_shared(bias + 4 * (threadIdx.x & 127), OUTPUT::round(bias_of_bits(bias_bits, gemm.bias_format)));
    }

    /* Sums 4 j + 2 h and the next one, scaled and with the bias. */
    __device__ __forceinline__ float2 pair(const float* sums, int j, int h, int part) const {
        const float2 of_bias = load_shared_pair(bias + 4 * (part + 8 * j + at.column()));
        return {sums[4 * j + 2 * h] * scale + of_bias.x, sums[4 * j + 2 * h + 1] * scale + of_bias.y};
    }

    /* A part's finished values to half of the staging memory, as a box of 64 rows x 128 bytes. */
    template <class Output>
    __device__ __forceinline__ void stage(u32 half, const float* sums, int part) const {
        if constexpr (Output::BYTES == 2) {
            const auto word = [&](int j, int h) {
                const float2 values = pair(sums, j, h, part);
                return Output::pack(values.x, values.y);
            };
            const int row = at.warp * 16 + (at.lane & 15);
#pragma unroll
            for (int j = 0; j < 8; j += 2)
                store_matrices(half + swizzled_128(row, j + (at.lane >> 4)), word(j, 0), word(j, 1), word(j + 1, 0),
                               word(j + 1, 1));
        } else {
#pragma unroll
            for (int i = 0; i < COLUMNS / 4; ++i) {
                const int j = i >> 1, h = i & 1, in_row = 4 * (8 * j + at.column());
                const float2 values = pair(sums, j, h, part);
                store_shared_pair(half + swizzled_128(at.row() + 8 * h, in_row >> 4) + (in_row & 15), values.x, values.y);
            }
        }
    }

    /* A part of a piece: rows from `row`, columns from `part` of the tile. Parts take turns in the two halves of the
       staging memory, so that one is written while the copy engine reads the other. */
    __device__ __forceinline__ void store(const float* sums, const Tile& tile, int row, int part) const {
        const int thread = threadIdx.x & 127;
        const u32 half = staging + part / COLUMNS % 2 * BOX_BYTES;
        // all but the newest store have been read
        if (thread == 0) store_wait_read<1>();
        warpgroup_sync(consumer);
        stage<OUTPUT>(half, sums, part);
        fence_for_copy_engine();
        warpgroup_sync(consumer);
        if (thread == 0) {
            // by depth, what lies behind the last row is another group's
            if (!BY_DEPTH || row < gemm.m)
                store_box(arguments.out, half, row + (BY_DEPTH ? tile.group * gemm.m : 0), tile.column + part);
            store_commit();
        }
    }

    __device__ __forceinline__ void end() const {
        if ((threadIdx.x & 127) == 0) store_wait();
    }
};
