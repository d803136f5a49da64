/* The functions of kernels_cuda/instructions_sm89.cuh in software.

   A copy happens, if `late`, as late as the waits allow: when its thread waits for it. Otherwise it happens as early as
   it can, and the first warp falls behind the others. A kernel is right only if both give the same: one shows what is
   read before it has arrived, the other what is overwritten before it has been read. An mma adds up as the tensor cores
   do it, see `accumulate` in formats_on_host.h: Ada's or, with `fraction_bits` 25, those of sm_120. */
#pragma once
#include "instructions.cuh"

extern "C" {
EXPORTED extern int late;
/* the shared memory of a launch */
EXPORTED extern int dynamic_bytes;
EXPORTED extern int fraction_bits;
}

namespace sm89 {
/* Called first by every thread of a block. */
void begin();
void wait_for_copies(u32 pending);
void mma(float (&sums)[4], const u32 (&a)[4], const u32 (&b)[2], const char* a_format, const char* b_format);
void mma_scaled(float (&sums)[4], const u32 (&a)[4], const u32 (&b)[2], u32 a_scales, u32 b_scales, int byte,
                int a_thread, int b_thread, const char* a_format, const char* b_format);
}  // namespace sm89

void copy_async(u32 to, const void* from, int bytes);
void copy_commit();
template <int PENDING>
static inline void copy_wait() { sm89::wait_for_copies(PENDING); }
void load_matrices(u32& first, u32& second, u32& third, u32& fourth, u32 address);

#ifdef STAGES /* in a variant */
static inline u32 shared_address() {
    sm89::begin();
    return 0;
}
static inline void mma(float (&sums)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    sm89::mma(sums, a, b, STRING(A_FORMAT), STRING(B_FORMAT));
}
static inline void mma_scaled(float (&sums)[4], const u32 (&a)[4], const u32 (&b)[2], u32 a_scales, u32 b_scales,
                              int byte, int a_thread, int b_thread) {
    sm89::mma_scaled(sums, a, b, a_scales, b_scales, byte, a_thread, b_thread, STRING(A_FORMAT), STRING(B_FORMAT));
}
#endif
