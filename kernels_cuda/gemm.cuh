/* Shared by the GEMM families: the problem, and how a sum becomes an output.

maths       out[m, n] = (sum over k of a[m, k] * b[n, k]) * a_scale_inv * b_scale_inv + bias[n]
            in fp32, rounded to nearest even once, when it is stored; the bias is rounded to the
            output's format before it is added, as autocast rounds it
tensors     a    [m, k] FP8, rows contiguous, k a multiple of 16
            b    [n, k] FP8, rows contiguous
            out  [m, n] fp32, bf16 or fp16, rows `out_stride` elements apart, each at a multiple of 16 bytes
            bias [n] in the format that `bias_format` names
splits      > 1: part s of K goes to rows s * split_rows ... of out, which is then fp32; without bias. sum_splits.cu
            adds the parts up
*/
#pragma once
#include "activations.cuh"

enum BiasFormat { NO_BIAS = 0, BIAS_FP32 = 1, BIAS_BF16 = 2, BIAS_FP16 = 3 };

struct Gemm {
    const float* a_scale_inv;
    const float* b_scale_inv;
    const void* bias;
    void* out;
    long long out_stride;
    int m, n, k, bias_format, splits;
};

__device__ __forceinline__ float bf16_to_float(u16 bits) { return __uint_as_float((u32)bits << 16); }

__device__ __forceinline__ float load_bias(const void* bias, int format, int column) {
    if (format == BIAS_FP32) return static_cast<const float*>(bias)[column];
    const u16 bits = static_cast<const u16*>(bias)[column];
    return format == BIAS_BF16 ? bf16_to_float(bits) : from_fp16(bits);
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
    __device__ static float low(u32 pair) { return __uint_as_float(pair << 16); }
    __device__ static float high(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }
};

struct OutFp16 : Fp16 {
    static constexpr int BYTES = 2;
    __device__ static void store(u16* address, float value) { *address = to_fp16(value); }
    __device__ static u32 pack(float low, float high) { return to_fp16x2(low, high); }
    __device__ static float low(u32 pair) { return from_fp16((u16)pair); }
    __device__ static float high(u32 pair) { return from_fp16((u16)(pair >> 16)); }
};
