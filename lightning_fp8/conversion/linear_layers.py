"""Which layers are linear layers: by the ``forward`` that they inherit, by registration, or as a probe finds."""

from __future__ import annotations

from abc import ABCMeta
from typing import TypeVar

from torch import nn
from torch.nn.parameter import is_lazy

from lightning_fp8.conversion.linear_probe import difference_from_linear
from lightning_fp8.modules.class_swap import own_class

KindT = TypeVar("KindT", bound=type[nn.Module])
_registered: list[type[nn.Module]] = [nn.Linear]
# parts of the names of classes that are probed, in lower case
_NAMES = ("linear", "dense")


def register_linear(kind: KindT) -> KindT:
    """Declare that a class computes ``F.linear(x, weight, bias)``: its layers run in FP8 without a probe.

    It is for classes that compute this but that :func:`lightning_fp8.describe` shows as not converted, such as one that
    calls a kernel of a GPU. So are subclasses that do not override its ``forward``. Also a class decorator.

    Args:
        kind: its layers have ``weight`` ``[N, K]`` and ``bias`` ``[N]`` or None; in FP8 its ``forward`` is not called.

    Raises:
        TypeError: if it is not a class of modules.

    >>> @register_linear
    ... class Mine(nn.Linear):
    ...     def forward(self, x):
    ...         return my_kernel(x, self.weight, self.bias)
    """
    if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
        raise TypeError(f"`register_linear` takes a subclass of nn.Module, got {kind!r}.")
    if kind not in _registered:
        _registered.append(kind)
    return kind


def inherits_forward(kind: type[nn.Module]) -> bool:
    """Whether a class has the ``forward`` of ``nn.Linear`` or of a registered class."""
    return any(issubclass(kind, base) and kind.forward is base.forward for base in _registered)


def is_named_linear(layer: nn.Module) -> bool:
    """Whether it may be a linear layer of another library, or in a ``torch.jit.ScriptModule``: by name and matrix."""
    name = getattr(layer, "original_name", own_class(layer).__name__).lower()
    if not isinstance(layer, tuple(_registered)) and not any(part in name for part in _NAMES):
        return False
    weight = dict(layer.named_parameters(recurse=False)).get("weight")
    return weight is not None and (is_lazy(weight) or weight.dim() == 2)


def how_recognised(kind: type[nn.Module]) -> str | None:
    """How layers of this class are known to be linear; None for ``nn.Linear`` itself."""
    for base in _registered:
        if issubclass(kind, base) and kind.forward is base.forward:
            inherited = f"with the `forward` of {'nn.Linear' if base is nn.Linear else base.__name__}"
            by = inherited if base is nn.Linear else f"{inherited}, by `register_linear`"
            return None if kind is nn.Linear else by
    return "its `forward` computes F.linear, by a probe"


def reason_against_linear(layer: nn.Module) -> str | None:
    """Why this layer is not a linear one that can be converted by its class; None if it is."""
    kind = own_class(layer)
    named = f"a {kind.__name__}"
    if isinstance(layer, nn.Bilinear):
        return f"{named}, which multiplies two inputs"
    if type(kind) not in (type, ABCMeta):
        return f"{named}, whose metaclass {type(kind).__name__} may act on classes that are made of it"
    if kind.__call__ is not nn.Module.__call__:
        return f"{named}, which has a `__call__` of its own"
    if isinstance(getattr(kind, "weight", None), property):
        return f"{named}, whose `weight` is a property"
    if inherits_forward(kind):
        return None
    difference = difference_from_linear(layer)
    return difference and f"{named}, whose `forward` is not that of a linear layer: {difference}"
