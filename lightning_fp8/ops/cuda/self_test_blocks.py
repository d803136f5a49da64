"""The casts in blocks compared with the reference on small random cases; :mod:`.self_test` does so for the others."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels_cuda import block_casts
from kernels_cuda.casts import INPUTS, column_sum_tiles
from kernels_cuda.launch import Kernel
from lightning_fp8.ops import blocks
from lightning_fp8.ops.amaxes import max_abs
from lightning_fp8.ops.cuda.self_test import casts_of_weights, hard_to_round, payloads, random_values
from lightning_fp8.ops.formats import FORMATS
from lightning_fp8.ops.operand import CurrentScale, WeightSlot, with_scale

# whole tiles, and ragged ones
_SHAPES = ((256, 256), (133, 171))
_KINDS = ("float32", "power of 2")


def cast(device: torch.device, input: torch.dtype, kernel: Kernel) -> str | None:
    """Both payloads and their scales, amax and column sums; both kinds of scales."""
    for x in _cases(input):
        for kind in _KINDS:
            failure = _compare(device, x, CurrentScale(blocks=kind), kernel)
            if failure is not None:
                return f"its self-test at {len(x)} x {x.shape[1]} with scales in {kind} gave {failure}"
    return None


def cast_weights(device: torch.device, kernel: Kernel) -> str | None:
    """Weights of all dtypes in squares, together and each alone: both payloads, their scales, scale and amax."""
    values = [x for dtype in INPUTS for x in _cases(dtype)]
    for kind in _KINDS:
        current = CurrentScale(blocks=kind)
        for x, *cast in casts_of_weights(device, values, kernel, True, kind == "power of 2"):
            failure = _compare_squares(x, current, *cast)
            if failure is not None:
                return f"its self-test at {len(x)} x {x.shape[1]} with scales in {kind} gave {failure}"
    return None


def _cases(input: torch.dtype) -> list[Tensor]:
    """Blocks of zeros, with inf and with NaN; ragged edges; numbers that are hard to round."""
    cases = [random_values(*shape, input) for shape in _SHAPES]
    cases[0][:128, :128], cases[0][130, 140], cases[0][140, 3] = 0, float("inf"), float("nan")
    hard = hard_to_round(input, "e4m3")
    # 448 makes the scale 1, which leaves midpoints where they are
    hard = hard.where(hard.abs() <= FORMATS["e4m3"].max, 0)
    hard[:, 0] = FORMATS["e4m3"].max
    return [*cases, hard]


def _compare(device: torch.device, x: Tensor, current: CurrentScale, kernel: Kernel) -> str | None:
    (rows, columns), moved = x.shape, x.to(device)
    y, y_t = payloads(x, device)
    scale_inv, scale_inv_t = (one.fill_(-1) for one in blocks.new_cast(moved, current, "both")[2:])
    sums = torch.full((column_sum_tiles(rows), columns), float("nan"), device=device)
    amax = torch.zeros(3, device=device)
    recorded = (torch.tensor([1], device=device), amax)
    power_of_two = current.blocks != "float32"
    outputs = (y, scale_inv), (y_t, scale_inv_t)
    block_casts.cast_blocks(kernel, moved, recorded, power_of_two, *outputs, sums)
    slot = with_scale(torch.ones(()), "e4m3")._replace(current=current)
    by_rows, by_columns, *inverses = blocks.cast(x, slot, "both")
    if not torch.allclose(sums.sum(0).cpu(), x.float().sum(0), rtol=1e-5, atol=1e-3, equal_nan=True):
        return "other column sums"
    return (
        _difference("payload", y, by_rows)
        or _difference("payload by columns", y_t, by_columns)
        or _difference("scale_inv", scale_inv, inverses[0])
        or _difference("scale_inv by columns", scale_inv_t, inverses[1])
        or _difference("amax", amax[1], max_abs(x))
    )


def _compare_squares(
    x: Tensor, current: CurrentScale, y: Tensor, y_t: Tensor, scale_inv: Tensor, scale: Tensor, amax: Tensor
) -> str | None:
    payload, payload_t, inverse, _ = blocks.cast_weight(
        x, WeightSlot(torch.zeros(1), "e4m3", None, False, current), "both"
    )
    largest = max_abs(x)
    return (
        _difference("payload", y, payload)
        or _difference("payload by columns", y_t, payload_t)
        or _difference("scale_inv", scale_inv, inverse)
        or _difference("amax", amax, largest)
        or _difference("scale", scale, blocks.block_scale(largest, FORMATS["e4m3"], current)[0])
    )


def _difference(name: str, actual: Tensor, expected: Tensor) -> str | None:
    actual = actual.cpu()
    same = (actual == expected) | (_is_nan(actual) & _is_nan(expected))
    return None if bool(same.all()) else f"{int((~same).sum())} of {same.numel()} other numbers in {name}"


def _is_nan(values: Tensor) -> Tensor:
    return values & 0x7F == 0x7F if values.dtype == torch.uint8 else values.isnan()
