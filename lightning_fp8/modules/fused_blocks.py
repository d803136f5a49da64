"""Feed-forward blocks of known classes, run fused: conversion changes the class of the object that holds the parts.

A class is recognised by the source of its method: see ``known_blocks``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from inspect import signature
from typing import Any, ClassVar, cast

from torch import Tensor, nn

from lightning_fp8.modules.adapters import adapted_layer
from lightning_fp8.modules.class_swap import Swapped, exchange_class, own_class, plain_class
from lightning_fp8.modules.computed_weight import is_computed
from lightning_fp8.modules.feed_forward import (
    SHARDED,
    FeedForward,
    activation_name,
    reason_against_fusing,
    run_block,
)
from lightning_fp8.modules.known_blocks import Form, form_of_class, known_form, part_at
from lightning_fp8.modules.linear import LinearForward

Step = FeedForward | Callable[[Tensor], Tensor]

_ACTIVATION_MODULES = ("torch.nn.modules.activation", "transformers.activations")


class Fp8FeedForward(Swapped):
    """A module whose feed-forward block runs fused if possible, else part by part.

    Never constructed: if conversion has converted the linear layers of a module of a known form, it changes the
    module's class to a subclass of both this class and the module's own.

    Attributes:
        form: how the class computes the block.
    """

    form: ClassVar[Form]

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduce_value = cast("tuple[Any, ...]", super().__reduce_ex__(protocol))
        return _new, (self.plain_class, self.form), *reduce_value[2:]


def _new(plain_class: type[nn.Module], form: Form) -> nn.Module:
    """An object to unpickle into. It gets the plain class if the code of that class no longer has this form."""
    is_same = form_of_class(plain_class, dict(zip(form.around, form.classes))) == form
    kind = _fused_class(plain_class, form) if is_same else plain_class
    return kind.__new__(kind)


def fuse_feed_forward(modules: Iterable[nn.Module]) -> None:
    """Give modules of a known form the fused class if a block's linear layers are converted, else their own class."""
    for module in modules:
        kind = plain_class(module)
        form = known_form(module, kind)
        if form is not None and any(map(_can_be_fused, _blocks(module, form))):
            exchange_class(module, _fused_class(kind, form))
        elif isinstance(module, Fp8FeedForward):
            exchange_class(module, kind)


def notes(modules: Iterable[nn.Module]) -> dict[nn.Module, str]:
    """For each linear layer of a feed-forward block of a known form, whether it runs fused, and why not."""
    texts: dict[nn.Module, str] = {}
    for module in modules:
        for base in plain_class(module).__mro__:
            form = known_form(module, base) if issubclass(base, nn.Module) else None
            if form is not None:
                for block in _blocks(module, form):
                    layers = [adapted_layer(part) for part in (*block.first, block.second)]
                    texts.update(dict.fromkeys(layers, _note(module, base, form, block)))
                break
    return texts


def _note(module: nn.Module, base: type[nn.Module], form: Form, block: FeedForward) -> str:
    """Whether a block of a module runs fused. ``base``, the module's class or a base of it, has this form."""
    kind, reason = plain_class(module), reason_against_fusing(block)
    if base is not kind:
        reason = f"{kind.__name__} overrides `{form.method}` of {base.__name__}"
    elif reason is None and not isinstance(module, Fp8FeedForward):
        reason = "built since the conversion, so call `convert` again"
    if reason == SHARDED:
        # sharded only between forwards: FSDP gathers them for each forward
        return "feed-forward fused if its weights are gathered"
    return "feed-forward fused" if reason is None else f"feed-forward not fused: {reason}"


def _parts(module: nn.Module, form: Form) -> list[Any]:
    """The parts that the method of the module calls, in the order of :attr:`Form.paths`."""
    return (
        list(module._modules.values()) if form.kind == "sequential" else [part_at(module, path) for path in form.paths]
    )


def _steps(module: nn.Module, form: Form) -> list[Step]:
    """What the module's method calls, with each feed-forward block in it as one step."""
    parts = _parts(module, form)
    if form.kind in ("sequential", "chain"):
        return _joined(parts)
    last, activation, *first = parts
    around = tuple(part_at(module, name) for name in form.around)
    return [FeedForward(tuple(first), activation, last, around=around, packed=form.kind == "packed")]


def _joined(calls: list[Callable[[Tensor], Tensor]]) -> list[Step]:
    """Calls, one after the other, with each linear - activation - dropouts - linear as one step."""
    steps: list[Step] = []
    position = 0
    while position < len(calls):
        block, length = _blockpart_at(calls, position)
        steps.append(calls[position] if block is None else block)
        position += length
    return steps


def _blockpart_at(calls: list[Callable[[Tensor], Tensor]], position: int) -> tuple[FeedForward | None, int]:
    """The block that begins at this position, and how many calls it takes."""
    end = position + 2
    while end < len(calls) and type(calls[end]) is nn.Dropout:
        end += 1
    if end < len(calls) and _is_linear(calls[position]) and _is_linear(calls[end]):
        activation = calls[position + 1]
        if not isinstance(activation, nn.Module) or type(activation).__module__ in _ACTIVATION_MODULES:
            dropouts = tuple(calls[position + 2 : end])
            first, second = cast(nn.Module, calls[position]), cast(nn.Module, calls[end])
            return FeedForward((first,), activation, second, dropouts), end + 1 - position  # type: ignore[arg-type]
    return None, 1


def _is_linear(call: object) -> bool:
    return isinstance(call, nn.Linear) or type(call) in LinearForward.family


def _blocks(module: nn.Module, form: Form) -> list[FeedForward]:
    return [step for step in _steps(module, form) if isinstance(step, FeedForward)]


def _can_be_fused(block: FeedForward) -> bool:
    """Whether the block meets the conditions that are fixed at conversion; others may change from call to call."""
    layers = [*block.first, block.second]
    return activation_name(block.activation) is not None and all(
        own_class(layer) in LinearForward.family and not is_computed(layer) for layer in layers
    )


def _run_steps(self: Fp8FeedForward, x: Tensor) -> Tensor:
    for step in _steps(self, self.form):
        x = run_block(step, x) if isinstance(step, FeedForward) else step(x)
    return x


def _run_two_modules(self: Fp8FeedForward, x: Tensor) -> Tensor:
    form = self.form
    is_known = tuple(type(part_at(self, name)) for name in form.around) == form.classes
    (block,) = _steps(self, form) if is_known else (None,)
    if not isinstance(block, FeedForward) or reason_against_fusing(block) is not None:
        return cast(Tensor, getattr(self.plain_class, form.method)(self, x))
    dropout, norm = (part_at(self, path) for path in form.behind)
    return cast(Tensor, norm(dropout(run_block(block, x)) + x))


def _method(run: Callable[[Any, Tensor], Tensor], plain: Callable[..., Any]) -> Callable[..., Tensor]:
    """The method of a fused class. Calls with anything but a single tensor run the plain method."""

    def method(self: Fp8FeedForward, *args: Tensor, **named: Tensor) -> Tensor:
        if named or len(args) != 1:
            return cast(Tensor, getattr(self.plain_class, self.form.method)(self, *args, **named))
        return run(self, *args)

    # transformers counts the arguments of `feed_forward_chunk`
    method.__signature__ = signature(plain)  # type: ignore[attr-defined]
    return method


_classes: dict[tuple[type[nn.Module], Form], type[Fp8FeedForward]] = {}


def _fused_class(kind: type[nn.Module], form: Form) -> type[Fp8FeedForward]:
    """The fused class, shared by all modules of a class."""
    if (kind, form) not in _classes:
        run = _run_two_modules if form.kind == "two modules" else _run_steps
        attributes = {"plain_class": kind, "form": form, form.method: _method(run, getattr(kind, form.method))}
        attributes |= {"__doc__": kind.__doc__, "__module__": kind.__module__}
        _classes[kind, form] = type(f"Fp8{kind.__name__}", (Fp8FeedForward, kind), attributes)
    return _classes[kind, form]
