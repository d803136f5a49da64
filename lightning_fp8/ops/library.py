"""Defines and calls the operators ``torch.ops.lightning_fp8.*``."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch._C import _get_tracing_state
from torch._C._functorch import (
    TransformType,
    get_interpreter_stack,
    is_legacy_batchedtensor,
    peek_interpreter_stack,
)
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling
from torch.nn import Parameter
from torch.utils._python_dispatch import _len_torch_dispatch_stack

from lightning_fp8.ops.operand import (
    Columns,
    Fp8Operand,
    Fp8Tensor,
    Groups,
    Layer,
    Slot,
    WeightSlot,
    how_in_words,
    parsed_how,
    refuse_recording_export,
    state_of,
)
from lightning_fp8.runtime.device import is_capturing

T = TypeVar("T")
LIBRARY = torch.library.Library("lightning_fp8", "DEF")
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order)
_PLAIN_TENSORS = frozenset((Tensor, Parameter))
_NO_TRANSFORMS = (
    "lightning_fp8: FP8 layers run neither in forward-mode differentiation (`torch.func.jvp`, `jacfwd`,"
    " `torch.autograd.forward_ad`) nor in the gradients of `torch.func` (`grad`, `vjp`, `jacrev`). Use"
    " `torch.autograd.grad`, call `lightning_fp8.unconvert(model)` first, or leave the layers in bf16 with"
    " `ignore_modules`."
)
# whether the CUDA functions also run on CPU tensors: for tests, and to measure host time
cuda_on_cpu = False


# Operators take tensors, strings and numbers; the values that the functions behind them take are flattened here, and
# only here. A state is passed by its handle, so a compiled graph does not see recording as a mutation of an input,
# which would force an order on the graphs of all layers and fail where their backward passes interleave. That is safe,
# since a maximum may be taken twice and in any order.
_PARTS: dict[type[tuple[Any, ...]], str] = {
    Fp8Operand: "Tensor {0}, Tensor {0}_t, Tensor {0}_scale_inv, Tensor {0}_t_scale_inv, str {0}_format",
    Fp8Tensor: "Tensor {0}, Tensor {0}_scale_inv, str {0}_format",
    Layer: "Tensor {0}_weight, Tensor? {0}_bias, Tensor? {0}_bias_value, Tensor {0}, Tensor {0}_t, "
    "Tensor {0}_scale_inv, Tensor {0}_t_scale_inv, str {0}_format",
    Columns: "Tensor? {0}, Tensor {0}_scale_inv, str {0}_format",
    Groups: "Tensor {0}_position, Tensor {0}_of_tile, Tensor {0}_edges",
    Slot: "Tensor {0}_scale, Tensor {0}_amax_history, Tensor {0}_index, int {0}_state, bool {0}_record, str {0}_how",
    WeightSlot: "Tensor {0}_index, int {0}_state, bool {0}_record, str {0}_how",
}
_BY_NAME = {kind.__name__: kind for kind in _PARTS}


class Signature(NamedTuple):
    """The signature of an operator and of the functions behind it.

    Attributes:
        name: of the operator.
        kinds: for each argument of the functions, the class to flatten; None if the operator takes it as it is.
        order: for each argument of the operator, its place among the flattened ones; empty if they are in that order.
    """

    name: str
    kinds: tuple[type[tuple[Any, ...]] | None, ...]
    order: tuple[int, ...] = ()

    def assembled(self, flat: Sequence[Any]) -> list[Any]:
        """The functions' arguments, made from the operator's."""
        if not any(self.kinds):
            return [*flat]
        values = iter([flat[self.order.index(at)] for at in range(len(flat))] if self.order else flat)
        arguments: list[Any] = []
        for kind in self.kinds:
            # the dispatcher leaves out what has its default value
            arguments.extend(islice(values, 1) if kind is None else (_assemble(kind, values),))
        return arguments

    def flattened(self, arguments: Iterable[Any]) -> list[Any]:
        """The operator's arguments, made from the functions'."""
        flat = _in_parts(arguments)
        return [flat[at] for at in self.order if at < len(flat)] if self.order else flat


def _assemble(kind: type[tuple[Any, ...]], values: Iterator[Any]) -> Any:
    constructor: Any = kind
    if kind is Layer:
        return constructor(*islice(values, 3), _assemble(Fp8Operand, values))
    flat = islice(values, _arguments(kind))
    if kind not in (Slot, WeightSlot):
        return constructor(*flat)
    *tensors, handle, record, how = flat
    fmt, current = parsed_how(how)
    state = state_of(handle)
    if kind is WeightSlot:
        return constructor(*tensors, fmt, state, record, current)
    return constructor(*tensors, fmt, state, record, current, 0 if state is None else state.model.generation)


def _arguments(kind: type[tuple[Any, ...]]) -> int:
    """How many of the operator's arguments one value of this class is flattened to."""
    return _PARTS[kind].count(",") + 1


def _in_parts(arguments: Iterable[Any]) -> list[Any]:
    """The functions' arguments, with each value in its parts."""
    # `extend`, because the compiler of torch 2.11 cannot add a named tuple to a list by `+=`
    flat: list[Any] = []
    # an exported or traced program may be loaded in another process, where the handle may belong to another model
    leaves_process = is_exporting() or _get_tracing_state() is not None
    for argument in arguments:
        if isinstance(argument, (Slot, WeightSlot)):
            state = argument.live_state
            handle = 0 if state is None else state.model.handle
            if leaves_process:
                refuse_recording_export(argument.record)
                handle = 0
            if isinstance(argument, Slot):
                flat.extend(argument[:3])
            else:
                flat.append(argument.index)
            flat.extend((handle, argument.record, how_in_words(argument.format, argument.current)))
        elif isinstance(argument, (Fp8Operand, Fp8Tensor, Columns, Groups)):
            flat.extend(argument)
        elif isinstance(argument, Layer):
            flat.extend((*argument[:3], *argument.operand))
        else:
            flat.append(argument)
    return flat


def define(schema: str, order: Sequence[str] = ()) -> Signature:
    """Define an operator by a schema that may name the classes of :mod:`lightning_fp8.ops.operand` as types.

    ``order`` has the names of the operator's arguments, if they are not in the order of the schema.
    """
    name, arguments, results = re.fullmatch(r"(\w+)\((.*)\) -> (.*)", schema).groups()  # type: ignore[union-attr]
    split = [argument.split(" ", 1) for argument in arguments.split(", ")]
    kinds = tuple(_BY_NAME.get(kind) for kind, _ in split)
    flat = ", ".join(
        f"{of} {called}" if kind is None else _PARTS[kind].format(called)
        for (of, called), kind in zip(split, kinds, strict=True)
    ).split(", ")
    names = [argument.split(" ")[1].split("=")[0] for argument in flat]
    places = tuple(names.index(called) for called in order)
    LIBRARY.define(f"{name}({', '.join([flat[at] for at in places] or flat)}) -> {results}", tags=_TAGS)
    return Signature(name, kinds, places)


class Operator:
    """Calls the device's function directly, or torch's operator where operators are watched or traced.

    torch's dispatcher takes several times as long as the function's own work on the host.

    Attributes:
        op: torch's operator.
        signature: its arguments.
        cpu: the function for tensors on a CPU.
        cuda: the function for tensors on a GPU.
    """

    def __init__(self, signature: Signature, cpu: Callable[..., Any], cuda: Callable[..., Any]) -> None:
        self.op = getattr(torch.ops.lightning_fp8, signature.name).default
        self.signature = signature
        self.cpu, self.cuda = cpu, cuda
        self._takes_fp8 = signature.kinds[0] is Fp8Tensor

    def __call__(self, *arguments: Any) -> Any:
        """The operator's result; its first argument is a tensor, possibly in FP8."""
        x = arguments[0][0] if self._takes_fp8 else arguments[0]
        if is_watched(x):
            refuse_transforms()
            return self.op(*self.signature.flattened(arguments))
        return (self.cuda if x.is_cuda or cuda_on_cpu else self.cpu)(*arguments)

    def run(self, *arguments: Any) -> Any:
        """The device's function: for use inside another operator, where nothing watches operators."""
        x = arguments[0][0] if self._takes_fp8 else arguments[0]
        return (self.cuda if x.is_cuda or cuda_on_cpu else self.cpu)(*arguments)


# dynamo calls this instead of tracing it: in torch 2.11 it would take torch's function to be True wherever it compiles
@torch.compiler.assume_constant_result
def is_exporting() -> bool:
    """Whether a program is being made by ``torch.export``."""
    return torch.compiler.is_exporting()


# dynamo calls this instead of tracing it; its guards include the transforms and the level of forward mode
@torch.compiler.assume_constant_result
def refuse_transforms() -> None:
    """Raise a RuntimeError in forward-mode differentiation and in the gradients of ``torch.func``.

    Operators would return zero tangents in the former. The latter do not reach the gradients of an operator, and copies
    of weights, which outlive them, would be their wrappers.
    """
    in_grad = any(interpreter.key() == TransformType.Grad for interpreter in get_interpreter_stack() or ())
    if in_grad or forward_ad._current_level >= 0:
        raise RuntimeError(_NO_TRANSFORMS)


def on_gpu(x: Tensor) -> bool:
    """Whether the CUDA functions run on x."""
    return x.is_cuda or cuda_on_cpu


def is_watched(x: Tensor) -> bool:
    """Whether calls on x must go through torch's operators: under a compiler, a dispatch mode (selective checkpointing,
    a FLOP counter), a transform of ``torch.func`` or ``torch.jit.trace``; for subclasses and meta tensors.
    """
    return (
        # other tracers use tensor subclasses
        is_dynamo_compiling()
        or type(x) not in _PLAIN_TENSORS
        or x.is_meta
        or _len_torch_dispatch_stack() > 0
        or in_transform()
        # of `torch.autograd.grad(is_grads_batched=True)`, which is no transform of `torch.func`
        or is_legacy_batchedtensor(x)
        or _get_tracing_state() is not None
    )


def backward_may_follow() -> bool:
    """Whether to prepare for a backward pass.

    ``torch.jit.trace`` always does: it traces again without gradients, and raises if the two programs differ.
    """
    return torch.is_grad_enabled() or _get_tracing_state() is not None


def in_transform() -> bool:
    """Whether a ``torch.func`` transform is running. Its tensors have no address, so changes cannot be detected."""
    return peek_interpreter_stack() is not None


def may_get_gradient(weight: Tensor) -> bool:
    """Whether the weight is trained; a tensor inside ``vmap`` does not say, outside of a compiler."""
    return weight.requires_grad or (not is_dynamo_compiling() and in_transform())


def can_keep_copies(weight: Tensor) -> bool:
    """Whether the current context can detect a stale copy, and may run different operators when there is a copy.

    Nothing in a compiled, traced or captured graph, or in a transform of ``torch.func``, can see whether a copy is
    stale. A dispatch mode, such as that of selective checkpointing, must see the same operators when a forward is
    recomputed.
    """
    return not (
        is_dynamo_compiling()
        or _get_tracing_state() is not None
        or _len_torch_dispatch_stack()
        or in_transform()
        or is_capturing(weight.is_cuda)
    )


def implement(
    signature: Signature, cpu: Callable[..., Any], cuda: Callable[..., Any], fake: Callable[..., Any]
) -> Operator:
    """Register the implementations of an operator for both devices, and its fake; returns the callable."""
    LIBRARY.impl(signature.name, with_flat_arguments(signature, cpu), "CPU")
    LIBRARY.impl(signature.name, with_flat_arguments(signature, cuda), "CUDA")
    torch.library.register_fake(f"lightning_fp8::{signature.name}", with_flat_arguments(signature, fake), lib=LIBRARY)
    return Operator(signature, cpu, cuda)


def with_flat_arguments(signature: Signature, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with the operator's flat arguments."""

    def operator(*flat: Any, **rest: Any) -> Any:
        return function(*signature.assembled(flat), **rest)

    return operator


class Differentiable(torch.autograd.Function):
    """The base of the functions that compute what differentiable operators do, where nothing watches operators."""

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        """Refuse forward-mode differentiation."""
        raise RuntimeError(_NO_TRANSFORMS)


def direct_apply(function: type[Differentiable]) -> Callable[..., Any]:
    """``function.apply`` without unwrapping the arguments for transforms, which :func:`is_watched` excludes."""
    return super(torch.autograd.Function, function).apply  # type: ignore[misc, no-any-return]


def implement_differentiable(
    signature: Signature,
    positions: Sequence[int],
    eager: Callable[..., Any],
    forward: Callable[..., Any],
    save: Callable[..., None],
    backward: Callable[..., Sequence[Tensor | None]],
    fake: Callable[..., Any],
) -> Operator:
    """Register an operator with gradients, on any device; returns the callable, like :func:`implement`.

    Args:
        signature: of the operator.
        positions: those of the tensors with gradients among the operator's arguments.
        eager: what runs instead of the operator where nothing watches operators.
        forward: what the operator computes.
        save: ``(ctx, output, *arguments)``, saves tensors for backward.
        backward: ``(ctx, *gradients of the output)``, returns the gradients of ``positions``, and possibly more that
            are None.
        fake: the shapes of what the operator computes.
    """

    def save_of_operator(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        save(ctx, output, *signature.assembled(inputs))

    def gradients_of_operator(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        grad_inputs: list[Tensor | None] = [None] * len(operator.op._schema.arguments)
        for at, gradient in zip(positions, backward(ctx, *gradients), strict=False):
            grad_inputs[at] = gradient
        return tuple(grad_inputs)

    name, qualified = signature.name, f"lightning_fp8::{signature.name}"
    LIBRARY.impl(name, with_flat_arguments(signature, forward), "CompositeExplicitAutograd")
    torch.library.register_autograd(qualified, gradients_of_operator, setup_context=save_of_operator, lib=LIBRARY)
    torch.library.register_fake(qualified, with_flat_arguments(signature, fake), lib=LIBRARY)
    operator = Operator(signature, eager, eager)
    return operator


def differentiable_in_layers(
    signature: Signature,
    collected: Callable[..., T],
    forward: Callable[[T], Any],
    save: Callable[[Any, Any, T], None],
    backward: Callable[..., Sequence[Tensor | None]],
    fake: Callable[[T], Any],
) -> Operator:
    """:func:`implement_differentiable` for an operator of an input and several layers, whose functions take one value.

    Gradients are those of the input, and of the weight and the bias of each :class:`~lightning_fp8.ops.operand.Layer`,
    in the order of the arguments; ``ctx.needs`` has a bool for each.

    Args:
        signature: of the operator.
        collected: makes the value from the operator's arguments.
        forward: what the operator computes.
        save: ``(ctx, output, value)``, saves tensors for backward.
        backward: as for :func:`implement_differentiable`.
        fake: the shapes of what the operator computes.
    """
    layers = [at for at, kind in enumerate(signature.kinds) if kind is Layer]

    class Function(Differentiable):
        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> Any:
            # backward would be given zeros in place of gradients that do not exist, those of payloads among them
            ctx.set_materialize_grads(False)
            ctx.needs, value = ctx.needs_input_grad[:-1], collected(*inputs[-1])
            output = forward(value)
            save(ctx, output, value)
            return output

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            if gradients[0] is None:
                return (None,) * len(ctx.needs_input_grad)
            return *backward(ctx, *gradients), None

    Function.__name__ = Function.__qualname__ = f"Fp8{signature.name.title()}"
    apply = direct_apply(Function)

    def apply_to_layers(*arguments: Any) -> Any:
        # autograd sees tensors that are arguments, but not those inside an argument
        return apply(arguments[0], *(tensor for at in layers for tensor in arguments[at][:2]), arguments)

    positions, at = [0], 0
    for kind in signature.kinds:
        positions += [at, at + 1] if kind is Layer else []
        at += 1 if kind is None else _arguments(kind)

    def save_of_operator(ctx: Any, output: Any, *arguments: Any) -> None:
        ctx.needs = [ctx.needs_input_grad[at] for at in positions]
        save(ctx, output, collected(*arguments))

    def of_value(function: Callable[[T], Any]) -> Callable[..., Any]:
        return lambda *arguments: function(collected(*arguments))

    return implement_differentiable(
        signature, positions, apply_to_layers, of_value(forward), save_of_operator, backward, of_value(fake)
    )
