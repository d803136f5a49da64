"""Defines and calls the operators ``torch.ops.lightning_fp8.*``."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch._C import _get_tracing_state

from lightning_fp8.ops.library import NO_TRANSFORMS, is_exporting, is_watched, refuse_transforms
from lightning_fp8.ops.operand import Groups, refuse_recording_export, state_of
from lightning_fp8.scalings.base import Scaling
from lightning_fp8.scalings.operand import Casting, Operand, Slot

T = TypeVar("T")
LIBRARY = torch.library.Library("lightning_fp8", "DEF")
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order)


class Layer(NamedTuple):
    """A linear layer among the arguments of an operator that runs several.

    Attributes:
        weight: ``[N, K]``; with the bias it gives the graph its edges, and the gradients their shapes and dtypes.
        bias: ``[N]`` or None.
        bias_value: the bias as it is added: unchanged, or rounded to the output's dtype.
        rows: the weight as fprop takes it.
        columns: the weight as dgrad takes it; None if no gradient needs it.
    """

    weight: Tensor
    bias: Tensor | None
    bias_value: Tensor | None
    rows: Operand
    columns: Operand | None


# Operators take only tensors, strings and numbers. The functions behind them take values with several of these, which
# are flattened here, and only here. A state is passed by its handle, so a compiled graph does not see recording as a
# mutation of an input: that would force an order on the graphs of all layers, and fail where their backward passes
# interleave. Hiding it is safe, because a maximum may be taken twice and in any order.
_OPERAND = "Tensor {0}, Tensor {0}_scale_inv, str {0}_scaling"
_NO_OPERAND = _OPERAND.replace("Tensor", "Tensor?")
_PARTS = {
    "Operand": _OPERAND,
    "Operand?": _NO_OPERAND,
    "Layer": "Tensor {0}_weight, Tensor? {0}_bias, Tensor? {0}_bias_value, "
    + ", ".join((_OPERAND, _NO_OPERAND.replace("{0}", "{0}_t"))),
    "Groups": "Tensor {0}_position, Tensor {0}_of_tile, Tensor {0}_edges",
    "Slot": "Tensor {0}_index, int {0}_state, bool {0}_record, str {0}_how",
}


class Signature(NamedTuple):
    """The signature of an operator and of the functions behind it.

    Attributes:
        name: of the operator.
        kinds: one for each argument of the functions: its key in ``_PARTS``, or an empty string if it stays as it is.
    """

    name: str
    kinds: tuple[str, ...]

    def assembled(self, flat: Sequence[Any]) -> list[Any]:
        """The functions' arguments, made from the operator's."""
        values = iter(flat)
        arguments: list[Any] = []
        for kind in self.kinds:
            # the dispatcher omits arguments with default values
            arguments.extend((_assemble(kind, values),) if kind else islice(values, 1))
        return arguments

    def flattened(self, arguments: Sequence[Any]) -> list[Any]:
        """The operator's arguments, made from the functions'."""
        # `extend`, because the compiler of torch 2.11 cannot add a named tuple to a list by `+=`
        flat: list[Any] = []
        for kind, argument in zip(self.kinds, arguments):
            _flatten(kind, argument, flat)
        return flat


def _assemble(kind: str, values: Iterator[Any]) -> Any:
    flat = list(islice(values, _PARTS[kind].count(",") + 1))
    if kind == "Groups":
        return Groups(*flat)
    if kind == "Slot":
        index, handle, record, how = flat
        rows, columns, casting, group = how.split("|", 3)
        state = state_of(handle)
        generation = 0 if state is None else state.model.generation
        scalings = Scaling.from_json(rows), Scaling.from_json(columns)
        return Slot(index, state, *scalings, record, Casting(int(casting)), group, generation)
    if kind == "Layer":
        parts = iter(flat)
        weight, bias, bias_value = islice(parts, 3)
        return Layer(weight, bias, bias_value, _assemble("Operand", parts), _assemble("Operand?", parts))
    codes, scale_inv, scaling = flat
    return None if codes is None else Operand(codes, scale_inv, Scaling.from_json(scaling))


def _flatten(kind: str, value: Any, flat: list[Any]) -> None:
    if not kind:
        flat.append(value)
    elif kind == "Slot":
        state = value.live_state
        handle = 0 if state is None else state.model.handle
        # an exported or traced program may be loaded in another process, where the handle may belong to another model
        if is_exporting() or _get_tracing_state() is not None:
            refuse_recording_export(value.record)
            handle = 0
        how = f"{value.rows.name}|{value.columns.name}|{int(value.casting)}|{value.group}"
        flat.extend((value.index, handle, value.record, how))
    elif kind == "Layer":
        flat.extend(value[:3])
        _flatten("Operand", value.rows, flat)
        _flatten("Operand?", value.columns, flat)
    elif kind == "Groups":
        flat.extend(value)
    elif value is None:
        flat.extend((None, None, ""))
    else:
        flat.extend((value.codes, value.scale_inv, value.scaling.name))


def define(schema: str) -> Signature:
    """Define an operator by a schema that may have the keys of ``_PARTS`` as types."""
    name, arguments, results = re.fullmatch(r"(\w+)\((.*)\) -> (.*)", schema).groups()  # type: ignore[union-attr]
    split = [argument.split(" ", 1) for argument in arguments.split(", ")]
    kinds = tuple(kind if kind in _PARTS else "" for kind, _ in split)
    flat = (_PARTS[kind].format(called) if kind in _PARTS else f"{kind} {called}" for kind, called in split)
    LIBRARY.define(f"{name}({', '.join(flat)}) -> {results}", tags=_TAGS)
    return Signature(name, kinds)


class Operator:
    """Calls a function directly, or torch's operator where operators are watched or traced.

    torch's dispatcher takes several times as long as the function's own work on the host.

    Attributes:
        op: torch's operator.
        signature: its arguments.
        run: the function that is called directly if nothing watches operators.
    """

    def __init__(self, signature: Signature, run: Callable[..., Any]) -> None:
        self.op = getattr(torch.ops.lightning_fp8, signature.name).default
        self.signature, self.run = signature, run

    def __call__(self, *arguments: Any) -> Any:
        """The operator's result; its first argument is a tensor, or an operand."""
        x = arguments[0][0] if self.signature.kinds[0] else arguments[0]
        return self.watched(*arguments) if is_watched(x) else self.run(*arguments)

    def watched(self, *arguments: Any) -> Any:
        """The result of torch's operator."""
        refuse_transforms()
        return self.op(*self.signature.flattened(arguments))


def implement(signature: Signature, function: Callable[..., Any], fake: Callable[..., Any]) -> Operator:
    """Register the implementation of an operator, for any device, and its fake; returns the callable."""
    for device in ("CPU", "CUDA"):
        LIBRARY.impl(signature.name, _with_flat_arguments(signature, function), device)
    torch.library.register_fake(f"lightning_fp8::{signature.name}", _with_flat_arguments(signature, fake), lib=LIBRARY)
    return Operator(signature, function)


def _with_flat_arguments(signature: Signature, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with the operator's flat arguments."""

    def operator(*flat: Any, **rest: Any) -> Any:
        return function(*signature.assembled(flat), **rest)

    return operator


class Differentiable(torch.autograd.Function):
    """The base of functions that run a differentiable operator's code directly if nothing watches operators."""

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        """Refuse forward-mode differentiation."""
        raise RuntimeError(NO_TRANSFORMS)


def direct_apply(function: type[Differentiable]) -> Callable[..., Any]:
    """``function.apply`` without unwrapping the arguments for transforms, which :func:`is_watched` excludes."""
    return super(torch.autograd.Function, function).apply  # type: ignore[misc, no-any-return]


def implement_differentiable(
    signature: Signature,
    eager: Callable[..., Any],
    forward: Callable[..., Any],
    save: Callable[..., None],
    backward: Callable[..., Sequence[Tensor | None]],
    fake: Callable[..., Any],
) -> Operator:
    """Register an operator with gradients, on any device; returns the callable, like :func:`implement`.

    Differentiable are the first argument, and the weight and the bias of each layer, in this order; or, without layers,
    the first three arguments: x, weight and bias.

    Args:
        signature: of the operator.
        eager: runs instead of the operator if nothing watches operators.
        forward: what the operator computes.
        save: ``(ctx, output, *arguments)``, saves tensors for backward; ``ctx.needs`` has a bool for each gradient.
        backward: ``(ctx, *gradients of the output)``, returns the gradients, and possibly more that are None.
        fake: the shapes of what the operator computes.
    """
    positions, at = [0], 0
    for kind in signature.kinds:
        positions += [at, at + 1] if kind == "Layer" else []
        at += _PARTS[kind].count(",") + 1 if kind else 1
    positions = positions if len(positions) > 1 else [0, 1, 2]

    def save_of_operator(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.is_eager, ctx.needs = False, [ctx.needs_input_grad[position] for position in positions]
        save(ctx, output, *signature.assembled(inputs))

    def gradients_of_operator(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        grad_inputs: list[Tensor | None] = [None] * len(operator.op._schema.arguments)
        for position, gradient in zip(positions, backward(ctx, *gradients), strict=False):
            grad_inputs[position] = gradient
        return tuple(grad_inputs)

    name, qualified = signature.name, f"lightning_fp8::{signature.name}"
    LIBRARY.impl(name, _with_flat_arguments(signature, forward), "CompositeExplicitAutograd")
    torch.library.register_autograd(qualified, gradients_of_operator, setup_context=save_of_operator, lib=LIBRARY)
    torch.library.register_fake(qualified, _with_flat_arguments(signature, fake), lib=LIBRARY)
    operator = Operator(signature, eager)
    return operator


def nothing(like: Tensor, dtype: torch.dtype) -> Tensor:
    """An empty tensor, in place of a result that is not requested."""
    return like.new_empty(0, dtype=dtype)
