"""The known forms of feed-forward blocks, recognised by what a class's method computes, not by the class's name."""

from __future__ import annotations

import re
from typing import NamedTuple

from torch import nn

from lightning_fp8.modules.straight_line import returned_by

# torch's transformer layers compute the block in `_ff_block`
_METHODS = ("forward", "_ff_block")
_CALL = re.compile(r"self\.(\w+)\((.+)\)")
# down(act(gate(x)) * up(x)), as in Llama
_GATED = re.compile(r"self\.(\w+)\(self\.(\w+)\(self\.(\w+)\(x\)\) \* self\.(\w+)\(x\)\)")
# down(up * act(gate)) with [gate | up] = gate_up(x), as in Phi-3
_PACKED = re.compile(
    r"self\.(\w+)\(self\.(\w+)\(x\)\.chunk\(2, dim=-1\)\[1\] \* self\.(\w+)\(self\.\2\(x\)\.chunk\(2, dim=-1\)\[0\]\)\)"
)
# BERT's layer calls two modules, of which the second adds the block's input
_TWO_MODULES = "self.output(self.intermediate(x), x)"
_OUTPUT = "self.LayerNorm(self.dropout(self.dense(x)) + y)"


class Form(NamedTuple):
    """How a known class computes its feed-forward block.

    Attributes:
        kind: ``"sequential"``; ``"chain"``, modules one after the other; ``"gated"``; ``"packed"``, which is gated with
            one layer for gate and up; or ``"two modules"``.
        method: the method that computes the block.
        names: the attributes that the method calls, first to last; for a gated block: gate, up, activation and last
            layer; for two modules: the attributes of the first module.
    """

    kind: str
    method: str
    names: tuple[str, ...] = ()


def form_of_class(kind: type[nn.Module], part_classes: tuple[type[nn.Module], ...]) -> Form | None:
    """How a class computes its feed-forward block; None if that is not known exactly.

    Args:
        kind: the class.
        part_classes: the classes of its modules ``intermediate`` and ``output``, if it has them.
    """
    # A class that acts when it is subclassed, or has a metaclass, is left alone. Exceptions are the layers of
    # transformers: they wrap their forward when subclassed, and support that, as `fully_shard` subclasses, too.
    acting = (base for base in kind.__mro__[:-1] if "__init_subclass__" in vars(base))
    if type(kind) is not type or any(base.__module__ != "transformers.modeling_layers" for base in acting):
        return None
    if kind.forward is nn.Sequential.forward and kind.__iter__ is nn.Sequential.__iter__:  # type: ignore[attr-defined]
        return Form("sequential", "forward")
    for method in _METHODS:
        expression = returned_by(getattr(kind, method, None))
        if expression is None:
            continue
        names = _chain(expression.text)
        if len(names) >= 3 and len(names) == expression.calls:
            return Form("chain", method, names)
        gated, packed = _GATED.fullmatch(expression.text), _PACKED.fullmatch(expression.text)
        if gated and expression.calls == 4:
            last, activation, gate, up = gated.groups()
            return Form("gated", method, (gate, up, activation, last))
        if packed and expression.calls == 4:
            last, first, activation = packed.groups()
            return Form("packed", method, (first, activation, last))
    return _form_of_two_modules(kind, part_classes)


def _chain(text: str) -> tuple[str, ...]:
    """The modules of ``self.c(self.b(self.a(x)))`` in the order of their calls; none if the text is something else."""
    names: list[str] = []
    while text != "x":
        call = _CALL.fullmatch(text)
        if call is None:
            return ()
        name, text = call.groups()
        names.insert(0, name)
    return tuple(names)


def _form_of_two_modules(kind: type[nn.Module], part_classes: tuple[type[nn.Module], ...]) -> Form | None:
    method = returned_by(getattr(kind, "feed_forward_chunk", None))
    if method is None or method != (_TWO_MODULES, 2) or len(part_classes) != 2:
        return None
    first, second = (returned_by(part.forward) for part in part_classes)
    names = () if first is None else _chain(first.text)
    if first is None or len(names) != 2 or first.calls != 2 or second != (_OUTPUT, 3):
        return None
    return Form("two modules", "feed_forward_chunk", names)
