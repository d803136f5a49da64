"""The operators of a gated feed-forward block, ``down(silu(gate(x)) * up(x))``: the only extra passes are casts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_fp8.ops.activations import gated, gated_gradients
from lightning_fp8.ops.basic import cast_operand, fprop, scaled_mm
from lightning_fp8.ops.cuda import dispatch as cuda
from lightning_fp8.ops.feed_forward import as_needed, columns_fake, dtypes_of
from lightning_fp8.ops.library import define, differentiable_in_layers, implement, is_k_major
from lightning_fp8.ops.linear_layer import in_rows, in_shape_of, linear_backward, refuse_double_backward
from lightning_fp8.ops.operand import Columns, Fp8Operand, Fp8Tensor, Layer, Slot, nothing

# gated_mlp: x [*, K], weights [N, K], [N, K] and [K', N]
#   -> (y [*, K'] and, for backward: the outputs of gate and up [M, N]; a_fp8_t, the input of down by columns; its
#   scale_inv). The slots are those of a and of the gradients of the three layers' outputs. `keep_a` and `keep_h` are as
#   for `mlp`.
_GATED_MLP = define(
    "gated_mlp(Tensor x, Layer gate, Layer up, Layer down, Fp8Operand x_fp8, Slot a, Slot d_gate, Slot d_up, Slot dy, "
    "bool keep_a, bool keep_h, ScalarType out_dtype) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)
# gated_backward: da [M, N], the gradient of silu(gate) * up -> (dx [M, K], dw_gate [N, K], db_gate [N] float32, dw_up,
#   db_up), both dw in the same dtype. What is not needed is empty: dx without the payloads of the weights, both dw
#   without that of x, and each db that `biases` does not request.
_GATED_BACKWARD = define(
    "gated_backward(Tensor da, Tensor gate, Tensor up, Columns x_fp8_t, Columns w_gate, Columns w_up, Slot d_gate, "
    "Slot d_up, ScalarType dx_dtype, ScalarType dw_dtype, bool[] biases) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)


def _gated_mlp(
    x: Tensor,
    gate: Layer,
    up: Layer,
    down: Layer,
    x_fp8: Fp8Operand,
    a: Slot,
    d_gate: Slot,
    d_up: Slot,
    dy: Slot,
    keep_a: bool,
    keep_h: bool,
    out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    h_gate, h_up = (fprop(x_fp8, layer.operand, layer.bias_value, out_dtype, a.gemm) for layer in (gate, up))
    if is_k_major(x_fp8.rows):
        rows, columns, scale_inv = cuda.cast_gated(h_gate, h_up, a, "both" if keep_a else "rows")
        a_fp8 = Fp8Operand(rows, columns, scale_inv, scale_inv, a.format)
    else:
        a_fp8 = cast_operand(gated(h_gate, h_up), a, "none", keep_a)
    if not keep_h:
        # their memory may be reused for the output
        h_gate, h_up = nothing(x, out_dtype), nothing(x, out_dtype)
    y = fprop(a_fp8, down.operand, down.bias_value, out_dtype, a.gemm)
    return in_shape_of(x, y), h_gate, h_up, a_fp8.columns, a_fp8.columns_scale_inv


def _gated_mlp_fake(
    x: Tensor,
    gate: Layer,
    up: Layer,
    down: Layer,
    x_fp8: Fp8Operand,
    a: Slot,
    d_gate: Slot,
    d_up: Slot,
    dy: Slot,
    keep_a: bool,
    keep_h: bool,
    out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    shape = (in_rows(x).shape[0], gate.weight.shape[0]) if keep_h else (0,)
    h_gate, h_up = (x.new_empty(shape, dtype=out_dtype) for _ in range(2))
    y = x.new_empty(*x.shape[:-1], down.weight.shape[0], dtype=out_dtype)
    return y, h_gate, h_up, columns_fake(x, gate.weight.shape[0], keep_a), x.new_empty((), dtype=torch.float32)


def _gated_gradients(
    da: Tensor,
    gate: Tensor,
    up: Tensor,
    x: Columns,
    w_gate: Columns,
    w_up: Columns,
    d_gate: Slot,
    d_up: Slot,
    dx_dtype: torch.dtype,
    dw_dtype: torch.dtype,
    biases: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    slots, weights = (d_gate, d_up), (w_gate, w_up)
    if is_k_major(da):
        layout = "rows" if x.payload is None else "columns" if w_gate.payload is None else "both"
        casts = cuda.cast_gated_gradients(gate, up, da, slots, layout, biases)
        of_layers = [
            _products(cast, slot, x, w, dx_dtype, dw_dtype) for cast, slot, w in zip(casts, slots, weights, strict=True)
        ]
    else:
        of_layers = [
            linear_backward.run(gradient, None, "none", x, w, slot, dx_dtype, dw_dtype, bias)
            for gradient, slot, w, bias in zip(gated_gradients(gate, up, da), slots, weights, biases, strict=True)
        ]
    (dx, dw_gate, db_gate), (dx_of_up, dw_up, db_up) = of_layers
    # added as autograd adds the gradients of a tensor that two layers use
    return dx + dx_of_up, dw_gate, db_gate, dw_up, db_up


def _products(
    dy: tuple[Tensor, Tensor, Tensor, Tensor],
    slot: Slot,
    x: Columns,
    w: Columns,
    dx_dtype: torch.dtype,
    dw_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    by_rows, by_columns, scale_inv, db = dy
    fmt, gemm, n = slot.format, slot.gemm, max(len(by_columns), by_rows.shape[-1])
    dx, dw = nothing(by_rows, dx_dtype), by_rows.new_empty(n, 0, dtype=dw_dtype)
    if w.payload is not None:
        operands = Fp8Tensor(by_rows, scale_inv, fmt), Fp8Tensor(w.payload, w.scale_inv, w.format)
        dx = scaled_mm.run(*operands, None, dx_dtype, False, gemm)
    if x.payload is not None:
        operands = Fp8Tensor(by_columns, scale_inv, fmt), Fp8Tensor(x.payload, x.scale_inv, x.format)
        dw = scaled_mm.run(*operands, None, dw_dtype, False, gemm)
    return dx, dw, db


def _gated_gradients_fake(
    da: Tensor,
    gate: Tensor,
    up: Tensor,
    x: Columns,
    w_gate: Columns,
    w_up: Columns,
    d_gate: Slot,
    d_up: Slot,
    dx_dtype: torch.dtype,
    dw_dtype: torch.dtype,
    biases: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    (m, n), k = gate.shape, 0 if x.payload is None else x.payload.shape[0]
    dx = nothing(da, dx_dtype) if w_gate.payload is None else da.new_empty(m, w_gate.payload.shape[0], dtype=dx_dtype)
    dw_gate, dw_up = (da.new_empty(n, k, dtype=dw_dtype) for _ in range(2))
    db_gate, db_up = (da.new_empty(n if bias else 0, dtype=torch.float32) for bias in biases)
    return dx, dw_gate, db_gate, dw_up, db_up


gated_backward = implement(_GATED_BACKWARD, _gated_gradients, _gated_gradients, _gated_gradients_fake)


def _save_for_backward(
    ctx: Any,
    output: tuple[Tensor, ...],
    x: Tensor,
    gate: Layer,
    up: Layer,
    down: Layer,
    x_fp8: Fp8Operand,
    a: Slot,
    d_gate: Slot,
    d_up: Slot,
    dy: Slot,
    *_: Any,
) -> None:
    h_gate, h_up, a_fp8_t, a_scale_inv = output[1:]
    needs_x, needs_gate, bias_gate, needs_up, bias_up, needs_down, _ = ctx.needs
    needs_h = needs_x or needs_gate or bias_gate or needs_up or bias_up
    operands = [layer.operand for layer in (gate, up, down)]
    # The gradients of gate and up need both outputs, which are kept in 16 bits; all other operands are kept in FP8.
    ctx.save_for_backward(
        *((h_gate, h_up) if needs_h else (None, None)),
        *(x_fp8.columns if needs_gate or needs_up else None, x_fp8.columns_scale_inv),
        *(a_fp8_t if needs_down else None, a_scale_inv),
        *(operands[0].columns if needs_x else None, operands[0].columns_scale_inv),
        *(operands[1].columns if needs_x else None, operands[1].columns_scale_inv),
        *(operands[2].columns if needs_h else None, operands[2].columns_scale_inv),
    )
    ctx.mark_non_differentiable(h_gate, h_up, a_fp8_t, a_scale_inv)
    ctx.slots, ctx.shape, ctx.dtypes = (d_gate, d_up, dy), x.shape, dtypes_of(x, gate, up, down)
    ctx.formats = (x_fp8.format, a.format, *(operand.format for operand in operands))


def _backward(ctx: Any, dy: Tensor, *_: Any) -> list[Tensor | None]:
    if torch.is_grad_enabled():
        refuse_double_backward()
    h_gate, h_up, *saved = ctx.saved_tensors
    x, a, w_gate, w_up, w_down = map(Columns, saved[::2], saved[1::2], ctx.formats)
    d_gate, d_up, dy_slot = ctx.slots
    dtype, gate_dtype, _, up_dtype, _, down_dtype, _ = ctx.dtypes
    da_dtype = dtype if h_gate is None else h_gate.dtype
    needs = ctx.needs
    da, dw_down, db_down = linear_backward(
        in_rows(dy), None, "none", a, w_down, dy_slot, da_dtype, down_dtype, needs[6]
    )
    of_first: tuple[Tensor | None, ...] = (None,) * 5
    if h_gate is not None:
        dtypes, biases = (dtype, torch.promote_types(gate_dtype, up_dtype)), [needs[2], needs[4]]
        of_first = gated_backward(da, h_gate, h_up, x, w_gate, w_up, d_gate, d_up, *dtypes, biases)
    return as_needed(ctx, *of_first, dw_down, db_down)


gated_mlp = differentiable_in_layers(_GATED_MLP, _gated_mlp, _save_for_backward, _backward, _gated_mlp_fake)
