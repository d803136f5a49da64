"""Linear - activation - linear on a CUDA device with GEMMs that write the next GEMM's FP8 operand, without casts."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch
from torch import Tensor

from kernels_cuda import gemm as kernel_gemm
from kernels_cuda.casts import Row
from kernels_cuda.gemm_variants import CHAINED_ACTIVATIONS, Configuration
from kernels_cuda.launch import Kernel
from lightning_fp8.ops.counting import is_counting
from lightning_fp8.ops.cuda import gemm_choice, kernels
from lightning_fp8.ops.cuda.dispatch import cast_gradient
from lightning_fp8.ops.cuda.gemm import as_operand, scaled_mm
from lightning_fp8.ops.operand import Columns, Fp8Operand, Slot, nothing
from lightning_fp8.runtime.switch import Switch


class Chain(NamedTuple):
    """The kernel of a GEMM that writes the next one's operand, its configuration, and the operand's place in the
    scaling state and format.
    """

    kernel: Kernel
    configuration: Configuration
    row: Row
    format: str


_wanted: bool | None = None


def _set_wanted(value: bool | None) -> None:
    global _wanted
    _wanted = value


_WANTED: Switch[bool | None] = Switch(lambda: _wanted, _set_wanted)


def left_out() -> AbstractContextManager[None]:
    """Run GEMMs and casts separately, in all threads, to measure the gain from chaining."""
    return _WANTED.at(False)


def taken() -> AbstractContextManager[None]:
    """Chain GEMMs and casts wherever possible, in all threads, to measure the gain."""
    return _WANTED.at(True)


def find(
    a: Tensor,
    b: Tensor,
    a_format: str,
    output: torch.dtype,
    promote: bool,
    activation: str,
    slot: Slot,
) -> Chain | None:
    """The kernel for ``a [M, K] @ b [N, K]^T`` followed by a cast; None if GEMM and cast must be separate.

    The scale of the cast must be known before the sums, so its tensor must have a history; and the cast must not be
    counted. The GEMM must be one that ours would run anyway, without split-K or padding, and the chain must not be
    slower.
    """
    (_, k), n = a.shape, b.shape[0]
    if _wanted is False or slot.state is None or is_counting(slot):
        return None
    if activation not in CHAINED_ACTIVATIONS or output not in (torch.bfloat16, torch.float16) or n % 8 or k % 16:
        return None
    sizes = (a.shape[0], n, k)
    configuration, splits = gemm_choice.choose(a.device, slot.gemm, *sizes, promote, output)
    # the other family has no chained epilogues
    if configuration is None or splits > 1 or configuration.family != "gemm_sm90":
        return None
    if _wanted is None and not gemm_choice.is_chained(a.device, activation, *sizes, promote, output):
        return None
    kernel = kernels.chained_kernel(a.device, configuration, a_format, output, promote, activation, slot.format)
    amax, _, has_history = slot.open() if kernel is not None else (None, False, False)
    if kernel is None or not has_history:
        return None
    return Chain(kernel, configuration, Row(slot.scale, slot.amax_history, slot.index, amax), slot.format)


def hidden(
    chain: Chain, x: Fp8Operand, w: Fp8Operand, bias: Tensor | None, keep_a: bool, keep_h: bool, out_dtype: torch.dtype
) -> tuple[Tensor, Fp8Operand]:
    """The first linear's output h ``[M, N]`` and the cast of its activation, as in the operator ``mlp``; h and the
    payload by columns are empty if they are not kept.
    """
    m, n = x.rows.shape[0], w.rows.shape[0]
    h = x.rows.new_empty((m, n) if keep_h else 0, dtype=out_dtype)
    scale_inv = torch.empty((), dtype=torch.float32, device=h.device)
    a_rows, a_columns = x.rows.new_empty(m, n), x.rows.new_empty((n, m) if keep_a else 0)
    a = Fp8Operand(a_rows, a_columns, scale_inv, scale_inv, chain.format)
    kernel_gemm.chained_gemm(
        chain.kernel,
        chain.configuration,
        as_operand(x.rows),
        as_operand(w.rows),
        h if keep_h else None,
        a.rows,
        a.columns if keep_a else None,
        chain.row,
        a.scale_inv,
        x.scale_inv,
        w.scale_inv,
        bias=None if bias is None else bias.contiguous(),
    )
    return h, a


def gradients(
    chain: Chain,
    dy: Tensor,
    h: Tensor,
    x: Columns,
    w1: Columns,
    a: Columns,
    w2: Columns,
    slot: Slot,
    dx_dtype: torch.dtype,
    dw_dtype: torch.dtype,
    biases: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """See the operator ``lightning_fp8::mlp_backward``; the chain's operand is the gradient of h, ``slot`` that of dy.

    Each payload is freed before the next ones are made.
    """
    fmt, gemm, (bias_1, bias_2) = slot.format, slot.gemm, biases
    dx, dw_1 = nothing(dy, dx_dtype), dy.new_empty(h.shape[1], 0, dtype=dw_dtype)
    dw_2 = dy.new_empty(dy.shape[1], 0, dtype=dw_dtype)
    layout = "rows" if a.payload is None else "both"
    dy_fp8, dy_fp8_t, dy_inv, db_2 = cast_gradient(dy, None, "none", slot, layout, bias_2)
    if a.payload is not None:
        dw_2 = scaled_mm(dy_fp8_t, a.payload, dy_inv, a.scale_inv, None, fmt, a.format, dw_dtype, False, gemm)
    del dy_fp8_t
    dh_fp8, dh_fp8_t, dh_inv, db_1 = _hidden_gradient(chain, dy_fp8, dy_inv, h, w2, x.payload is not None, bias_1)
    del dy_fp8
    if w1.payload is not None:
        dx = scaled_mm(dh_fp8, w1.payload, dh_inv, w1.scale_inv, None, fmt, w1.format, dx_dtype, False, gemm)
    del dh_fp8
    if x.payload is not None:
        dw_1 = scaled_mm(dh_fp8_t, x.payload, dh_inv, x.scale_inv, None, fmt, x.format, dw_dtype, False, gemm)
    return dx, dw_1, db_1, dw_2, db_2


def _hidden_gradient(
    chain: Chain, dy_fp8: Tensor, dy_scale_inv: Tensor, h: Tensor, w: Columns, by_columns: bool, bias: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The cast of the gradient of h by rows and, if asked for, by columns, its scale_inv and column sums ``[N]``."""
    if w.payload is None:
        raise ValueError("There is no gradient of h without the second weight.")
    m, n = h.shape
    dh_fp8, dh_fp8_t = dy_fp8.new_empty(m, n), dy_fp8.new_empty((n, m) if by_columns else 0)
    scale_inv = torch.empty((), dtype=torch.float32, device=h.device)
    sums_shape = (kernel_gemm.column_sum_rows(m), n) if bias else (0,)
    partial = torch.empty(sums_shape, dtype=torch.float32, device=h.device)
    kernel_gemm.chained_gemm(
        chain.kernel,
        chain.configuration,
        as_operand(dy_fp8),
        as_operand(w.payload),
        h.contiguous(),
        dh_fp8,
        dh_fp8_t if by_columns else None,
        chain.row,
        scale_inv,
        dy_scale_inv,
        w.scale_inv,
        column_sums=partial if bias else None,
    )
    return dh_fp8, dh_fp8_t, scale_inv, partial.sum(dim=0) if bias else partial
