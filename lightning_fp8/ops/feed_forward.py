"""The operators of feed-forward blocks: the only extra passes over the hidden tensors are casts, if any."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_fp8.ops import blocks
from lightning_fp8.ops.activations import activated_width, gated, gated_gradients
from lightning_fp8.ops.backward import gradient_layout, gradients_by
from lightning_fp8.ops.basic import cast_operand, fprop, scaled_mm
from lightning_fp8.ops.cuda import dispatch as cuda
from lightning_fp8.ops.cuda.layouts import needs_transposed_payload
from lightning_fp8.ops.library import define, differentiable_in_layers, implement, on_gpu
from lightning_fp8.ops.linear_layer import in_rows, in_shape_of, linear_backward, refuse_double_backward
from lightning_fp8.ops.operand import Columns, Fp8Operand, Layer, Slot, columns_shape, nothing

# mlp: linear - activation - linear. x [*, K], weights [N', K] and [K', N]
#   -> (y [*, K'] and, for backward: h [M, N'], the first linear's output; a_fp8_t, the second's input by columns; its
#   scale_inv). N' is N, or 2 N for swiglu. The slots are those of a and of the gradients of h and y. Without `keep_a`
#   backward does not need a_fp8_t, which may then be empty; without `keep_h` it does not need h, which is then empty.
_MLP = define(
    "mlp(Tensor x, Layer first, Layer second, Fp8Operand x_fp8, Slot a, Slot dh, Slot dy, str activation, bool keep_a, "
    "bool keep_h, ScalarType out_dtype) -> (Tensor, Tensor, Tensor, Tensor)"
)
# gated_mlp: down(silu(gate(x)) * up(x)). x [*, K], weights [N, K], [N, K] and [K', N]
#   -> (y [*, K'] and, for backward: the outputs of gate and up [M, N]; a_fp8_t, the input of down by columns; its
#   scale_inv). The slots are those of a and of the gradients of the three layers' outputs. `keep_a` and `keep_h` are as
#   for `mlp`.
_GATED_MLP = define(
    "gated_mlp(Tensor x, Layer gate, Layer up, Layer down, Fp8Operand x_fp8, Slot a, Slot d_gate, Slot d_up, Slot dy, "
    "bool keep_a, bool keep_h, ScalarType out_dtype) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)
# mlp_backward: dy [M, K'] -> (dx [M, K], dw_1 [N', K], db_1 [N'] float32, dw_2 [K', N], db_2 [K'] float32),
#   both dw in the same dtype. As in linear_backward, what is not needed is empty: dx without the payload of w1, dw_1
#   without that of x, dw_2 without that of a, and each db that `biases` does not request.
_MLP_BACKWARD = define(
    "mlp_backward(Tensor dy, Tensor h, str activation, Columns x_fp8_t, Columns w1_fp8_t, Columns a_fp8_t, "
    "Columns w2_fp8_t, Slot dh_slot, Slot dy_slot, ScalarType dx_dtype, ScalarType dw_dtype, bool[] biases) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)
# gated_backward: da [M, N], the gradient of silu(gate) * up -> (dx [M, K], dw_gate [N, K], db_gate [N] float32, dw_up,
#   db_up), both dw in the same dtype. What is not needed is empty: dx without the payloads of the weights, both dw
#   without that of x, and each db that `biases` does not request.
_GATED_BACKWARD = define(
    "gated_backward(Tensor da, Tensor gate, Tensor up, Columns x_fp8_t, Columns w_gate, Columns w_up, Slot d_gate, "
    "Slot d_up, ScalarType dx_dtype, ScalarType dw_dtype, bool[] biases) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)


class Block(NamedTuple):
    """The arguments of ``mlp`` and ``gated_mlp``.

    Attributes:
        x: ``[*, K]``.
        inner: the layers that take x: one, or gate and up.
        outer: the layer that takes ``a``, the activation of their outputs.
        x_fp8: x in FP8.
        a: the slot of ``a``.
        inner_slots: those of the gradients of the inner layers' outputs.
        dy: the slot of the output's gradient.
        activation: of a single inner layer; empty for ``silu(gate) * up``.
        keep_a: whether backward needs ``a``.
        keep_h: whether backward needs the inner layers' outputs.
        out_dtype: of these outputs, and of the block's.
    """

    x: Tensor
    inner: Sequence[Layer]
    outer: Layer
    x_fp8: Fp8Operand
    a: Slot
    inner_slots: Sequence[Slot]
    dy: Slot
    activation: str
    keep_a: bool
    keep_h: bool
    out_dtype: torch.dtype

    @classmethod
    def of_mlp(cls, *arguments: Any) -> Block:
        """From the arguments of ``mlp``."""
        x, first, second, x_fp8, a, dh, *rest = arguments
        return cls(x, (first,), second, x_fp8, a, (dh,), *rest)

    @classmethod
    def of_gated_mlp(cls, *arguments: Any) -> Block:
        """From the arguments of ``gated_mlp``."""
        x, gate, up, down, x_fp8, a, d_gate, d_up, dy, *rest = arguments
        return cls(x, (gate, up), down, x_fp8, a, (d_gate, d_up), dy, "", *rest)


def _forward(block: Block) -> tuple[Tensor, ...]:
    x, a, dtype = block.x, block.a, block.out_dtype
    hidden = [fprop(block.x_fp8, layer.operand, layer.bias_value, dtype) for layer in block.inner]
    if block.activation:
        a_fp8 = cast_operand(hidden[0], a, block.activation, block.keep_a)
    elif on_gpu(x):
        a_fp8 = cuda.cast_gated(hidden[0], hidden[1], a, block.keep_a)
    else:
        a_fp8 = cast_operand(gated(*hidden), a, "none", block.keep_a)
    # their memory may be reused for the output
    hidden = hidden if block.keep_h else [nothing(x, dtype) for _ in hidden]
    y = fprop(a_fp8, block.outer.operand, block.outer.bias_value, dtype)
    return in_shape_of(x, y), *hidden, a_fp8.by_columns, a_fp8.columns_scale_inv


def _fake(block: Block) -> tuple[Tensor, ...]:
    x, dtype = block.x, block.out_dtype
    m, n = math.prod(x.shape[:-1]), block.inner[0].weight.shape[0]
    hidden = [x.new_empty((m, n) if block.keep_h else 0, dtype=dtype) for _ in block.inner]
    width = activated_width(n, block.activation)
    a_scale_inv = x.new_empty((), dtype=torch.float32)
    if block.a.current.blocks:
        cast = blocks.new_cast(x, (m, width), block.a.current, "both" if block.keep_a else "rows")
        _, a_fp8_t, _, a_scale_inv, _ = cuda.in_blocks(cast, block.a)
    elif needs_transposed_payload(x.device, (m, width)):
        a_fp8_t = x.new_empty(columns_shape(m, width) if block.keep_a else 0, dtype=torch.uint8)
    else:
        a_fp8_t = x.new_empty(m, width, dtype=torch.uint8).t()
    y = x.new_empty(*x.shape[:-1], block.outer.weight.shape[0], dtype=dtype)
    return y, *hidden, a_fp8_t, a_scale_inv


def _save(ctx: Any, output: tuple[Tensor, ...], block: Block) -> None:
    _, *hidden, a_fp8_t, a_scale_inv = output
    needs_x, needs_h, needs_outer = ctx.needs[0], any(ctx.needs[:-2]), ctx.needs[-2]
    x_fp8, inner, outer = block.x_fp8, [layer.operand for layer in block.inner], block.outer.operand
    # The gradient of the activation needs the hidden tensors, which are kept in 16 bits; the others are kept in FP8.
    ctx.save_for_backward(
        *(hidden if needs_h else [None] * len(hidden)),
        *(x_fp8.by_columns if any(ctx.needs[1:-2:2]) else None, x_fp8.columns_scale_inv),
        *(a_fp8_t if needs_outer else None, a_scale_inv),
        *(part for w in inner for part in (w.by_columns if needs_x else None, w.columns_scale_inv)),
        *(outer.by_columns if needs_h else None, outer.columns_scale_inv),
    )
    ctx.mark_non_differentiable(*hidden, a_fp8_t, a_scale_inv)
    ctx.slots, ctx.activation, ctx.shape = (*block.inner_slots, block.dy), block.activation, block.x.shape
    ctx.formats = [x_fp8.format, block.a.format, *(w.format for w in inner), outer.format]
    # those of x and of each weight and bias are also those of their gradients
    tensors = [block.x, *(tensor for layer in (*block.inner, block.outer) for tensor in layer[:2])]
    ctx.dtypes = [None if tensor is None else tensor.dtype for tensor in tensors]


def _backward(ctx: Any, dy: Tensor, *_: Any) -> list[Tensor | None]:
    if torch.is_grad_enabled():
        refuse_double_backward()
    # a checkpoint lets them be taken once
    layers, tensors = len(ctx.slots) - 1, ctx.saved_tensors
    hidden, saved = tensors[:layers], tensors[layers:]
    x, a, *inner, outer = map(Columns, saved[::2], saved[1::2], ctx.formats)
    *inner_slots, dy_slot = ctx.slots
    needs, dtype, dtypes = ctx.needs, ctx.dtypes[0], ctx.dtypes[1::2]
    # the wider of the weights' dtypes, so that a gradient in the narrower one is rounded only once
    if ctx.activation and hidden[0] is not None:
        types, biases = (dtype, torch.promote_types(*dtypes)), [needs[2], needs[4]]
        operands = (x, *inner, a, outer)
        gradients = mlp_backward(in_rows(dy), *hidden, ctx.activation, *operands, *ctx.slots, *types, biases)
        return _as_needed(ctx, gradients)
    da_dtype = dtype if hidden[0] is None else hidden[0].dtype
    rest = a, outer, dy_slot, da_dtype, dtypes[-1], needs[-1]
    da, dw, db = linear_backward(in_rows(dy), None, "none", *rest)
    of_inner: Sequence[Tensor | None] = [None] * (1 + 2 * layers)
    if hidden[0] is not None:
        types, biases = (dtype, torch.promote_types(*dtypes[:-1])), [needs[2], needs[4]]
        of_inner = gated_backward(da, *hidden, x, *inner, *inner_slots, *types, biases)
    return _as_needed(ctx, [*of_inner, dw, db])


def _as_needed(ctx: Any, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
    """The gradients that are asked for, in the shapes and dtypes that autograd expects."""
    dx, *of_layers = gradients
    if dx is not None and ctx.needs[0]:
        dx = dx.view(ctx.shape)
    every = zip((dx, *of_layers), ctx.needs, ctx.dtypes, strict=True)
    return [gradient.to(dtype) if needed and gradient is not None else None for gradient, needed, dtype in every]


class _MlpBackward(NamedTuple):
    """The arguments of ``mlp_backward``."""

    dy: Tensor
    h: Tensor
    activation: str
    x: Columns
    w1: Columns
    a: Columns
    w2: Columns
    dh_slot: Slot
    dy_slot: Slot
    dx_dtype: torch.dtype
    dw_dtype: torch.dtype
    biases: Sequence[bool]


def _mlp_gradients(*arguments: Any) -> tuple[Tensor, ...]:
    inputs = _MlpBackward(*arguments)
    h, dtype, (bias_1, bias_2) = inputs.h, inputs.dw_dtype, inputs.biases
    second = inputs.a, inputs.w2, inputs.dy_slot, h.dtype, dtype, bias_2
    da, *of_second = linear_backward.run(inputs.dy, None, "none", *second)
    first = inputs.x, inputs.w1, inputs.dh_slot, inputs.dx_dtype, dtype, bias_1
    return *linear_backward.run(da, h, inputs.activation, *first), *of_second


def _mlp_gradients_fake(*arguments: Any) -> tuple[Tensor, ...]:
    inputs = _MlpBackward(*arguments)
    dy, dtype, (m, n_1), n_2 = inputs.dy, inputs.dw_dtype, inputs.h.shape, inputs.dy.shape[1]
    k_1, k_2 = (0 if operand.payload is None else operand.payload.shape[0] for operand in (inputs.x, inputs.a))
    dw_1, dw_2 = dy.new_empty(n_1, k_1, dtype=dtype), dy.new_empty(n_2, k_2, dtype=dtype)
    db_1, db_2 = (dy.new_empty(n if bias else 0, dtype=torch.float32) for n, bias in zip((n_1, n_2), inputs.biases))
    return _dx_fake(dy, m, inputs.w1, inputs.dx_dtype), dw_1, db_1, dw_2, db_2


def _dx_fake(dy: Tensor, m: int, w: Columns, dtype: torch.dtype) -> Tensor:
    return nothing(dy, dtype) if w.payload is None else dy.new_empty(m, w.payload.shape[0], dtype=dtype)


class _GatedBackward(NamedTuple):
    """The arguments of ``gated_backward``."""

    da: Tensor
    gate: Tensor
    up: Tensor
    x: Columns
    w_gate: Columns
    w_up: Columns
    d_gate: Slot
    d_up: Slot
    dx_dtype: torch.dtype
    dw_dtype: torch.dtype
    biases: Sequence[bool]


def _gated_gradients(*arguments: Any) -> tuple[Tensor, ...]:
    inputs = _GatedBackward(*arguments)
    x, weights, slots = inputs.x, (inputs.w_gate, inputs.w_up), (inputs.d_gate, inputs.d_up)
    types = inputs.dx_dtype, inputs.dw_dtype
    hidden = inputs.gate, inputs.up, inputs.da
    of_layers = []
    if on_gpu(inputs.da):
        casts = cuda.cast_gated_gradients(*hidden, slots, gradient_layout(x, inputs.w_gate), inputs.biases)
        for cast, slot, w, bias in zip(casts, slots, weights, inputs.biases, strict=True):
            # in place of the gradient, a tensor of its shape
            rest = inputs.gate, None, "none", x, w, slot, *types, bias
            of_layers.append(gradients_by(_returning(*cast), scaled_mm.run)(*rest))
    else:
        for gradient, slot, w, bias in zip(gated_gradients(*hidden), slots, weights, inputs.biases, strict=True):
            of_layers.append(linear_backward.run(gradient, None, "none", x, w, slot, *types, bias))
    (dx, dw_gate, db_gate), (dx_of_up, dw_up, db_up) = of_layers
    # added as autograd adds the gradients of a tensor that two layers use
    return dx + dx_of_up, dw_gate, db_gate, dw_up, db_up


def _gated_gradients_fake(*arguments: Any) -> tuple[Tensor, ...]:
    inputs = _GatedBackward(*arguments)
    da, (m, n) = inputs.da, inputs.gate.shape
    k = 0 if inputs.x.payload is None else inputs.x.payload.shape[0]
    dw_gate, dw_up = (da.new_empty(n, k, dtype=inputs.dw_dtype) for _ in range(2))
    db_gate, db_up = (da.new_empty(n if bias else 0, dtype=torch.float32) for bias in inputs.biases)
    return _dx_fake(da, m, inputs.w_gate, inputs.dx_dtype), dw_gate, db_gate, dw_up, db_up


def _returning(*cast: Tensor) -> Any:
    """A function that returns a cast that has been made."""

    def constant(*_: Any) -> tuple[Tensor, ...]:
        return cast

    return constant


mlp = differentiable_in_layers(_MLP, Block.of_mlp, _forward, _save, _backward, _fake)
gated_mlp = differentiable_in_layers(_GATED_MLP, Block.of_gated_mlp, _forward, _save, _backward, _fake)
mlp_backward = implement(_MLP_BACKWARD, _mlp_gradients, _mlp_gradients, _mlp_gradients_fake)
gated_backward = implement(_GATED_BACKWARD, _gated_gradients, _gated_gradients, _gated_gradients_fake)
