"""Each kernel compared with the reference on a small random case, on the device it is to run on.

A test returns None, or a description of the error. It waits for the device, once per kernel, device, driver and source.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from kernels_cuda import casts, scales
from kernels_cuda.launch import Kernel
from lightning_fp8.ops import amaxes, reference
from lightning_fp8.ops.activations import activate, activation_gradient
from lightning_fp8.ops.amaxes import max_abs, scale_of_current
from lightning_fp8.ops.formats import FORMATS
from lightning_fp8.ops.operand import by_columns, new_payloads

# one shape of whole tiles, one with ragged edges on both sides
_SHAPES = ((256, 128), (133, 71))
_TENSORS = 3
# The last bits of activation functions differ between libraries, so after rounding a code may be the neighbouring one.
_NEIGHBOURING = 0.01
_NEARLY_ZERO = 1e-5
# one scale leaves midpoints where they are, the other makes subnormals of the input large enough to be seen
_ROUNDING_SCALES = (1.0, 2.0**127)
# how many numbers of the input's dtype are tested on each side of a midpoint
_NEAREST = 8


def cast_transpose(
    device: torch.device, input: torch.dtype, format: str, activation: str, backward: bool, kernel: Kernel
) -> str | None:
    """Both payloads, scale, amax and column sums; with a history and at first use."""
    for rows, columns in _SHAPES:
        width = 2 * columns if activation == "swiglu" else columns
        x, dy = (random_values(rows, columns_, input) for columns_ in (width, columns))
        values = activation_gradient(x, dy, activation) if backward else activate(x, activation)
        for index in range(_TENSORS - 1):
            failure = _compare_cast(device, format, activation, x, dy if backward else None, values, index, kernel)
            if failure is not None:
                return f"its self-test at {rows} x {columns} gave {failure}"
    if activation != "none":
        return None
    failure = _compare_groups(device, input, format, kernel)
    if failure is not None:
        return f"its self-test of groups of rows gave {failure}"
    failure = _compare_rounding(device, input, format, kernel)
    return None if failure is None else f"its self-test of numbers that are hard to round gave {failure}"


def hard_to_round(input: torch.dtype, format: str) -> Tensor:
    """The numbers that are easy to cast wrongly, ``[rows, 64]``.

    All numbers of the format and the midpoints between them, each with the eight nearest numbers of the input's dtype
    on both sides; the dtype's smallest numbers, subnormal and normal, and its largest; zero, inf and NaN; with both
    signs.
    """
    codes = torch.arange(128, dtype=torch.uint8).view(FORMATS[format].dtype).float()
    codes, info = codes[codes.isfinite()], torch.finfo(input)
    centres = torch.cat([codes, (codes[1:] + codes[:-1]) / 2, torch.tensor([info.tiny, info.max])]).to(input)
    bits = centres.view(torch.int32 if input.itemsize == 4 else torch.int16)[:, None]
    # what follows the largest number is inf and NaN, and nothing comes before zero
    positive = (bits + torch.arange(-_NEAREST, _NEAREST + 1)).clamp(min=0).to(bits.dtype).view(input).flatten()
    values = torch.cat([positive, -positive])
    return torch.nn.functional.pad(values, (0, -len(values) % 64)).view(-1, 64)


def _compare_rounding(device: torch.device, input: torch.dtype, format: str, kernel: Kernel) -> str | None:
    x, dtype = hard_to_round(input, format), FORMATS[format].dtype
    ones, index = torch.ones(1, device=device), torch.zeros(1, dtype=torch.int64, device=device)
    for scale in _ROUNDING_SCALES:
        y, y_t = payloads(x, device)
        amax = torch.zeros_like(ones)
        result = casts.Result(ones * scale, ones, index, amax, torch.zeros((), device=device), y, y_t)
        casts.cast_transpose(kernel, x.to(device), result)
        codes = reference.saturating_cast(x, torch.tensor(scale), FORMATS[format])
        # all NaN codes are equivalent
        for payload in (y, y_t, codes):
            payload[payload.view(dtype).float().isnan()] = 0x7F
        failure = _compare(y.cpu(), y_t.cpu(), codes, format, exact=True)
        if failure is None and not amax.isnan():
            failure = f"the amax {amax.item()} in place of NaN"
        if failure is not None:
            return f"{failure}, at a scale of {scale}"
    return None


def _compare_cast(
    device: torch.device,
    format: str,
    activation: str,
    x: Tensor,
    dy: Tensor | None,
    values: Tensor,
    index: int,
    kernel: Kernel,
) -> str | None:
    newest, scale, amax, current = _state(device)
    rows, width = values.shape
    y, y_t = payloads(values, device)
    sums = None
    # only gradients have column sums
    if activation == "none" or dy is not None:
        sums = torch.full((casts.column_sum_tiles(rows), width), float("nan"), device=device)
    scale_inv = torch.zeros((), device=device)
    place = scale, newest, torch.tensor([index], device=device), amax
    moved = None if dy is None else dy.to(device)
    result = casts.Result(*place, scale_inv, y, y_t, sums, current)
    casts.cast_transpose(kernel, x.to(device), result, moved, activation == "swiglu")
    # from the recorded amax, which is compared too: at first use, a difference in its last bit would shift every code
    used = _expected_scale(scale, newest, index, amax[index].cpu(), format)
    codes = reference.saturating_cast(values, used, FORMATS[format])
    exact = activation in ("none", "relu")
    relative, absolute = (1e-5, 1e-4) if exact else (1e-3, 1e-1)
    if sums is not None and not torch.allclose(
        sums.sum(dim=0).cpu(), values.float().sum(dim=0), rtol=relative, atol=absolute
    ):
        return "other column sums"
    return _compare(y.cpu(), y_t.cpu(), codes, format, exact) or _compare_state(
        scale_inv, used, amax[index], max_abs(values), exact
    )


def _compare_groups(device: torch.device, input: torch.dtype, format: str, kernel: Kernel) -> str | None:
    """One group of two tiles, with a history, one without a row, one without a history; a tile of no group."""
    newest, scale, amax, _ = _state(device)
    x = random_values(4 * casts.TILE_ROWS, _SHAPES[1][1], input)
    y, y_t = payloads(x, device)
    scale_inv, current = (torch.zeros(_TENSORS, device=device) for _ in range(2))
    index = torch.tensor([0, 2, 1], device=device)
    of_tile = torch.tensor([0, 0, 2, -1], dtype=torch.int32, device=device)
    result = casts.Result(scale, newest, index, amax, scale_inv, y, y_t, current_amax=current, group_of_tile=of_tile)
    casts.cast_transpose(kernel, x.to(device), result)
    for group, row, part in ((0, 0, slice(2 * casts.TILE_ROWS)), (2, 1, slice(2 * casts.TILE_ROWS, -casts.TILE_ROWS))):
        used = _expected_scale(scale, newest, row, amax[row].cpu(), format)
        codes = reference.saturating_cast(x[part], used, FORMATS[format])
        failure = _compare(y[part].cpu(), y_t[:, part].cpu(), codes, format, exact=True)
        failure = failure or _compare_state(scale_inv[group], used, amax[row], max_abs(x[part]), exact=True)
        if failure is not None:
            return failure
    return None if amax[2] == 0 else "an amax of a group without a row"


def _compare(y: Tensor, y_t: Tensor, codes: Tensor, format: str, exact: bool) -> str | None:
    if not torch.equal(y_t, by_columns(y)):
        return "a transposed payload that is not the payload's transpose, padded with zeros"
    dtype = FORMATS[format].dtype
    if not same_codes(y.view(dtype), codes.view(dtype), 0.0 if exact else _NEIGHBOURING):
        return f"{int((y != codes).sum())} other codes"
    return None


def same_codes(got: Tensor, expected: Tensor, neighbouring: float) -> bool:
    """Whether two FP8 tensors agree, except for a share ``neighbouring`` of codes that are adjacent or near zero."""
    codes, expected_codes = got.view(torch.uint8), expected.view(torch.uint8)
    if torch.equal(codes, expected_codes):
        return True
    if not neighbouring:
        return False
    # codes of one sign are in the order of their values; near zero an activation is the difference of large numbers
    close = (codes.int() - expected_codes.int()).abs() <= 1
    close |= (got.float() - expected.float()).abs() <= _NEARLY_ZERO * torch.finfo(got.dtype).max
    return bool(close.all()) and (codes != expected_codes).float().mean().item() <= neighbouring


def _compare_state(scale_inv: Tensor, used: Tensor, amax: Tensor, expected: Tensor, exact: bool) -> str | None:
    tolerance = 0.0 if exact else 2**-7
    if not torch.allclose(amax.cpu(), expected, rtol=tolerance, atol=0):
        return f"the amax {amax.item()} in place of {expected.item()}"
    if not torch.allclose(scale_inv.cpu(), used.reciprocal(), rtol=tolerance, atol=0):
        return f"the scale_inv {scale_inv.item()} in place of {used.reciprocal().item()}"
    return None


def cast_weights(device: torch.device, kernel: Kernel) -> str | None:
    """Weights of all dtypes and both shapes; numbers that are hard to round."""
    values = [random_values(*_SHAPES[number % len(_SHAPES)], dtype) for number, dtype in enumerate(casts.INPUTS)]
    for dtype in casts.INPUTS:
        hard = hard_to_round(dtype, "e4m3")
        # without numbers above the format's largest, so that the scale is 1
        values.append(hard.where(hard.abs() <= FORMATS["e4m3"].max, 0))
    for x, *cast in casts_of_weights(device, values, kernel):
        failure = _compare_weight(x, *cast)
        if failure is not None:
            return f"its self-test gave {failure}"
    return None


def casts_of_weights(
    device: torch.device,
    values: list[Tensor],
    kernel: Kernel,
    kind: tuple[bool, bool] = (False, False),
    power_of_two: bool = False,
) -> Iterator[tuple[Tensor, ...]]:
    """Each weight, cast with the others and then alone: its values, both payloads, their scale_inv, noted scale and
    amax. ``kind``: the arguments of :func:`kernels_cuda.casts.weights_variant`."""
    for together in (True, False):
        outputs = [payloads(x, device) for x in values]
        # a cast replaces a weight's amax, instead of raising it
        scale, amax = torch.ones(len(values), device=device), torch.full((len(values),), 1e9, device=device)
        weights = [
            casts.Weight(x.to(device), torch.tensor([number], device=device), *pair)
            for number, (x, pair) in enumerate(zip(values, outputs, strict=True))
        ]
        tables = [casts.weight_table(some, *kind) for some in ([weights] if together else zip(weights))]
        for table in tables:
            casts.cast_weights(kernel, table, scale, amax, power_of_two)
        inverses = [both for table in tables for both in zip(table.scale_inv, table.scale_inv_t, strict=True)]
        for number, x in enumerate(values):
            yield x, *outputs[number], *inverses[number], scale[number], amax[number]


def _compare_weight(
    values: Tensor, y: Tensor, y_t: Tensor, scale_inv: Tensor, _: Tensor, scale: Tensor, amax: Tensor
) -> str | None:
    expected = max_abs(values)
    used = scale_of_current(expected, FORMATS["e4m3"])
    codes = reference.saturating_cast(values, used, FORMATS["e4m3"])
    if scale.item() != used.item():
        return f"the scale {scale.item()} in place of {used.item()}"
    return _compare(y.cpu(), y_t.cpu(), codes, "e4m3", exact=True) or _compare_state(
        scale_inv, used, amax, expected, exact=True
    )


def update_scales(device: torch.device, kernel: Kernel) -> str | None:
    """Some steps with tensors that ran, did not run and overflowed, over a window longer than a chunk."""
    tensors, delayed, length = 37, 29, 1030
    generator = torch.Generator().manual_seed(0)
    history = torch.rand(length, delayed, generator=generator)
    mine = {
        "amax": torch.zeros(tensors),
        "amax_history": history,
        "scale": torch.ones(tensors),
        "fp8_max": torch.full((tensors,), 448.0),
        "nonfinite_steps": torch.zeros(tensors, dtype=torch.int64),
    }
    theirs = {name: tensor.to(device, copy=True) for name, tensor in mine.items()}
    for most_recent in (False, True):
        amax = torch.rand(tensors, generator=generator)
        # for the last ones, which are weights, only the counter changes
        amax[3], amax[5], amax[7], amax[30] = 0, float("inf"), float("nan"), float("inf")
        mine["amax"].copy_(amax)
        theirs["amax"].copy_(amax)
        amaxes.update_scales(**mine, most_recent=most_recent, margin_factor=2.0)
        scales.update_scales(kernel, **theirs, most_recent=most_recent, margin_factor=2.0)
    for name, expected in mine.items():
        if not torch.equal(expected, theirs[name].cpu()):
            return f"its self-test gave another {name}"
    return None


def random_values(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """Normal values over several magnitudes, the same in every process, without touching torch's generator."""
    generator = torch.Generator().manual_seed(rows * 10007 + columns)
    values = torch.randn(rows, columns, generator=generator)
    return (values * torch.randn(rows, 1, generator=generator).exp2()).to(dtype)


def payloads(x: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """Both payloads of a tensor like x, which a kernel has not written yet."""
    y, y_t = new_payloads(torch.empty(0, device=device), x.shape, "both")
    return y.fill_(0xA5), y_t.fill_(0xA5)


def _state(device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Newest amaxes, scales, recorded amaxes and memory for a current amax; tensor 1 has no history."""
    newest = torch.tensor([1.0, 0.0, 2.0], device=device)
    scale = torch.tensor([37.5, 1.0, 3.0], device=device)
    return newest, scale, torch.zeros(_TENSORS, device=device), torch.zeros((), device=device)


def _expected_scale(scale: Tensor, newest: Tensor, index: int, current: Tensor, format: str) -> Tensor:
    return scale[index].cpu() if newest[index] > 0 else scale_of_current(current, FORMATS[format])
