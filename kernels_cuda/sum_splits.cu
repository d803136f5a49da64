/* sum_splits: adds up the parts of a GEMM whose K was divided among blocks.

maths       out[m, n] = (part 0 + part 1 + ...)[m, n] + bias[n], in fp32, in this order, rounded once; the bias is
            rounded to the output's format first
tensors     parts  splits x [m, n] fp32, rows `row_stride` elements apart, a multiple of 4; parts `part_stride` apart
            out    [m, n] fp32, bf16 or fp16, rows `out_stride` elements apart
            bias   [n], see gemm.cuh
block       256 threads; each takes four neighbouring columns of a row, 16 bytes of each part
grid        ceil(m * ceil(n / 4) / 256)
bytes       per element 4 * splits read, just written by the GEMM and so partly in the L2 cache, and out written
ceiling     memory bandwidth
reference   torch.sum
*/
#include "gemm.cuh"

constexpr int THREADS = 256, COLUMNS = 4;

struct Arguments {
    const float* parts;
    void* out;
    const void* bias;
    long long part_stride, row_stride, out_stride;
    int m, n, splits, bias_format;
};

extern "C" __global__ void __launch_bounds__(THREADS) sum_splits(const __grid_constant__ Arguments arguments) {
    const int across = (arguments.n + COLUMNS - 1) / COLUMNS;
    const long long index = (long long)blockIdx.x * THREADS + threadIdx.x;
    const long long row = index / across;
    const int column = (int)(index % across) * COLUMNS;
    if (row >= arguments.m) return;
    const float* part = arguments.parts + row * arguments.row_stride + column;
    float sums[COLUMNS] = {};
    for (int split = 0; split < arguments.splits; ++split, part += arguments.part_stride) {
        // a row has room for its stride, a multiple of 4, so its last four can be read
        const float4 four = *reinterpret_cast<const float4*>(part);
        sums[0] += four.x;
        sums[1] += four.y;
        sums[2] += four.z;
        sums[3] += four.w;
    }
    OUTPUT::Element* out = static_cast<OUTPUT::Element*>(arguments.out) + row * arguments.out_stride + column;
#pragma unroll
    for (int i = 0; i < COLUMNS; ++i) {
        if (column + i >= arguments.n) return;
        if (arguments.bias_format != NO_BIAS)
            sums[i] += OUTPUT::round(load_bias(arguments.bias, arguments.bias_format, column + i));
        OUTPUT::store(out + i, sums[i]);
    }
}
