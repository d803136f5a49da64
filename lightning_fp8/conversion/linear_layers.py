"""Decides which layers are linear: those with the ``forward`` of nn.Linear, of a registered or of a known class.

Known classes come from other libraries. Each is recognised by its name and by the source of its ``forward``, so a
version of the library that computes something else is not mistaken for it.
"""

from __future__ import annotations

from abc import ABCMeta
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar

from torch import nn
from torch.nn.parameter import is_lazy

from lightning_fp8.modules.class_swap import own_class, plain_class
from lightning_fp8.modules.family import Family
from lightning_fp8.modules.known_source import source_digest
from lightning_fp8.modules.linear import LinearForward, linear_class

KindT = TypeVar("KindT", bound=type[nn.Module])
_registered: list[type[nn.Module]] = [nn.Linear]
# parts of the names of classes that `describe` shows, in lower case
_NAMES = ("linear", "dense")


class KnownLinear(NamedTuple):
    """What is known of a class.

    Attributes:
        digests: digests of the source of its ``forward``, one for each version that differs.
        settings: the attributes on which its result depends, with the values for which it computes F.linear.
    """

    digests: tuple[str, ...]
    settings: Mapping[str, Any] = {}


KNOWN: dict[str, KnownLinear] = {
    # 2.0.0 to 2.2.0; version 1 inherits `forward`
    "openfold.model.primitives.Linear": KnownLinear(("2cf4bf0a603f8952",), {"precision": None}),
    # 0.9.0 to 1.0.31
    "timm.layers.linear.Linear": KnownLinear(("b476311d01a949b3",)),
    # 2.0.0 to 2.8.1
    "torch_geometric.nn.dense.linear.Linear": KnownLinear(("926c48e5a6e79c00",)),
    # 5.0.0 to 5.24.0
    "transformers.models.falcon.modeling_falcon.FalconLinear": KnownLinear(("83449a3536ec0fd4",)),
}


def known_linear(kind: type[nn.Module]) -> KnownLinear | None:
    """What is known of a class; None if the class is not known, or defines no known ``forward``."""
    # by name first: reading the source of every class of a model takes time
    known = KNOWN.get(f"{kind.__module__}.{kind.__qualname__}")
    return known if known is not None and source_digest(vars(kind).get("forward")) in known.digests else None


def register_linear(kind: KindT) -> KindT:
    """Declare that a class computes ``F.linear(x, weight, bias)``: its layers run in FP8.

    Use it for classes with their own ``forward`` that :func:`lightning_fp8.describe` shows as not converted. It also
    applies to subclasses that do not override this ``forward``. It can be used as a class decorator.

    Args:
        kind: the class. Its layers have ``weight`` ``[N, K]`` and ``bias`` ``[N]`` or None. FP8 layers do not call its
            ``forward``.

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


def linear_base(kind: type[nn.Module]) -> type[nn.Module] | None:
    """The class that ``kind`` has its ``forward`` from, if that is nn.Linear, registered or known; else None."""
    known = (base for base in kind.__mro__ if issubclass(base, nn.Module) and known_linear(base) is not None)
    bases = (base for base in (*_registered, *known) if issubclass(kind, base) and kind.forward is base.forward)
    return next(bases, None)


def is_named_linear(layer: nn.Module) -> bool:
    """Whether a layer may be linear, judged by its class name and its matrix: of another library, or scripted."""
    kind = own_class(layer)
    name = getattr(layer, "original_name", kind.__name__).lower()
    is_linear = isinstance(layer, tuple(_registered)) or linear_base(kind) is not None
    if not is_linear and not any(part in name for part in _NAMES):
        return False
    weight = dict(layer.named_parameters(recurse=False)).get("weight")
    return weight is not None and (is_lazy(weight) or weight.dim() == 2)


def how_recognised(kind: type[nn.Module]) -> str | None:
    """How layers of this class are known to be linear; None for ``nn.Linear`` itself."""
    base = linear_base(kind)
    if base is None or kind is nn.Linear:
        return None
    if base is nn.Linear:
        return "with the `forward` of nn.Linear"
    if base in _registered:
        return f"with the `forward` of {base.__name__}, by `register_linear`"
    return f"with the known `forward` of {base.__module__}.{base.__qualname__}"


def reason_against_linear(layer: nn.Module) -> str | None:
    """Why this layer is not a linear layer that can be converted by its class; None if it is."""
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
    base = linear_base(kind)
    if base is None:
        return (
            f"{named}, whose `forward` is not known to be linear: if it computes F.linear(x, weight, bias), call"
            f" `lightning_fp8.conversion.register_linear({kind.__name__})`"
        )
    known = None if base in _registered else known_linear(base)
    for name, value in known.settings.items() if known else ():
        if getattr(layer, name) != value:
            return f"{named}, which computes F.linear only if its `{name}` is {value!r}, not {getattr(layer, name)!r}"
    return None


def _is_linear(layer: nn.Module) -> bool:
    return isinstance(layer, (nn.Linear, nn.Bilinear)) or is_named_linear(layer)


LINEAR = Family(LinearForward, _is_linear, lambda layer: linear_class(plain_class(layer)), reason_against_linear)
