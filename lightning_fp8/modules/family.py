"""A family of layers: layers that conversion recognises as one kind, and that compute in the same way."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import nn

from lightning_fp8.modules.base import Fp8Module
from lightning_fp8.modules.class_swap import own_class


class Family(NamedTuple):
    """A family of layers.

    Attributes:
        base: the base class of its FP8 classes; its ``gemm_weights`` accepts plain layers too.
        recognises: whether a layer, plain or converted, belongs to it.
        fp8_class: the class of such a layer in FP8.
        reason_against: why such a layer, if plain, cannot run in FP8; None if it can.
    """

    base: type[Fp8Module]
    recognises: Callable[[nn.Module], bool]
    fp8_class: Callable[[nn.Module], type[Fp8Module]]
    reason_against: Callable[[nn.Module], str | None]


def of_class(plain: type[nn.Module], fp8: type[Fp8Module], name: str) -> Family:
    """The family of a single class, without subclasses; messages call it ``name``."""

    def reason_against(layer: nn.Module) -> str | None:
        kind = own_class(layer)
        return None if kind is plain else f"a {kind.__name__}, a subclass of {name}, which alone is converted"

    return Family(fp8, lambda layer: isinstance(layer, plain), lambda layer: fp8, reason_against)
