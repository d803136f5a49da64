/* gemm_sm89: FP8 GEMM with mma.sync, for Ada (sm_89) and the consumer GPUs of Blackwell (sm_120).

maths       see gemm.cuh. The tensor cores accumulate fewer bits than fp32 has; with PROMOTE their sums over every 128
            along K are added up in fp32 registers. With blocks (B_SCALE_ROWS) they are multiplied there by their
            scales: a thread loads those of its 8 rows and 8 columns (or the one that these share) from global memory
            when the first of the 128 are multiplied. That takes 16 registers (9 if shared) and, for 64 sums, 128
            multiply-adds and products (64 and 8 if shared) instead of 64 additions
            With blocks and without PROMOTE (sm_120 only) the tensor cores themselves multiply by the scales. A word has
            those of a row for 128 along K, and a thread brings two words of a and one of b, which it loads while the
            128 before are multiplied. Sums stay in the tensor cores, whose terms have 25 bits behind the largest there,
            by MMA-Sim (github.com/microsoft/MMA-Sim)
tensors     see gemm.cuh; rows of a and b `a_stride` and `b_stride` bytes apart, at multiples of 16
variants    A_FORMAT, B_FORMAT e4m3|e5m2, OUTPUT OutFp32|OutBf16|OutFp16, PROMOTE 0|1, BLOCK_M, BLOCK_N, STAGES,
            B_SCALE_ROWS 0|1, with PROMOTE also 128; GROUPED 0|1, with PROMOTE also 2
tile        BLOCK_M x BLOCK_N of out (128 x 128), of which each of 8 warps computes 64 x 32 as 4 x 4 mma of 16 x 8, in
            steps of 64 along K:

               columns   0..31  32..63  64..95  96..127
            rows  0..63     w0      w2      w4       w6
            rows 64..127    w1      w3      w5       w7

grid        ceil(m / BLOCK_M) * ceil(n / BLOCK_N) * parts blocks of 256 threads, two on a multiprocessor if shared
            memory allows, one with PROMOTE; tiles in groups of 8 rows of tiles, column by column, so that the blocks
            at work share operands in L2
shared      STAGES * (BLOCK_M + BLOCK_N) * 64 bytes, 16 KB a stage: one is multiplied while STAGES - 1 arrive. Of
            the 100 KB of a multiprocessor two blocks can have 3 stages each, one block 6. The four 16-byte pieces of a
            row are swizzled by row / 2 % 4, so that the eight rows of an ldmatrix touch every bank once
bytes       (m * k * ceil(n / BLOCK_N) + n * k * ceil(m / BLOCK_M)) from L2: 128 FLOP per byte; out once, from
            registers, two columns at a time. 2 m n k FLOP
ceiling     the tensor cores: 8192 x 8192 x 8192 takes 1.5 ms at the 733 TFLOP/s of an L40S's datasheet, which needs
            5.7 TB/s from L2. Not measured
reference   lightning_fp8.scalings.per_tensor.PerTensor.emulated_product
*/
#include "gemm.cuh"
#include "instructions_sm89.cuh"

constexpr int THREADS = 256, BLOCK_K = 64, WARPS_DOWN = 2;
constexpr int WARP_M = BLOCK_M / WARPS_DOWN, WARP_N = BLOCK_N * WARPS_DOWN * 32 / THREADS;
constexpr int MMAS_M = WARP_M / 16, MMAS_N = WARP_N / 8;
constexpr int A_BYTES = BLOCK_M * BLOCK_K, STAGE_BYTES = A_BYTES + BLOCK_N * BLOCK_K;
constexpr int PIECE = 16, PIECES = BLOCK_K / PIECE, ROWS_AT_ONCE = THREADS / PIECES;
constexpr int RASTER_ROWS = 8, STEPS_PROMOTED = 128 / BLOCK_K;
static_assert(BLOCK_M % ROWS_AT_ONCE == 0 && BLOCK_N % ROWS_AT_ONCE == 0, "rows are copied by 64");
static_assert(!BY_ROWS || BLOCK_M == GROUP_ROWS, "tiles are in one group");
static_assert(!BY_DEPTH || PROMOTE, "see gemm.cuh");
static_assert(IN_BLOCKS || GROUPED, "cuBLASLt is as fast where whole tensors have one scale");
static_assert(MMAS_M * 16 == WARP_M && MMAS_N % 2 == 0, "an ldmatrix of b serves two mma");

struct Arguments {
    const u8* a;
    const u8* b;
    long long a_stride, b_stride;
    Gemm gemm;
#if B_SCALE_ROWS && PROMOTE
    ScaleStrides strides;
#endif
#if GROUPED
    const int* groups;
#endif
};

/* This block's tile, by its first row and column, its steps along K, and its group, below 0 where there is nothing to
   do. */
struct Work {
    int row, column, first_step, end_step, group = 0;
    __device__ explicit Work(const Arguments& arguments) {
        const Gemm& gemm = arguments.gemm;
        const int tiles_m = (gemm.m + BLOCK_M - 1) / BLOCK_M, tiles_n = (gemm.n + BLOCK_N - 1) / BLOCK_N;
        const int part = blockIdx.x / (tiles_m * tiles_n), tile = blockIdx.x - part * tiles_m * tiles_n;
        const int group_row = tile / (RASTER_ROWS * tiles_n) * RASTER_ROWS;
        const int group_rows = min(RASTER_ROWS, tiles_m - group_row);
        const int within = tile - group_row * tiles_n;
        row = (group_row + within % group_rows) * BLOCK_M;
        column = within / group_rows * BLOCK_N;
        first_step = 0;
        end_step = (gemm.k + BLOCK_K - 1) / BLOCK_K;
#if GROUPED
        const int* groups = arguments.groups;
        group = BY_DEPTH ? part : groups[row / GROUP_ROWS];
        if (BY_DEPTH) {
            first_step = groups[part] / BLOCK_K;
            end_step = groups[part + 1] / BLOCK_K;
        }
#endif
    }
};

/* The offset of 16 bytes of an operand in a stage. */
__device__ __forceinline__ u32 swizzled(int row, int piece) {
    return row * BLOCK_K + (piece ^ (row >> 1 & (PIECES - 1))) * PIECE;
}

/* What a thread copies of an operand's ROWS rows: 16 bytes of every 64th. */
template <int ROWS>
struct Copier {
    const u8* from;
    long long stride;
    int rows, k;   // inside the operand, from this thread's first row and byte on
    u32 to;
    __device__ Copier(const u8* operand, long long stride, int first_row, int all_rows, int all_k, u32 stage)
        : stride(stride) {
        const int row = threadIdx.x / PIECES, piece = threadIdx.x % PIECES;
        from = operand + (first_row + row) * stride + piece * PIECE;
        rows = all_rows - first_row - row;
        k = all_k - piece * PIECE;
        to = stage + swizzled(row, piece);
    }
    __device__ void copy(int step, int stage) const {
        const int column = step * BLOCK_K;
        const u8* source = from + column;
#pragma unroll
        for (int row = 0; row < ROWS; row += ROWS_AT_ONCE) {
            // 64 rows further down the swizzle is the same
            copy_async(to + stage * STAGE_BYTES + row * BLOCK_K, source + row * stride,
                     row < rows && column < k ? PIECE : 0);
        }
    }
};

/* The scales of a step, for this warp's sums from `row` and `column` on, if blocks have any. `load` is called before
   each step, `multiply` is an mma, and `of` is what promoted sums are multiplied by. */
#if B_SCALE_ROWS && PROMOTE
/* Those of this thread's sums, for 128 along K. Rows and columns outside of a and b take the scale of the last one. */
static_assert(BLOCK_N == SCALED_TOGETHER, "columns of a tile share a scale");
struct StepScales {
    const Arguments& arguments;
    int row, column;
    float of_a[MMAS_M][2], of_b[MMAS_N][2];
    __device__ StepScales(const Arguments& arguments, int row, int column, int)
        : arguments(arguments), row(row), column(column) {}
    __device__ void load(int step) {
        if (step % STEPS_PROMOTED != 0) return;
        const Gemm& gemm = arguments.gemm;
        const ScaleStrides& strides = arguments.strides;
        const int lane = threadIdx.x % 32;
        const float* a = gemm.a_scale_inv + (long long)(step / STEPS_PROMOTED) * strides.a_step;
        const float* b = gemm.b_scale_inv + (long long)(step / STEPS_PROMOTED) * strides.b_step;
#pragma unroll
        for (int i = 0; i < 2 * MMAS_M; ++i) {
            const int m = min(row + 8 * i + lane / 4, gemm.m - 1);
            of_a[i / 2][i % 2] = a[(long long)m * strides.a_row];
        }
#pragma unroll
        for (int j = 0; j < 2 * MMAS_N; ++j) {
            const int n = B_SCALE_ROWS == 1 ? min(column + j / 2 * 8 + 2 * (lane % 4) + j % 2, gemm.n - 1) : column;
            of_b[j / 2][j % 2] = b[(long long)(n / B_SCALE_ROWS) * strides.b_row];
        }
    }
    __device__ void multiply(float (&sums)[4], const u32 (&a)[4], const u32 (&b)[2], int, int, int) const {
        mma(sums, a, b);
    }
    __device__ float of(int i, int j, int element) const { return of_a[i][element / 2] * of_b[j][element % 2]; }
};
#elif B_SCALE_ROWS
// rows, and elements along K, whose scales are a tile
constexpr int SCALE_TILE = 128, SCALE_TILE_BYTES = 512;
static_assert(BLOCK_M == SCALE_TILE && BLOCK_N == SCALE_TILE && BLOCK_K * STEPS_PROMOTED == SCALE_TILE, "whole tiles");
static_assert(MMAS_M == 4 && MMAS_N == 4, "two words hold the scales of a warp's 64 rows, one those of its 32 columns");
/* Those of 128 along K that this lane brings, of row 8 (lane % 4) + lane / 4 of every 32, and those of the next 128. */
struct StepScales {
    const u8 *a, *b;
    int tiles;
    uint2 of_a, next_of_a;
    u32 of_b, next_of_b;
    __device__ StepScales(const Arguments& arguments, int row, int column, int step) {
        tiles = (arguments.gemm.k + SCALE_TILE - 1) / SCALE_TILE;
        a = of_lane(arguments.gemm.a_scale_inv, row);
        b = of_lane(arguments.gemm.b_scale_inv, column);
        load_next(step / STEPS_PROMOTED);
    }
    /* In a tile, the words of rows r, r + 32, r + 64 and r + 96 lie together. */
    __device__ const u8* of_lane(const float* scales, int row) const {
        const u8* tile = reinterpret_cast<const u8*>(scales) + (long long)(row / SCALE_TILE) * tiles * SCALE_TILE_BYTES;
        const int lane = threadIdx.x % 32;
        return tile + (lane % 4 * 8 + lane / 4) * 16 + row % SCALE_TILE / 32 * 4;
    }
    __device__ void load_next(int tile) {
        const int offset = min(tile, tiles - 1) * SCALE_TILE_BYTES;
        next_of_a = *reinterpret_cast<const uint2*>(a + offset);
        next_of_b = *reinterpret_cast<const u32*>(b + offset);
    }
    __device__ void load(int step) {
        if (step % STEPS_PROMOTED == 0) {
            of_a = next_of_a;
            of_b = next_of_b;
            load_next(step / STEPS_PROMOTED + 1);
        } else {   // to the other two blocks
            of_a = make_uint2(of_a.x >> 16, of_a.y >> 16);
            of_b >>= 16;
        }
    }
    __device__ void multiply(float (&sums)[4], const u32 (&a)[4], const u32 (&b)[2], int i, int j, int block) const {
        mma_scaled(sums, a, b, i < 2 ? of_a.x : of_a.y, of_b, block, i % 2, j);
    }
    __device__ float of(int, int, int) const { return 1.0f; }
};
#else
struct StepScales {
    __device__ StepScales(const Arguments&, int, int, int) {}
    __device__ void load(int) {}
    __device__ void multiply(float (&sums)[4], const u32 (&a)[4], const u32 (&b)[2], int, int, int) const {
        mma(sums, a, b);
    }
    __device__ float of(int, int, int) const { return 1.0f; }
};
#endif

struct Sums {
    float of[MMAS_M][MMAS_N][4];
    __device__ void add(Sums& partial, const StepScales& scales) {
#pragma unroll
        for (int i = 0; i < MMAS_M; ++i)
#pragma unroll
            for (int j = 0; j < MMAS_N; ++j)
#pragma unroll
                for (int element = 0; element < 4; ++element) {
                    of[i][j][element] += partial.of[i][j][element] * scales.of(i, j, element);
                    partial.of[i][j][element] = 0.0f;
                }
    }
};

/* Adds a stage's 64 along K to the sums of this warp's 64 x 32. */
__device__ __forceinline__ void multiply(Sums& sums, const StepScales& scales, u32 stage, int warp_row,
                                         int warp_column) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int piece = 0; piece < PIECES; piece += 2) {
        u32 a[MMAS_M][4], b[MMAS_N][2];
#pragma unroll
        for (int i = 0; i < MMAS_M; ++i)   // rows 0..7, rows 8..15, both again 16 bytes further along K
            load_matrices(a[i][0], a[i][1], a[i][2], a[i][3],
                        stage + swizzled(warp_row + 16 * i + lane % 16, piece + lane / 16));
#pragma unroll
        for (int j = 0; j < MMAS_N; j += 2)   // rows 0..7, the same 16 bytes further along K, then rows 8..15
            load_matrices(b[j][0], b[j][1], b[j + 1][0], b[j + 1][1],
                        stage + A_BYTES +
                            swizzled(warp_column + 8 * j + lane / 16 * 8 + lane % 8, piece + lane / 8 % 2));
#pragma unroll
        for (int i = 0; i < MMAS_M; ++i)
#pragma unroll
            for (int j = 0; j < MMAS_N; ++j) scales.multiply(sums.of[i][j], a[i], b[j], i, j, piece / 2);
    }
}

/* Two neighbours in a row of out, the first in an even column: the second is outside where n is odd. */
struct Pair {
    float first, second;
};

template <class Output>
__device__ __forceinline__ void store_pair(typename Output::Element* address, Pair pair, bool both) {
    if (!both) Output::store(address, pair.first);
    else if constexpr (Output::BYTES == 4)
        *reinterpret_cast<uint2*>(address) = make_uint2(__float_as_uint(pair.first), __float_as_uint(pair.second));
    else *reinterpret_cast<u32*>(address) = Output::pack(pair.first, pair.second);
}

/* Stores the sums of this warp that are inside of out; the first one is at `row` and `column`. */
template <class Output>
__device__ __forceinline__ void store(const Sums& sums, const Gemm& gemm, int row, int column, int group) {
    const int lane = threadIdx.x % 32, before = BY_ROWS ? group * gemm.n : 0;
    const long long rows_before = BY_DEPTH ? (long long)group * gemm.m : 0;
    auto* out = static_cast<typename Output::Element*>(gemm.out) + rows_before * gemm.out_stride;
    const float scale = whole_scale(gemm, group);
#pragma unroll
    for (int j = 0; j < MMAS_N; ++j) {
        const int n = column + 8 * j + 2 * (lane % 4);
        const bool some = n < gemm.n, both = n + 1 < gemm.n, has_bias = gemm.bias_format != NO_BIAS;
        const auto addend = [&](int at) { return Output::round(load_bias(gemm.bias, gemm.bias_format, before + at)); };
        const float low = has_bias && some ? addend(n) : 0.0f, high = has_bias && both ? addend(n + 1) : 0.0f;
#pragma unroll
        for (int i = 0; i < 2 * MMAS_M; ++i) {
            const int m = row + 8 * i + lane / 4;
            const float* of = &sums.of[i / 2][j][i % 2 * 2];
            const Pair pair = {of[0] * scale + low, of[1] * scale + high};
            if (some && m < gemm.m) store_pair<Output>(out + m * gemm.out_stride + n, pair, both);
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, PROMOTE ? 1 : 2)
    gemm_sm89(const __grid_constant__ Arguments arguments) {
    const Gemm& gemm = arguments.gemm;
    const Work work(arguments);
    if (work.group < 0) return;
    const u8* all_b = arguments.b + (BY_ROWS ? (long long)work.group * gemm.n * arguments.b_stride : 0);
    const u32 stages = shared_address();
    const Copier<BLOCK_M> a(arguments.a, arguments.a_stride, work.row, gemm.m, gemm.k, stages);
    const Copier<BLOCK_N> b(all_b, arguments.b_stride, work.column, gemm.n, gemm.k, stages + A_BYTES);
    const int warp = threadIdx.x / 32, warp_row = warp % WARPS_DOWN * WARP_M, warp_column = warp / WARPS_DOWN * WARP_N;
    // a group is committed for every step, also where nothing is left to copy: the waits count groups
    const auto copy = [&](int step, int stage) {
        if (step < work.end_step) {
            a.copy(step, stage);
            b.copy(step, stage);
        }
        copy_commit();
    };
    for (int stage = 0; stage < STAGES - 1; ++stage) copy(work.first_step + stage, stage);
    Sums sums = {}, partial = {};
    StepScales scales(arguments, work.row + warp_row, work.column + warp_column, work.first_step);
    int stage = 0;
    for (int step = work.first_step; step < work.end_step; ++step) {
        copy_wait<STAGES - 2>();
        // all threads' copies have arrived, and no thread still reads the operands of the previous step
        __syncthreads();
        copy(step + STAGES - 1, stage == 0 ? STAGES - 1 : stage - 1);
        scales.load(step);
        multiply(PROMOTE ? partial : sums, scales, stages + stage * STAGE_BYTES, warp_row, warp_column);
        if (PROMOTE && (step % STEPS_PROMOTED == STEPS_PROMOTED - 1 || step + 1 == work.end_step)) sums.add(partial, scales);
        stage = stage + 1 == STAGES ? 0 : stage + 1;
    }
    store<OUTPUT>(sums, gemm, work.row + warp_row, work.column + warp_column, work.group);
}
