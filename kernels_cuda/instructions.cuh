/* Machine instructions without a C++ name, one small function each. */
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;

/* Two fp32 -> two FP8 codes, `low` in the lower byte: nearest even, finite overflow and inf to the largest value, NaN
   to 0x7F. PTX takes the upper half first. */
__device__ __forceinline__ u32 to_e4m3x2(float low, float high) {
    u16 codes;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(high), "f"(low));
    return codes;
}

__device__ __forceinline__ u32 to_e5m2x2(float low, float high) {
    u16 codes;
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(high), "f"(low));
    return codes;
}

/* Two non-negative fp32 -> two E8M0 codes, `low` in the lower byte: rounded up, NaN to 0xFF. On sm_100 and later. */
__device__ __forceinline__ u32 to_e8m0x2(float low, float high) {
    u16 codes;
    asm("cvt.rp.satfinite.ue8m0x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(high), "f"(low));
    return codes;
}

__device__ __forceinline__ float from_fp16(u16 bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}

__device__ __forceinline__ u16 to_fp16(float value) {
    u16 bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}

/* Two fp32 -> two of a 16-bit format, `low` in the lower half: nearest even. */
__device__ __forceinline__ u32 to_bf16x2(float low, float high) {
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

__device__ __forceinline__ u32 to_fp16x2(float low, float high) {
    u32 pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

/* As the lower half of a pair: the instruction that converts a single number is slower. */
__device__ __forceinline__ u16 to_bf16(float value) { return (u16)to_bf16x2(value, 0.0f); }

/* 2^x and 1 / x, each one instruction: relative errors of at most 2^-22 and 2^-23; results below 2^-126 are 0. */
__device__ __forceinline__ float exp2_approx(float x) {
    float value;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(value) : "f"(x));
    return value;
}

__device__ __forceinline__ float reciprocal_approx(float x) {
    float value;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(value) : "f"(x));
    return value;
}

/* max(x, |y|), NaN if either is. */
__device__ __forceinline__ float max_magnitude(float x, float y) {
    float value;
    asm("{\n.reg .f32 magnitude;\nabs.f32 magnitude, %2;\nmax.NaN.f32 %0, %1, magnitude;\n}"
        : "=f"(value)
        : "f"(x), "f"(y));
    return value;
}

/* The same for both numbers of pairs, of which those of x are not negative. */
__device__ __forceinline__ u32 max_magnitude_bf16x2(u32 x, u32 y) {
    u32 pair;
    asm("{\n.reg .b32 magnitudes;\nabs.bf16x2 magnitudes, %2;\nmax.NaN.bf16x2 %0, %1, magnitudes;\n}"
        : "=r"(pair)
        : "r"(x), "r"(y));
    return pair;
}

__device__ __forceinline__ u32 max_magnitude_fp16x2(u32 x, u32 y) {
    u32 pair;
    asm("{\n.reg .b32 magnitudes;\nabs.f16x2 magnitudes, %2;\nmax.NaN.f16x2 %0, %1, magnitudes;\n}"
        : "=r"(pair)
        : "r"(x), "r"(y));
    return pair;
}

/* 16 bytes at a 16-byte-aligned address that are read once: they bypass L1. */
__device__ __forceinline__ uint4 load_once(const void* address) {
    uint4 words;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
                 : "l"(address));
    return words;
}

/* Hides from the compiler where a word came from: it recomputes what follows from the word, and keeps no register. */
__device__ __forceinline__ void forget_origin(u32& word) { asm volatile("" : "+r"(word)); }
