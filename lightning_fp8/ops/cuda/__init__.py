"""The operators on a CUDA device: choice of a kernel or GEMM, its test at first use, fallback to torch's operators."""
