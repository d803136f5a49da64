"""Arguments of every operator: each recipe's scaling, each layout, and sizes that are no multiple of anything."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_fp8 import BlockScaling, CurrentScaling, DelayedScaling, MXScaling
from lightning_fp8.core import casts, feed_forward, linear
from lightning_fp8.core.operators import Layer, Operator
from lightning_fp8.ops.activations import ACTIVATIONS
from lightning_fp8.ops.formats import Role
from lightning_fp8.scaling import ScalingState
from lightning_fp8.scaling.plan import plan_of
from lightning_fp8.scalings import products
from lightning_fp8.scalings.base import Scaling
from lightning_fp8.scalings.operand import Cast, Casting, Operand, Slot, Want
from lightning_fp8.scalings.recipe import Recipe
from lightning_fp8.scalings.unscaled import Unscaled

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LAYOUTS = ("rows", "columns", "both")
STRIDES = ("contiguous", "transposed", "every second row", "some columns", "one row, expanded")
OF_TENSORS: dict[str, Recipe] = {
    "delayed": DelayedScaling(amax_history_len=4),
    "delayed, without a history": DelayedScaling(amax_history_len=4),
    "evaluated": DelayedScaling(amax_history_len=4),
    "current": CurrentScaling(),
    "current with a margin, E4M3": CurrentScaling(margin=2, fp8_format="E4M3"),
}
IN_BLOCKS: dict[str, Recipe] = {
    "blocks": BlockScaling(),
    "blocks, powers of 2": BlockScaling(power_of_2_scales=True),
    "mx": MXScaling(),
    "mx, squares": MXScaling(weight_blocks=(32, 32)),
}


class Case(NamedTuple):
    """The options of an operator, of which each uses some.

    Attributes:
        name: the operator.
        scaling: of :data:`OF_TENSORS` or :data:`IN_BLOCKS`.
        layout: of the cast. For products: of fprop, dgrad or wgrad. In backward, ``"rows"`` without the input,
            ``"columns"`` without the weight. For a layer, ``"rows"`` with a wgrad and ``"columns"`` with an fprop that
            is not in FP8.
        dtype: of inputs and gradients.
        other: of outputs and weights.
        activation: between the layers.
        strides: of the tensor that is cast.
        flag: whether there is a bias, a state that records, an input of three dimensions, and what backward needs.
    """

    name: str
    scaling: str
    layout: str
    dtype: torch.dtype
    other: torch.dtype
    activation: str
    strides: str
    flag: bool


class Made:
    """The parts of a case's arguments, for M rows, K inputs and N outputs."""

    def __init__(self, case: Case, m: int, n: int, k: int) -> None:
        self.case, self.m, self.n, self.k = case, m, n, k
        self.state = ScalingState(["a"], (OF_TENSORS | IN_BLOCKS)[case.scaling])
        if case.scaling in ("delayed", "evaluated"):
            self.state.amax.fill_(4.0)
            self.state.update()

    def matrix(self, rows: int, columns: int, plain: bool = False) -> Tensor:
        strides, dtype = "contiguous" if plain else self.case.strides, self.case.dtype
        if strides == "transposed":
            return torch.randn(columns, rows, dtype=dtype).t()
        if strides == "every second row":
            return torch.randn(2 * rows, columns, dtype=dtype)[::2]
        if strides == "some columns":
            return torch.randn(rows, columns + 3, dtype=dtype)[:, 1 : columns + 1]
        if strides == "one row, expanded":
            return torch.randn(1, columns, dtype=dtype).expand(rows, columns)
        return torch.randn(rows, columns, dtype=dtype)

    def slot(self, role: Role, columns: Scaling | None = None) -> Slot:
        """``columns``: in place of the recipe's scaling."""
        state, is_evaluated = self.state, self.case.scaling == "evaluated"
        of_rows, of_columns = getattr(plan_of(state.recipe), role)
        casting = Casting.OWN_POWER_OF_2 if is_evaluated else Casting.HISTORY
        return Slot(
            state.indices[state.row_of(0, role)],
            state if self.case.flag or self.case.scaling == "delayed" else None,
            of_rows,
            columns or of_columns,
            self.case.flag,
            Casting.OWN if role == "weight" else casting,
            generation=state.model.generation,
        )

    def operand(self, rows: int, columns: int, role: Role = "input") -> Cast:
        return products.cast(self.matrix(rows, columns, plain=True), self.slot(role), Want(True, True))

    def weight(self, rows: int, columns: int) -> Cast:
        return products.cast_weight(torch.randn(rows, columns), self.slot("weight"), Want(True, True))

    def layer(self, rows: int, columns: int, trains: bool = True) -> Layer:
        bias = torch.randn(rows, dtype=self.case.other, requires_grad=trains) if self.case.flag else None
        value = None if bias is None else bias.detach().to(self.case.dtype)
        weight = torch.randn(rows, columns, dtype=self.case.other, requires_grad=trains)
        return Layer(weight, bias, value, *self.weight(rows, columns)[:2])

    def x(self) -> tuple[Tensor, Cast]:
        """An input, of three dimensions with the flag, and its cast."""
        x = torch.randn(2, self.m, self.k) if self.case.flag else torch.randn(self.m, self.k)
        return x.to(self.case.dtype).requires_grad_(), self.operand(self.m * (2 if self.case.flag else 1), self.k)

    def kept(self, cast: Cast, without: str = "") -> Operand | None:
        return None if self.case.layout == without else cast.columns

    def hidden(self, width: int) -> int:
        """The outputs of a layer whose activation has this width."""
        return 2 * width if self.case.activation == "swiglu" else width

    def product(self) -> tuple[Operand | None, Operand | None]:
        """The operands of fprop, dgrad or wgrad."""
        x, w, dy = (
            self.operand(self.m, self.k),
            self.weight(self.n, self.k),
            self.operand(self.m, self.n, "grad_output"),
        )
        return {
            "rows": (x.rows, w.rows),
            "columns": (dy.rows, w.columns),
            "both": (dy.columns, x.columns),
        }[self.case.layout]


def _in_layout(case: Case) -> tuple[bool, bool]:
    return case.layout != "columns", case.layout != "rows"


def _cast(args: Made) -> tuple[Any, ...]:
    return args.matrix(args.m, args.k), args.slot("input"), *_in_layout(args.case)


def _cast_weight(args: Made) -> tuple[Any, ...]:
    return args.matrix(args.n, args.k), args.slot("weight"), *_in_layout(args.case)


def _scaled_mm(args: Made) -> tuple[Any, ...]:
    a, b = args.product()
    bias = torch.randn(len(b.codes)) if args.case.flag and b is not None else None
    return a, b, bias, args.case.other, args.case.layout == "rows"


def _linear(args: Made) -> tuple[Any, ...]:
    (x, x_fp8), (weight, bias, value, *w_fp8), dtype = args.x(), args.layer(args.n, args.k), args.case.dtype
    slot, (x_rows, x_columns, _), w_rows = args.slot("grad_output"), x_fp8, w_fp8[0]
    # an operand of values, with the dtype that the layer multiplies in
    unscaled, values = Unscaled(), linear.in_rows(x.detach())
    if args.case.layout == "rows":
        x_columns = unscaled.cast(values, slot, Want(False, True)).columns
        slot = args.slot("grad_output", columns=unscaled)
    if args.case.layout == "columns":
        x_rows = unscaled.cast(values, slot, Want()).rows
        w_rows = unscaled.cast(weight.detach().to(dtype), slot, Want()).rows
    return x, weight, bias, value, x_rows, x_columns, w_rows, w_fp8[1], slot, dtype


def _linear_backward(args: Made) -> tuple[Any, ...]:
    case = args.case
    x, w = args.kept(args.operand(args.m, args.k), "rows"), args.kept(args.weight(args.n, args.k), "columns")
    return args.matrix(args.m, args.n), x, w, args.slot("grad_output"), case.dtype, case.other, case.flag


def _mlp(args: Made) -> tuple[Any, ...]:
    (x, x_fp8), case = args.x(), args.case
    trains = case.layout != "rows"
    layers = args.layer(args.hidden(args.n), args.k), args.layer(args.k, args.n, trains)
    slots = args.slot("input"), args.slot("grad_output"), args.slot("grad_output")
    return x, *layers, *x_fp8[:2], *slots, case.activation, trains, True, case.dtype


def _mlp_backward(args: Made) -> tuple[Any, ...]:
    case, (m, n, k) = args.case, (args.m, args.n, args.k)
    columns = (args.kept(args.operand(m, k), "rows"), args.kept(args.weight(args.hidden(n), k), "columns"))
    columns = *columns, args.kept(args.operand(m, n), "rows"), args.kept(args.weight(k, n))
    slots, tensors = (args.slot("grad_output"),) * 2, (args.matrix(m, k), args.matrix(m, args.hidden(n), plain=True))
    return *tensors, case.activation, *columns, *slots, case.dtype, case.other, [case.flag, not case.flag]


def _gated_mlp(args: Made) -> tuple[Any, ...]:
    (x, x_fp8), case = args.x(), args.case
    trains = case.layout != "rows"
    layers = args.layer(args.n, args.k), args.layer(args.n, args.k), args.layer(args.k, args.n, trains)
    slots = args.slot("input"), *[args.slot("grad_output")] * 3
    return x, *layers, *x_fp8[:2], *slots, trains, True, case.dtype


def _gated_backward(args: Made) -> tuple[Any, ...]:
    case, (m, n, k) = args.case, (args.m, args.n, args.k)
    x, w = args.kept(args.operand(m, k), "rows"), args.kept(args.weight(n, k), "columns")
    tensors = args.matrix(m, n), *[args.matrix(m, n, plain=True)] * 2
    slots = (args.slot("grad_output"),) * 2
    return *tensors, x, w, w, *slots, case.dtype, case.other, [case.flag, not case.flag]


def _update_scales(args: Made) -> tuple[Any, ...]:
    state = args.state
    tensors = state.amax, state.amax_history, state.scale, state.fp8_max, state.nonfinite_steps
    return *tensors, args.case.flag, 1.0


# each operator, its arguments, and the scalings that it supports
_EVERY = OF_TENSORS | IN_BLOCKS
_MAKE: dict[str, tuple[Operator, Callable[[Made], tuple[Any, ...]], dict[str, Recipe]]] = {
    "cast": (casts._cast_op, _cast, _EVERY),
    "cast_weight": (casts._cast_weight_op, _cast_weight, _EVERY),
    "scaled_mm": (casts.scaled_mm, _scaled_mm, _EVERY),
    "linear": (linear.linear, _linear, _EVERY),
    "linear_backward": (linear.linear_backward, _linear_backward, _EVERY),
    "mlp": (feed_forward.mlp, _mlp, _EVERY),
    "mlp_backward": (feed_forward.mlp_backward, _mlp_backward, _EVERY),
    "gated_mlp": (feed_forward.gated_mlp, _gated_mlp, _EVERY),
    "gated_backward": (feed_forward.gated_backward, _gated_backward, _EVERY),
    "update_scales": (casts.update_scales, _update_scales, OF_TENSORS),
}
OPERATORS = {name: operator for name, (operator, *_) in _MAKE.items()}


def cases(name: str) -> list[Case]:
    """Each layout with other options at random, always the same, in each scaling; its fakes are those of the first."""
    choose, scalings = random.Random(name).choice, _MAKE[name][2]
    if name.startswith("cast"):
        drawn = [(*both, bool(number % 2)) for number, both in enumerate(product(STRIDES, LAYOUTS))]
    else:
        # products take many times as long
        drawn = [(choose(STRIDES), layout, flag) for flag, layout in product((True, False), LAYOUTS)]
    all_cases = []
    for strides, layout, flag in drawn:
        rest = layout, choose(DTYPES), choose(DTYPES), choose([*ACTIVATIONS]), strides, flag
        all_cases += [Case(name, scaling, *rest) for scaling in scalings]
    return all_cases


def arguments(case: Case, m: int, n: int, k: int) -> tuple[Any, ...]:
    """Arguments of the function behind the operator."""
    return _MAKE[case.name][1](Made(case, m, n, k))
