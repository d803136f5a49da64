/* FP8 formats from their definition, for the stand-ins of tensor cores. */
#pragma once
#include <algorithm>
#include <cmath>
#include <cstring>

/* Of a code: its value, and the exponent that Hopper's tensor cores align it by. A subnormal has the smallest exponent of
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
