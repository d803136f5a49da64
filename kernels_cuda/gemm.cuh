/* Shared by the GEMM families: the problem, and how a sum becomes an output.

maths       out[m, n] = (sum over k of a[m, k] * b[n, k]) * a_scale_inv * b_scale_inv + bias[n]
            in fp32, rounded to nearest even once, when it is stored; the bias is rounded to the
            output's format before it is added, as autocast rounds it
            With blocks (B_SCALE_ROWS 1 or 128) every 128 along K have their own scales, and the sum of each step is
            multiplied by them when it is added to the others in fp32:
            out[m, n] = sum over steps of ((sum over the 128 k of a step of a[m, k] * b[n, k]) * a_scale_inv[m, step]
                        * b_scale_inv[n / B_SCALE_ROWS, step]) + bias[n]
            With B_SCALE_ROWS 1 and without PROMOTE every 32 along K have scales, powers of two that the tensor cores
            multiply by
tensors     a    [m, k] FP8, rows contiguous, k a multiple of 16
            b    [n, k] FP8, rows contiguous
            out  [m, n] fp32, bf16 or fp16, rows `out_stride` elements apart, each at a multiple of 16 bytes
            bias [n] in the format that `bias_format` names
            a_scale_inv, b_scale_inv  [1] fp32; with blocks [m, ceil(k / 128)] and [ceil(n / B_SCALE_ROWS),
                 ceil(k / 128)], with any strides: fastest where neighbouring rows are neighbours in memory. For every
                 32 along K, tiles of 512 bytes in E8M0, each for 128 rows and 128 along K, those of the same rows one
                 after the other: the scale of row r and block c of a tile is in byte r % 32 * 16 + r / 32 * 4 + c
groups      (GROUPED) of rows, such as the tokens of each expert of a mixture, sorted by group: each group begins at a
            multiple of 128 rows, and zeros fill up its last 128. The host knows neither how many rows a group has nor
            where they begin. Each has a scale of its own, a_scale_inv and b_scale_inv are [groups]
            1, by rows: every 128 rows of a multiply with the b of their group. b is [groups, n, k], bias [groups, n],
               and `groups` [m / 128] names the group of each 128 rows, -1 behind the last one, where nothing is written
            2, by depth: a is [m, k], b [n, k], rows contiguous; out [groups, m, n]. The sum of a group is over its part
               of K, `groups`[g] ... `groups`[g + 1], multiples of 128, zeros where that is empty. Without bias, with
               PROMOTE
*/
#pragma once
#include "formats.cuh"

#ifndef B_SCALE_ROWS
#define B_SCALE_ROWS 0
#endif
constexpr bool IN_BLOCKS = B_SCALE_ROWS != 0;
#ifndef GROUPED
#define GROUPED 0
#endif
constexpr bool BY_ROWS = GROUPED == 1, BY_DEPTH = GROUPED == 2;
static_assert(!(GROUPED && IN_BLOCKS), "a group has one scale");
// groups begin at multiples of so many rows
constexpr int GROUP_ROWS = 128;
// elements along K that share a scale
constexpr int SCALED_TOGETHER = 128;

enum BiasFormat { NO_BIAS = 0, BIAS_FP32 = 1, BIAS_BF16 = 2, BIAS_FP16 = 3 };

struct Gemm {
    const float* a_scale_inv;
    const float* b_scale_inv;
    const void* bias;
    void* out;
    long long out_stride;
    int m, n, k, bias_format;
    int parts;   // by depth, how many groups there are; else 1
};

/* Strides of block scales, in elements: from a row to the next, and from a step of K to the next. */
struct ScaleStrides {
    int a_row, a_step, b_row, b_step;
};

/* The factor of all sums where whole tensors, or groups, have one scale. */
__device__ __forceinline__ float whole_scale(const Gemm& gemm, int group) {
    return IN_BLOCKS ? 1.0f : gemm.a_scale_inv[group] * gemm.b_scale_inv[group];
}

__device__ __forceinline__ float bf16_to_float(u16 bits) { return __uint_as_float((u32)bits << 16); }

/* Apart from the number that they are, so that nothing waits for the load before the number is needed. */
__device__ __forceinline__ u32 load_bias_bits(const void* bias, int format, int column) {
    return format == BIAS_FP32 ? static_cast<const u32*>(bias)[column] : static_cast<const u16*>(bias)[column];
}

__device__ __forceinline__ float bias_of_bits(u32 bits, int format) {
    if (format == BIAS_FP32) return __uint_as_float(bits);
    return format == BIAS_BF16 ? bf16_to_float((u16)bits) : from_fp16((u16)bits);
}

__device__ __forceinline__ float load_bias(const void* bias, int format, int column) {
    return bias_of_bits(load_bias_bits(bias, format, column), format);
}

/* The output of a sum. `pack`: two of a 16-bit format in a word, the first in the lower half. */
struct OutFp32 : Fp32 {
    static constexpr int BYTES = 4;
    __device__ static void store(float* address, float value) { *address = value; }
};

struct OutBf16 : Bf16 {
    static constexpr int BYTES = 2;
    __device__ static void store(u16* address, float value) { *address = to_bf16(value); }
    __device__ static u32 pack(float low, float high) { return to_bf16x2(low, high); }
};

struct OutFp16 : Fp16 {
    static constexpr int BYTES = 2;
    __device__ static void store(u16* address, float value) { *address = to_fp16(value); }
    __device__ static u32 pack(float low, float high) { return to_fp16x2(low, high); }
};
