"""Linear - activation - linear on a CUDA device with GEMMs that write the next one's FP8 operand: no casts between."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import NamedTuple

import torch
from torch import Tensor

from kernels_cuda import gemm as kernel_gemm
from kernels_cuda.casts import Row
from kernels_cuda.gemm import CHAINED_ACTIVATIONS, Configuration
from kernels_cuda.launch import Kernel
from lightning_fp8.ops import gemm_choice, kernels
from lightning_fp8.ops.counting import is_counting
from lightning_fp8.ops.cuda import cast_gradient
from lightning_fp8.ops.gemm import as_operand, choice_for, scaled_mm
from lightning_fp8.scaling import amax_of, gemm_of, state_of
from lightning_fp8.switch import Switch


class Chain(NamedTuple):
    """The kernel of a GEMM that writes the next one's operand, how it is cut up, and which tensor the operand is."""

    kernel: Kernel
    configuration: Configuration
    row: Row


_wanted: bool | None = None


def _set_wanted(value: bool | None) -> None:
    global _wanted
    _wanted = value


_WANTED: Switch[bool | None] = Switch(lambda: _wanted, _set_wanted)


def left_out() -> AbstractContextManager[None]:
    """GEMMs and casts one by one, in all threads, to measure what chaining them brings."""
    return _WANTED.at(False)


def taken() -> AbstractContextManager[None]:
    """GEMMs and casts chained wherever they can be, in all threads, to measure what that brings."""
    return _WANTED.at(True)


def find(
    a: Tensor,
    b: Tensor,
    a_format: str,
    output: torch.dtype,
    promote: bool,
    activation: str,
    scale: Tensor,
    amax_history: Tensor,
    index: Tensor,
    format: str,
    state: int,
    record: bool,
) -> Chain | None:
    """The kernel for ``a [M, K] @ b [N, K]^T`` with a cast behind it; None where GEMM and cast are to be two.

    The cast's scale has to be known before the sums are, so every tensor must have a history, and nobody may count what
    is cast. The GEMM must be one of ours anyway, in whole, its sizes such as need no padding, and the chain not slower.
    """
    known, (_, k), n = state_of(state), a.shape, b.shape[0]
    if _wanted is False or known is None or is_counting(state, record):
        return None
    if not (known.every_tensor_has_history and known.uses_histories(record)):
        return None
    if activation not in CHAINED_ACTIVATIONS or output not in (torch.bfloat16, torch.float16) or n % 8 or k % 16:
        return None
    configuration, splits = choice_for(a, b, known.gemm, promote, output)
    # the other family stores no operands
    if configuration is None or splits > 1 or configuration.family != "gemm_sm90":
        return None
    sizes = (a.shape[0], n, k)
    if _wanted is None and not gemm_choice.is_chained(a.device, activation, *sizes, promote, output):
        return None
    kernel = kernels.chained_kernel(a.device, configuration, a_format, output, promote, activation, format)
    if kernel is None:
        return None
    return Chain(kernel, configuration, Row(scale, amax_history, index, amax_of(state, record)))


def hidden(
    chain: Chain,
    x_fp8: Tensor,
    w_fp8: Tensor,
    x_scale_inv: Tensor,
    w_scale_inv: Tensor,
    bias: Tensor | None,
    keep_a: bool,
    keep_h: bool,
    out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The first linear's output h ``[M, N]`` and the cast of its activation, as of the operator ``mlp``.

    Returns:
        h, a_fp8 ``[M, N]``, a_fp8_t ``[N, M]`` and its scale_inv; h and a_fp8_t are empty where they are not kept.
    """
    m, n = x_fp8.shape[0], w_fp8.shape[0]
    h = x_fp8.new_empty((m, n) if keep_h else 0, dtype=out_dtype)
    a_fp8, a_fp8_t = x_fp8.new_empty(m, n), x_fp8.new_empty((n, m) if keep_a else 0)
    scale_inv = torch.empty((), dtype=torch.float32, device=x_fp8.device)
    kernel_gemm.chained_gemm(
        chain.kernel, chain.configuration, as_operand(x_fp8), as_operand(w_fp8), h if keep_h else None,
        a_fp8, a_fp8_t if keep_a else None, chain.row, scale_inv, x_scale_inv, w_scale_inv,
        bias=None if bias is None else bias.contiguous(),
    )  # fmt: skip
    return h, a_fp8, a_fp8_t, scale_inv


def gradients(
    chain: Chain,
    dy: Tensor,
    h: Tensor,
    x_fp8_t: Tensor | None,
    x_scale_inv: Tensor,
    w1_fp8_t: Tensor | None,
    w1_scale_inv: Tensor,
    a_fp8_t: Tensor | None,
    a_scale_inv: Tensor,
    w2_fp8_t: Tensor,
    w2_scale_inv: Tensor,
    scale: Tensor,
    amax_history: Tensor,
    dy_index: Tensor,
    format: str,
    state: int,
    record: bool,
    dx_dtype: torch.dtype,
    dw_1_dtype: torch.dtype,
    dw_2_dtype: torch.dtype,
    bias_1: bool,
    bias_2: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """See the operator ``lightning_fp8::mlp_backward``; the chain's operand is the gradient of h.

    Each payload is let go of before the next ones are made.
    """
    gemm = gemm_of(state)
    dx, dw_1 = dy.new_empty(0, dtype=dx_dtype), dy.new_empty(h.shape[1], 0, dtype=dw_1_dtype)
    dw_2 = dy.new_empty(dy.shape[1], 0, dtype=dw_2_dtype)
    layout = "rows" if a_fp8_t is None else "both"
    dy_fp8, dy_fp8_t, dy_scale_inv, db_2 = cast_gradient(
        dy, None, "none", scale, amax_history, dy_index, format, layout, state, record, bias_2
    )
    if a_fp8_t is not None:
        dw_2 = scaled_mm(
            dy_fp8_t, a_fp8_t, dy_scale_inv, a_scale_inv, None, format, "e4m3", dw_2_dtype, False, gemm
        )  # fmt: skip
    del dy_fp8_t
    dh_fp8, dh_fp8_t, dh_scale_inv, db_1 = _hidden_gradient(
        chain, dy_fp8, h, w2_fp8_t, dy_scale_inv, w2_scale_inv, x_fp8_t is not None, bias_1
    )
    del dy_fp8
    if w1_fp8_t is not None:
        dx = scaled_mm(dh_fp8, w1_fp8_t, dh_scale_inv, w1_scale_inv, None, format, "e4m3", dx_dtype, False, gemm)
    del dh_fp8
    if x_fp8_t is not None:
        dw_1 = scaled_mm(dh_fp8_t, x_fp8_t, dh_scale_inv, x_scale_inv, None, format, "e4m3", dw_1_dtype, False, gemm)
    return dx, dw_1, db_1, dw_2, db_2


def _hidden_gradient(
    chain: Chain,
    dy_fp8: Tensor,
    h: Tensor,
    w_fp8_t: Tensor,
    dy_scale_inv: Tensor,
    w_scale_inv: Tensor,
    by_columns: bool,
    bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The cast of the gradient of h by rows and, if asked for, by columns, its scale_inv and column sums ``[N]``."""
    m, n = h.shape
    dh_fp8, dh_fp8_t = dy_fp8.new_empty(m, n), dy_fp8.new_empty((n, m) if by_columns else 0)
    scale_inv = torch.empty((), dtype=torch.float32, device=h.device)
    sums_shape = (kernel_gemm.column_sum_rows(m), n) if bias else (0,)
    partial = torch.empty(sums_shape, dtype=torch.float32, device=h.device)
    kernel_gemm.chained_gemm(
        chain.kernel, chain.configuration, as_operand(dy_fp8), as_operand(w_fp8_t), h.contiguous(),
        dh_fp8, dh_fp8_t if by_columns else None, chain.row, scale_inv, dy_scale_inv, w_scale_inv,
        column_sums=partial if bias else None,
    )  # fmt: skip
    return dh_fp8, dh_fp8_t, scale_inv, partial.sum(dim=0) if bias else partial
