"""Linear layers of other libraries with a ``forward`` of their own that is known to compute F.linear.

Each is known by the name of its class and by the source of that ``forward``, so a version of the library that computes
something else is not mistaken for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import nn

from lightning_fp8.modules.known_source import source_digest


class KnownLinear(NamedTuple):
    """What is known of a class.

    Attributes:
        digests: of the source of its ``forward``, one for each version that differs.
        settings: the attributes on which its result depends, with the values that make it F.linear.
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
    """What is known of a class; None for one that is not known, or defines no ``forward``, or an unknown one."""
    # by name first: reading the source of every class of a model takes time
    known = KNOWN.get(f"{kind.__module__}.{kind.__qualname__}")
    return known if known is not None and source_digest(vars(kind).get("forward")) in known.digests else None
