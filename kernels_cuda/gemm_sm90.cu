/* gemm_sm90: the scaled FP8 GEMM of Hopper, persistent and specialised by warps.

maths       see gemm.cuh
tensors     a, b and out as tensor maps: a in boxes of BLOCK_M x 128 bytes, b of BLOCK_N / CLUSTER x 128, out of 64 rows
            x 128 bytes, all swizzled by 128 bytes. Boxes are filled with zeros outside a and b, and not written
            outside out: any m, n and k
tile        BLOCK_M x BLOCK_N of the output, of which each of two warpgroups computes half of the rows, in steps of
            128 along K, STAGES of them in shared memory at a time:

                            columns 0 ... BLOCK_N - 1
            rows    0 ... BLOCK_M / 2 - 1    warpgroup 1    one or two wgmmas of 64 rows
            BLOCK_M / 2 ... BLOCK_M - 1      warpgroup 2

            Warpgroup 0 loads: each step of a, and its block's share of b, which the copy engine hands to all CLUSTER
            blocks (neighbours along m, with the same columns). A stage is `full` when its bytes are there, and `empty`
            when all that read it, in all the cluster's blocks, have done so
variants    A_FORMAT, B_FORMAT e4m3|e5m2, OUTPUT OutFp32|OutBf16|OutFp16, BLOCK_M 128|256, BLOCK_N 128, STAGES, CLUSTER;
            PROMOTE 1: partial sums leave the tensor cores every 128 along K and are added up in fp32 registers (the
            tensor cores' own accumulator keeps fewer bits). With PROMOTE also B_SCALE_ROWS 0|1|128, see
            gemm_sm90_blocks.cuh. GROUPED 0, or with 128 x 128 and CLUSTER 1 also 1 and 2: the map of b by rows has the
            rows of all groups, that of out by depth too, where m is a multiple of 64. Without PROMOTE GROUPED 1 alone
grid        at most a block for each multiprocessor, whole clusters, 384 threads; each cluster takes every n-th tile.
            Tiles are ordered in groups of 16 rows of tiles, so that concurrent tiles share operands in the L2 cache
shared      STAGES * (BLOCK_M + BLOCK_N) * 128 bytes, 16 KB per warpgroup to stage its stores, the bias, the barriers
flops       2 m n k; bytes m k + n k + out. At 256 x 128 a block reads 384 bytes from L2 for 65536 flops, five sixths
            of that where two blocks share b
ceiling     1979 TFLOP/s by the datasheet of the H200
reference   lightning_fp8.scalings.per_tensor.PerTensor.emulated_product
*/
#include "gemm_sm90_blocks.cuh"
#include "gemm_sm90_store.cuh"

/* Loads all steps of all tiles of this block, as stages become empty. */
__device__ __forceinline__ void produce(const Arguments& arguments, const SharedMemory& memory, u32 block) {
    Stage stage;
    for (Work work(arguments); work.left(); work.next()) {
        const Tile tile = work.tile(block);
        if (tile.group < 0) continue;
        // what lies behind the last column is another group's, and not stored
        const int b_row = tile.column + (BY_ROWS ? tile.group * arguments.gemm.n : 0);
        for (int step = tile.first_step; step < tile.end_step; ++step) {
            barrier_wait(memory.empty(stage.index), stage.parity ^ 1);
            const u32 full = memory.full(stage.index), a = memory.stage(stage.index), b = a + A_BYTES;
            barrier_expect(full, STAGE_BYTES);
            load_box(a, arguments.a, full, tile.row, step * BLOCK_K);
            if constexpr (CLUSTER == 1) {
                load_box(b, arguments.b, full, b_row, step * BLOCK_K);
            } else {
                const int rows = BLOCK_N / CLUSTER;
                load_box_for((1 << CLUSTER) - 1, b + block * rows * BLOCK_K, arguments.b, full,
                             b_row + block * rows, step * BLOCK_K);
            }
            stage.advance();
        }
    }
}

/* Partial sums of one step at a time, added up in registers. */
__device__ __forceinline__ void multiply_promoted(Sums (&sums)[PIECES], const Tile& tile, const SharedMemory& memory,
                                                  Stage& stage, int consumer, StepScales scales) {
    Sums step_sums;
    for (int step = tile.first_step; step < tile.end_step; ++step) {
        barrier_wait(memory.full(stage.index), stage.parity);
        const u64 a = operand(memory.stage(stage.index) + consumer * CONSUMER_ROWS * BLOCK_K);
        const u64 b = operand(memory.stage(stage.index) + A_BYTES);
#pragma unroll
        for (int piece = 0; piece < PIECES; ++piece) {
            mma_fence();
#pragma unroll
            for (int k = 0; k < BLOCK_K; k += MMA_K)
                mma(step_sums.values, operand_at(a, piece * PIECE_ROWS * BLOCK_K + k), operand_at(b, k), k == 0);
            mma_commit();
            if (piece == 0) scales.advance(step + 1 < tile.end_step);
            mma_wait<0>();
            if (piece == PIECES - 1) release(memory, stage.index);
            scales.add(sums[piece], step_sums, piece);
        }
        stage.advance();
    }
    scales.end();
}

/* All steps in the tensor cores' accumulators; the products of a step run while those of the next one are issued. */
__device__ __forceinline__ void multiply(Sums (&sums)[PIECES], const Tile& tile, const SharedMemory& memory,
                                         Stage& stage, int consumer) {
    int previous = 0;
    for (int step = tile.first_step; step < tile.end_step; ++step) {
        barrier_wait(memory.full(stage.index), stage.parity);
        const u64 a = operand(memory.stage(stage.index) + consumer * CONSUMER_ROWS * BLOCK_K);
        const u64 b = operand(memory.stage(stage.index) + A_BYTES);
#pragma unroll
        for (int piece = 0; piece < PIECES; ++piece) pin(sums[piece].values);
        mma_fence();
#pragma unroll
        for (int k = 0; k < BLOCK_K; k += MMA_K)
#pragma unroll
            for (int piece = 0; piece < PIECES; ++piece)
                mma(sums[piece].values, operand_at(a, piece * PIECE_ROWS * BLOCK_K + k), operand_at(b, k), false);
        mma_commit();
#pragma unroll
        for (int piece = 0; piece < PIECES; ++piece) pin(sums[piece].values);
        mma_wait<1>();
        // only this step's products may still run, so the stage before has been read
        if (step != tile.first_step) release(memory, previous);
        previous = stage.index;
        stage.advance();
    }
    mma_wait<0>();
    release(memory, previous);
}

/* Computes and stores this warpgroup's rows of all tiles of this block. */
__device__ __forceinline__ void consume(const Arguments& arguments, const SharedMemory& memory, u32 block,
                                        int consumer) {
    Stage stage;
    Epilogue epilogue(arguments, memory, consumer);
    for (Work work(arguments); work.left(); work.next()) {
        const Tile tile = work.tile(block);
        // the same for all threads, which the compiler sees only of a vote; else the main loop would not be uniform
        if (BY_ROWS && __any_sync(0xffffffffu, tile.group < 0)) continue;
        const int row = tile.row + consumer * CONSUMER_ROWS;
        epilogue.begin(tile);
        Sums sums[PIECES];
#pragma unroll
        for (int piece = 0; piece < PIECES; ++piece)
#pragma unroll
            for (int i = 0; i < BLOCK_N / 2; ++i) sums[piece].values[i] = 0.0f;
        if constexpr (PROMOTE) {
            const StepScales scales(arguments, memory, tile, consumer, row);
            multiply_promoted(sums, tile, memory, stage, consumer, scales);
        }
        else multiply(sums, tile, memory, stage, consumer);
        epilogue.share_bias();
#pragma unroll
        for (int piece = 0; piece < PIECES; ++piece)
#pragma unroll
            for (int part = 0; part < BLOCK_N / Epilogue::COLUMNS; ++part)
                epilogue.store(&sums[piece].values[part * Epilogue::COLUMNS / 2], tile, row + piece * PIECE_ROWS,
                               part * Epilogue::COLUMNS);
    }
    epilogue.end();
}

extern "C" __global__ void CLUSTER_DIMENSIONS __launch_bounds__(THREADS, 1)
    gemm_sm90(const __grid_constant__ Arguments arguments) {
    // uniform over the warp, which the compiler cannot see
    const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x, 0) / 128;
    const SharedMemory memory(shared_address());
    const u32 block = CLUSTER == 1 ? 0 : block_in_cluster();
    if (threadIdx.x == 0) {
        prefetch_map(arguments.a);
        prefetch_map(arguments.b);
        prefetch_map(arguments.out);
        for (int i = 0; i < STAGES; ++i) {
            barrier_init(memory.full(i), 1);
            barrier_init(memory.empty(i), CONSUMERS * CLUSTER);
        }
        barrier_init_fence();
    }
    cluster_sync<true>();
    if (warpgroup == 0) {
        give_registers<40>();
        if (threadIdx.x == 0) produce(arguments, memory, block);
    } else {
        take_registers<232>();
        consume(arguments, memory, block, warpgroup - 1);
    }
    // no block leaves while another may still arrive at its barriers
    cluster_sync<false>();
}
