"""Exchanges the classes of modules, including those that ``fully_shard`` or a parametrization has subclassed."""

from __future__ import annotations

from typing import cast

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.utils import parametrize

_known: dict[type, type[nn.Module]] = {}


class Swapped(nn.Module):
    """A module whose class the conversion has exchanged.

    Attributes:
        plain_class: the class before the conversion, which :func:`lightning_fp8.unconvert` restores.
    """

    plain_class: type[nn.Module]


def plain_class(module: nn.Module) -> type[nn.Module]:
    """The class of a module before the conversion."""
    return module.plain_class if isinstance(module, Swapped) else own_class(module)


def own_class(module: object) -> type[nn.Module]:
    """The class of a module, before ``fully_shard`` and parametrizations."""
    kind = type(module)
    kind = kind.__mro__[2] if _is_sharded(kind) else kind
    return cast(type[nn.Module], kind.__mro__[1] if _is_parametrized(kind) else kind)


def exchange_class(module: nn.Module, kind: type[nn.Module]) -> None:
    """Change the class of a module; what ``fully_shard`` and parametrizations have added stays."""
    present = type(module)
    module.__class__ = kind
    if parametrize.is_parametrized(module):
        # as torch does when the first tensor of a module is parametrized
        parametrize._inject_new_class(module)
        for name in cast(nn.ModuleDict, module.parametrizations):
            parametrize._inject_property(module, name)
    if _is_sharded(present):
        module.__class__ = _sharded(type(module), present)


def _is_sharded(kind: type) -> bool:
    # `fully_shard` makes a class of these two bases, and leaves no other mark
    return kind.__mro__[1] is FSDPModule


def _is_parametrized(kind: type) -> bool:
    # torch makes such a class for each module
    return kind.__module__ == parametrize.__name__ and kind.__name__.startswith("Parametrized")


def _sharded(kind: type, example: type) -> type[nn.Module]:
    # one class for all modules of a kind, as in torch
    if kind not in _known:
        # the attributes that torch gives this class, such as the method that refuses deep copies
        attributes = {name: value for name, value in vars(example).items() if name not in ("__module__", "__doc__")}
        _known[kind] = type(f"FSDP{kind.__name__}", (FSDPModule, kind), attributes)
    return _known[kind]
