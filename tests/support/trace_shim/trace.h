/* Runs a kernel's threads one after another, and notes what each of them does to synchronise: nothing waits, is copied
   or multiplied. The notes of a thread do not depend on the others, as its path follows from its arguments alone.
   Included before a kernel's source, in place of the machine instructions. Kinds of notes:

   I  initialises a barrier, with `number` arrivals    F  the fence that shows initialised barriers
   S  waits for all threads                            W  waits for a barrier, with `number` as its parity
   A  arrives at a barrier                             E  arrives, and expects `number` bytes
   L  asks for `number` bytes at `place`, for a barrier or for the thread's copies
   K  commits a group of copies                        P  waits for all but the newest `number` groups of copies
   R  issues a product that reads `number` bytes at `place`
   C  commits a group of products                      D  waits for all but the newest `number` groups of products */
#pragma once
#include "cuda_on_host.h"

struct Note {
    int thread, kind, block, place, number, barrier;
};
constexpr int MOST = 1 << 21;
static Note notes[MOST];
static int noted;

/* `place` is an address in the shared memory of the cluster's block `block`. */
static void note(char kind, int block = 0, int place = 0, int number = 0, int barrier = -1) {
    if (noted == MOST) std::abort();
    notes[noted++] = {(int)host::current, kind, block, place, number, barrier};
}
static inline int here() { return host::block(); }

Dimensions threadIdx, blockIdx, blockDim, gridDim;
namespace host {
unsigned current, blocks;
}
void __syncthreads() { note('S'); }
/* As if all lanes had the same value. */
const unsigned* exchange(unsigned value) {
    static unsigned lanes[32];
    std::fill(lanes, lanes + 32, value);
    return lanes;
}

extern "C" EXPORTED const Note* all_notes(int* count) {
    *count = noted;
    return notes;
}
