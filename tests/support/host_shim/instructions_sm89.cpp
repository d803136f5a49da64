#include "cuda_on_host.h"
#include "formats_on_host.h"
#include "instructions_sm89.cuh"

#include <cstdio>
#include <vector>

int late = 1;
int dynamic_bytes = 0;
int fraction_bits = 13;

namespace sm89 {
typedef unsigned long long Address;
struct Copy {
    u32 to;
    const u8* from;
    int bytes;
};
struct Copies {
    std::vector<std::vector<Copy>> committed;
    std::vector<Copy> open;
};
struct Words {
    u32 of[32][8];
};

static std::vector<u8> memory;
static Copies copies[256];
static Words brought[8][2];
static unsigned turn[256];

static void fail(const char* message, Address address) {
    std::fprintf(stderr, "%s: %llu\n", message, address);
    std::abort();
}

static u8* sixteen_bytes(u32 address) {
    if (address % 16 != 0) fail("shared memory off a 16-byte boundary", address);
    if (address + 16 > memory.size()) fail("outside of the block's shared memory", address);
    return &memory[address];
}

static void perform(const Copy& copy) {
    if ((Address)copy.from % 16 != 0) fail("a copy from off a 16-byte boundary", (Address)copy.from);
    u8* to = sixteen_bytes(copy.to);
    std::memset(to, 0, 16);
    std::memcpy(to, copy.from, copy.bytes);
}

/* The first warp waits while the others advance by a few matrices or mma. */
static void fall_behind() {
    for (int i = 0; !late && threadIdx.x < 32 && i < 4; ++i) {
        host::progress = true;
        host::yield();
    }
}

/* Gathers the words of all lanes of a warp. Buffers alternate, so one barrier is enough. */
template <int COUNT>
static const Words& exchanged(const u32 (&words)[COUNT]) {
    const unsigned thread = threadIdx.x;
    Words& all = brought[thread / 32][turn[thread]++ % 2];
    std::memcpy(all.of[thread % 32], words, sizeof(words));
    host::wait_for_warp();
    return all;
}

/* Memory left by an earlier block becomes NaN in both formats. */
void begin() {
    if (threadIdx.x == 0) memory.assign(dynamic_bytes, 0x7f);
    copies[threadIdx.x] = {};
}

void wait_for_copies(u32 pending) {
    auto& committed = copies[threadIdx.x].committed;
    while (committed.size() > pending) {
        for (const Copy& copy : committed.front()) perform(copy);
        committed.erase(committed.begin());
    }
}

/* Of the factors of a lane's sum, those of a and those of b: values, and the exponents that they are aligned by. */
struct Factors {
    float of[2][32];
    short exponents[2][32];
    Factors(const Words& words, u32 sum, const char* a_format, const char* b_format) {
        const Values* formats[2] = {&values(a_format), &values(b_format)};
        // a's rows lane / 4 and 8 more, b's rows 2 (lane % 4) and the next; four of K to a word, 16 to a quarter warp
        const u32 lane = threadIdx.x % 32, rows[2] = {lane / 4, 2 * (lane % 4) + sum % 2};
        const u32 first[2] = {sum / 2, 4}, apart[2] = {2, 1};
        for (u32 side = 0; side < 2; ++side)
            for (u32 k = 0; k < 32; ++k) {
                const u32 word = words.of[4 * rows[side] + k % 16 / 4][first[side] + k / 16 * apart[side]];
                of[side][k] = formats[side]->of[word >> 8 * (k % 4) & 255];
                exponents[side][k] = formats[side]->exponents[word >> 8 * (k % 4) & 255];
            }
    }
};

void mma(float (&sums)[4], const u32 (&a)[4], const u32 (&b)[2], const char* a_format, const char* b_format) {
    const Words& words = exchanged({a[0], a[1], a[2], a[3], b[0], b[1]});
    for (u32 i = 0; i < 4; ++i) {
        const Factors factors(words, i, a_format, b_format);
        const auto& of = factors.of;
        const auto& exponents = factors.exponents;
        if (fraction_bits == 25) sums[i] = accumulate<32, 25, 23>(sums[i], of[0], exponents[0], of[1], exponents[1]);
        else for (u32 k = 0; k < 32; k += 16)
            sums[i] = accumulate<16, 13, 13>(sums[i], of[0] + k, exponents[0] + k, of[1] + k, exponents[1] + k);
    }
}

/* PTX ISA, "Block Scaling for mma.sync", for .scale_vec::1X: thread-id-a names a pair of lanes in each quad, the first
   with the scale of the quad's row and the second with that of the row 8 below; thread-id-b names one lane. */
void mma_scaled(float (&sums)[4], const u32 (&a)[4], const u32 (&b)[2], u32 a_scales, u32 b_scales, int byte,
                int a_thread, int b_thread, const char* a_format, const char* b_format) {
    if ((byte & ~3) || (a_thread & ~1) || (b_thread & ~3)) fail("no such scale", byte << 16 | a_thread << 8 | b_thread);
    const Words& words = exchanged({a[0], a[1], a[2], a[3], b[0], b[1], a_scales, b_scales});
    const u32 lane = threadIdx.x % 32;
    for (u32 i = 0; i < 4; ++i) {
        const u32 a_lane = lane / 4 * 4 + 2 * a_thread + i / 2, b_lane = 4 * (2 * (lane % 4) + i % 2) + b_thread;
        const u32 a_scale = words.of[a_lane][6] >> 8 * byte & 255, b_scale = words.of[b_lane][7] >> 8 * byte & 255;
        const Factors factors(words, i, a_format, b_format);
        const bool is_nan = a_scale == 255 || b_scale == 255;
        sums[i] = is_nan ? NAN
                         : accumulate_scaled(sums[i], factors.of[0], factors.exponents[0], factors.of[1],
                                             factors.exponents[1], (int)(a_scale + b_scale) - 2 * 127);
    }
}
}  // namespace sm89

void copy_async(u32 to, const void* from, int bytes) {
    const sm89::Copy copy = {to, static_cast<const u8*>(from), bytes};
    if (late)
        sm89::copies[threadIdx.x].open.push_back(copy);
    else
        sm89::perform(copy);
}

void copy_commit() {
    sm89::Copies& copies = sm89::copies[threadIdx.x];
    copies.committed.push_back(std::move(copies.open));
    copies.open.clear();
}

void load_matrices(u32& first, u32& second, u32& third, u32& fourth, u32 address) {
    const u32 lane = threadIdx.x % 32;
    sm89::fall_behind();
    const sm89::Words& addresses = sm89::exchanged({address});
    u32* words[4] = {&first, &second, &third, &fourth};
    for (u32 matrix = 0; matrix < 4; ++matrix) {
        u32 banks = 0;
        for (u32 row = 0; row < 8; ++row) banks |= 1 << (addresses.of[8 * matrix + row][0] / 16 % 8);
        if (banks != 255) sm89::fail("rows of a matrix in the same banks", addresses.of[8 * matrix][0]);
        const u8* row = sm89::sixteen_bytes(addresses.of[8 * matrix + lane / 4][0]);
        std::memcpy(words[matrix], row + 4 * (lane % 4), 4);
    }
}
