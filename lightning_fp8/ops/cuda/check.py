"""A kernel compared with torch's own operations before its first use: small cases whose results have no rounding error.

Values are integers times powers of two, so sums are exact in fp32 in any order. Where sums are promoted, they need more
bits than a tensor core's accumulator has, but not within 128 elements: a kernel that does not promote gives others.
An activation's last bits differ between libraries; there, the values that codes and scales stand for are compared.
Each check returns None or a description of what is wrong. It waits for the device, and keeps no memory.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise, product

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels_cuda import block_casts, casts, scales
from kernels_cuda import gemm as gemms
from kernels_cuda.gemm_variants import Configuration
from kernels_cuda.launch import Kernel
from lightning_fp8.ops import amaxes, e8m0
from lightning_fp8.ops.activations import activate, activation_gradient
from lightning_fp8.ops.amaxes import by_element, max_abs, power_of_2, scale_of_current
from lightning_fp8.ops.arithmetic import block_amaxes, by_columns, of_rows, saturated, saturated_blocks, square_amaxes
from lightning_fp8.ops.formats import E4M3, FORMATS
from lightning_fp8.ops.operand import columns_shape

# ragged in tiles, blocks and vectors; and with rows of whole vectors of 16 bytes
_ROWS, _WIDTHS = 133, (171, 176)
# the width of a gated pair's halves, in whole blocks
_GATED_COLUMNS = 256
# activations whose results have no rounding error
_EXACT = ("none", "relu")
# the others' results, relative: those of bf16, and of the kernels' approximations in fp32
_ACTIVATION_ERROR = 2.0**-7
# of a product: eight steps of 128 and a part of one
_K = 1040
# a name, what the kernel wrote, and what it should be
_Results = Iterable[tuple[str, Tensor, Tensor]]


def cast_transpose(
    device: torch.device, kernel: Kernel, input: torch.dtype, format: str, activation: str, backward: bool
) -> str | None:
    """Both payloads, scale_inv, amax and column sums: with a history, then without one, as one tensor or in groups."""
    failures = (_cast_transpose(device, kernel, input, format, activation, backward, width) for width in _WIDTHS)
    return next(filter(None, failures), None)


def _cast_transpose(
    device: torch.device, kernel: Kernel, input: torch.dtype, format: str, activation: str, backward: bool, width: int
) -> str | None:
    fmt, is_gated = FORMATS[format], activation == "swiglu"
    x = _integers(3 * casts.TILE_ROWS if activation == "none" else _ROWS, width * (1 + is_gated), input)
    dy = _integers(len(x), width, input, 1) if backward else None
    values = activate(x, activation) if dy is None else activation_gradient(x, dy, activation)
    # of three tensors, with and without a history; groups of two tiles, of none and of one. The first scale makes
    # subnormal codes
    newest, scale = torch.tensor([1.0, 0.0, 2.0]), torch.tensor([torch.finfo(fmt.dtype).tiny, 1.0, 3.0])
    parts: list[tuple[Tensor, list[int], list[slice]]] = [
        (torch.tensor([row]), [0] * -(-len(x) // casts.TILE_ROWS), [slice(len(x))]) for row in (0, 1)
    ]
    if activation == "none":
        two = 2 * casts.TILE_ROWS
        parts.append((torch.tensor([0, 2, 1]), [0, 0, 2], [slice(two), slice(0), slice(two, None)]))
    for index, of_tile, rows in parts:
        is_grouped = len(index) > 1
        if activation == "none":
            # with which a tensor has no scale of its own
            x[5, :2] = torch.tensor([float("inf"), float("nan")]) if newest[index[0]] > 0 else 0
            values = x
        y, y_t = _unwritten(values, device)
        amax, current, scale_inv = (torch.zeros(size, device=device) for size in (3, len(index), len(index)))
        sums = None
        if activation == "none" or dy is not None:
            sums = torch.full((casts.column_sum_tiles(len(x)), values.shape[1]), float("nan"), device=device)
        tiles = torch.tensor(of_tile, dtype=torch.int32, device=device) if is_grouped else None
        place = scale.to(device), newest.to(device), index.to(device)
        measured, inverse = (current, scale_inv) if is_grouped else (current[0], scale_inv[0])
        result = casts.Result(*place, amax, inverse, y, y_t, sums, measured, group_of_tile=tiles)
        casts.cast_transpose(kernel, x.to(device), result, None if dy is None else dy.to(device), is_gated)
        results: list[tuple[str, Tensor, Tensor]] = [("transposed payload", y_t, by_columns(y))]
        if sums is not None:
            results.append(("column sums", sums.sum(0), values.float().sum(0)))
        for group, (row, part) in enumerate(zip(index.tolist(), rows, strict=True)):
            largest = max_abs(values[part])
            results.append(("amax", amax[row], largest))
            if len(values[part]):
                # of the amax that was recorded: a difference in its last bit would move every code
                used = scale[row] if newest[row] > 0 else scale_of_current(amax[row].cpu(), fmt)
                results.append(("scale_inv", scale_inv[group], used.reciprocal()))
                results.append(("payload", y[part], saturated(values[part], used, fmt)))
        if failure := _difference(results, activation, format):
            history = "with history" if newest[index[0]] > 0 else "without history"
            return f"{failure}, {'in groups of rows' if is_grouped else history}"
    return None


def cast_blocks(
    device: torch.device, kernel: Kernel, input: torch.dtype, mx: bool, activation: str, backward: bool
) -> str | None:
    """Both payloads and their scales, amax and column sums, for each kind of scale that the kernel writes."""
    is_gated = activation == "swiglu"
    kinds = ("e8m0",) if mx else ("float32", "power of 2")
    # both with and without rare numbers, as NaN hides every other amax
    rarities = (False, True) if activation == "none" else (False,)
    for width, rare, kind in product((_GATED_COLUMNS,) if is_gated else _WIDTHS, rarities, kinds):
        x = _integers(_ROWS, width * (1 + is_gated), input)
        dy = _integers(_ROWS, width, input, 1) if backward else None
        if rare:
            x[:, :32], x[3, 40], x[7, 41] = 0, float("inf"), float("nan")
        values = activate(x, activation) if dy is None else activation_gradient(x, dy, activation)
        y, y_t = _unwritten(values, device)
        inverses = [
            _new_scales(device, rows, columns, mx).fill_(77) for rows, columns in (values.shape, values.shape[::-1])
        ]
        sums = torch.full((casts.column_sum_tiles(len(x)), values.shape[1]), float("nan"), device=device)
        amax, index = torch.zeros(3, device=device), torch.tensor([1], device=device)
        result = block_casts.Result((index, amax), (y, inverses[0]), (y_t, inverses[1]), sums)
        moved = None if dy is None else dy.to(device)
        block_casts.cast(kernel, x.to(device), result, moved, is_gated, kind == "power of 2")
        by_rows, by_depth = _in_blocks(values, kind, False), _in_blocks(values.t(), kind, False, y_t.shape[1])
        results = [("amax", amax[1], max_abs(values)), ("column sums", sums.sum(0), values.float().sum(0))]
        if activation in _EXACT:
            results += zip(("payload", "scale_inv"), (y, inverses[0]), by_rows)
            results += zip(("payload by columns", "scale_inv by columns"), (y_t, inverses[1]), by_depth)
        else:
            columns = F.pad(values.t(), (0, y_t.shape[1] - len(values)))
            results += zip(("values", "values by columns"), map(_values, (y, y_t), inverses), (values, columns))
        if failure := _difference(results, activation):
            return f"{failure}, with scales in {kind}"
    return None


def cast_weights(device: torch.device, kernel: Kernel, squares: bool, mx: bool) -> str | None:
    """Weights of all dtypes, together and one alone: both payloads, their scales, and the amax and scale noted."""
    weights = [
        _integers(_ROWS, width, dtype, seed) for seed, (dtype, width) in enumerate(product(casts.INPUTS, _WIDTHS))
    ]
    # subnormal codes
    for weight in weights:
        weight[0] *= 2.0**-10
    kinds = ("e8m0",) if mx else ("float32", "power of 2") if squares else ("",)
    for kind in kinds:
        for some in (weights, weights[:1]):
            payloads = [_unwritten(weight, device) for weight in some]
            # a cast replaces a weight's amax, instead of raising it
            scale, amax = torch.ones(len(some), device=device), torch.full((len(some),), 1e9, device=device)
            jobs = [
                casts.Weight(weight.to(device), torch.tensor([number], device=device), *both)
                for number, (weight, both) in enumerate(zip(some, payloads, strict=True))
            ]
            table = casts.weight_table(jobs, squares, mx)
            casts.cast_weights(kernel, table, scale, amax, kind == "power of 2")
            for number, (weight, (y, y_t)) in enumerate(zip(some, payloads, strict=True)):
                largest = max_abs(weight)
                if kind:
                    used = _scale_of(largest, kind)[0]
                    codes, inverse = _in_blocks(weight, kind, squares)
                    codes_t, inverse_t = _in_blocks(weight.t(), kind, squares, y_t.shape[1])
                else:
                    used = scale_of_current(largest, E4M3)
                    codes, inverse = saturated(weight, used, E4M3), used.reciprocal()
                    codes_t, inverse_t = by_columns(codes), inverse
                results = [
                    ("payload", y, codes),
                    ("transposed payload", y_t, codes_t),
                    ("scale_inv", table.scale_inv[number], inverse),
                    ("scale_inv by columns", table.scale_inv_t[number], inverse_t),
                    ("amax", amax[number], largest),
                    ("scale", scale[number], used),
                ]
                if failure := _difference(results):
                    return f"{failure}{f', with scales in {kind}' if kind else ''}"
    return None


def update_scales(device: torch.device, kernel: Kernel) -> str | None:
    """Steps with tensors that ran, did not run and overflowed, over a window longer than a chunk."""
    tensors, delayed, length = 37, 29, 1030
    generator = torch.Generator().manual_seed(0)
    expected = {
        "amax": torch.zeros(tensors),
        "amax_history": torch.rand(length, delayed, generator=generator),
        "scale": torch.ones(tensors),
        "fp8_max": torch.full((tensors,), 448.0),
        "nonfinite_steps": torch.zeros(tensors, dtype=torch.int64),
    }
    # the largest is in the older chunk
    expected["amax_history"][-3] = 2.0
    written = {name: tensor.to(device, copy=True) for name, tensor in expected.items()}
    for most_recent in (False, True):
        amax = torch.rand(tensors, generator=generator)
        # for the last ones, which are weights, only the counter changes
        amax[3], amax[5], amax[7], amax[30] = 0, float("inf"), float("nan"), float("inf")
        expected["amax"].copy_(amax)
        written["amax"].copy_(amax)
        amaxes.update_scales(**expected, most_recent=most_recent, margin_factor=2.0)
        scales.update_scales(kernel, **written, most_recent=most_recent, margin_factor=2.0)
        # after each step, as the next one writes every scale again
        if failure := _difference((name, written[name], tensor) for name, tensor in expected.items()):
            return failure
    return None


def gemm(
    device: torch.device,
    kernel: Kernel,
    configuration: Configuration,
    a_format: str,
    b_format: str,
    output: torch.dtype,
    promote: bool,
    b_scale_rows: int = 0,
    grouped: str = "",
) -> str | None:
    """More tiles than run at once, partial ones on all sides, more steps than stages, a bias; or groups of rows.

    For the arguments see :func:`kernels_cuda.gemm_variants.variant`.
    """
    m, n = configuration.block_m + 40, configuration.block_n + 23
    if configuration.family == "gemm_sm90" and not grouped:
        n = configuration.block_n * (kernel.multiprocessors // configuration.cluster) + 23
    if grouped:
        return _grouped_gemm(device, kernel, configuration, (a_format, b_format), output, promote, grouped == "depth")
    a, b = (_operand(device, rows, _K, fmt, promote) for rows, fmt in ((m, a_format), (n, b_format)))
    if not b_scale_rows:
        scale_inv = [torch.tensor(2.0**-exponent, device=device) for exponent in (4, 2)]
    elif promote:
        steps = -(-_K // gemms.SCALE_ROWS)
        scale_inv = [_powers(device, rows, steps) for rows in (m, -(-n // b_scale_rows))]
    else:
        scale_inv = [
            e8m0.to_tiles((_powers(device, rows, -(-_K // e8m0.BLOCK)).log2() + 127).byte()) for rows in (m, n)
        ]
    bias = torch.arange(n, device=device).remainder(7).float()
    out = torch.full((m, -(-n // 8) * 8), float("nan"), dtype=output, device=device)[:, :n]
    gemms.gemm(kernel, configuration, (a, scale_inv[0]), (b, scale_inv[1]), out, bias)
    expected = _exact(a, scale_inv[0], a_format) @ _exact(b, scale_inv[1], b_format).t() + bias
    return _difference([("sums", out, expected.float().to(output))])


def _grouped_gemm(
    device: torch.device,
    kernel: Kernel,
    configuration: Configuration,
    formats: tuple[str, str],
    output: torch.dtype,
    promote: bool,
    by_depth: bool,
) -> str | None:
    """Groups of one tile, of none, of many and of two; tiles of no group, which stay as they are."""
    tiles, n, k = [1, 0, 8, 2], 208, _K
    edges = [128 * sum(tiles[:group]) for group in range(len(tiles) + 1)]
    of_tile = [group for group, count in enumerate(tiles) for _ in range(count)] + [-1] * 3
    rows = 128 * len(of_tile)
    scale_inv = [torch.tensor(values, device=device) / 64 for values in ([1.0, 4.0, 0.5, 2.0], [2.0, 1.0, 4.0, 1.0])]
    shapes = ((192, rows), (304, rows)) if by_depth else ((rows, k), (len(tiles) * n, k))
    a, b = (_operand(device, *shape, fmt, promote) for shape, fmt in zip(shapes, formats, strict=True))
    bias = torch.arange(len(tiles) * n, device=device).remainder(7).float().view(-1, n)
    a_values, b_values = (_exact(codes, None, fmt) for codes, fmt in zip((a, b), formats, strict=True))
    if by_depth:
        out = torch.full((len(tiles), len(a), len(b)), float("nan"), dtype=output, device=device)
        parts = torch.tensor(edges, dtype=torch.int32, device=device)
        gemms.gemm_by_depth(kernel, configuration, (a, scale_inv[0]), (b, scale_inv[1]), parts, out)
    else:
        out = torch.full((rows, n), float("nan"), dtype=output, device=device)
        groups = torch.tensor(of_tile, dtype=torch.int32, device=device)
        matrices = b.view(len(tiles), n, k), scale_inv[1]
        gemms.gemm_by_rows(kernel, configuration, (a, scale_inv[0]), matrices, groups, out, bias)
        b_values = b_values.view(len(tiles), n, k)
    results = []
    for group, (begin, end) in enumerate(pairwise(edges)):
        factor, part = scale_inv[0][group] * scale_inv[1][group], slice(begin, end)
        if by_depth:
            got, expected = out[group], a_values[:, part] @ b_values[:, part].t() * factor
        else:
            got, expected = out[part], a_values[part] @ b_values[group].t() * factor + bias[group]
        results.append((f"sums of group {group}", got, expected.float().to(output)))
    if not by_depth:
        results.append(("rows of no group", out[edges[-1] :], torch.full_like(out[edges[-1] :], float("nan"))))
    return _difference(results)


def product_of_mx(
    device: torch.device, a_rows: int = 272, b_rows: int = 144
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor], Tensor]:
    """Codes in E4M3 and tiles of scales in E8M0 of two operands, one with K padded as by columns, and their exact
    product in fp32: to check torch's own product of such operands."""
    operands = []
    for rows, width in ((a_rows, _K), (b_rows, _K + 16)):
        codes = F.pad(_operand(device, rows, _K, E4M3.name, False), (0, width - _K))
        exponents = _powers(device, rows, -(-_K // e8m0.BLOCK)).log2() + 127
        operands.append((codes, e8m0.to_tiles(exponents.byte())))
    a, b = operands
    values = (_exact(codes[:, :_K].contiguous(), tiles, E4M3.name) for codes, tiles in (a, b))
    left, right = values
    return a, b, (left @ right.t()).float()


def _integers(rows: int, columns: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Eighths of integers, larger in some rows, the last one the largest; the same in every process, without touching
    torch's generator."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(-100, 101, (rows, columns), generator=generator) / 8
    values *= 2.0 ** (torch.arange(rows) % 5)[:, None]
    values[-1, -1] = 230
    return values.to(dtype)


def _operand(device: torch.device, rows: int, k: int, format: str, promote: bool) -> Tensor:
    """Codes ``[rows, k] uint8`` of odd integers up to 7; all positive if ``promote``, so that sums are large."""
    generator = torch.Generator().manual_seed(rows)
    values = 2 * torch.randint(0, 4, (rows, k), generator=generator) + 1
    if not promote:
        values *= 2 * torch.randint(0, 2, (rows, k), generator=generator) - 1
    return values.to(device).to(FORMATS[format].dtype).view(torch.uint8)


def _powers(device: torch.device, rows: int, columns: int) -> Tensor:
    """Scales from 1/16 to 1/4, ``[rows, columns] float32``, with the strides of a cast's."""
    generator = torch.Generator().manual_seed(rows)
    return (2.0 ** -torch.randint(2, 5, (columns, rows), generator=generator)).to(device).t()


def _exact(codes: Tensor, scale_inv: Tensor | None, format: str) -> Tensor:
    """The values that codes stand for, in fp64: no setting of torch makes products of these less precise."""
    values = codes.view(FORMATS[format].dtype).double()
    return values if scale_inv is None else values * by_element(scale_inv, codes)


def _values(codes: Tensor, scale_inv: Tensor) -> Tensor:
    codes, scale_inv = codes.cpu(), scale_inv.cpu()
    return codes.view(E4M3.dtype).float() * by_element(scale_inv, codes)


def _unwritten(like: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """Both payloads of a tensor of this shape, which a kernel has not written yet."""
    shapes = like.shape, columns_shape(*like.shape)
    y, y_t = (torch.full(shape, 0xA5, dtype=torch.uint8, device=device) for shape in shapes)
    return y, y_t


def _new_scales(device: torch.device, rows: int, columns: int, mx: bool) -> Tensor:
    """Memory for the scales of blocks of a row."""
    if mx:
        return torch.empty(e8m0.size_of_tiles(rows, columns), dtype=torch.uint8, device=device)
    return torch.empty(-(-columns // amaxes.BLOCK), rows, device=device).t()


def _scale_of(amax: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """The scale of blocks with these amaxes, and its inverse or, in E8M0, the inverse's code."""
    if kind == "e8m0":
        codes = e8m0.codes_of(amax, E4M3)
        return e8m0.multipliers_of(codes), codes
    scale = scale_of_current(amax, E4M3)
    scale = power_of_2(scale) if kind == "power of 2" else scale
    return scale, scale.reciprocal()


def _in_blocks(x: Tensor, kind: str, squares: bool, width: int = 0) -> tuple[Tensor, Tensor]:
    """The payload of x ``[M, K]`` in blocks of a row, or in squares, and its scale_inv."""
    size = e8m0.BLOCK if kind == "e8m0" else amaxes.BLOCK
    scale, inverse = _scale_of((square_amaxes if squares else block_amaxes)(x, size), kind)
    payload = saturated_blocks(x, of_rows(scale, size, len(x)), E4M3, size, width or x.shape[1])
    if kind == "e8m0":
        inverse = e8m0.squares_to_tiles(inverse) if squares else e8m0.to_tiles(inverse)
    return payload, inverse


def _difference(results: _Results, activation: str = "none", format: str = E4M3.name) -> str | None:
    """The first of the results that is not what it should be: bit for bit, but for NaN and zeros, which are all equal;
    behind an activation, within its error and that of a cast."""
    is_exact = activation in _EXACT
    for name, actual, expected in results:
        got, wanted = actual.cpu(), expected.cpu()
        if "payload" in name:
            got, wanted = (codes.view(FORMATS[format].dtype).float() for codes in (got, wanted))
        same = (got == wanted) | (got.isnan() & wanted.isnan())
        if not is_exact and got.is_floating_point():
            is_cast = "payload" in name or "values" in name
            error = _ACTIVATION_ERROR + (torch.finfo(FORMATS[format].dtype).eps if is_cast else 0.0)
            same |= (got - wanted).abs() <= error * wanted.abs() + 2.0**-10 * max_abs(wanted)
        if not bool(same.all()):
            return f"its check gave {int((~same).sum())} of {same.numel()} other numbers in {name}"
    return None
