"""The base of layouts: names and shapes of scales, how the config is read, and how it is written.

A weight in FP8 is ``code * scale``, with codes ``float8_e4m3fn [N, K]`` and fp32 scales. A file has one kind of scales:

===========  ==============================  ====================================================
kind         shape                           a scale is for
===========  ==============================  ====================================================
``tensor``   ``[]`` or ``[1]``               the whole weight
``row``      ``[N, 1]``                      a row: an output of the layer
``block``    ``[ceil(N/128), ceil(K/128)]``  128 x 128, or what is left of it at the weight's ends
``group``    ``[N, K/32] uint8``             32 elements of a row: a power of two in E8M0
===========  ==============================  ====================================================

With blocks and groups, all readers scale inputs by their own values (dynamically), and accept no static scales. Dynamic
inputs have no scale in the file. The dtypes say which weights are in FP8, so lists of layers outside of FP8
(``ignore``) have no effect when a file is read.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from torch import Tensor

from lightning_fp8.ops import e8m0
from lightning_fp8.ops.amaxes import BLOCK
from lightning_fp8.scalings.mx import MXScaling
from lightning_fp8.scalings.per_block import BlockScaling
from lightning_fp8.scalings.per_tensor import CurrentScaling, DelayedScaling
from lightning_fp8.scalings.recipe import Recipe

# a group is 32 elements of a row, and its scale a power of two in one byte
Kind = Literal["tensor", "row", "block", "group"]
BLOCK_SIZE = [BLOCK, BLOCK]
# rows and columns that have one scale; None for all
SIDES: dict[Kind, tuple[int | None, int | None]] = {
    "tensor": (None, None),
    "row": (1, None),
    "block": (BLOCK, BLOCK),
    "group": (1, e8m0.BLOCK),
}
_WORDS: dict[Kind, str] = {
    "tensor": "single numbers",
    "row": "a column with a number for each row",
    "block": f"a matrix with a number for each block of {BLOCK} x {BLOCK}",
    "group": f"a matrix in uint8 with a number for every {e8m0.BLOCK} elements of a row",
}
_OF_CACHES = (".k_scale", ".v_scale", ".q_scale")


@dataclass(frozen=True)
class Scheme:
    """How the weights of a checkpoint are quantized.

    Attributes:
        layout: name of the layout.
        kinds: the possible kinds of weight scales: one for the tensor, each row, each block, or each group.
        suffix: appended to the name of a weight to get the name of its scale.
        input_name: replaces ``weight`` to get the name of the scale of the weight's input.
        static: whether inputs have scales.
        has_cache: whether the file may hold scales of an FP8 cache of keys and values, which training has no use for.
    """

    layout: str | None
    kinds: tuple[Kind, ...]
    suffix: str = "_scale"
    input_name: str = "input_scale"
    static: bool = False
    has_cache: bool = False

    @property
    def in_words(self) -> str:
        """The allowed scales, in words."""
        return " or ".join(_WORDS[kind] for kind in self.kinds)

    @property
    def recipe(self) -> type[Recipe]:
        """The recipe that matches the scaling of weights and inputs best."""
        if self.in_e8m0:
            return MXScaling
        return BlockScaling if "block" in self.kinds else DelayedScaling if self.static else CurrentScaling

    @property
    def in_e8m0(self) -> bool:
        """Whether the scales of weights are powers of two in one byte."""
        return "group" in self.kinds

    def scale_of(self, weight: str) -> str:
        """Name of a weight's scale."""
        return weight + self.suffix

    def input_of(self, weight: str) -> str:
        """Name of the scale of a weight's input."""
        return weight.removesuffix("weight") + self.input_name

    def is_of_cache(self, name: str) -> bool:
        """Whether a tensor is a scale of a cache."""
        return self.has_cache and name.endswith(_OF_CACHES)


def grid_of(kind: Kind, weight: tuple[int, ...]) -> tuple[int, ...]:
    """The shape ``[E, rows, columns]`` of the scales of a weight ``[E, N, K]``.

    >>> grid_of("block", (300, 200)), grid_of("tensor", (8, 300, 200))
    ((3, 2), (8, 1, 1))
    """
    sizes = zip(weight[-2:], SIDES[kind])
    return (*weight[:-2], *(1 if side is None else -(-size // side) for size, side in sizes))


def kind_of(kinds: Collection[Kind], weight: tuple[int, ...], scale: tuple[int, ...]) -> Kind | None:
    """The kind of a scale of this shape for a weight of this shape; None if no kind fits.

    >>> kind_of(("row", "block"), (300, 200), (3, 2))
    'block'
    """
    if len(weight) < 2:
        return None
    experts = weight[:-2]
    in_short = {"tensor": ((*experts, 1), experts)}
    return next((kind for kind in kinds if scale in (grid_of(kind, weight), *in_short.get(kind, ()))), None)


@dataclass(frozen=True)
class Config:
    """A part of a config, with its place for messages."""

    file: Path
    values: Mapping[str, Any]
    place: str = "quantization_config"

    def one_of(self, key: str, choices: Collection[Any]) -> Any:
        """The value of a key.

        Raises:
            ValueError: if the value is not one of the choices.
        """
        value = self.values.get(key)
        # 1 equals True, and a list is not hashable
        if not any(type(value) is type(choice) and value == choice for choice in choices):
            expected = " or ".join(map(repr, choices))
            raise ValueError(
                f"{self.file}: `{self.place}` must have {key}={expected}, got {reprlib.repr(value)}. `load_exported`"
                " reads weights in E4M3, quantized as docs/fp8-checkpoints.md lists."
            )
        return value

    def part(self, key: str) -> Config:
        """The object under a key.

        Raises:
            ValueError: if the value is not an object.
        """
        value, place = self.values.get(key), f"{self.place}.{key}"
        if not isinstance(value, dict):
            raise ValueError(f"{self.file}: `{place}` must be an object, got {reprlib.repr(value)}.")
        return Config(self.file, value, place)

    @property
    def has_cache(self) -> bool:
        """Whether keys and values are kept in FP8."""
        return any(self.values.get(key) for key in ("kv_cache_scheme", "kv_cache_quant_algo"))


class Quantized(NamedTuple):
    """A weight in FP8 as a file holds it, on the CPU.

    Attributes:
        codes: ``float8_e4m3fn``, in the weight's own shape.
        scale_inv: what its codes are multiplied by, in the shape of its kind and the dtype of the file.
        input_scale_inv: ``[] float32``, what the codes of the layer's input are multiplied by; None for dynamic inputs.
    """

    codes: Tensor
    scale_inv: Tensor
    input_scale_inv: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A layout that is read.

    Attributes:
        name: the name of the layout.
        method: the ``quant_method`` of its config.
        read: returns its scheme, from the config and the names of all tensors; layouts of one method share it.
        config_file: the file with the quantization config if ``config.json`` has none.
    """

    name: str | None
    method: str
    read: Callable[[Config, Collection[str]], Scheme]
    config_file: str | None = None


@dataclass(frozen=True, kw_only=True)
class WritableLayout(Layout):
    """A layout that is also written; its name is the value of ``export``'s argument.

    Attributes:
        suffixes: for each kind, the suffix to the name of a weight that gives the name of its scale.
        config: returns ``quantization_config``, from the scheme and the paths of linear layers outside of FP8.
        input_name: replaces ``weight`` to get the name of the scale of the weight's input.
        single: the shape of a scale for a whole tensor.
        ragged: whether its readers accept incomplete blocks.
        linear_only: whether its readers accept only weights of ``nn.Linear``.
        plain_by_end: whether its readers treat a layer as plain if its path ends like the path of a plain layer.
    """

    suffixes: Mapping[Kind, str]
    config: Callable[[Scheme, Sequence[str]], dict[str, Any]]
    input_name: str = "input_scale"
    single: tuple[int, ...] = ()
    ragged: bool = False
    linear_only: bool = True
    plain_by_end: bool = False

    def scheme(self, kind: Kind, static: bool) -> Scheme:
        """How weights with scales of this kind are written. With blocks, no reader accepts static scales of inputs."""
        is_static = static and kind not in ("block", "group")
        return Scheme(self.name, (kind,), self.suffixes[kind], self.input_name, is_static)

    def tensors(self, scheme: Scheme, name: str, weight: Quantized) -> dict[str, Tensor]:
        """The scales of a weight by their names in the file."""
        (kind,), shape = scheme.kinds, tuple(weight.codes.shape)
        if kind == "tensor":
            scale = weight.scale_inv.reshape((*shape[:-2], *self.single))
        else:
            scale = weight.scale_inv.expand(grid_of(kind, shape))
        # a weight with several names repeats its scales for each, and safetensors refuses tensors that share memory
        tensors = {scheme.scale_of(name): scale.contiguous().clone()}
        if scheme.static and weight.input_scale_inv is not None:
            tensors[scheme.input_of(name)] = weight.input_scale_inv.reshape(self.single)
        return tensors
