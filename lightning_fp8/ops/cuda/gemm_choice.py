"""Chooses the GEMM for a product, cuBLASLt or one of our kernels, from measurements on this GPU."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch

from kernels_cuda.gemm_variants import Configuration, configurations
from lightning_fp8.ops.cuda import gemm_table
from lightning_fp8.ops.cuda.gemm_table import Row
from lightning_fp8.ops.cuda.kernels import backend
from lightning_fp8.runtime.choice import check_choice
from lightning_fp8.runtime.warn_once import warn_once

GEMMS = ("auto", "rawkernel", "cublaslt")
MOST_SPLITS = 16
# elements of K in a step, and steps in a part: a shorter one spends most of its time filling and draining the pipeline
_STEP, _LEAST_STEPS = 128, 8
# measured GEMMs up to this distance count as similar: a factor of two in one of m, n, k
_NEAR = 1.0
# if none is similar, this many of the nearest must agree
_VOTES = 3
# distance of a GEMM that differs only in the dtype of its output
_OTHER_OUTPUT = 0.5
# overhead of a tile beyond its products, in elements of K
_FILL = 256
# per clock and multiprocessor: bytes from the L2 cache, and FP8 multiply-adds
_L2_BYTES, _MULTIPLY_ADDS = 47, 4096


class Choice(NamedTuple):
    """How a GEMM is computed.

    Attributes:
        configuration: of our kernel; None for cuBLASLt, which is ``torch._scaled_mm``.
        splits: the number of parts of K that are computed in parallel and then added.
    """

    configuration: Configuration | None
    splits: int = 1

    @property
    def name(self) -> str:
        """``"256x128 s4 c2, K in 4"``, as in tables and messages."""
        if self.configuration is None:
            return "cuBLASLt"
        return self.configuration.name + (f", K in {self.splits}" if self.splits > 1 else "")


def check_gemm(value: str) -> None:
    """ValueError unless ``gemm`` is one of ``"auto"``, ``"rawkernel"`` and ``"cublaslt"``."""
    check_choice("`gemm`", value, GEMMS)


# more shapes than a model has, but bounded, for models in which the number of tokens always changes
@functools.lru_cache(maxsize=4096)
def choose(device: torch.device, gemm: str, m: int, n: int, k: int, promote: bool, output: torch.dtype) -> Choice:
    """Which GEMM computes ``[m, k] x [n, k] -> [m, n]``.

    ``"cublaslt"`` always selects cuBLASLt, ``"rawkernel"`` one of ours if the GPU has any. ``"auto"`` selects whichever
    had the lower median time in the nearest measured GEMM: same ``promote``, smallest
    ``sqrt(log2(m/m')^2 + log2(n/n')^2 + log2(k/k')^2)``, plus 0.5 for another dtype of the output. Up to a distance of
    1, a factor of two in one of m, n, k, our kernel runs in the measured configuration, beyond that in the one of
    :func:`estimated`; and there ``"auto"`` selects ours only if ours was faster in all of the three nearest. If no GEMM
    with this ``promote`` was measured, ``"auto"`` selects cuBLASLt, and a warning says so once.

    Args:
        device: where it runs; our kernels run on CUDA GPUs only.
        gemm: one of :data:`GEMMS`.
        m: rows of the output.
        n: columns of the output.
        k: the dimension that is summed over.
        promote: whether partial sums are added up in fp32 registers every 128 along K.
        output: dtype of the output.

    Raises:
        ValueError: for another ``gemm``.
    """
    check_gemm(gemm)
    if gemm == "cublaslt" or device.type != "cuda" or backend() == "reference" or 0 in (m, n, k):
        return Choice(None)
    gpu = torch.cuda.get_device_properties(device)
    capability = (gpu.major, gpu.minor)
    ours = configurations(capability, promote)
    if not ours:
        warn_once(
            f"FP8 GEMMs run by torch._scaled_mm on {gpu.name}: lightning_fp8 has no GEMM kernel for compute capability"
            f" {gpu.major}.{gpu.minor}."
        )
        return Choice(None)
    measured = gemm_table.rows(gpu.name, capability)
    nearest = _nearest(measured, m, n, k, promote, output)
    if gemm == "auto" and not nearest:
        _say_unmeasured(gpu, promote, bool(measured))
        return Choice(None)
    is_near = bool(nearest) and _distance(nearest[0], m, n, k, output) <= _NEAR
    if gemm == "auto" and not all(row.is_faster for row in nearest[: 1 if is_near else _VOTES]):
        return Choice(None)
    if is_near and nearest[0].configuration is not None:
        return Choice(nearest[0].configuration, min(nearest[0].splits, most_splits(k, promote)))
    return estimated(ours, m, n, k, promote, gpu.multi_processor_count)


@functools.lru_cache(maxsize=4096)
def choose_in_blocks(device: torch.device, gemm: str, m: int, n: int, k: int) -> Choice:
    """:func:`choose` where each block of the operands has a scale: ours by :func:`estimated` if the GPU has any.

    cuBLASLt for ``"cublaslt"``, and if there is no kernel.
    """
    check_gemm(gemm)
    if gemm == "cublaslt" or device.type != "cuda" or backend() == "reference" or 0 in (m, n, k):
        return Choice(None)
    gpu = torch.cuda.get_device_properties(device)
    ours = configurations((gpu.major, gpu.minor), True)
    return estimated(ours, m, n, k, True, gpu.multi_processor_count) if ours else Choice(None)


def estimated(ours: tuple[Configuration, ...], m: int, n: int, k: int, promote: bool, multiprocessors: int) -> Choice:
    """The configuration and number of splits with the smallest estimated time; the first and smallest of equals.

    time      = waves * block_m * block_n * (128 * ceil(steps / splits) + 256) / efficiency
    steps     = ceil(k / 128)
    waves     = ceil(clusters * splits / floor(multiprocessors / cluster))
    clusters  = ceil(m / (block_m * cluster)) * ceil(n / block_n)
    efficiency = min(1, 47 / (4096 * (block_m + block_n / cluster) / (block_m * block_n)))

    A wave is as many tiles as run at a time; ragged tiles count whole, and filling and draining the pipeline counts as
    256 elements of K. The efficiency is what the L2 cache delivers, in bytes a clock, relative to what a tile needs:
    128x128 without a cluster needs 64 and is limited to 0.73, 128x256 in clusters of two needs 32. K is split only if
    sums are promoted and tiles fill less than half of the multiprocessors, and into at most :func:`most_splits` parts.
    """
    choices = [
        Choice(one, splits)
        for one in ours
        for splits in range(1, _splits_worth_it(one, m, n, k, promote, multiprocessors) + 1)
    ]
    return min(choices, key=lambda choice: _estimate(choice, m, n, k, multiprocessors))


def most_splits(k: int, promote: bool) -> int:
    """How many parts K may have: at most 16, each of at least 8 steps of 128; only one without promotion."""
    steps = -(-k // _STEP)
    return max(1, min(steps // _LEAST_STEPS, MOST_SPLITS)) if promote else 1


def clusters(configuration: Configuration, m: int, n: int) -> int:
    """The number of clusters for an output ``[m, n]``, including partial ones."""
    return -(-m // (configuration.block_m * configuration.cluster)) * -(-n // configuration.block_n)


def _splits_worth_it(one: Configuration, m: int, n: int, k: int, promote: bool, multiprocessors: int) -> int:
    fills_half = 2 * clusters(one, m, n) * one.cluster >= multiprocessors
    return 1 if fills_half else most_splits(k, promote)


def _estimate(choice: Choice, m: int, n: int, k: int, multiprocessors: int) -> float:
    one, splits = choice
    if one is None:
        raise ValueError("Only our own kernels' times are estimated.")
    waves = -(-clusters(one, m, n) * splits // (multiprocessors // one.cluster))
    steps = math.ceil(math.ceil(k / _STEP) / splits)
    tile = one.block_m * one.block_n
    needed = _MULTIPLY_ADDS * (one.block_m + one.block_n / one.cluster) / tile
    return waves * tile * (_STEP * steps + _FILL) / min(1.0, _L2_BYTES / needed)


def _nearest(measured: tuple[Row, ...], m: int, n: int, k: int, promote: bool, output: torch.dtype) -> list[Row]:
    alike = [row for row in measured if row.promote == promote]
    return sorted(alike, key=lambda row: _distance(row, m, n, k, output))[:_VOTES]


def _distance(row: Row, m: int, n: int, k: int, output: torch.dtype) -> float:
    ratios = (m / row.m, n / row.n, k / row.k)
    return math.hypot(*map(math.log2, ratios)) + (0.0 if row.output == output else _OTHER_OUTPUT)


def _say_unmeasured(gpu: Any, promote: bool, others: bool) -> None:
    kind = f" {'with' if promote else 'without'} promoted sums" if others else ""
    warn_once(
        f"FP8 GEMMs{kind} run by torch._scaled_mm on {gpu.name}: nothing has been measured on this GPU that would say"
        " where lightning_fp8's kernels are faster. `python -m lightning_fp8 tune` does that."
    )
