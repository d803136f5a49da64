"""Classes of modules and their exchange, with what ``fully_shard`` has put in front of them."""

from __future__ import annotations

from typing import cast

from torch import nn
from torch.distributed.fsdp import FSDPModule

_known: dict[type, type[nn.Module]] = {}


def own_class(module: object) -> type[nn.Module]:
    """The class of a module; of one that ``fully_shard`` was called on, the class that it had before."""
    kind = type(module)
    return cast(type[nn.Module], kind.__mro__[2] if _is_sharded(kind) else kind)


def exchange_class(module: nn.Module, kind: type[nn.Module]) -> None:
    """Give a module another class of its own; what ``fully_shard`` has put in front stays there."""
    present = type(module)
    module.__class__ = _sharded(kind, present) if _is_sharded(present) else kind


def _is_sharded(kind: type) -> bool:
    # `fully_shard` makes a class of these two bases, and does not say so anywhere else
    return kind.__mro__[1] is FSDPModule


def _sharded(kind: type, example: type) -> type[nn.Module]:
    # one class for all modules of a kind, as torch has it
    if kind not in _known:
        # whatever torch has put into the class of the two, which is to refuse deep copies
        attributes = {name: value for name, value in vars(example).items() if name not in ("__module__", "__doc__")}
        _known[kind] = type(f"FSDP{kind.__name__}", (FSDPModule, kind), attributes)
    return _known[kind]
