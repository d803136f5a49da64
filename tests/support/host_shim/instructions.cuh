/* The functions of kernels_cuda/instructions.cuh in software, from the formats' definitions. */
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;

/* A test of the self-tests gets a wrong cast by another ROUND, or by FAULT, which changes a value before its cast. */
#ifndef ROUND
#define ROUND std::nearbyint
#endif

/* Bits of |value| rounded to nearest even, for a format with subnormals below 2^min_exponent; from `overflow` on it is
   `top`. */
static inline u32 encode(float value, int mantissa_bits, int min_exponent, double overflow, u32 top) {
    const double magnitude = std::fabs((double)value);
    if (magnitude >= overflow) return top;
    if (magnitude == 0) return 0;
    int exponent;
    std::frexp(magnitude, &exponent);
    exponent = std::max(exponent - 1, min_exponent);
    const long units = (long)ROUND(std::ldexp(magnitude, mantissa_bits - exponent));
    // the implicit one of a normal number carries into the exponent field, also when rounding reached the next power
    return ((u32)(exponent - min_exponent) << mantissa_bits) + (u32)units;
}
static inline u32 sign_of(float value) { return __float_as_uint(value) >> 31; }
static inline u16 to_bf16(float value) {
    if (std::isnan(value)) return 0x7fff;
    const u32 bits = __float_as_uint(value);
    return (u16)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
static inline u32 fp8(float value, int mantissa_bits, int min_exponent, double largest, u32 top) {
#ifdef FAULT
    value = FAULT(value, min_exponent);
#endif
    if (std::isnan(value)) return 0x7f;
    return sign_of(value) << 7 | encode(value, mantissa_bits, min_exponent, largest, top);
}
static inline u32 to_e4m3x2(float low, float high) {
    return fp8(low, 3, -6, 448, 0x7e) | fp8(high, 3, -6, 448, 0x7e) << 8;
}
static inline u32 to_e5m2x2(float low, float high) {
    return fp8(low, 2, -14, 57344, 0x7b) | fp8(high, 2, -14, 57344, 0x7b) << 8;
}
/* The exponent, plus 127, of the least power of two that is not below the value, from 2^-127 on. */
static inline u32 e8m0(float value) {
    int exponent;
    if (std::isnan(value)) return 0xff;
    if (value == 0) return 0;
    const double mantissa = std::frexp((double)value, &exponent);
    return (u32)std::min(std::max(exponent - (mantissa == 0.5) + 127, 0), 0xfe);
}
static inline u32 to_e8m0x2(float low, float high) { return e8m0(low) | e8m0(high) << 8; }
static inline float from_fp16(u16 bits) {
    const int exponent = bits >> 10 & 31, mantissa = bits & 1023;
    const float sign = bits >> 15 ? -1.0f : 1.0f;
    if (exponent == 31) return mantissa ? std::nanf("") : sign * INFINITY;
    return sign * std::ldexp((float)(exponent ? mantissa + 1024 : mantissa), std::max(exponent, 1) - 25);
}
static inline u16 to_fp16(float value) {
    if (std::isnan(value)) return 0x7fff;
    return (u16)(sign_of(value) << 15 | encode(value, 10, -14, 65520, 0x7c00));
}
static inline u32 to_bf16x2(float low, float high) { return to_bf16(low) | (u32)to_bf16(high) << 16; }
static inline u32 to_fp16x2(float low, float high) { return to_fp16(low) | (u32)to_fp16(high) << 16; }
/* With the device's largest error, up or down depending on the argument's bits. */
static inline float off_by(float value, float x, float relative) {
    return (__float_as_uint(x) * 2654435761u) >> 31 ? value * (1.0f + relative) : value * (1.0f - relative);
}
static inline float flushed(float value) { return std::fabs(value) < 0x1p-126f ? std::copysign(0.0f, value) : value; }
static inline float exp2_approx(float x) { return flushed(off_by(std::exp2(flushed(x)), x, 0x1p-22f)); }
static inline float reciprocal_approx(float x) { return flushed(off_by(1.0f / flushed(x), x, 0x1p-23f)); }
static inline float max_magnitude(float x, float y) {
    return std::isnan(x) || std::isnan(y) ? std::nanf("") : std::max(x, std::fabs(y));
}
/* Of two numbers in halves of a word, those beyond `infinity` NaN. */
static inline u32 max_magnitudes(u32 x, u32 y, u32 infinity) {
    const auto larger = [&](u32 one, u32 other) {
        return one > infinity || other > infinity ? 0x7fffu : std::max(one, other);
    };
    return larger(x & 0x7fff, y & 0x7fff) | larger(x >> 16 & 0x7fff, y >> 16 & 0x7fff) << 16;
}
static inline u32 max_magnitude_bf16x2(u32 x, u32 y) { return max_magnitudes(x, y, 0x7f80); }
static inline u32 max_magnitude_fp16x2(u32 x, u32 y) { return max_magnitudes(x, y, 0x7c00); }
static inline uint4 load_once(const void* address) {
    // as on the device, where a load off its 16-byte boundary is an error
    if ((unsigned long long)address % 16 != 0) std::abort();
    return *static_cast<const uint4*>(address);
}
static inline void forget_origin(u32&) {}
