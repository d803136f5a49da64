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
        if case.scaling == "delayed":
            self.state.amax.fill_(4.0)
            self.state.update()

    def matrix(self, rows: int, columns: int, plain: bool = False) -> Tensor:
        strides, dtype = "contiguous" if plain else self.case.strides, self.case.dtype
        if strides == "transposed":
            return torch.ones(columns, rows, dtype=dtype).t()
        if strides == "every second row":
            return torch.ones(2 * rows, columns, dtype=dtype)[::2]
        if strides == "some columns":
            return torch.ones(rows, columns + 3, dtype=dtype)[:, 1 : columns + 1]
        if strides == "one row, expanded":
            return torch.ones(1, columns, dtype=dtype).expand(rows, columns)
        return torch.ones(rows, columns, dtype=dtype)

    def slot(self, role: Role) -> Slot:
        history, current = self.state.model.scaling_of(self.state.precisions[0], "")
        state, row = self.state if self.case.flag else None, self.state.indices[self.state.row_of(0, role)]
        fmt = self.state.recipe.format_of(role).name
        return Slot(self.state.scale, history, row, fmt, state, self.case.flag, "auto", current)

    def weight_slot(self) -> WeightSlot:
        state, current = self.state if self.case.flag else None, self.state.recipe.current
        return WeightSlot(self.state.indices[self.state.row_of(0, "weight")], "e4m3", state, self.case.flag, current)

    def operand(self, rows: int, columns: int, role: Role = "input") -> Fp8Operand:
        return ops.cast_operand(self.matrix(rows, columns, plain=True), self.slot(role), "none", True)

    def weight(self, rows: int, columns: int) -> Fp8Operand:
        return ops.cast_weight_operand(torch.ones(rows, columns), self.weight_slot(), True)

    def layer(self, rows: int, columns: int, trains: bool = True) -> Layer:
        bias = torch.ones(rows, dtype=self.case.other, requires_grad=trains) if self.case.flag else None
        value = None if bias is None else bias.detach().to(self.case.dtype)
        weight = torch.ones(rows, columns, dtype=self.case.other, requires_grad=trains)
        return Layer(weight, bias, value, self.weight(rows, columns))

    def x(self) -> tuple[Tensor, Fp8Operand]:
        """An input, of three dimensions with the flag, and its cast."""
        x = torch.ones(2, self.m, self.k) if self.case.flag else torch.ones(self.m, self.k)
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


def _cast(made: Made) -> tuple[Any, ...]:
    case = made.case
    return made.matrix(made.m, made.hidden(made.k)), made.slot("input"), case.activation, case.layout


def _scaled_mm(made: Made) -> tuple[Any, ...]:
    a, b = made.product()
    bias = torch.ones(len(b.payload)) if made.case.flag else None
    return a, b, bias, made.case.other, made.case.layout == "rows"


def _scaled_mm_add(made: Made) -> tuple[Any, ...]:
    a, b = made.product()
    return made.matrix(len(a.payload), len(b.payload)).clone(), a, b, made.case.flag


def _linear(made: Made) -> tuple[Any, ...]:
    (x, x_fp8), (weight, bias, value, w_fp8), dtype = made.x(), made.layer(made.n, made.k), made.case.dtype
    plain, plain_weight = ops.in_rows(x.detach()), weight.detach().to(dtype)
    if made.case.layout == "rows":
        x_fp8 = x_fp8._replace(by_columns=plain.t())
    if made.case.layout == "columns":
        x_fp8, w_fp8 = x_fp8._replace(by_rows=plain), w_fp8._replace(by_rows=plain_weight)
    return x, weight, bias, value, x_fp8, w_fp8, made.slot("grad_output"), dtype


def _linear_backward(made: Made) -> tuple[Any, ...]:
    case, n = made.case, made.hidden(made.n)
    h = None if case.activation == "none" else made.matrix(made.m, n, plain=True)
    x, w = made.kept(made.operand(made.m, made.k), "rows"), made.kept(made.weight(n, made.k), "columns")
    dy, slot = made.matrix(made.m, made.n), made.slot("grad_output")
    return dy, h, case.activation, x, w, slot, case.dtype, case.other, case.flag


def _mlp(made: Made) -> tuple[Any, ...]:
    (x, x_fp8), case = made.x(), made.case
    trains = case.layout != "rows"
    layers = made.layer(made.hidden(made.n), made.k), made.layer(made.k, made.n, trains)
    slots = made.slot("input"), made.slot("grad_output"), made.slot("grad_output")
    return x, *layers, x_fp8, *slots, case.activation, trains, True, case.dtype


def _mlp_backward(made: Made) -> tuple[Any, ...]:
    case, (m, n, k) = made.case, (made.m, made.n, made.k)
    kept = (made.kept(made.operand(m, k), "rows"), made.kept(made.weight(made.hidden(n), k), "columns"))
    kept = *kept, made.kept(made.operand(m, n), "rows"), made.kept(made.weight(k, n))
    slots, tensors = (made.slot("grad_output"),) * 2, (made.matrix(m, k), made.matrix(m, made.hidden(n), plain=True))
    return *tensors, case.activation, *kept, *slots, case.dtype, case.other, [case.flag, not case.flag]


def _gated_mlp(made: Made) -> tuple[Any, ...]:
    (x, x_fp8), case = made.x(), made.case
    trains = case.layout != "rows"
    layers = made.layer(made.n, made.k), made.layer(made.n, made.k), made.layer(made.k, made.n, trains)
    slots = made.slot("input"), *[made.slot("grad_output")] * 3
    return x, *layers, x_fp8, *slots, trains, True, case.dtype


def _gated_backward(made: Made) -> tuple[Any, ...]:
    case, (m, n, k) = made.case, (made.m, made.n, made.k)
    x, w = made.kept(made.operand(m, k), "rows"), made.kept(made.weight(n, k), "columns")
    tensors = made.matrix(m, n), *[made.matrix(m, n, plain=True)] * 2
    slots = (made.slot("grad_output"),) * 2
    return *tensors, x, w, w, *slots, case.dtype, case.other, [case.flag, not case.flag]


def _update_scales(made: Made) -> tuple[Any, ...]:
    state = made.state
    tensors = state.amax, state.amax_history, state.scale, state.fp8_max, state.nonfinite_steps
    return *tensors, made.case.flag, 1.0


# each operator's arguments, and the scalings that it supports
_MAKE: dict[str, tuple[Callable[[Made], tuple[Any, ...]], dict[str, Recipe]]] = {
    "cast": (_cast, OF_TENSORS),
    "cast_weight": (lambda made: (made.matrix(made.n, made.k), made.weight_slot(), made.case.layout), OF_TENSORS),
    "cast_blocks": (_cast, IN_BLOCKS),
    "cast_weight_blocks": (lambda made: (made.matrix(made.n, made.k), made.weight_slot(), made.case.layout), IN_BLOCKS),
    "scaled_mm": (_scaled_mm, OF_TENSORS | IN_BLOCKS),
    "scaled_mm_add_": (_scaled_mm_add, OF_TENSORS | IN_BLOCKS),
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
    made = []
    for strides, layout, flag in drawn:
        # with an activation, a transposed tensor is copied first
        activation = "none" if strides == "transposed" else choose(ACTIVATIONS)
        rest = layout, choose(DTYPES), choose(DTYPES), activation, strides, flag
        made += [Case(name, scaling, *rest) for scaling in scalings]
    return made


def arguments(case: Case, m: int, n: int, k: int) -> tuple[Any, ...]:
    """Arguments of the function behind the operator."""
    return _MAKE[case.name][0](Made(case, m, n, k))
