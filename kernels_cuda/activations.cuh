/* Activations and their gradients in fp32, in torch's own order of operations, each result rounded to the input's
   format as the separate operators round it; `exact` ones give nothing that needs rounding. */
#pragma once
#include "formats.cuh"

struct Identity {
    static constexpr bool exact = true;
    __device__ static float forward(float x) { return x; }
    __device__ static float backward(float, float dy) { return dy; }
};

struct Relu {
    static constexpr bool exact = true;
    // as torch's on the CPU: -0 and NaN stay, and a NaN's gradient passes
    __device__ static float forward(float x) { return x < 0.0f ? 0.0f : x; }
    __device__ static float backward(float x, float dy) { return x <= 0.0f ? 0.0f : dy; }
};

struct Gelu {
    static constexpr bool exact = false;
    __device__ static float cdf(float x) { return 0.5f * (1.0f + erff(x * 0.70710678118654752440f)); }
    __device__ static float forward(float x) { return x * cdf(x); }
    __device__ static float backward(float x, float dy) {
        const float pdf = expf(-0.5f * x * x) * 0.39894228040143267794f;
        return dy * (cdf(x) + x * pdf);
    }
};

struct GeluTanh {
    static constexpr bool exact = false;
    static constexpr float beta = 0.79788456080286535588f, kappa = 0.044715f;
    __device__ static float tanh_inner(float x) { return tanhf(beta * (x + kappa * (x * x * x))); }
    __device__ static float forward(float x) { return 0.5f * x * (1.0f + tanh_inner(x)); }
    __device__ static float backward(float x, float dy) {
        const float t = tanh_inner(x);
        const float inner = beta * (1.0f + 3.0f * kappa * (x * x));
        return dy * (0.5f * (1.0f + t) + 0.5f * x * (1.0f - t * t) * inner);
    }
};

struct Silu {
    static constexpr bool exact = false;
    __device__ static float forward(float x) { return x / (1.0f + expf(-x)); }
    __device__ static float backward(float x, float dy) {
        const float sigmoid = 1.0f / (1.0f + expf(-x));
        return dy * sigmoid * (1.0f + x * (1.0f - sigmoid));
    }
};

template <class Input, class Activation>
__device__ __forceinline__ float rounded(float result) {
    if constexpr (Activation::exact) return result;
    else return Input::round(result);
}
