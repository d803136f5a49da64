#include "cuda_on_host.h"

#include <setjmp.h>
#include <ucontext.h>

#include <cstdio>
#include <memory>
#include <vector>

Dimensions threadIdx, blockIdx, blockDim, gridDim;

namespace host {
constexpr std::size_t STACK = 1 << 16;
struct Fiber {
    /* For the start; later switches are jumps, which, unlike `swapcontext`, make no system call. */
    ucontext_t context;
    jmp_buf place;
    bool begun = false;
    /* Uninitialized, so that untouched pages take no memory. */
    std::unique_ptr<char[]> stack{new char[STACK]};
    bool done = true;
    /* What it waits for: there is no use in switching to it before that has another generation. */
    const Barrier* at = nullptr;
    unsigned generation = 0;
};
unsigned current, blocks;
bool progress;
void (*at_start)() = nullptr;
bool (*when_stuck)() = nullptr;
static std::vector<Fiber> fibers;
static jmp_buf scheduler;
/* Threads that have returned count as arrived at every later barrier of the block, as on the device. */
static std::vector<unsigned> alive;
static std::vector<Barrier> of_block, of_warp;
static std::vector<std::vector<unsigned>> exchanged;
static unsigned first_block, round;
/* Whether a fiber waits for the next round by choice. */
static bool by_choice;
static void (*body)();

static void become(unsigned fiber) {
    current = fiber;
    threadIdx.x = fiber % blockDim.x;
    blockIdx.x = first_block + fiber / blockDim.x;
}

void yield() {
    const unsigned me = current;
    if (_setjmp(fibers[me].place) == 0) _longjmp(scheduler, 1);
    become(me);
}

void lag() {
    const unsigned now = round;
    while (round == now) {
        by_choice = true;
        yield();
    }
}

void wait(Barrier& barrier, unsigned threads) {
    const unsigned generation = barrier.generation;
    progress = true;
    if (++barrier.arrived == threads) {
        barrier.arrived = 0;
        ++barrier.generation;
    }
    Fiber& fiber = fibers[current];
    fiber.generation = generation;
    fiber.at = &barrier;
    while (barrier.generation == generation) yield();
    fiber.at = nullptr;
}

bool has_ended(unsigned block) { return alive[block] == 0; }

void wait_for_warp() { wait(of_warp[current / 32], 32); }

void fail(const char* what) {
    std::fprintf(stderr, "%s (block %u, thread %u)\n", what, blockIdx.x, threadIdx.x);
    std::abort();
}

/* Each thread that has this place, of one block after another: to begin a context takes a system call. */
static void enter() {
    for (;;) {
        body();
        fibers[current].done = progress = true;
        --alive[block()];
        if (_setjmp(fibers[current].place) == 0) _longjmp(scheduler, 1);
    }
}

/* Lets a fiber run until it yields or has returned. */
__attribute__((noinline)) static void resume(unsigned index) {
    Fiber& fiber = fibers[index];
    become(index);
    if (_setjmp(scheduler) != 0) return;
    if (fiber.begun) _longjmp(fiber.place, 1);
    fiber.begun = true;
    setcontext(&fiber.context);
}

/* Each warp in turn as far as it can go, so that one is ahead of the others where no barrier holds it. */
static void run_cluster() {
    unsigned left = fibers.size();
    while (left != 0) {
        bool moved = false;
        by_choice = false;
        for (unsigned first = 0; first < fibers.size(); first += 32) {
            do {
                progress = false;
                for (unsigned fiber = first; fiber < std::min(first + 32, (unsigned)fibers.size()); ++fiber) {
                    const Fiber& one = fibers[fiber];
                    if (one.done || (one.at != nullptr && one.at->generation == one.generation)) continue;
                    resume(fiber);
                    if (fibers[fiber].done) --left;
                }
                moved |= progress;
            } while (progress);
        }
        ++round;
        if (left != 0 && !moved && !by_choice && !(when_stuck != nullptr && when_stuck()))
            fail("a barrier that not all threads reach");
    }
}

void launch(unsigned grid, unsigned block, void (*kernel)(), unsigned cluster) {
    body = kernel;
    blocks = cluster;
    gridDim.x = grid;
    blockDim.x = block;
    if (grid % cluster != 0) fail("a grid that is not whole clusters");
    fibers.resize(cluster * block);
    of_warp.resize(cluster * block / 32);
    exchanged.assign(of_warp.size(), std::vector<unsigned>(32));
    for (Fiber& fiber : fibers) {
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = fiber.stack.get();
        fiber.context.uc_stack.ss_size = STACK;
        makecontext(&fiber.context, enter, 0);
    }
    for (first_block = 0; first_block < grid; first_block += cluster) {
        for (Fiber& fiber : fibers) fiber.done = false;
        alive.assign(cluster, block);
        of_block.assign(cluster, Barrier());
        if (at_start != nullptr) at_start();
        run_cluster();
    }
    /* A process loads hundreds of variants, each with fibers of its own. */
    std::vector<Fiber>().swap(fibers);
}
}  // namespace host

void __syncthreads() {
    host::wait(host::of_block[host::block()], host::alive[host::block()]);
}

const unsigned* exchange(unsigned value) {
    host::wait_for_warp();
    host::exchanged[host::current / 32][host::current % 32] = value;
    host::wait_for_warp();
    return host::exchanged[host::current / 32].data();
}
