/* The number formats of a cast: what comes in, what goes out. `word` rounds the numbers of
   a word, of which a format of 32 bits has one; `larger` is max(x, |y|) of each. */
#pragma once
#include "instructions.cuh"

/* Eight neighbours as they lie in memory, so that those loaded ahead take no more registers than their bytes need. */
template <int WORDS>
struct Raw {
    u32 words[WORDS];
};

struct Fp32 {
    typedef float Element;
    typedef Raw<8> Eight;
    __device__ static float round(float value) { return value; }
    __device__ static u32 word(float value, float) { return __float_as_uint(value); }
    __device__ static Eight load(const float* address) {
        const uint4 first = load_once(address), second = load_once(address + 4);
        return {{first.x, first.y, first.z, first.w, second.x, second.y, second.z, second.w}};
    }
    __device__ static void put(Eight& eight, int at, float element) { eight.words[at] = __float_as_uint(element); }
    __device__ static float get(const Eight& eight, int at) { return __uint_as_float(eight.words[at]); }
    __device__ static u32 larger(u32 x, u32 y) {
        return __float_as_uint(max_magnitude(__uint_as_float(x), __uint_as_float(y)));
    }
};

/* shared by the two 16-bit formats: two elements per word, the first in the lower half */
struct SixteenBits {
    typedef u16 Element;
    typedef Raw<4> Eight;
    __device__ static Eight load(const u16* address) {
        const uint4 loaded = load_once(address);
        return {{loaded.x, loaded.y, loaded.z, loaded.w}};
    }
    __device__ static void put(Eight& eight, int at, u16 element) {
        eight.words[at >> 1] |= (u32)element << (16 * (at & 1));
    }
};

struct Bf16 : SixteenBits {
    // as the upper half of a pair, whose bits are the fp32 number's
    __device__ static float round(float value) { return __uint_as_float(to_bf16x2(0.0f, value)); }
    __device__ static u32 word(float low, float high) { return to_bf16x2(low, high); }
    __device__ static float get(const Eight& eight, int at) {
        const u32 word = eight.words[at >> 1];
        return __uint_as_float(at & 1 ? word & 0xffff0000u : word << 16);
    }
    __device__ static u32 larger(u32 x, u32 y) { return max_magnitude_bf16x2(x, y); }
};

struct Fp16 : SixteenBits {
    __device__ static float round(float value) { return from_fp16(to_fp16(value)); }
    __device__ static u32 word(float low, float high) { return to_fp16x2(low, high); }
    __device__ static float get(const Eight& eight, int at) {
        return from_fp16((u16)(eight.words[at >> 1] >> (16 * (at & 1))));
    }
    __device__ static u32 larger(u32 x, u32 y) { return max_magnitude_fp16x2(x, y); }
};

struct E4M3 {
    __device__ static float max() { return 448.0f; }
    __device__ static u32 codes(float low, float high) { return to_e4m3x2(low, high); }
};

struct E5M2 {
    __device__ static float max() { return 57344.0f; }
    __device__ static u32 codes(float low, float high) { return to_e5m2x2(low, high); }
};
