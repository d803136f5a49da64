"""The rule for products: which GEMM computes one on a GPU, ours or cuBLASLt's.

==============================  =================  =================  =================
operands                        9.0                8.9, 12.x          10.x, 11.x
==============================  =================  =================  =================
one scale each, fast sums       cuBLASLt           cuBLASLt           cuBLASLt
one scale each, precise sums    ours               cuBLASLt           cuBLASLt
128-blocks, scales in fp32      ours               ours               none
blocks of 32, scales in E8M0    none               12.x: ours         cuBLASLt
groups of rows                  ours               ours               none
==============================  =================  =================  =================

Fast sums stay in the tensor cores (fprop); precise ones are added up in fp32 registers every 128 along K (dgrad,
wgrad). Where torch has the product too, it takes over if a kernel cannot be used. No run changes the rule; a measured
row in ``docs/results`` does. ``LIGHTNING_FP8_BACKEND`` overrides it: ``kernels`` for ours wherever there is one, or
``cublaslt``.
"""

from __future__ import annotations

import functools
import os
from typing import Literal

import torch

from kernels_cuda.gemm_variants import Configuration, configurations, mx_configuration
from lightning_fp8.runtime.device import gpu_of

BACKENDS = ("auto", "kernels", "cublaslt", "reference")
# what has a scale: each operand, 128-blocks of them, or 32 elements along K
Scales = Literal["one", "blocks", "mx"]
_IN_WORDS = {"one": "operands with one scale each", "blocks": "operands in 128-blocks", "mx": "operands in MX"}


@functools.cache
def backend() -> str:
    """``LIGHTNING_FP8_BACKEND``: ``auto``, ``kernels``, ``cublaslt``, or ``reference`` for plain torch on every device.

    Read once.

    Raises:
        ValueError: for any other value.
    """
    name = os.environ.get("LIGHTNING_FP8_BACKEND", "auto")
    if name not in BACKENDS:
        raise ValueError(f"LIGHTNING_FP8_BACKEND must be one of {', '.join(BACKENDS)}, got {name!r}.")
    return name


# more shapes than a model has, but bounded, for models in which the number of tokens always changes
@functools.lru_cache(maxsize=4096)
def configuration_for(device: torch.device, m: int, n: int, scales: Scales, fast: bool) -> Configuration | None:
    """The configuration of ours by which the rule computes ``[m, k] x [n, k] -> [m, n]``; None for torch's GEMM.

    Args:
        device: where it runs.
        m: rows of the output.
        n: columns of the output.
        scales: what has a scale.
        fast: whether sums may stay in the tensor cores.

    Raises:
        RuntimeError: if ``LIGHTNING_FP8_BACKEND=kernels`` asks for a kernel that there is not on this GPU.
    """
    asked, gpu = backend(), gpu_of(device)
    if gpu is None or asked in ("reference", "cublaslt"):
        return None
    capability = gpu.capability
    if scales == "mx":
        ours = tuple(filter(None, [mx_configuration(capability)]))
    else:
        ours = configurations(capability, scales == "blocks")
    if not ours and asked == "kernels":
        raise RuntimeError(
            f"LIGHTNING_FP8_BACKEND=kernels: lightning_fp8 has no GEMM kernel for {_IN_WORDS[scales]} on {gpu.name},"
            f" compute capability {capability[0]}.{capability[1]}. torch's operators have those that cuBLASLt has:"
            " set LIGHTNING_FP8_BACKEND=auto."
        )
    if not ours or (scales == "one" and fast and asked == "auto"):
        return None
    return min(ours, key=lambda configuration: _waves(configuration, m, n, gpu.multiprocessors))


def _waves(configuration: Configuration, m: int, n: int, multiprocessors: int) -> int:
    """Elements of the output for which each multiprocessor takes time: ragged tiles, and ragged waves, count whole."""
    block_m, block_n, cluster = configuration.block_m, configuration.block_n, configuration.cluster
    clusters = -(-m // (block_m * cluster)) * -(-n // block_n)
    return -(-clusters // (multiprocessors // cluster)) * block_m * block_n
