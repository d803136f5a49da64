"""Measures which GEMM is fastest for each shape on this GPU; ``gemm="auto"`` chooses by the results."""
