"""The known forms of feed-forward blocks, recognised by what a class's method computes, not by the class's name.

The method runs once, with a stand-in for the module whose attributes can only be called. What it returns is then a tree
of these calls: ``(name, argument)`` of a module, ``"x"`` of the method's argument.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import nn

# torch's transformer layers compute the block in `_ff_block`, BERT's in `feed_forward_chunk`
_METHODS = ("forward", "_ff_block", "feed_forward_chunk")
# parts of the names of instructions that run code conditionally, or have effects besides the value that is returned
_EFFECTS = ("JUMP", "EXC", "FINALLY", "WITH", "YIELD", "GLOBAL", "DEREF", "IMPORT", "FUNCTION", "STORE_ATTR")


class Form(NamedTuple):
    """How a known class computes its feed-forward block.

    Attributes:
        kind: ``"sequential"``; ``"chain"``, modules one after the other; ``"gated"``; ``"packed"``, which is gated with
            one layer for gate and up; or ``"two modules"``.
        method: the method that computes the block.
        paths: the parts that the method calls: of a chain in the order of the calls; of any other block the last layer,
            the activation, and the first layer, or gate and up.
        around: for two modules, their names, in the order of the calls.
        classes: for two modules, their classes.
        behind: for two modules, the dropout of the block's output, and the norm of its sum with the block's input.
    """

    kind: str
    method: str
    paths: tuple[str, ...] = ()
    around: tuple[str, ...] = ()
    classes: tuple[type[nn.Module], ...] = ()
    behind: tuple[str, ...] = ()


def form_of_class(kind: type[nn.Module], classes: Mapping[str, type[nn.Module]]) -> Form | None:
    """How a class computes its feed-forward block; None if that is not known exactly.

    Args:
        kind: the class.
        classes: the classes of its modules, by name.
    """
    # A class that acts when it is subclassed, or has a metaclass, is left alone. Exceptions are the layers of
    # transformers: they wrap their forward when subclassed, and support that, as `fully_shard` subclasses, too.
    acting = (base for base in kind.__mro__[:-1] if "__init_subclass__" in vars(base))
    if type(kind) is not type or any(base.__module__ != "transformers.modeling_layers" for base in acting):
        return None
    if kind.forward is nn.Sequential.forward and kind.__iter__ is nn.Sequential.__iter__:  # type: ignore[attr-defined]
        return Form("sequential", "forward")
    for method in _METHODS:
        tree, called = computed_by(getattr(kind, method, None))
        form = None
        match tree:
            case (last, ("*", (activation, (gate, "x")), (up, "x"))):
                # Llama's
                form = Form("gated", method, (last, activation, gate, up))
            case (last, ("*", ("half 1", (first, "x")), (activation, ("half 0", (same, "x"))))) if same == first:
                # Phi-3's
                form = Form("packed", method, (last, activation, first))
            case (second, (first, "x"), "x") if called == (first, second) and classes.keys() >= set(called):
                # BERT's
                return _form_of_two_modules(method, called, (classes[first], classes[second]))
            case _ if len(called) >= 3 and tree == _chain(called):
                return Form("chain", method, called)
        if form is not None and sorted(form.paths) == sorted(called):
            return form
    return None


def _chain(names: tuple[str, ...]) -> Any:
    tree: Any = "x"
    for name in names:
        tree = name, tree
    return tree


def _form_of_two_modules(method: str, names: tuple[str, ...], classes: tuple[type[nn.Module], ...]) -> Form | None:
    match [computed_by(kind.forward) for kind in classes]:
        case [
            ((activation, (first, "x")), (_, _)),
            ((norm, ("+", (dropout, (last, "x")), "y")), (_, _, _)),
        ]:
            inner, outer = names
            paths = f"{outer}.{last}", f"{inner}.{activation}", f"{inner}.{first}"
            return Form("two modules", method, paths, names, classes, (f"{outer}.{dropout}", f"{outer}.{norm}"))
    return None


def computed_by(method: object) -> tuple[Any, tuple[str, ...]]:
    """What a method returns, as a tree, and the modules that it calls; None if it may do, or depend on, anything else.

    >>> class Block:
    ...     def forward(self, hidden):
    ...         hidden = self.up(hidden)
    ...         return self.down(hidden)
    >>> computed_by(Block.forward)
    (('down', ('up', 'x')), ('up', 'down'))
    """
    unknown = None, ()
    # a method that a decorator has wrapped reads the wrapped one from a closure
    if not inspect.isfunction(method) or any(
        effect in step.opname for step in dis.get_instructions(method) for effect in _EFFECTS
    ):
        return unknown
    arguments = list(inspect.signature(method).parameters.values())[1:]
    if any(param.kind is not param.POSITIONAL_OR_KEYWORD or param.default is not param.empty for param in arguments):
        return unknown
    module = _Module()
    try:
        returned = method(module, *map(_Value, "xy"[: len(arguments)]))
    except (AttributeError, TypeError):
        return unknown
    return (returned.tree, tuple(module._called)) if isinstance(returned, _Value) else unknown


@dataclass(frozen=True)
class _Value:
    """Stands for a tensor; operations other than these raise an error."""

    tree: Any

    def __add__(self, other: _Value) -> _Value:
        return _Value(("+", self.tree, other.tree))

    def __mul__(self, other: _Value) -> _Value:
        return _Value(("*", self.tree, other.tree))

    def chunk(self, chunks: int, dim: int) -> list[_Value]:
        if (chunks, dim) != (2, -1):
            raise TypeError
        return [_Value((f"half {number}", self.tree)) for number in range(2)]


class _Module:
    """Stands for a module that holds others, and records their calls."""

    def __init__(self) -> None:
        self._called: list[str] = []

    def __getattr__(self, name: str) -> Callable[..., _Value]:
        def call(*arguments: _Value) -> _Value:
            self._called.append(name)
            return _Value((name, *(argument.tree for argument in arguments)))

        return call
