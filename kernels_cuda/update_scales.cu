/* update_scales: the end of an optimizer step for all R tensors of a model, history roll included.

maths       push = amax finite and > 0                                  (per tensor r below D: the others are weights)
            history[:, r] = [amax, history[:-1, r]]                     where push
            m = max over history[:, r], or history[0, r] if most_recent
            scale[r] = min(fp8_max[r] / min(m * margin_factor, FLT_MAX), FLT_MAX)   where push
            amax[r] = 0
            nonfinite_steps[r] += 1                                     where amax is inf or NaN, weights included
tensors     amax, scale, fp8_max [R] fp32; nonfinite_steps [R] int64; history [H, D] fp32, newest first, row-major
block       8 tensors x 128 threads each; every thread holds up to 8 rows of a chunk of 1024:

               r     r+1   ...   r+7
            t0    t1    ...   t7        rows 0, 128, 256, ... of the chunk
            t8    ...                   rows 1, 129, ...

            A chunk is read whole before it is written, the oldest chunk first, so the roll needs no second history.
            Eight neighbouring columns are the 32 bytes of a sector
grid        ceil(R / 8) blocks of 1024 threads; 4 KB of shared memory
bytes       H * D * 8 (each history entry read and written once) and 32 R
ceiling     memory bandwidth: 8 MB, about 2 us at 4.3 TB/s, for D = 1000 and H = 1024
reference   lightning_fp8.ops.amaxes.update_scales
*/
constexpr int TENSORS = 8, LANES = 128, ROWS_PER_LANE = 8, CHUNK = LANES * ROWS_PER_LANE;

struct Arguments {
    float* amax;
    float* history;
    float* scale;
    const float* fp8_max;
    long long* nonfinite_steps;
    int tensors, delayed, length, most_recent;
    float margin_factor;
};

extern "C" __global__ void __launch_bounds__(TENSORS* LANES)
    update_scales(const __grid_constant__ Arguments arguments) {
    __shared__ float maxima[LANES][TENSORS];
    const float largest = 3.40282347e+38f;
    const int within = threadIdx.x % TENSORS, lane = threadIdx.x / TENSORS;
    const int delayed = arguments.delayed, length = arguments.length;
    const int r = blockIdx.x * TENSORS + within;
    const bool exists = r < arguments.tensors;
    const float recorded = exists ? arguments.amax[r] : 0.0f;
    // false for inf and for NaN, with which every comparison is false
    const bool finite = recorded <= largest;
    const bool push = finite && recorded > 0.0f && r < delayed;
    float m = recorded;
    for (int start = (length - 1) / CHUNK * CHUNK; start >= 0; start -= CHUNK) {
        float moving[ROWS_PER_LANE];
#pragma unroll
        for (int i = 0; i < ROWS_PER_LANE; ++i) {
            const int row = start + i * LANES + lane;
            moving[i] = 0.0f;
            if (push && row < length)
                moving[i] = row == 0 ? recorded : arguments.history[(row - 1) * (long long)delayed + r];
            m = fmaxf(m, moving[i]);
        }
        __syncthreads();
#pragma unroll
        for (int i = 0; i < ROWS_PER_LANE; ++i) {
            const int row = start + i * LANES + lane;
            if (push && row < length) arguments.history[row * (long long)delayed + r] = moving[i];
        }
        // the next chunk's first row comes from below what was written here, so no second barrier
    }
    maxima[lane][within] = m;
    __syncthreads();
    if (lane != 0 || !exists) return;
    if (r < delayed) arguments.amax[r] = 0.0f;
    if (!finite) arguments.nonfinite_steps[r] += 1;
    if (!push) return;
    if (arguments.most_recent) m = recorded;
    else for (int i = 1; i < LANES; ++i) m = fmaxf(m, maxima[i][within]);
    const float grown = m * arguments.margin_factor;
    const float result = arguments.fp8_max[r] / (grown <= largest ? grown : largest);
    arguments.scale[r] = result <= largest ? result : largest;
}
