"""The casts in blocks compared with the reference on small random cases; :mod:`.self_test` does so for the others."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels_cuda import block_casts
from kernels_cuda.casts import INPUTS, column_sum_tiles
from kernels_cuda.launch import Kernel
from lightning_fp8.ops import blocks, e8m0
from lightning_fp8.ops.amaxes import max_abs
from lightning_fp8.ops.cuda.self_test import casts_of_weights, hard_to_round, payloads, random_values
from lightning_fp8.ops.formats import FORMATS
from lightning_fp8.ops.operand import CurrentScale, WeightSlot, with_scale

# whole tiles, and ragged ones
_SHAPES = ((256, 256), (133, 171))
_KINDS = ("float32", "power of 2")
# by whether blocks are squares
_MX_KINDS = {False: "e8m0", True: "e8m0 squares"}


def cast(device: torch.device, input: torch.dtype, kernel: Kernel, mx: bool = False) -> str | None:
    """Both payloads and their scales, amax and column sums; each kind of scales, or with ``mx`` those in E8M0."""
    for x in _cases(input):
        for kind in (_MX_KINDS[False],) if mx else _KINDS:
            failure = _compare(device, x, CurrentScale(blocks=kind), kernel)
            if failure is not None:
                return f"its self-test at {len(x)} x {x.shape[1]} with scales in {kind} gave {failure}"
    return None


def cast_weights(device: torch.device, kernel: Kernel, squares: bool = True, mx: bool = False) -> str | None:
    """Weights of all dtypes in blocks, together and each alone: both payloads, their scales, scale and amax."""
    values = [x for dtype in INPUTS for x in _cases(dtype)]
    for kind in (_MX_KINDS[squares],) if mx else _KINDS:
        current = CurrentScale(blocks=kind)
        for x, *cast in casts_of_weights(device, values, kernel, (squares, mx), kind == "power of 2"):
            failure = _compare_weight(x, current, *cast)
            if failure is not None:
                return f"its self-test at {len(x)} x {x.shape[1]} with scales in {kind} gave {failure}"
    return None


def _cases(input: torch.dtype) -> list[Tensor]:
    """Blocks of zeros, with inf and with NaN; ragged edges; numbers and scales that are hard to round."""
    cases = [random_values(*shape, input) for shape in _SHAPES]
    cases[0][:128, :128], cases[0][130, 140], cases[0][140, 3] = 0, float("inf"), float("nan")
    # in a block that codes of zeros complete
    cases[1][-1, -1] = float("inf")
    hard = hard_to_round(input, "e4m3")
    # 448 makes the scale 1, which leaves midpoints where they are
    largest = FORMATS["e4m3"].max
    hard = hard.where(hard.abs() <= largest, 0)
    hard[:, :: e8m0.BLOCK] = largest
    # just below, at and above each power of two times 448, the amax of a block by rows; the last ones are infinite
    powers = largest * torch.tensor([1 - 2.0**-8, 1.0, 1 + 2.0**-7])[:, None] * 2.0 ** torch.arange(-149, 121)
    return [*cases, hard, F.pad(powers.view(-1, 1).to(input), (0, 2))]


def _compare(device: torch.device, x: Tensor, current: CurrentScale, kernel: Kernel) -> str | None:
    (rows, columns), moved = x.shape, x.to(device)
    y, y_t = payloads(x, device)
    scale_inv, scale_inv_t = (one.fill_(77) for one in blocks.new_cast(moved, current, "both")[2:])
    sums = torch.full((column_sum_tiles(rows), columns), float("nan"), device=device)
    amax = torch.zeros(3, device=device)
    recorded = (torch.tensor([1], device=device), amax)
    power_of_two = current.blocks != "float32"
    outputs = (y, scale_inv), (y_t, scale_inv_t)
    if current.in_e8m0:
        block_casts.cast_mx(kernel, moved, recorded, *outputs, sums)
    else:
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


def _compare_weight(
    x: Tensor,
    current: CurrentScale,
    y: Tensor,
    y_t: Tensor,
    scale_inv: Tensor,
    scale_inv_t: Tensor,
    scale: Tensor,
    amax: Tensor,
) -> str | None:
    payload, payload_t, inverse, inverse_t = blocks.cast_weight(
        x, WeightSlot(torch.zeros(1), "e4m3", None, False, current), "both"
    )
    largest = max_abs(x)
    return (
        _difference("payload", y, payload)
        or _difference("payload by columns", y_t, payload_t)
        or _difference("scale_inv", scale_inv, inverse)
        or (_difference("scale_inv by columns", scale_inv_t, inverse_t) if current.in_e8m0 else None)
        or _difference("amax", amax, largest)
        or _difference("scale", scale, blocks.block_scale(largest, FORMATS["e4m3"], current)[0])
    )


def _difference(name: str, actual: Tensor, expected: Tensor) -> str | None:
    actual = actual.cpu()
    same = actual == expected
    if name.startswith("payload"):
        # all NaN codes are equivalent
        same |= (actual & expected & 0x7F) == 0x7F
    elif actual.dtype != torch.uint8:
        same |= actual.isnan() & expected.isnan()
    return None if bool(same.all()) else f"{int((~same).sum())} of {same.numel()} other numbers in {name}"
