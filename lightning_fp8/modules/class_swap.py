"""Exchanges the classes of modules, including those that ``fully_shard`` has subclassed."""

from __future__ import annotations

from typing import cast

from torch import nn
from torch.distributed.fsdp import FSDPModule

_known: dict[type, type[nn.Module]] = {}


def own_class(module: object) -> type[nn.Module]:
    """The class of a module; after ``fully_shard``, the class that the module had before."""
    kind = type(module)
    return cast(type[nn.Module], kind.__mro__[2] if _is_sharded(kind) else kind)


def exchange_class(module: nn.Module, kind: type[nn.Module]) -> None:
    """Change the class of a module; the base class that ``fully_shard`` has added stays."""
    present = type(module)
    module.__class__ = _sharded(kind, present) if _is_sharded(present) else kind


def _is_sharded(kind: type) -> bool:
    # `fully_shard` makes a class of these two bases, and leaves no other mark
    return kind.__mro__[1] is FSDPModule


def _sharded(kind: type, example: type) -> type[nn.Module]:
    # one class for all modules of a kind, as in torch
    if kind not in _known:
        # the attributes that torch gives this class, such as the method that refuses deep copies
        attributes = {name: value for name, value in vars(example).items() if name not in ("__module__", "__doc__")}
        _known[kind] = type(f"FSDP{kind.__name__}", (FSDPModule, kind), attributes)
    return _known[kind]
