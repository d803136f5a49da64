"""Measures the GEMMs of linear layers on this GPU ahead of training, as ``gemm="auto"`` does at first use."""
