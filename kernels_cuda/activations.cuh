/* Activations and their gradients in fp32, each result rounded to the input's format as the separate operators round
   it; results of `exact` ones need no rounding. Where torch's are not finite, these are not either. A gradient knows the
   format: a formula of several of torch's operators rounds to it in between, in fp16 to inf beyond 65504. */
#pragma once
#include "formats.cuh"

struct Identity {
    static constexpr bool exact = true;
    __device__ static float forward(float x) { return x; }
    template <class Input>
    __device__ static float backward(float, float dy) { return dy; }
};

template <class Activation>
constexpr bool is_identity = false;
template <>
constexpr bool is_identity<Identity> = true;

struct Relu {
    static constexpr bool exact = true;
    // as torch's on the CPU: -0 and NaN stay, and a NaN's gradient passes
    __device__ static float forward(float x) { return x < 0.0f ? 0.0f : x; }
    template <class Input>
    __device__ static float backward(float x, float dy) { return x <= 0.0f ? 0.0f : dy; }
};

/* s = 1 / (1 + 2^-x), and s * (1 - s), without cancellation. */
__device__ __forceinline__ float logistic2(float x) { return reciprocal_approx(1.0f + exp2_approx(-x)); }

struct Logistic2 {
    float value, spread;
    __device__ explicit Logistic2(float x) {
        const float e = exp2_approx(-fabsf(x)), larger = reciprocal_approx(1.0f + e), smaller = e * larger;
        value = x < 0.0f ? smaller : larger;
        spread = smaller * larger;
    }
};

constexpr float LOG2_E = 1.44269504088896340736f;

/* The other activations are x times a logistic function, without a branch: their quotients and exponentials are the
   device's approximate ones, a few units in the last place of fp32 off. */

struct Gelu {
    static constexpr bool exact = false;
    /* Of the normal distribution: a minimax polynomial, odd in x, gives log2 of the odds. The product of x and the
       error is below 2e-7; where x < -5, and x * cdf(x) is below 2e-6, the relative error is no longer small. */
    __device__ static float cdf(float x) {
        const float square = x * x;
        float odds = 4.21676694e-9f;
        odds = odds * square - 3.4065809e-7f;
        odds = odds * square + 1.0751467e-5f;
        odds = odds * square - 1.54473688e-4f;
        odds = odds * square - 1.11247391e-4f;
        odds = odds * square + 0.104858972f;
        odds = odds * square + 2.3021996f;
        return logistic2(x * odds);
    }
    __device__ static float forward(float x) { return x * cdf(x); }
    template <class Input>
    __device__ static float backward(float x, float dy) {
        const float density = exp2_approx(-0.5f * LOG2_E * (x * x)) * 0.39894228040143267794f;
        return dy * (cdf(x) + x * density);
    }
};

struct GeluTanh {
    static constexpr bool exact = false;
    static constexpr float beta = 0.79788456080286535588f, kappa = 0.044715f;
    /* (1 + tanh(beta * (x + kappa * x^3))) / 2 is a logistic function of this */
    __device__ static float odds(float x) {
        return x * (2.0f * LOG2_E * beta + 2.0f * LOG2_E * beta * kappa * (x * x));
    }
    __device__ static float forward(float x) { return x * logistic2(odds(x)); }
    template <class Input>
    __device__ static float backward(float x, float dy) {
        const Logistic2 weight(odds(x));
        return dy * (weight.value + x * weight.spread * (2.0f * beta + 6.0f * beta * kappa * (x * x)));
    }
};

struct Silu {
    static constexpr bool exact = false;
    __device__ static float forward(float x) { return x * logistic2(LOG2_E * x); }
    template <class Input>
    __device__ static float backward(float x, float dy) {
        const Logistic2 sigmoid(LOG2_E * x);
        return dy * (sigmoid.value + x * sigmoid.spread);
    }
};

template <class Input, class Activation>
__device__ __forceinline__ float rounded(float result) {
    if constexpr (Activation::exact) return result;
    else return Input::round(result);
}
