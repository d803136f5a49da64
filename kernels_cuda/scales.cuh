/* Which scale a cast uses, and how it records the amax. */
#pragma once
#include "instructions.cuh"

/* One tensor's place in the scaling state. [R] and [D] are whole arenas, in which `index` selects the tensor. */
struct ScalingRow {
    float* scale;                // [R]
    const float* newest;         // [D], the newest row of the history; 0 where a tensor has none
    const long long* index;      // [1]
    const float* current_amax;   // [1], max|x| of this very tensor; null where every tensor has a history
    float* amax;                 // [R], or null: record nothing
    float* scale_inv;            // [1], written
};

__device__ __forceinline__ float largest_finite() { return 3.40282347e+38f; }

/* FP8_MAX / amax; 1 where amax is inf or NaN, so that the finite elements survive. */
__device__ __forceinline__ float scale_of_current(float amax, float fp8_max) {
    if (!(amax <= largest_finite())) return 1.0f;
    return fminf(fp8_max / amax, largest_finite());
}

/* The scale of one block, at most FP8_MAX / amax. */
__device__ __forceinline__ float block_scale(float amax, float fp8_max, int power_of_two) {
    const float scale = scale_of_current(amax, fp8_max);
    // never subnormal: sign and exponent alone are the power of two below
    return power_of_two ? __uint_as_float(__float_as_uint(scale) & 0xff800000u) : scale;
}

__device__ __forceinline__ float scale_to_use(const ScalingRow& row, long long index, float fp8_max) {
    const bool delayed = row.current_amax == nullptr || row.newest[index] > 0.0f;
    return delayed ? row.scale[index] : scale_of_current(*row.current_amax, fp8_max);
}

/* Amaxes are handled as bits: those of non-negative floats order as integers, NaN > inf > every finite value. */
__device__ __forceinline__ u32 larger_amax(u32 amax, float value) {
    return __float_as_uint(max_magnitude(__uint_as_float(amax), value));
}

__device__ __forceinline__ void record_amax(float* amax, u32 bits) {
    atomicMax(reinterpret_cast<u32*>(amax), bits);
}
