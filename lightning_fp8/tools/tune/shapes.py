"""What is measured: the three GEMMs of linear layers, and the ways of computing each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from kernels_cuda.gemm_variants import Configuration
from lightning_fp8.ops.cuda.gemm_choice import Choice, clusters, most_splits
from lightning_fp8.ops.formats import dtype_name

# the most important sizes first, as a run may be interrupted
_TOKENS, _HIDDEN = (8192, 2048, 32768), (4096, 1024, 8192)
# in and out, in units of the hidden size: the two of the feed-forward; attention's output; its query, key and value
_PROJECTIONS = ((1, 4), (4, 1), (1, 1), (1, 3))


class Gemm(NamedTuple):
    """One GEMM, ``[m, k] x [n, k] -> [m, n]``.

    Attributes:
        m: rows of the output.
        n: columns of the output.
        k: length of the sums.
        promote: whether partial sums are added up in fp32 registers every 128 along K.
        output: dtype of the output.
        a_format: of the first operand.
        b_format: of the second operand.
    """

    m: int
    n: int
    k: int
    promote: bool
    output: torch.dtype
    a_format: str
    b_format: str

    @property
    def name(self) -> str:
        """``"8192x4096x1024 promoted float32"``."""
        return f"{self.m}x{self.n}x{self.k} {'promoted' if self.promote else 'fast'} {dtype_name(self.output)}"

    def as_json(self) -> list[Any]:
        """The fields, for :meth:`from_json`."""
        return [dtype_name(field) if isinstance(field, torch.dtype) else field for field in self]

    @classmethod
    def from_json(cls, fields: Sequence[Any]) -> Gemm:
        """The inverse of :meth:`as_json`."""
        made = cls(*fields)
        return made._replace(output=getattr(torch, fields[cls._fields.index("output")]))


class Layer(NamedTuple):
    """A linear layer and the number of tokens in its input."""

    tokens: int
    inputs: int
    outputs: int

    def gemms(self) -> list[Gemm]:
        """Fprop, dgrad and wgrad, the last with an output for fp32 weights."""
        tokens, inputs, outputs = self
        return [
            Gemm(tokens, outputs, inputs, False, torch.bfloat16, "e4m3", "e4m3"),
            Gemm(tokens, inputs, outputs, True, torch.bfloat16, "e5m2", "e4m3"),
            Gemm(outputs, inputs, tokens, True, torch.float32, "e5m2", "e4m3"),
        ]


LAYERS = tuple(
    Layer(tokens, hidden * inputs, hidden * outputs)
    for tokens in _TOKENS
    for hidden in _HIDDEN
    for inputs, outputs in _PROJECTIONS
)


def parse_layers(text: str) -> tuple[Layer, ...]:
    """Layers from the command line.

    >>> parse_layers("8192x4096x16384,2048x1024x1024")[0]
    Layer(tokens=8192, inputs=4096, outputs=16384)

    Raises:
        ValueError: if the text is not valid; the message names the part that is wrong.
    """
    layers = []
    for part in text.split(","):
        sizes = part.strip().split("x")
        if len(sizes) != 3 or not all(size.isdecimal() and int(size) for size in sizes):
            raise ValueError(f"layers are given as TOKENSxINxOUT, such as 8192x4096x16384, with commas; got {part!r}")
        layers.append(Layer(*map(int, sizes)))
    return tuple(layers)


def gemms_of(layers: Iterable[Layer]) -> list[Gemm]:
    """The GEMMs of all layers, each once."""
    return list(dict.fromkeys(gemm for layer in layers for gemm in layer.gemms()))


def candidates(gemm: Gemm, ours: Sequence[Configuration], multiprocessors: int) -> list[Choice]:
    """Every configuration without splits, and with K split as long as the tiles of all parts fit on the GPU at once.

    Args:
        gemm: what is computed.
        ours: the configurations that the GPU has for it.
        multiprocessors: number of multiprocessors of the GPU.
    """
    made = []
    for one in ours:
        fitting = multiprocessors // (clusters(one, gemm.m, gemm.n) * one.cluster)
        most = max(1, min(fitting, most_splits(gemm.k, gemm.promote)))
        made += [Choice(one, splits) for splits in sorted({1, 2, 4, 8, most}) if splits <= most]
    return made
