"""Linear - activation - linear, and ``down(silu(gate(x)) * up(x))``, on a page: inner tensors that only casts read.

Kept for backward are both inputs in FP8 and the activation's inputs in the dtype of the output.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from lightning_fp8.core import linear as page
from lightning_fp8.core.linear import Kept, in_rows, in_shape_of, of_cast, refuse_double_backward, run_backward
from lightning_fp8.core.operators import (
    Differentiable,
    Layer,
    define,
    direct_apply,
    implement,
    implement_differentiable,
    nothing,
)
from lightning_fp8.ops.activations import ACTIVATIONS
from lightning_fp8.scalings import products
from lightning_fp8.scalings.operand import Cast, Computed, Operand, Slot, Want

# mlp: linear - activation - linear. x [*, K], weights [N', K] and [K', N]
#   -> (y [*, K'] and, for backward: h [M, N'], the first linear's output; codes and scale_inv of a by columns, the
#   second's input). N' is N, or 2 N for swiglu. The slots are those of a and of the gradients of h and y. Without
#   `keep_a` backward does not need a; without `keep_h` it does not need h: they are empty.
_MLP = define(
    "mlp(Tensor x, Layer first, Layer second, Operand x_rows, Operand? x_columns, Slot a, Slot dh, Slot dy, "
    "str activation, bool keep_a, bool keep_h, ScalarType out_dtype) -> (Tensor, Tensor, Tensor, Tensor)"
)
# gated_mlp: down(silu(gate(x)) * up(x)). x [*, K], weights [N, K], [N, K] and [K', N]
#   -> (y [*, K'] and, for backward: the outputs of gate and up [M, N]; a by columns, as above). The slots are those of
#   a and of the gradients of the three layers' outputs.
_GATED_MLP = define(
    "gated_mlp(Tensor x, Layer gate, Layer up, Layer down, Operand x_rows, Operand? x_columns, Slot a, Slot d_gate, "
    "Slot d_up, Slot dy, bool keep_a, bool keep_h, ScalarType out_dtype) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)
# mlp_backward: dy [M, K'] -> (dx [M, K], dw_1 [N', K], db_1 [N'] float32, dw_2 [K', N], db_2 [K'] float32), both dw in
#   the same dtype. As in linear_backward, what is not needed is empty.
_MLP_BACKWARD = define(
    "mlp_backward(Tensor dy, Tensor h, str activation, Operand? x, Operand? w1, Operand? a, Operand? w2, "
    "Slot dh_slot, Slot dy_slot, ScalarType dx_dtype, ScalarType dw_dtype, bool[] biases) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)
# gated_backward: da [M, N], the gradient of silu(gate) * up -> (dx [M, K], dw_gate [N, K], db_gate [N] float32, dw_up,
#   db_up), both dw in the same dtype. What is not needed is empty.
_GATED_BACKWARD = define(
    "gated_backward(Tensor da, Tensor gate, Tensor up, Operand? x, Operand? w_gate, Operand? w_up, Slot d_gate, "
    "Slot d_up, ScalarType dx_dtype, ScalarType dw_dtype, bool[] biases) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)


class Block(NamedTuple):
    """The arguments of ``mlp`` and ``gated_mlp``.

    Attributes:
        x: ``[*, K]``.
        inner: the layers that take x: one, or gate and up.
        outer: the layer that takes ``a``, the activation of their outputs.
        x_rows: x in FP8, for fprop.
        x_columns: for wgrad.
        a: the slot of ``a``.
        slots: those of the gradients of the layers' outputs.
        activation: of the inner layers' outputs.
        keep_a: whether backward needs ``a``.
        keep_h: whether backward needs the inner layers' outputs.
        dtype: of these outputs, and of the block's.
    """

    x: Tensor
    inner: Sequence[Layer]
    outer: Layer
    x_rows: Operand
    x_columns: Operand | None
    a: Slot
    slots: Sequence[Slot]
    activation: str
    keep_a: bool
    keep_h: bool
    dtype: torch.dtype


def _of_mlp(*arguments: Any) -> Block:
    x, first, second, x_rows, x_columns, a, dh, dy, *rest = arguments
    return Block(x, (first,), second, x_rows, x_columns, a, (dh, dy), *rest)


def _of_gated_mlp(*arguments: Any) -> Block:
    x, gate, up, down, x_rows, x_columns, a, d_gate, d_up, dy, *rest = arguments
    return Block(x, (gate, up), down, x_rows, x_columns, a, (d_gate, d_up, dy), "swiglu", *rest)


# The page


def _forward(block: Block) -> tuple[Tensor, ...]:
    x, dtype = block.x, block.dtype
    hidden = [page.forward(block.x_rows, layer.rows, layer.bias_value, dtype) for layer in block.inner]
    a = products.cast(Computed(block.activation, tuple(hidden)), block.a, Want(True, block.keep_a))
    # their memory may be reused for the output
    hidden = hidden if block.keep_h else [nothing(x, dtype) for _ in hidden]
    y = page.forward(cast(Operand, a.rows), block.outer.rows, block.outer.bias_value, dtype)
    return in_shape_of(x, y), *hidden, *_kept(x, a)


def _kept(x: Tensor, a: Cast) -> tuple[Tensor, Tensor]:
    return (nothing(x, torch.uint8), nothing(x, torch.float32)) if a.columns is None else a.columns[:2]


def _save(ctx: Any, output: tuple[Tensor, ...], block: Block) -> None:
    _, *hidden, a, a_scale_inv = output
    needs_x, needs_h, needs_outer = ctx.needs[0], any(ctx.needs[:-2]), ctx.needs[-2]
    scaling = block.a.columns.multiplied_as(block.x.device)
    of_x = block.x_columns if any(ctx.needs[1:-2:2]) else None
    of_inner = [layer.columns if needs_x else None for layer in block.inner]
    of_a = Operand(a, a_scale_inv, scaling) if needs_outer else None
    # x once, with the first
    inner = [Kept(None if at else of_x, w) for at, w in enumerate(of_inner)]
    outer = Kept(of_a, block.outer.columns if needs_h else None)
    tensors, scalings = zip(*(layer.parts() for layer in (*inner, outer)), strict=True)
    # the gradient of the activation needs the hidden tensors, which are kept in 16 bits; the others are kept in FP8
    ctx.save_for_backward(*(hidden if needs_h else [None] * len(hidden)), *chain.from_iterable(tensors))
    ctx.weights = [layer.weight for layer in (*block.inner, block.outer)]
    ctx.rest = block.slots, scalings, block.activation, block.x.shape
    # those of x and of each weight and bias are also those of their gradients
    tensors = [block.x, *(tensor for layer in (*block.inner, block.outer) for tensor in layer[:2])]
    ctx.dtypes = [None if tensor is None else tensor.dtype for tensor in tensors]


def _gradients(ctx: Any, dy: Tensor | None, *of_hidden: Tensor | None) -> list[Tensor | None]:
    slots, scalings, activation, shape = ctx.rest
    # a checkpoint lets them be taken once
    layers, tensors = len(slots) - 1, ctx.saved_tensors
    hidden, saved = tensors[:layers], tensors[layers:]
    *inner, outer = (Kept.of(saved[4 * at : 4 * at + 4], of) for at, of in enumerate(scalings))
    needs, dtype, dtypes = ctx.needs, ctx.dtypes[0], ctx.dtypes[1::2]
    if torch.is_grad_enabled() and not ctx.is_eager:
        refuse_double_backward()
    # as an operator, hidden tensors have no derivatives, and these are zeros
    of_hidden = of_hidden[:layers] if ctx.is_eager else (None,) * layers
    if torch.is_grad_enabled() or dy is None or any(of is not None for of in of_hidden):
        parts = hidden, of_hidden, inner, outer
        return _as_needed(ctx, shape, _part_by_part(ctx, None if dy is None else in_rows(dy), *parts))
    # the wider of the weights' dtypes, so that a gradient in the narrower one is rounded only once
    if layers == 1 and hidden[0] is not None:
        types, biases = (dtype, torch.promote_types(*dtypes)), [needs[2], needs[4]]
        gradients = mlp_backward(in_rows(dy), *hidden, activation, *inner[0], *outer, *slots, *types, biases)
        return _as_needed(ctx, shape, gradients)
    da_dtype = dtype if hidden[0] is None else hidden[0].dtype
    da, dw, db = page.linear_backward(in_rows(dy), *outer, slots[-1], da_dtype, dtypes[-1], needs[-1])
    of_inner: Sequence[Tensor | None] = [None] * (1 + 2 * layers)
    if hidden[0] is not None:
        types, biases = (dtype, torch.promote_types(*dtypes[:-1])), [needs[2], needs[4]]
        gate, up = inner
        of_inner = gated_backward(da, *hidden, gate.x, gate.w, up.w, *slots[:-1], *types, biases)
    return _as_needed(ctx, shape, [*of_inner, dw, db])


def _part_by_part(
    ctx: Any,
    dy: Tensor | None,
    hidden: Sequence[Tensor],
    of_hidden: Sequence[Tensor | None],
    inner: Sequence[Kept],
    outer: Kept,
) -> list[Tensor | None]:
    """The gradients where second derivatives are asked for: as of layers that are called one by one.

    The inner layers' outputs are those of the block, too, so what their second derivatives are arrives with
    ``of_hidden``: in this call, or in a further one.
    """
    (*inner_slots, dy_slot), _, activation, _ = ctx.rest
    weights, needs, dtypes = ctx.weights, ctx.needs, ctx.dtypes
    backward = page.differentiable_backward if torch.is_grad_enabled() else _without_weight
    of_outer: list[Tensor | None] = [None, None]
    gradients: list[Tensor | None] = [None] * len(inner)
    if dy is not None:
        da_dtype = hidden[0].dtype if hidden[0] is not None else dtypes[0]
        da, *of_outer = backward(dy, weights[-1], *outer, dy_slot, da_dtype, dtypes[-2], needs[-1])
        if hidden[0] is not None:
            is_packed = Computed(activation, tuple(hidden)).is_packed
            parts = hidden[0].chunk(2, dim=-1) if is_packed else hidden
            if torch.is_grad_enabled():
                # torch's own gradient of silu has no derivative
                made = torch.autograd.grad(ACTIVATIONS[activation].value(*parts), parts, da, create_graph=True)
            else:
                made = ACTIVATIONS[activation].gradients(*parts, da)
            gradients = [torch.cat(made, dim=-1)] if is_packed else list(made)
    dx: Tensor | None = None
    of_inner: list[Tensor | None] = []
    for at, (kept, slot, extra) in enumerate(zip(inner, inner_slots, of_hidden, strict=True)):
        gradient = gradients[at]
        dh = extra if gradient is None else gradient if extra is None else gradient + extra
        if dh is None:
            of_inner += [None, None]
            continue
        kept = kept._replace(x=inner[0].x)
        of_x, *of_layer = backward(dh, weights[at], *kept, slot, dtypes[0], dtypes[1 + 2 * at], needs[2 + 2 * at])
        dx = of_x if dx is None else dx + of_x
        of_inner += of_layer
    return [dx, *of_inner, *of_outer]


def _without_weight(dy: Tensor, weight: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    return page.linear_backward(dy, *arguments)  # type: ignore[no-any-return]


def _as_needed(ctx: Any, shape: torch.Size, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
    """The gradients that are asked for, in the shapes and dtypes that autograd expects."""
    dx, *of_layers = gradients
    if dx is not None and ctx.needs[0]:
        dx = dx.view(shape)
    every = zip((dx, *of_layers), ctx.needs, ctx.dtypes, strict=True)
    return [gradient.to(dtype) if needed and gradient is not None else None for gradient, needed, dtype in every]


def _mlp_backward(
    dy: Tensor,
    h: Tensor,
    activation: str,
    x: Operand | None,
    w1: Operand | None,
    a: Operand | None,
    w2: Operand | None,
    dh_slot: Slot,
    dy_slot: Slot,
    dx_dtype: torch.dtype,
    dw_dtype: torch.dtype,
    biases: Sequence[bool],
) -> tuple[Tensor, ...]:
    da, *of_second = run_backward(dy, a, w2, dy_slot, h.dtype, dw_dtype, biases[1])
    dh = Computed(activation, (h,), da)
    return *run_backward(dh, x, w1, dh_slot, dx_dtype, dw_dtype, biases[0]), *of_second


def _gated_backward(
    da: Tensor,
    gate: Tensor,
    up: Tensor,
    x: Operand | None,
    w_gate: Operand | None,
    w_up: Operand | None,
    d_gate: Slot,
    d_up: Slot,
    dx_dtype: torch.dtype,
    dw_dtype: torch.dtype,
    biases: Sequence[bool],
) -> tuple[Tensor, ...]:
    pair = Computed("swiglu", (gate, up), da)
    want = Want(w_gate is not None or x is None, x is not None)
    casts = products.cast_pair(pair, (d_gate, d_up), want, biases)
    of_gate, of_up = (of_cast(pair, casts, x, w, dx_dtype, dw_dtype) for w in (w_gate, w_up))
    # added as autograd adds the gradients of a tensor that two layers use
    return of_gate[0] + of_up[0], *of_gate[1:], *of_up[1:]


# As operators for compilers, and under autograd


def _fake(block: Block) -> tuple[Tensor, ...]:
    x, dtype = block.x, block.dtype
    m, n = math.prod(x.shape[:-1]), block.inner[0].weight.shape[0]
    hidden = [x.new_empty((m, n) if block.keep_h else 0, dtype=dtype) for _ in block.inner]
    packed = block.activation == "swiglu" and len(block.inner) == 1
    a = products.fake_cast(x, (m, n // 2 if packed else n), block.a, Want(False, block.keep_a))
    y = x.new_empty(*x.shape[:-1], block.outer.weight.shape[0], dtype=dtype)
    return y, *hidden, *_kept(x, a)


def _mlp_backward_fake(
    dy: Tensor,
    h: Tensor,
    activation: str,
    x: Operand | None,
    w1: Operand | None,
    a: Operand | None,
    w2: Operand | None,
    dh_slot: Slot,
    dy_slot: Slot,
    dx_dtype: torch.dtype,
    dw_dtype: torch.dtype,
    biases: Sequence[bool],
) -> tuple[Tensor, ...]:
    of_first = page.of_layer_fake(dy, h.shape[1], x, dw_dtype, biases[0])
    of_second = page.of_layer_fake(dy, dy.shape[1], a, dw_dtype, biases[1])
    return page.dx_fake(dy, h.shape[0], w1, dx_dtype), *of_first, *of_second


def _gated_backward_fake(
    da: Tensor,
    gate: Tensor,
    up: Tensor,
    x: Operand | None,
    w_gate: Operand | None,
    w_up: Operand | None,
    d_gate: Slot,
    d_up: Slot,
    dx_dtype: torch.dtype,
    dw_dtype: torch.dtype,
    biases: Sequence[bool],
) -> tuple[Tensor, ...]:
    m, n = gate.shape
    of_gate, of_up = (page.of_layer_fake(da, n, x, dw_dtype, bias) for bias in biases)
    return page.dx_fake(da, m, w_gate, dx_dtype), *of_gate, *of_up


mlp_backward = implement(_MLP_BACKWARD, _mlp_backward, _mlp_backward_fake)
gated_backward = implement(_GATED_BACKWARD, _gated_backward, _gated_backward_fake)


class _FeedForward(Differentiable):
    """Both operators where nothing watches operators: x, and weight and bias of each layer; then the block."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Any:
        # backward would be given zeros in place of gradients that do not exist, those of codes among them
        ctx.set_materialize_grads(False)
        ctx.is_eager, ctx.needs, block = True, ctx.needs_input_grad[:-1], inputs[-1]
        output = _forward(block)
        _save(ctx, output, block)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        if all(gradient is None for gradient in gradients):
            return (None,) * len(ctx.needs_input_grad)
        return *_gradients(ctx, *gradients), None


_apply = direct_apply(_FeedForward)


def _operator(signature: Any, block_of: Any) -> Any:
    def eager(*arguments: Any) -> Any:
        # autograd sees tensors that are arguments, but not those inside an argument
        block = block_of(*arguments)
        layers = *block.inner, block.outer
        return _apply(block.x, *(tensor for layer in layers for tensor in layer[:2]), block)

    return implement_differentiable(
        signature,
        eager,
        lambda *arguments: _forward(block_of(*arguments)),
        lambda ctx, output, *arguments: _save(ctx, output, block_of(*arguments)),
        _gradients,
        lambda *arguments: _fake(block_of(*arguments)),
    )


mlp = _operator(_MLP, _of_mlp)
gated_mlp = _operator(_GATED_MLP, _of_gated_mlp)
