"""Linear layers of other libraries with a ``forward`` of their own that is known to compute F.linear.

Each is known by the name of its class and by the source of that ``forward``, so a version of the library that computes
something else is not mistaken for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

from torch import nn

from lightning_fp8.modules.known_source import digest_of, source_digest


class KnownLinear(NamedTuple):
    """What is known of a class.

    Attributes:
        forwards: the source of its ``forward`` in each version that differs in more than docstrings and annotations.
        settings: the attributes on which its result depends, with the values that make it F.linear.
    """

    forwards: tuple[str, ...]
    settings: Mapping[str, Any] = {}


KNOWN: dict[str, KnownLinear] = {
    # since 2.0.0; version 1 inherits `forward`
    "openfold.model.primitives.Linear": KnownLinear(
        (
            """
            def forward(self, input):
                d = input.dtype
                deepspeed_is_initialized = (
                    deepspeed_is_installed and
                    deepspeed.comm.comm.is_initialized()
                )
                if self.precision is not None:
                    with torch.cuda.amp.autocast(enabled=False):
                        bias = self.bias.to(dtype=self.precision) if self.bias is not None else None
                        return nn.functional.linear(input.to(dtype=self.precision),
                                                    self.weight.to(dtype=self.precision),
                                                    bias).to(dtype=d)
                if d is torch.bfloat16 and not deepspeed_is_initialized:
                    with torch.cuda.amp.autocast(enabled=False):
                        bias = self.bias.to(dtype=d) if self.bias is not None else None
                        return nn.functional.linear(input, self.weight.to(dtype=d), bias)
                return nn.functional.linear(input, self.weight, self.bias)
            """,
        ),
        {"precision": None},
    ),
    "timm.layers.linear.Linear": KnownLinear(
        (
            """
            def forward(self, input):
                if torch.jit.is_scripting():
                    bias = self.bias.to(dtype=input.dtype) if self.bias is not None else None
                    return F.linear(input, self.weight.to(dtype=input.dtype), bias=bias)
                else:
                    return F.linear(input, self.weight, self.bias)
            """,
        )
    ),
    "torch_geometric.nn.dense.linear.Linear": KnownLinear(
        (
            """
            def forward(self, x):
                return F.linear(x, self.weight, self.bias)
            """,
        )
    ),
    "transformers.models.falcon.modeling_falcon.FalconLinear": KnownLinear(
        (
            """
            def forward(self, input):
                hidden_states = input @ self.weight.T
                if self.bias is None:
                    return hidden_states
                return hidden_states + self.bias
            """,
        )
    ),
}


@cache
def _known() -> dict[tuple[str, str], KnownLinear]:
    return {(name, digest_of(source)): known for name, known in KNOWN.items() for source in known.forwards}


def known_linear(kind: type[nn.Module]) -> KnownLinear | None:
    """What is known of a class; None for one that is not known, or defines no ``forward``, or an unknown one."""
    return _known().get((f"{kind.__module__}.{kind.__qualname__}", source_digest(vars(kind).get("forward"))))
