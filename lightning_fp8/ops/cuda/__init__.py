"""The operators on a CUDA device: which kernel or GEMM serves, its test at first use, torch's own operators else."""
