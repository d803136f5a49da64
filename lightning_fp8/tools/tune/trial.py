"""One GEMM: checks a candidate's result, and times candidates compared with ``torch._scaled_mm``."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernels_cuda.gemm import split_rows
from lightning_fp8.ops.cuda.gemm import kernels_of
from lightning_fp8.ops.cuda.gemm_choice import Choice
from lightning_fp8.ops.formats import FORMATS, dtype_name
from lightning_fp8.ops.operand import Fp8Tensor
from lightning_fp8.tools import timing
from lightning_fp8.tools.timing import Variant
from lightning_fp8.tools.tune.shapes import Gemm

# `lightning_fp8.ops.cuda.gemm.run_choice`
Run = Callable[..., Tensor]
# a race condition may not show in a single run
_CHECKS = 3
# products of integers up to this, and their sums, are exact in any order of summation
_LARGEST = 2
_SCALES_INV = (0.5, 0.25)


class Operands(NamedTuple):
    """``a [m, k]`` and ``b [n, k]``."""

    a: Fp8Tensor
    b: Fp8Tensor


def unserved(gemm: Gemm, choice: Choice, device: torch.device) -> str | None:
    """Why there is no kernel for a choice, so that torch would replace it; None if there is one."""
    if choice.configuration is None:
        return None
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = kernels_of(choice, device, gemm.a_format, gemm.b_format, gemm.output, gemm.promote)
    if found is not None:
        return None
    return "no kernel: " + (" ".join(str(one.message) for one in said) or "none is available")


def wrong(gemm: Gemm, choice: Choice, device: torch.device, run: Run) -> str | None:
    """What is wrong with a choice's result, compared with torch's product of the same integers; None if nothing.

    The results of three runs must be bitwise equal to it.
    """
    given = operands(gemm, device, whole=True)
    expected = _product(gemm, given)
    for _ in range(_CHECKS):
        _leave_poison(gemm, choice, device)
        got = computed(run, choice, given, gemm)
        if got.shape != expected.shape or got.dtype != gemm.output:
            return f"gave {dtype_name(got.dtype)} {tuple(got.shape)}"
        others = int((got != expected).sum())
        if others:
            return f"gave {others} wrong elements of {expected.numel()}"
    return None


def timed(gemm: Gemm, choices: Sequence[Choice], rounds: int, device: torch.device, run: Run) -> dict[str, Any]:
    """A row for the table: the fastest of the choices and ``torch._scaled_mm``, both with percentiles.

    Args:
        gemm: what is computed.
        choices: ours, all known to give the right result; may be empty.
        rounds: batches of each, taken in turns.
        device: the GPU.
        run: computes a choice.
    """
    size = gemm.m * gemm.k + gemm.n * gemm.k + gemm.m * gemm.n * gemm.output.itemsize
    inputs = [operands(gemm, device) for _ in range(timing.copies_for(size, device))]
    in_turn = {choice.name: choice for choice in (*choices, *_torch_if_it_can(run, gemm, inputs[0]))}
    variants = [
        Variant(name, functools.partial(_call, run, choice, gemm, inputs), lambda: None, len(inputs))
        for name, choice in in_turn.items()
    ]
    # queued: a small GEMM takes the device less time than its call takes the host
    times = timing.time_in_turns(variants, rounds, timing.kernel_batch(device))
    best = min(choices, key=lambda choice: times[choice.name].p50_us, default=None)
    return {
        **dict(zip(("m", "n", "k", "promote"), gemm)),
        "output": dtype_name(gemm.output),
        "configuration": best.configuration.name if best and best.configuration else None,
        "splits": best.splits if best else 1,
        **_percentiles("", times.get(best.name) if best else None),
        **_percentiles("cublaslt_", times.get(Choice(None).name)),
    }


def _call(run: Run, choice: Choice, gemm: Gemm, inputs: Sequence[Operands], at: int) -> Tensor:
    return computed(run, choice, inputs[at], gemm)


def computed(run: Run, choice: Choice, operands: Operands, gemm: Gemm) -> Tensor:
    """The result of a choice, ``[m, n]``."""
    return run(choice, *operands, None, gemm.output, gemm.promote)


def _torch_if_it_can(run: Run, gemm: Gemm, operands: Operands) -> list[Choice]:
    try:
        computed(run, Choice(None), operands, gemm)
    except torch.OutOfMemoryError:
        raise
    # "not supported", as torch or cuBLASLt reports it
    except RuntimeError:
        return []
    return [Choice(None)]


def _percentiles(prefix: str, times: timing.Times | None) -> dict[str, float | None]:
    return {f"{prefix}{name}": getattr(times, name, None) for name in ("p20_us", "p50_us", "p80_us")}


def operands(gemm: Gemm, device: torch.device, whole: bool = False) -> Operands:
    """Operands with normally distributed values, whose bits vary as in training, or with integers if ``whole``."""
    made = []
    for rows, name, scale_inv in zip((gemm.m, gemm.n), (gemm.a_format, gemm.b_format), _SCALES_INV, strict=True):
        if whole:
            values = torch.randint(-_LARGEST, _LARGEST + 1, (rows, gemm.k), dtype=torch.int8, device=device).bfloat16()
        else:
            values = torch.randn(rows, gemm.k, dtype=torch.bfloat16, device=device)
        payload = values.to(FORMATS[name].dtype).view(torch.uint8)
        made.append(Fp8Tensor(payload, torch.tensor(scale_inv, device=device), name))
    return Operands(*made)


def _product(gemm: Gemm, operands: Operands) -> Tensor:
    a, b = (operand.payload.view(FORMATS[operand.format].dtype).float() for operand in operands)
    return (a @ b.t()).mul_(math.prod(_SCALES_INV)).to(gemm.output)


def _leave_poison(gemm: Gemm, choice: Choice, device: torch.device) -> None:
    """Fill memory with NaN and free it: the allocator uses it next, for outputs and partial sums."""
    poison = [torch.full((gemm.m, gemm.n), math.nan, dtype=gemm.output, device=device)]
    if choice.configuration is not None and choice.splits > 1:
        rows = choice.splits * split_rows(choice.configuration, gemm.m)
        poison.append(torch.full((rows, gemm.n), math.nan, device=device))
