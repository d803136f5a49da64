#include "cuda_on_host.h"
#include "formats_on_host.h"
#include "instructions_sm89.cuh"

#include <cstdio>
#include <vector>

int late = 1;
int accumulator_bits = 24;

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
    u32 of[32][6];
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

static float rounded(double sum) {
    if (!std::isfinite(sum) || sum == 0) return (float)sum;
    int exponent;
    const double fraction = std::frexp(sum, &exponent);
    return (float)std::ldexp(std::nearbyint(std::ldexp(fraction, accumulator_bits)), exponent - accumulator_bits);
}

/* Memory left by an earlier block becomes NaN in both formats. */
void begin(u32 shared_bytes) {
    if (threadIdx.x == 0) memory.assign(shared_bytes, 0x7f);
    copies[threadIdx.x] = {};
}

void wait_for_copies(u32 pending) {
    auto& committed = copies[threadIdx.x].committed;
    while (committed.size() > pending) {
        for (const Copy& copy : committed.front()) perform(copy);
        committed.erase(committed.begin());
    }
}

void mma(float (&sums)[4], const u32 (&a)[4], const u32 (&b)[2], const char* a_format, const char* b_format) {
    const Values &a_values = values(a_format), &b_values = values(b_format);
    const u32 lane = threadIdx.x % 32;
    const Words& words = exchanged({a[0], a[1], a[2], a[3], b[0], b[1]});
    for (u32 i = 0; i < 4; ++i) {
        // a's rows lane / 4 and 8 more, b's rows 2 (lane % 4) and the next; four of K to a word, 16 to a quarter warp
        const u32 a_row = lane / 4, upper = i / 2, b_row = 2 * (lane % 4) + i % 2;
        double sum = sums[i];
        for (u32 k = 0; k < 32; ++k) {
            const u32 a_word = words.of[4 * a_row + k % 16 / 4][upper + k / 16 * 2];
            const u32 b_word = words.of[4 * b_row + k % 16 / 4][4 + k / 16];
            sum += (double)a_values.of[a_word >> 8 * (k % 4) & 255] * b_values.of[b_word >> 8 * (k % 4) & 255];
        }
        sums[i] = rounded(sum);
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
