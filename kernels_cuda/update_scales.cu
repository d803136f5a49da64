/* update_scales: the end of an optimizer step for all R tensors of a model, history roll included.

maths       push = amax finite and > 0                                  (per tensor r)
            history[:, r] = [amax, history[:-1, r]]                     where push
            m = max over history[:, r], or history[0, r] if most_recent
            scale[r] = min(fp8_max[r] / min(m * margin_factor, FLT_MAX), FLT_MAX)   where push
            nonfinite_steps[r] += 1                                     where amax is inf or NaN
            amax[r] = 0
tensors     amax, scale, fp8_max [R] fp32; nonfinite_steps [R] int64; history [H, R] fp32, newest first, row-major
grid        ceil(R / block) blocks, one thread a tensor: neighbouring threads read neighbouring columns of each row
bytes       H * R * 8 (each history entry read and written once) and 32 R
ceiling     the memory's: 8 MB, about 2 us at 4.3 TB/s, for R = 1000 and H = 1024; the H dependent steps of one thread
            are its latency, which is larger
reference   lightning_fp8.scaling.ScalingState.update
*/
extern "C" __global__ void update_scales(float* amax, float* history, float* scale, const float* fp8_max,
                                         long long* nonfinite_steps, int tensors, int length, int most_recent,
                                         float margin_factor) {
    const float largest = 3.40282347e+38f;
    const int r = blockIdx.x * blockDim.x + threadIdx.x;
    if (r >= tensors) return;
    const float recorded = amax[r];
    amax[r] = 0.0f;
    // false for inf and for NaN, with which every comparison is false
    if (!(recorded <= largest)) {
        nonfinite_steps[r] += 1;
        return;
    }
    if (recorded == 0.0f) return;
    // The roll carries the entry that moves down in a register, so a column is read and written once.
    float moving = recorded;
    float m = recorded;
    for (long long row = 0; row < length; ++row) {
        const long long at = row * tensors + r;
        const float leaving = history[at];
        history[at] = moving;
        m = moving > m ? moving : m;
        moving = leaving;
    }
    if (most_recent) m = recorded;
    const float grown = m * margin_factor;
    const float result = fp8_max[r] / (grown <= largest ? grown : largest);
    scale[r] = result <= largest ? result : largest;
}
