/* Which scale a cast uses, and how it records the amax. */
#pragma once
#include "instructions.cuh"

/* The place in the scaling state of one tensor, or of each group of its rows. [R] and [D] are whole arenas, in which
   `index` selects the tensor. */
struct ScalingRow {
    float* scale;                // [R]
    const float* newest;         // [D], the newest row of the history; 0 where a tensor has none
    const long long* index;      // [groups], 1 of a tensor without groups
    const float* current_amax;   // [groups], max|x| of this very tensor; null where it is known to have a history
    float* amax;                 // [R], or null: record nothing
    float* scale_inv;            // [groups], written where a group has rows
    const int* group_of_tile;    // [tiles of rows], below 0 where there is nothing to cast; null without groups
};

__device__ __forceinline__ float largest_finite() { return 3.40282347e+38f; }

/* FP8_MAX / amax; 1 where amax is inf or NaN, so that the finite elements survive. */
__device__ __forceinline__ float scale_of_current(float amax, float fp8_max) {
    if (!(amax <= largest_finite())) return 1.0f;
    return fminf(fp8_max / amax, largest_finite());
}

/* At most FP8_MAX / amax. The quotient is rounded, but never up to a power of two, as FP8_MAX is 7 * 2^n. */
__device__ __forceinline__ float block_scale(float amax, float fp8_max, int power_of_two) {
    const float scale = scale_of_current(amax, fp8_max);
    // never subnormal: sign and exponent alone are the power of two below
    return power_of_two ? __uint_as_float(__float_as_uint(scale) & 0xff800000u) : scale;
}

/* Whether the architecture has the conversion to E8M0. Its result is that of integers; both run on a host. */
#ifndef CONVERTS_TO_E8M0
#define CONVERTS_TO_E8M0 (__CUDA_ARCH__ >= 1000)
#endif

/* The least 2^(code - 127) by which a block's maximum, divided, is at most FP8_MAX; code 0xFF, NaN, for inf or NaN. */
__device__ __forceinline__ u32 e8m0_scale(float amax, float fp8_max) {
    if (!(amax <= largest_finite())) return 0xff;
    const float quotient = amax * (1.0f / fp8_max);
#if CONVERTS_TO_E8M0
    return to_e8m0x2(quotient, 0.0f) & 0xff;
#else
    // up to the next exponent, which for a subnormal number begins above 2^-127, in the middle of the mantissas
    const u32 bits = __float_as_uint(quotient);
    return (bits + (bits < 0x800000u ? 0x3fffffu : 0x7fffffu)) >> 23;
#endif
}

/* 2^(127 - code). Never subnormal, as the largest amax has code 247. */
__device__ __forceinline__ float e8m0_multiplier(u32 code) {
    return __uint_as_float(code == 0xff ? 0x7fffffffu : (254 - code) << 23);
}

/* What the scale of a tensor follows from: its history, or where that is empty its own values; its own values alone; or
   these, rounded down to a power of two. */
enum ScaleFrom { HISTORY = 0, OWN_VALUES = 1, OWN_VALUES_ROUNDED = 2 };

__device__ __forceinline__ bool has_history(const ScalingRow& row, long long index, int scale_from) {
    return scale_from == HISTORY && row.newest[index] > 0.0f;
}

__device__ __forceinline__ float scale_to_use(const ScalingRow& row, int group, long long index, float fp8_max,
                                              int scale_from) {
    if (row.current_amax == nullptr || has_history(row, index, scale_from)) return row.scale[index];
    const float amax = row.current_amax[group];
    const bool rounds = scale_from == OWN_VALUES_ROUNDED;
    return rounds && amax == 0.0f ? 1.0f : block_scale(amax, fp8_max, rounds);
}

/* Amaxes are handled as bits: those of non-negative floats order as integers, NaN > inf > every finite value. */
__device__ __forceinline__ u32 larger_amax(u32 amax, float value) {
    return __float_as_uint(max_magnitude(__uint_as_float(amax), value));
}

__device__ __forceinline__ void record_amax(float* amax, u32 bits) {
    atomicMax(reinterpret_cast<u32*>(amax), bits);
}
