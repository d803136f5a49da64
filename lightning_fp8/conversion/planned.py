"""Which layers of a model are converted, and why the others are not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from torch import nn

from lightning_fp8.conversion.candidates import fp8_classes, is_linear_by_name, reason_against, too_small
from lightning_fp8.modules.adapters import adapted_layer, adapter_modules
from lightning_fp8.modules.base import Fp8Module
from lightning_fp8.modules.experts import find_routers
from lightning_fp8.modules.fused_blocks import plain_class
from lightning_fp8.modules.linear import Fp8Linear
from lightning_fp8.modules.paths import matches
from lightning_fp8.ops.formats import PRODUCTS, Product
from lightning_fp8.scaling.config import Fp8Config


class PlannedLayer(NamedTuple):
    """A layer that does matrix multiplications, and what a conversion does to it.

    Attributes:
        path: module path.
        layer: the layer itself.
        becomes: its class after the conversion; None if it will be plain.
        reason: why it stays plain, or becomes plain again; None for a layer to convert.
        is_too_small: whether the reason is ``min_features``.
        in_adapter: whether it belongs to an adapter of PEFT, converted or not.
        in_bf16: its products that do not run in FP8 even if it is converted.
    """

    path: str
    layer: nn.Module
    becomes: type[Fp8Module] | None
    reason: str | None
    is_too_small: bool
    in_adapter: bool
    in_bf16: tuple[Product, ...]


def planned_layers(
    modules: Sequence[tuple[str, nn.Module]],
    ignore_modules: Sequence[str],
    config: Fp8Config,
    products: Mapping[nn.Module, tuple[tuple[Product, ...], str]],
) -> Iterator[PlannedLayer]:
    """Each layer that does matrix multiplications, in the order of ``modules``.

    Args:
        modules: path and module of the model and of everything inside it.
        ignore_modules: patterns.
        config: of the model.
        products: by layer, its products in bf16, and the setting that put them there.
    """
    everything = [layer for _, layer in modules]
    classes, routers, of_adapters = fp8_classes(everything), set(find_routers(everything)), adapter_modules(everything)
    ignored = {part for path, layer in modules if matches(path, ignore_modules) for part in layer.modules()}
    outputs_of_converted: set[nn.Module] = set()
    for path, layer in modules:
        if not (isinstance(layer, (*classes, nn.Bilinear)) or layer in routers or is_linear_by_name(layer)):
            continue
        in_adapter, (in_bf16, source) = layer in of_adapters, products[layer]
        if layer in ignored:
            reason: str | None = "matches `ignore_modules`"
        elif in_bf16 == PRODUCTS:
            reason = f"all three products in bf16 by {source}"
        elif in_adapter and not config.adapters:
            reason = "belongs to an adapter of PEFT: pass `adapters=True` to convert it"
        elif layer in routers:
            reason = "a router: rounded to FP8, its outputs would choose other experts"
        else:
            reason = reason_against(layer, tuple(classes), layer in outputs_of_converted)
        of_size = None if reason else too_small(layer, config.min_features)
        becomes = None if reason or of_size else classes.get(plain_class(layer), Fp8Linear)
        if becomes is not None and isinstance(layer, nn.MultiheadAttention):
            outputs_of_converted.add(adapted_layer(layer.out_proj))
        yield PlannedLayer(path, layer, becomes, reason or of_size, of_size is not None, in_adapter, in_bf16)
