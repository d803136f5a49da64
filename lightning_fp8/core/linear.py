"""A linear layer in FP8 on one page: what is cast, multiplied and kept, in the order in which it happens.

     y[M, N] =  x[M, K]   @ w[N, K]^T + bias     fprop, sums along K
    dx[M, K] = dy[M, N]   @ w[N, K]              dgrad, sums along N
    dw[N, K] = dy[M, N]^T @ x[M, K]              wgrad, sums along M

Each of the three tensors is an operand of two products: along its rows in one, along its columns in the other. Its slot
has a scaling for each. Backward keeps the operands by columns, so it does not need x itself.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_fp8.core.operators import (
    Differentiable,
    define,
    direct_apply,
    implement,
    implement_differentiable,
    nothing,
)
from lightning_fp8.ops.library import is_watched
from lightning_fp8.scalings import products
from lightning_fp8.scalings.operand import Cast, Operand, Slot, Source, Want

# The page. `casts.cast` and `casts.cast_weight` have cast the input and the weight before, because layers share input
# casts and keep weight casts. Families call these functions, or have a page of the same form.


def forward(x: Operand, w: Operand, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """fprop: x of ``[M, K]``, w of ``[N, K]``, bias ``[N]`` -> y ``[M, N]``."""
    return products.multiply(x, w, bias, dtype, fast=True)


def cast_gradient(dy: Source, x: Operand | None, w: Operand | None, slot: Slot, sums: bool) -> Cast:
    """dy ``[M, N]``, in one pass for the products with x and w and, with ``sums``, the gradient of the bias."""
    if w is not None:
        rows = w.scaling.takes_gradient(w, slot.rows)
        slot = slot if rows is slot.rows else slot._replace(rows=rows)
    # cast even if only the bias needs a gradient, to record the amax
    return products.cast(dy, slot, Want(w is not None or x is None, x is not None, sums))


def dgrad(dy: Operand | None, w: Operand | None, dtype: torch.dtype) -> Tensor | None:
    """dy of ``[M, N]`` by rows, w by columns -> dx ``[M, K]``; None if it is not needed."""
    return None if dy is None or w is None else products.multiply(dy, w, None, dtype, fast=False)


def wgrad(dy: Operand | None, x: Operand | None, dtype: torch.dtype) -> Tensor | None:
    """dy of ``[M, N]`` and x, both by columns -> dw ``[N, K]``; None if it is not needed."""
    return None if dy is None or x is None else products.multiply(dy, x, None, dtype, fast=False)


# saved in place of an operand that no gradient needs
_NOTHING: tuple[None, None] = (None, None)


class Kept(NamedTuple):
    """The operands that gradients need, kept for backward: one byte per element if the product is in FP8.

    Attributes:
        x: ``x^T [K, M]``, for wgrad.
        w: ``w^T [K, N]``, for dgrad.
    """

    x: Operand | None
    w: Operand | None

    def parts(self) -> tuple[list[Tensor | None], list[Any]]:
        """Codes and scale_inv of both, as autograd saves them; and their scalings."""
        x, w = self
        tensors = [*(_NOTHING if x is None else x[:2]), *(_NOTHING if w is None else w[:2])]
        return tensors, [None if x is None else x.scaling, None if w is None else w.scaling]

    @staticmethod
    def of(tensors: Sequence[Any], scalings: Sequence[Any]) -> Kept:
        """From :meth:`parts`."""
        (x, x_scale_inv, w, w_scale_inv), (of_x, of_w) = tensors, scalings
        return Kept(
            None if x is None else Operand(x, x_scale_inv, of_x), None if w is None else Operand(w, w_scale_inv, of_w)
        )


# The page under autograd, and as operators for compilers

# linear: fprop, differentiable in x [*, K], weight [N, K] and bias [N] -> y [*, N]. These three define the edges of the
#   graph, and the shapes and dtypes of the gradients; the products use their casts. bias_value is the bias itself, or
#   the bias rounded to out_dtype. dy is the slot of the gradient of y.
_LINEAR = define(
    "linear(Tensor x, Tensor weight, Tensor? bias, Tensor? bias_value, Operand x_rows, Operand? x_columns, "
    "Operand w_rows, Operand? w_columns, Slot dy, ScalarType out_dtype) -> Tensor"
)
# linear_backward: dy [M, N] -> (dx [M, K], dw [N, K], db [N] float32). Without w there is no dgrad, without x no wgrad,
#   without `bias` no sum: their results are empty.
_BACKWARD = define(
    "linear_backward(Tensor dy, Operand? x, Operand? w, Slot slot, ScalarType dx_dtype, ScalarType dw_dtype, bool bias)"
    " -> (Tensor, Tensor, Tensor)"
)


def _linear(
    ctx: Any,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    bias_value: Tensor | None,
    x_rows: Operand,
    x_columns: Operand | None,
    w_rows: Operand,
    w_columns: Operand | None,
    dy: Slot,
    dtype: torch.dtype,
) -> Tensor:
    """``ctx`` is None inside the operator, which saves tensors for backward itself."""
    if ctx is not None:
        ctx.set_materialize_grads(False)
        ctx.needs = ctx.needs_input_grad
        _save(ctx, None, x, weight, bias, bias_value, x_rows, x_columns, w_rows, w_columns, dy, dtype)
    y = forward(x_rows, w_rows, bias_value, dtype)
    return y if x.dim() == 2 else in_shape_of(x, y)


def _save(
    ctx: Any,
    output: Tensor | None,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    bias_value: Tensor | None,
    x_rows: Operand,
    x_columns: Operand | None,
    w_rows: Operand,
    w_columns: Operand | None,
    dy: Slot,
    dtype: torch.dtype,
) -> None:
    needs_x, needs_weight = ctx.needs[:2]
    tensors, scalings = Kept(x_columns if needs_weight else None, w_columns if needs_x else None).parts()
    ctx.save_for_backward(*tensors)
    # Not by `save_for_backward`: the state's tensors change in place by design; backward reads their current values.
    dtypes = x.dtype, weight.dtype, None if bias is None else bias.dtype
    # for second derivatives; backward keeps its cast, so nothing checks the version of the weight itself
    ctx.weight = weight
    ctx.rest = dy, scalings, x.shape, dtypes


def _gradients(ctx: Any, dy: Tensor | None) -> tuple[Tensor | None, ...]:
    """The gradients of x, weight and bias, and None for the other arguments of :func:`_linear`."""
    if dy is None:
        return (None,) * 10
    slot, scalings, shape, (x_dtype, weight_dtype, bias_dtype) = ctx.rest
    needs_x, needs_weight, needs_bias = ctx.needs[:3]
    arguments = *Kept.of(ctx.saved_tensors, scalings), slot, x_dtype, weight_dtype, needs_bias
    if torch.is_grad_enabled():
        dx, dw, db = differentiable_backward(in_rows(dy), ctx.weight, *arguments)
    else:
        run = linear_backward.watched if is_watched(dy) else run_backward
        dx, dw, db = run(in_rows(dy), *arguments)
    return (
        (dx if len(shape) == 2 else dx.view(shape)) if needs_x else None,
        dw if needs_weight else None,
        (db if db.dtype == bias_dtype else db.to(bias_dtype)) if needs_bias else None,
        *(None,) * 7,
    )


def run_backward(
    dy: Source,
    x: Operand | None,
    w: Operand | None,
    slot: Slot,
    dx_dtype: torch.dtype,
    dw_dtype: torch.dtype,
    bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The results of the operator ``lightning_fp8::linear_backward``."""
    return of_cast(dy, [cast_gradient(dy, x, w, slot, bias)], x, w, dx_dtype, dw_dtype)


def of_cast(
    dy: Source, casts: list[Cast], x: Operand | None, w: Operand | None, dx_dtype: torch.dtype, dw_dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """The same for the first cast in the list, which is removed so that its memory can be reused."""
    like = dy if isinstance(dy, Tensor) else dy.inputs[0]
    rows, columns, sums = casts.pop(0)
    dx = dgrad(rows, w, dx_dtype)
    del rows
    dw = wgrad(columns, x, dw_dtype)
    return (
        nothing(like, dx_dtype) if dx is None else dx,
        like.new_empty(dy.shape[1], 0, dtype=dw_dtype) if dw is None else dw,
        nothing(like, torch.float32) if sums is None else sums,
    )


def _fake(x: Tensor, weight: Tensor, *rest: Any) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0], dtype=rest[-1])


def _backward_fake(
    dy: Tensor,
    x: Operand | None,
    w: Operand | None,
    slot: Slot,
    dx_dtype: torch.dtype,
    dw_dtype: torch.dtype,
    bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    m, n = dy.shape
    return dx_fake(dy, m, w, dx_dtype), *of_layer_fake(dy, n, x, dw_dtype, bias)


def dx_fake(dy: Tensor, m: int, w: Operand | None, dtype: torch.dtype) -> Tensor:
    """The shape of :func:`dgrad`."""
    return nothing(dy, dtype) if w is None else dy.new_empty(m, w.codes.shape[0], dtype=dtype)


def of_layer_fake(dy: Tensor, n: int, x: Operand | None, dtype: torch.dtype, bias: bool) -> tuple[Tensor, Tensor]:
    """The shapes of :func:`wgrad` and of the bias gradient."""
    dw = dy.new_empty(n, 0 if x is None else x.codes.shape[0], dtype=dtype)
    return dw, dy.new_empty(n if bias else 0, dtype=torch.float32)


class _Gradients(Differentiable):
    """dgrad, wgrad and the bias sum with derivatives of their own, as for a loss on forces or a gradient penalty.

    Gradients pass casts unchanged, as everywhere. For a cotangent g of dx, the derivatives are ``g @ w^T`` by dy and
    ``dy^T @ g`` by w, both computed in the dtype of dy. Derivatives of dw are not defined.
    """

    @staticmethod
    def forward(ctx: Any, dy: Tensor, weight: Tensor, arguments: Sequence[Any]) -> Any:
        """dy ``[M, N]``, weight ``[N, K]``, and the other arguments of :func:`run_backward`."""
        ctx.set_materialize_grads(False)
        _, w, *_ = arguments
        is_held = weight.untyped_storage().nbytes() < weight.numel() * weight.element_size()
        # a weight without a master has the values of its cast
        ctx.values = w if is_held else None
        ctx.save_for_backward(dy, weight)
        return linear_backward(dy, *arguments)

    @staticmethod
    def backward(ctx: Any, g: Tensor | None, of_dw: Tensor | None, of_sums: Tensor | None) -> Any:
        """Uses operations that autograd can differentiate further."""
        dy, weight = ctx.saved_tensors
        if of_dw is not None:
            raise RuntimeError(
                "lightning_fp8: second derivatives through the gradient of an FP8 layer's weight, as in MAML, are not"
                " defined. Leave the layers that need them in bf16 with `ignore_modules`. Those through gradients of"
                " inputs are defined."
            )
        by_dy = by_w = None
        if g is not None:
            if ctx.needs_input_grad[0]:
                w = weight if ctx.values is None else ctx.values.scaling.values(ctx.values).t()[: weight.shape[0]]
                by_dy = g.to(dy.dtype) @ w.to(dy.dtype).t()
            if ctx.needs_input_grad[1]:
                by_w = (dy.t() @ g.to(dy.dtype)).to(weight.dtype)
        if of_sums is not None and ctx.needs_input_grad[0]:
            rows = of_sums.to(dy.dtype).expand_as(dy)
            by_dy = rows if by_dy is None else by_dy + rows
        return by_dy, by_w, None


differentiable_gradients = _Gradients.apply


def differentiable_backward(dy: Tensor, weight: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`run_backward` with derivatives of dx by dy and by the weight.

    Raises:
        RuntimeError: under a compiler, which has no second derivatives.
    """
    if is_watched(dy):
        refuse_double_backward()
    return differentiable_gradients(dy, weight, arguments)  # type: ignore[no-any-return]


class _Linear(Differentiable):
    """The operator, run directly if nothing watches operators."""

    forward = staticmethod(_linear)
    backward = staticmethod(_gradients)


linear_backward = implement(_BACKWARD, run_backward, _backward_fake)
linear = implement_differentiable(
    _LINEAR, direct_apply(_Linear), functools.partial(_linear, None), _save, _gradients, _fake
)


def in_rows(x: Tensor) -> Tensor:
    """x ``[*, K]`` -> ``[M, K]``."""
    return x if x.dim() == 2 else x.flatten(0, -2) if x.dim() > 2 else x[None]


def in_shape_of(x: Tensor, y: Tensor) -> Tensor:
    """y ``[M, N]`` for an x ``[*, K]`` -> ``[*, N]``."""
    # no view, so that the result may be changed in place
    return y if x.dim() == 2 else torch.ops.aten._unsafe_view(y, (*x.shape[:-1], y.shape[1]))  # type: ignore[no-any-return]


def refuse_double_backward() -> None:
    """Refuse to differentiate a backward for which this is not defined.

    Raises:
        RuntimeError: always.
    """
    raise RuntimeError(
        "lightning_fp8: second derivatives (`create_graph=True`) are defined neither in compiled or traced code nor"
        " through experts. Run the model without them, or leave the layers in bf16 with `ignore_modules`."
    )
