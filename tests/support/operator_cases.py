"""Arguments of every operator: each recipe's scaling, each layout, and sizes that are no multiple of anything."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_fp8 import BlockScaling, CurrentScaling, DelayedScaling, MXScaling, ops
from lightning_fp8.ops.activations import ACTIVATIONS
from lightning_fp8.ops.formats import Role
from lightning_fp8.ops.operand import Columns, Fp8Operand, Fp8Tensor, Layer, Slot, WeightSlot
from lightning_fp8.scaling import ScalingState
from lightning_fp8.scaling.recipe import Recipe

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
        activation: of the cast, or between the layers.
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


def by_rows(operand: Fp8Operand) -> Fp8Tensor:
    return Fp8Tensor(operand.by_rows, operand.scale_inv, operand.format)


def by_columns(operand: Fp8Operand) -> Fp8Tensor:
    return Fp8Tensor(operand.by_columns, operand.columns_scale_inv, operand.format)


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

    def slot(self, role: Role) -> Slot:
        current = self.state.model.scaling_of(self.state.precisions[0], self.case.scaling != "evaluated", "")
        state, row = self.state if self.case.flag else None, self.state.indices[self.state.row_of(0, role)]
        fmt = self.state.recipe.format_of(role).name
        return Slot(self.state.scale, self.state.amax_history, row, fmt, state, self.case.flag, current)

    def weight_slot(self) -> WeightSlot:
        state, current = self.state if self.case.flag else None, self.state.recipe.current
        return WeightSlot(self.state.indices[self.state.row_of(0, "weight")], "e4m3", state, self.case.flag, current)

    def operand(self, rows: int, columns: int, role: Role = "input") -> Fp8Operand:
        return ops.cast_operand(self.matrix(rows, columns, plain=True), self.slot(role), "none", True)

    def weight(self, rows: int, columns: int) -> Fp8Operand:
        return ops.cast_weight_operand(torch.randn(rows, columns), self.weight_slot(), True)

    def layer(self, rows: int, columns: int, trains: bool = True) -> Layer:
        bias = torch.randn(rows, dtype=self.case.other, requires_grad=trains) if self.case.flag else None
        value = None if bias is None else bias.detach().to(self.case.dtype)
        weight = torch.randn(rows, columns, dtype=self.case.other, requires_grad=trains)
        return Layer(weight, bias, value, self.weight(rows, columns))

    def x(self) -> tuple[Tensor, Fp8Operand]:
        """An input, of three dimensions with the flag, and its cast."""
        x = torch.randn(2, self.m, self.k) if self.case.flag else torch.randn(self.m, self.k)
        return x.to(self.case.dtype).requires_grad_(), self.operand(self.m * (2 if self.case.flag else 1), self.k)

    def kept(self, operand: Fp8Operand, without: str = "") -> Columns:
        columns = None if self.case.layout == without else operand.by_columns
        return Columns(columns, operand.columns_scale_inv, operand.format)

    def hidden(self, width: int) -> int:
        """The outputs of a layer whose activation has this width."""
        return 2 * width if self.case.activation == "swiglu" else width

    def product(self) -> tuple[Fp8Tensor, Fp8Tensor]:
        """The operands of fprop, dgrad or wgrad."""
        x, w, dy = (
            self.operand(self.m, self.k),
            self.weight(self.n, self.k),
            self.operand(self.m, self.n, "grad_output"),
        )
        return {
            "rows": (by_rows(x), by_rows(w)),
            "columns": (by_rows(dy), by_columns(w)),
            "both": (by_columns(dy), by_columns(x)),
        }[self.case.layout]


def _cast(args: Made) -> tuple[Any, ...]:
    case = args.case
    return args.matrix(args.m, args.hidden(args.k)), args.slot("input"), case.activation, case.layout


def _scaled_mm(args: Made) -> tuple[Any, ...]:
    a, b = args.product()
    bias = torch.randn(len(b.payload)) if args.case.flag else None
    return a, b, bias, args.case.other, args.case.layout == "rows"


def _linear(args: Made) -> tuple[Any, ...]:
    (x, x_fp8), (weight, bias, value, w_fp8), dtype = args.x(), args.layer(args.n, args.k), args.case.dtype
    plain, plain_weight = ops.in_rows(x.detach()), weight.detach().to(dtype)
    if args.case.layout == "rows":
        x_fp8 = x_fp8._replace(by_columns=plain.t())
    if args.case.layout == "columns":
        x_fp8, w_fp8 = x_fp8._replace(by_rows=plain), w_fp8._replace(by_rows=plain_weight)
    return x, weight, bias, value, x_fp8, w_fp8, args.slot("grad_output"), dtype


def _linear_backward(args: Made) -> tuple[Any, ...]:
    case, n = args.case, args.hidden(args.n)
    h = None if case.activation == "none" else args.matrix(args.m, n, plain=True)
    x, w = args.kept(args.operand(args.m, args.k), "rows"), args.kept(args.weight(n, args.k), "columns")
    dy, slot = args.matrix(args.m, args.n), args.slot("grad_output")
    return dy, h, case.activation, x, w, slot, case.dtype, case.other, case.flag


def _mlp(args: Made) -> tuple[Any, ...]:
    (x, x_fp8), case = args.x(), args.case
    trains = case.layout != "rows"
    layers = args.layer(args.hidden(args.n), args.k), args.layer(args.k, args.n, trains)
    slots = args.slot("input"), args.slot("grad_output"), args.slot("grad_output")
    return x, *layers, x_fp8, *slots, case.activation, trains, True, case.dtype


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
    return x, *layers, x_fp8, *slots, trains, True, case.dtype


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


# each operator's arguments, and the scalings that it supports
_MAKE: dict[str, tuple[Callable[[Made], tuple[Any, ...]], dict[str, Recipe]]] = {
    "cast": (_cast, OF_TENSORS),
    "cast_weight": (lambda args: (args.matrix(args.n, args.k), args.weight_slot(), args.case.layout), OF_TENSORS),
    "cast_blocks": (_cast, IN_BLOCKS),
    "cast_weight_blocks": (lambda args: (args.matrix(args.n, args.k), args.weight_slot(), args.case.layout), IN_BLOCKS),
    "scaled_mm": (_scaled_mm, OF_TENSORS | IN_BLOCKS),
    "linear": (_linear, OF_TENSORS | IN_BLOCKS),
    "linear_backward": (_linear_backward, OF_TENSORS | IN_BLOCKS),
    "mlp": (_mlp, OF_TENSORS | IN_BLOCKS),
    "mlp_backward": (_mlp_backward, OF_TENSORS | IN_BLOCKS),
    "gated_mlp": (_gated_mlp, OF_TENSORS | IN_BLOCKS),
    "gated_backward": (_gated_backward, OF_TENSORS | IN_BLOCKS),
    "update_scales": (_update_scales, OF_TENSORS),
}
OPERATORS = tuple(_MAKE)


def cases(name: str) -> list[Case]:
    """Each layout with other options at random, always the same, in each scaling; its fakes are those of the first."""
    choose, scalings = random.Random(name).choice, _MAKE[name][1]
    if name.startswith("cast"):
        drawn = [(*both, bool(number % 2)) for number, both in enumerate(product(STRIDES, LAYOUTS))]
    else:
        # products take many times as long
        drawn = [(choose(STRIDES), layout, flag) for flag, layout in product((True, False), LAYOUTS)]
    all_cases = []
    for strides, layout, flag in drawn:
        # with an activation, a transposed tensor is copied first
        activation = "none" if strides == "transposed" else choose(ACTIVATIONS)
        rest = layout, choose(DTYPES), choose(DTYPES), activation, strides, flag
        all_cases += [Case(name, scaling, *rest) for scaling in scalings]
    return all_cases


def arguments(case: Case, m: int, n: int, k: int) -> tuple[Any, ...]:
    """Arguments of the function behind the operator."""
    return _MAKE[case.name][0](Made(case, m, n, k))
