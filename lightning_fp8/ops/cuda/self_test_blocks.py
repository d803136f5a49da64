"""The casts in blocks compared with the reference on small random cases; :mod:`.self_test` does so for the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels_cuda import block_casts
from kernels_cuda.casts import INPUTS, column_sum_tiles
from kernels_cuda.launch import Kernel
from lightning_fp8.ops import blocks, e8m0
from lightning_fp8.ops.activations import activate, activation_gradient, gated, gated_gradients
from lightning_fp8.ops.amaxes import max_abs
from lightning_fp8.ops.cuda.self_test import casts_of_weights, hard_to_round, payloads, random_values
from lightning_fp8.ops.formats import FORMATS
from lightning_fp8.ops.operand import CurrentScale, WeightSlot, with_scale

# whole tiles, and ragged ones
_SHAPES = ((256, 256), (133, 171))
_KINDS = ("float32", "power of 2")
# by whether blocks are squares
_MX_KINDS = {False: "e8m0", True: "e8m0 squares"}


class _Given(NamedTuple):
    """What a variant takes, on its device; up for gated ones, dy for gradients."""

    x: Tensor
    up: Tensor | None
    dy: Tensor | None

    def every(self, change: Callable[[Tensor], Tensor]) -> _Given:
        return _Given(*(None if tensor is None else change(tensor) for tensor in self))  # type: ignore[arg-type]

    def in_fp64(self, activation: str) -> Sequence[Tensor]:
        """The tensors to cast."""
        x, up, dy = self.every(lambda tensor: tensor.cpu().double())
        if up is not None:
            return [gated(x, up)] if dy is None else gated_gradients(x, up, dy)
        return [activate(x, activation) if dy is None else activation_gradient(x, dy, activation)]


def cast(
    device: torch.device,
    input: torch.dtype,
    kernel: Kernel,
    mx: bool = False,
    activation: str = "none",
    backward: bool = False,
) -> str | None:
    """Both payloads and their scales, amax and column sums; each kind of scales, or with ``mx`` those in E8M0.

    The last bits of an activation are the kernel's own, so its results are taken for the values that are cast.
    """
    cases = _cases(input)
    if activation != "none":
        # the values of each element are asked for in a tile of its own, so these are small; the one without inf and
        # NaN has an amax to compare
        cases = [cases[0][64:192, :160].contiguous(), random_values(133, 139, input)]
    for x in cases:
        rows, columns = x.shape
        up = random_values(columns, rows, input).t().contiguous() if activation == "swiglu" else None
        dy = random_values(rows + 1, columns, input)[1:] if backward else None
        tensors = _Given(x, up, dy).every(lambda tensor: tensor.to(device))
        values: Sequence[Tensor] = [x]
        if activation != "none":
            # the sum of a column of one row
            values = [sums.view(rows, columns).to(input) for sums in _sums_of_one_row(device, tensors, kernel)]
            if not all(map(_is_nearly, values, tensors.in_fp64(activation), [tensors] * len(values))):
                return f"its self-test at {rows} x {columns} gave other values"
        for kind in (_MX_KINDS[False],) if mx else _KINDS:
            failure = _compare(device, tensors, values, CurrentScale(blocks=kind), kernel)
            if failure is not None:
                return f"its self-test at {rows} x {columns} with scales in {kind} gave {failure}"
    return None


def _sums_of_one_row(device: torch.device, tensors: _Given, kernel: Kernel) -> list[Tensor]:
    flat = tensors.every(lambda tensor: tensor.reshape(1, -1))
    sums = [torch.full(flat.x.shape, float("nan"), device=device) for _ in range(_results(tensors))]
    _launch(kernel, flat, [block_casts.Result(None, column_sums=row) for row in sums], False)
    return [row.cpu() for row in sums]


def _results(tensors: _Given) -> int:
    """How many tensors a variant casts: also the gradient of up."""
    return 1 if tensors.up is None or tensors.dy is None else 2


def _launch(kernel: Kernel, tensors: _Given, results: Sequence[block_casts.Result], power_of_two: bool) -> None:
    x, up, dy = tensors
    if up is None:
        block_casts.cast(kernel, x, results[0], dy, power_of_two=power_of_two)
    else:
        of_up = None if dy is None else results[1]
        block_casts.cast_gated(kernel, x, up, results[0], dy, of_up, power_of_two)


def _is_nearly(values: Tensor, exact: Tensor, tensors: _Given) -> bool:
    """Whether results have the errors of their dtype, or of fp32 before the last operations."""
    info, slack = torch.finfo(values.dtype), torch.full_like(exact, 2.0**-18)
    for factor in (tensors.up, tensors.dy):
        slack = slack if factor is None else slack * (1 + factor.cpu().double().abs())
    expected = exact.to(values.dtype)
    close = (values.double() - exact).abs() <= max(4 * info.eps, 2.0**-18) * exact.abs() + slack + info.smallest_normal
    # a sum may overflow by its last bit
    both = close | (values.isfinite() == expected.isfinite()) & ~expected.isfinite() | (exact.abs() > 0.99 * info.max)
    return bool(both.all())


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


def _compare(
    device: torch.device, tensors: _Given, values: Sequence[Tensor], current: CurrentScale, kernel: Kernel
) -> str | None:
    written, results = [], []
    for x in values:
        y, y_t = payloads(x, device)
        scale_inv, scale_inv_t = (inv.fill_(77) for inv in blocks.new_cast(tensors.x, x.shape, current, "both")[2:])
        sums = torch.full((column_sum_tiles(len(x)), x.shape[1]), float("nan"), device=device)
        amax = torch.zeros(3, device=device)
        recorded = torch.tensor([1], device=device), amax
        results.append(block_casts.Result(recorded, (y, scale_inv), (y_t, scale_inv_t), sums))
        written.append((y, y_t, scale_inv, scale_inv_t, sums, amax[1]))
    _launch(kernel, tensors, results, current.blocks == "power of 2")
    failures = (_compare_cast(x, current, *outputs) for x, outputs in zip(values, written, strict=True))
    return next((failure for failure in failures if failure is not None), None)


def _compare_cast(
    x: Tensor,
    current: CurrentScale,
    y: Tensor,
    y_t: Tensor,
    scale_inv: Tensor,
    scale_inv_t: Tensor,
    sums: Tensor,
    amax: Tensor,
) -> str | None:
    slot = with_scale(torch.ones(()), "e4m3")._replace(current=current)
    by_rows, by_columns, *inverses = blocks.cast(x, slot, "none", "both")
    if not torch.allclose(sums.sum(0).cpu(), x.float().sum(0), rtol=1e-5, atol=1e-3, equal_nan=True):
        return "other column sums"
    return (
        _difference("payload", y, by_rows)
        or _difference("payload by columns", y_t, by_columns)
        or _difference("scale_inv", scale_inv, inverses[0])
        or _difference("scale_inv by columns", scale_inv_t, inverses[1])
        or _difference("amax", amax, max_abs(x))
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
        # all NaN codes are equivalent, and both zeros, as a sum of one has no sign
        same |= ((actual & expected & 0x7F) == 0x7F) | ((actual | expected) & 0x7F == 0)
    elif actual.dtype != torch.uint8:
        same |= actual.isnan() & expected.isnan()
    return None if bool(same.all()) else f"{int((~same).sum())} of {same.numel()} other numbers in {name}"
