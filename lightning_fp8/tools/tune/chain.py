"""GEMMs chained to the cast of the next operand, compared with a GEMM and a separate cast: results and times."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernels_cuda.casts import Row
from kernels_cuda.gemm_variants import CHAINED_ACTIVATIONS
from lightning_fp8.ops.cuda import chained, kernels
from lightning_fp8.ops.cuda import dispatch as cuda
from lightning_fp8.ops.cuda.gemm_choice import Choice
from lightning_fp8.ops.cuda.self_test import same_codes
from lightning_fp8.ops.formats import FORMATS
from lightning_fp8.ops.operand import Columns, Fp8Operand
from lightning_fp8.tools import timing
from lightning_fp8.tools.timing import Variant
from lightning_fp8.tools.tune import trial
from lightning_fp8.tools.tune.shapes import Gemm
from lightning_fp8.tools.tune.trial import Operands, Run

CHAINED, SEPARATE = "chained", "separate"
# share of codes that may be off by one: sums of integers are exact, but an activation's last bits may differ
_NEIGHBOURING = 0.05


class Inputs(NamedTuple):
    """The inputs of a GEMM followed by a cast.

    Attributes:
        operands: of the GEMM.
        h: ``[m, n]``, the activation's input, if its gradient is computed; else None.
        row: the scale that the cast uses.
    """

    operands: Operands
    h: Tensor | None
    row: Row


# returns the payload by rows ``[m, n]`` and by columns ``[n, m]``, and possibly other tensors
Way = Callable[[Inputs], tuple[Tensor, ...]]


def activations(gemm: Gemm, row: dict[str, Any]) -> tuple[str, ...]:
    """The activations whose cast may be chained to a GEMM, given its row of the table.

    In a model, such GEMMs are inside a feed-forward block: fprop into the hidden layer, and dgrad back into it.
    """
    inside = gemm.output == torch.bfloat16 and gemm.n > gemm.k
    return CHAINED_ACTIVATIONS if inside and row["configuration"] is not None and row["splits"] == 1 else ()


def measured(
    gemm: Gemm, choice: Choice, separate: Choice, activation: str, rounds: int, device: torch.device, run: Run
) -> dict[str, Any]:
    """``{"wrong": None, "chained_us": ..., "separate_us": ...}``, medians; or ``{"wrong": what}``.

    Args:
        gemm: what is computed.
        choice: our GEMM, which is chained to the cast.
        separate: the fastest GEMM, followed by a separate cast.
        activation: applied after the GEMM; its gradient if sums are promoted, as in dgrad.
        rounds: batches of each, taken in turns.
        device: the GPU.
        run: computes a choice.
    """
    ways = {
        CHAINED: _chained(gemm, choice, activation, device),
        SEPARATE: _separate(gemm, separate, activation, device, run),
    }
    missing = [name for name, way in ways.items() if way is None]
    if missing:
        return {"wrong": f"no kernel: {', '.join(missing)}"}
    found = {name: way for name, way in ways.items() if way is not None}
    wrong = _wrong(gemm, found, _inputs(gemm, device, whole=True))
    if wrong is not None:
        return {"wrong": wrong}
    size = gemm.m * gemm.k + gemm.n * gemm.k + 4 * gemm.m * gemm.n
    inputs = [_inputs(gemm, device) for _ in range(timing.copies_for(size, device))]
    variants = [
        Variant(name, functools.partial(_call, way, inputs), lambda: None, len(inputs)) for name, way in found.items()
    ]
    times = timing.time_in_turns(variants, rounds, timing.kernel_batch(device))
    return {"wrong": None, "chained_us": times[CHAINED].p50_us, "separate_us": times[SEPARATE].p50_us}


def _call(way: Way, inputs: list[Inputs], at: int) -> tuple[Tensor, ...]:
    return way(inputs[at])


def _chained(gemm: Gemm, choice: Choice, activation: str, device: torch.device) -> Way | None:
    one = choice.configuration
    if one is None or one.family != "gemm_sm90":
        return None
    kernel = kernels.chained_kernel(device, one, gemm.a_format, gemm.output, gemm.promote, activation, gemm.a_format)
    if kernel is None:
        return None

    def way(given: Inputs) -> tuple[Tensor, ...]:
        a, b, a_inv, b_inv = given.operands
        chain = chained.Chain(kernel, one, given.row, gemm.a_format)
        if given.h is None:
            x = Fp8Operand(a, a[:0], a_inv, a_inv, gemm.a_format)
            w = Fp8Operand(b, b[:0], b_inv, b_inv, gemm.b_format)
            h, made = chained.hidden(chain, x, w, None, True, True, gemm.output)
            return made.rows, made.columns, made.scale_inv, h
        return chained._hidden_gradient(chain, a, a_inv, given.h, Columns(b, b_inv, gemm.b_format), True, True)

    return way


def _separate(gemm: Gemm, choice: Choice, activation: str, device: torch.device, run: Run) -> Way | None:
    kernel = kernels.cast_kernel(device, gemm.output, gemm.a_format, activation, gemm.promote)
    if kernel is None:
        return None

    def way(given: Inputs) -> tuple[Tensor, ...]:
        out = trial.computed(run, choice, given.operands, gemm)
        x, dy = (out, None) if given.h is None else (given.h, out)
        *made, sums = cuda._launch(kernel, x, given.row, "both", activation, dy, sums=gemm.promote)
        return (*made, *(() if sums is None else (sums,)), out)

    return way


def _wrong(gemm: Gemm, ways: dict[str, Way], given: Inputs) -> str | None:
    dtype = FORMATS[gemm.a_format].dtype
    for what, got, expected in zip(("rows", "columns"), ways[CHAINED](given), ways[SEPARATE](given)):
        if not same_codes(got.view(dtype), expected.view(dtype), _NEIGHBOURING):
            return f"gave {int((got != expected).sum())} other codes of {got.numel()} by {what}"
    return None


def _inputs(gemm: Gemm, device: torch.device, whole: bool = False) -> Inputs:
    scale, amax = torch.ones(1, device=device), torch.zeros(1, device=device)
    h = torch.randn(gemm.m, gemm.n, dtype=gemm.output, device=device) if gemm.promote else None
    row = Row(scale, torch.ones(1, device=device), torch.zeros(1, dtype=torch.int64, device=device), amax)
    return Inputs(trial.operands(gemm, device, whole), h, row)
