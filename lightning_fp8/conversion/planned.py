"""Which layers of a model are converted, and why the others are not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from torch import nn

from lightning_fp8.conversion.candidates import fp8_classes, is_linear_by_name, reason_against, sizes
from lightning_fp8.conversion.min_features import too_small
from lightning_fp8.modules.adapters import adapted_layer, adapter_modules
from lightning_fp8.modules.base import Fp8Module
from lightning_fp8.modules.experts import find_routers
from lightning_fp8.modules.fused_blocks import plain_class
from lightning_fp8.modules.linear import Fp8Linear
from lightning_fp8.modules.paths import matches
from lightning_fp8.ops.formats import PRODUCTS, Product
from lightning_fp8.scaling.config import Fp8Config

_IN_ADAPTER = "belongs to an adapter of PEFT: pass `adapters=True` to convert it"


class PlannedLayer(NamedTuple):
    """A layer that does matrix multiplications, and what a conversion does to it.

    Attributes:
        path: module path.
        layer: the layer itself.
        becomes: its class after the conversion; None if it will be plain.
        reason: why it stays plain, or becomes plain again; None for a layer to convert.
        in_bf16: its products that do not run in FP8 even if it is converted.
        is_too_small: whether the reason is ``min_features``.
        in_adapter: whether it belongs to an adapter of PEFT, converted or not.
    """

    path: str
    layer: nn.Module
    becomes: type[Fp8Module] | None
    reason: str | None
    is_too_small: bool
    in_adapter: bool
    in_bf16: tuple[Product, ...] = ()


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
    classes = fp8_classes(layer for _, layer in modules)
    routers = set(find_routers(layer for _, layer in modules))
    kinds = tuple(classes)
    ignored = {part for path, layer in modules if matches(path, ignore_modules) for part in layer.modules()}
    of_adapters = adapter_modules(layer for _, layer in modules)
    least = config.min_features
    outputs_of_converted: set[nn.Module] = set()
    for path, layer in modules:
        if not (isinstance(layer, (*kinds, nn.Bilinear)) or layer in routers or is_linear_by_name(layer)):
            continue
        is_output, in_adapter = layer in outputs_of_converted, layer in of_adapters
        in_bf16, source = products[layer]
        if layer in ignored:
            reason: str | None = "matches `ignore_modules`"
        elif in_bf16 == PRODUCTS:
            reason = f"all three products in bf16 by {source}"
        elif in_adapter and not config.adapters:
            reason = _IN_ADAPTER
        elif layer in routers:
            reason = "a router: rounded to FP8, its outputs would choose other experts"
        else:
            reason = reason_against(layer, kinds, is_output)
        size_reason = too_small(sizes(layer), least) if least and not reason else None
        if reason or size_reason:
            is_too_small = size_reason is not None
            yield PlannedLayer(path, layer, None, reason or size_reason, is_too_small, in_adapter, in_bf16)
            continue
        if isinstance(layer, nn.MultiheadAttention):
            outputs_of_converted.add(adapted_layer(layer.out_proj))
        # the output projection of an attention is a subclass of nn.Linear that only marks its owner
        yield PlannedLayer(path, layer, classes.get(plain_class(layer), Fp8Linear), None, False, in_adapter, in_bf16)
