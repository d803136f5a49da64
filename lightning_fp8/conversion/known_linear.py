"""Linear layers of other libraries with a ``forward`` of their own that is known to compute F.linear.

Each is known by the name of its class and by the source of that ``forward``, so a version of the library that computes
something else is not mistaken for it.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Mapping
from functools import cache
from types import CodeType, FunctionType
from typing import Any, NamedTuple

from torch import nn


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


def known_linear(kind: type[nn.Module]) -> KnownLinear | None:
    """What is known of a class; None for one that is not known, or defines no ``forward``, or an unknown one."""
    name, forward = f"{kind.__module__}.{kind.__qualname__}", vars(kind).get("forward")
    if name not in KNOWN or not isinstance(forward, FunctionType):
        return None
    # the code, as `inspect` would look through a wrapper
    return KNOWN[name] if _is_known(name, forward.__code__) else None


@cache
def _is_known(name: str, code: CodeType) -> bool:
    try:
        source = normalized(inspect.getsource(code))
    except (OSError, SyntaxError):
        # there is no source file, or this is no function of its own lines
        return False
    return source in map(normalized, KNOWN[name].forwards)


def normalized(source: str) -> str:
    """The syntax tree of a function, as text, without comments, docstring and annotations."""
    (function,) = ast.parse(textwrap.dedent(source)).body
    if isinstance(function, ast.FunctionDef):
        function.returns = None
        for node in ast.walk(function.args):
            if isinstance(node, ast.arg):
                node.annotation = None
        if ast.get_docstring(function) is not None:
            del function.body[0]
    return ast.dump(function)
