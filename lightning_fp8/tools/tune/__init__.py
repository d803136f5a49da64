"""Measures which GEMM is the fastest for which shape on this GPU, for ``gemm="auto"`` to choose by."""
