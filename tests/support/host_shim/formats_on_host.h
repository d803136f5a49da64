/* FP8 formats from their definition, and how tensor cores add products of them. */
#pragma once
#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>

#include "cuda_on_host.h"

/* Of a code: its value, and the exponent that tensor cores align it by. A subnormal has the smallest exponent of
   its format, and zero one that no sum is aligned by. */
constexpr short ZERO = -1000;
struct Values {
    float of[256];
    short exponents[256];
    explicit Values(const char* format) {
        const bool e5m2 = std::strcmp(format, "e5m2") == 0;
        const int mantissa_bits = e5m2 ? 2 : 3, bias = e5m2 ? 15 : 7;
        for (int code = 0; code < 256; ++code) {
            const int exponent = (code & 127) >> mantissa_bits, mantissa = code & ((1 << mantissa_bits) - 1);
            const int significand = exponent ? mantissa + (1 << mantissa_bits) : mantissa;
            exponents[code] = significand ? std::max(exponent, 1) - bias : ZERO;
            float value = std::ldexp((float)significand, std::max(exponent, 1) - bias - mantissa_bits);
            if (e5m2 && exponent == 31) value = mantissa ? NAN : INFINITY;
            if (!e5m2 && (code & 127) == 127) value = NAN;
            of[code] = code >> 7 ? -value : value;
        }
    }
};
static inline const Values& values(const char* format) {
    static const Values e4m3("e4m3"), e5m2("e5m2");
    return std::strcmp(format, "e5m2") == 0 ? e5m2 : e4m3;
}

/* sum + the sum of a[k] * b[k], as tensor cores add them: all terms are aligned to the largest exponent (of a product:
   the sum of its factors'), each is cut off behind BITS, they are added exactly, and of the result KEPT bits behind the
   leading one remain. The model is that of MMA-Sim (github.com/microsoft/MMA-Sim), which was compared with the hardware
   bit for bit: on Hopper 32 products with 13 bits, on Ada twice 16, on sm_120 32 with 25 bits, of which fp32 keeps 23.
   Most of a GEMM's time goes here. */
template <int COUNT, int BITS, int KEPT>
__attribute__((no_sanitize("undefined"))) static float accumulate(float sum, const float* a, const short* a_exponents,
                                                                  const float* b, const short* b_exponents) {
    using Units = std::conditional_t<(BITS > 20), long long, int>;
    float products[COUNT], plain = sum;
    short exponent = ZERO;
    for (int k = 0; k < COUNT; ++k) {
        const short of_product = a_exponents[k] + b_exponents[k];
        exponent = of_product > exponent ? of_product : exponent;
        products[k] = a[k] * b[k];
    }
    for (int k = 0; k < COUNT; ++k) plain += products[k];
    if (sum != 0) exponent = std::max<int>(exponent, (__float_as_uint(sum) >> 23 & 255) - 127);
    if (!std::isfinite(plain) || exponent <= ZERO / 2) return plain;
    const float unit = __uint_as_float((127 + exponent - BITS) << 23), units = 1 / unit;
    Units total = (Units)(sum * units);
    for (int k = 0; k < COUNT; ++k) total += (Units)(products[k] * units);
    const double exact = total;
    unsigned long long bits;
    std::memcpy(&bits, &exact, 8);
    bits &= ~0ull << (52 - KEPT);
    double kept;
    std::memcpy(&kept, &bits, 8);
    return (float)kept * unit;
}

/* The same on sm_120 where all products are multiplied by 2^scale, a product of two scales in E8M0, which exceeds the
   range of fp32. What is kept of the result is in that range. */
static float accumulate_scaled(float sum, const float* a, const short* a_exponents, const float* b,
                               const short* b_exponents, int scale) {
    const int bits = 25, kept = 23, smallest = -126;
    int exponent = ZERO;
    double plain = sum;
    for (int k = 0; k < 32; ++k) {
        const int of_product = a_exponents[k] + b_exponents[k];
        if (of_product > ZERO / 2) exponent = std::max(exponent, of_product + scale);
        plain += (double)a[k] * b[k];
    }
    if (sum != 0) exponent = std::max({exponent, std::ilogb(sum), smallest});
    if (!std::isfinite(plain) || exponent == ZERO) return (float)plain;
    const double unit = std::ldexp(1.0, exponent - bits), of_products = std::ldexp(1.0, scale) / unit;
    long long total = (long long)(sum / unit);
    for (int k = 0; k < 32; ++k) total += (long long)((double)a[k] * b[k] * of_products);
    if (total == 0) return 0.0f;
    const double exact = (double)total * unit;
    const double last = std::ldexp(1.0, std::max(std::ilogb(exact), smallest) - kept);
    return (float)(std::trunc(exact / last) * last);
}
