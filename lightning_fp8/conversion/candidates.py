"""Which layers of a model are converted, and why others are not: by settings, their class, state, sizes or dtypes."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import is_parametrized

from lightning_fp8.conversion.linear_layers import LINEAR, linear_base
from lightning_fp8.modules import attention
from lightning_fp8.modules.adapters import adapted_layer, adapter_modules
from lightning_fp8.modules.base import Fp8Module
from lightning_fp8.modules.class_swap import own_class, plain_class
from lightning_fp8.modules.computed_weight import is_computed
from lightning_fp8.modules.family import Family
from lightning_fp8.modules.paths import matches
from lightning_fp8.modules.tensor_classes import has_own_operators
from lightning_fp8.ops.formats import CASTABLE_DTYPES, PRODUCTS, Product
from lightning_fp8.scaling.config import Fp8Config

# families for layers of other libraries; a model with such a layer has imported the first module
_OF_LIBRARIES = {
    "transformers.pytorch_utils": "conv1d",
    "transformers.integrations.moe": "experts",
    "transformers.models.llama4.modeling_llama4": "experts",
}


class Sizes(NamedTuple):
    """The sizes of one GEMM weight.

    Attributes:
        inputs: K, the dimension that is summed over.
        outputs: N.
    """

    inputs: int
    outputs: int

    def __str__(self) -> str:
        return f"{self.inputs} -> {self.outputs}"


class PlannedLayer(NamedTuple):
    """A layer that does matrix multiplications, and what a conversion does to it.

    Attributes:
        path: module path.
        layer: the layer itself.
        becomes: its class after the conversion; None if it will be plain.
        reason: why it stays plain, or becomes plain again; None for a layer to convert.
        is_ignored: whether a pattern of ``ignore_modules`` or ``keep_fp32`` is the reason.
        is_too_small: whether ``min_features`` is the reason.
        in_adapter: whether it belongs to an adapter of PEFT.
        in_bf16: its products that run in bf16 even if it is converted.
    """

    path: str
    layer: nn.Module
    becomes: type[Fp8Module] | None
    reason: str | None
    is_ignored: bool
    is_too_small: bool
    in_adapter: bool
    in_bf16: tuple[Product, ...]


def planned_layers(
    modules: Sequence[tuple[str, nn.Module]],
    patterns: Mapping[str, Sequence[str]],
    config: Fp8Config,
    products: Mapping[nn.Module, tuple[tuple[Product, ...], str]],
) -> Iterator[PlannedLayer]:
    """Each layer that does matrix multiplications, in the order of ``modules``.

    ``patterns`` has the patterns of modules that stay plain, by argument. ``products`` has, for each layer, its
    products in bf16 and the setting that put them there.
    """
    everything = [layer for _, layer in modules]
    routers, of_adapters, families = _routers(everything), adapter_modules(everything), _families()
    ignored = _ignored(modules, patterns)
    outputs_of_converted: set[nn.Module] = set()
    for path, layer in modules:
        family = next((family for family in families if family.recognises(layer)), None)
        if family is None and layer not in routers:
            continue
        in_adapter, (in_bf16, source) = layer in of_adapters, products[layer]
        if layer in ignored:
            reason: str | None = ignored[layer]
        elif in_bf16 == PRODUCTS:
            reason = f"all three products in bf16 by {source}"
        elif in_adapter:
            reason = "belongs to an adapter of PEFT, which stays as it is"
        elif layer in routers:
            reason = "a router: rounding to FP8 would change its choice of experts"
        else:
            reason = reason_against(layer, layer in outputs_of_converted)
        of_size = None if reason else too_small(layer, config.min_features)
        becomes = None if reason or of_size else (family or LINEAR).fp8_class(layer)
        if becomes is not None and isinstance(layer, nn.MultiheadAttention):
            outputs_of_converted.add(adapted_layer(layer.out_proj))
        whys = (layer in ignored, of_size is not None, in_adapter)
        yield PlannedLayer(path, layer, becomes, reason or of_size, *whys, in_bf16)


def _ignored(modules: Sequence[tuple[str, nn.Module]], patterns: Mapping[str, Sequence[str]]) -> dict[nn.Module, str]:
    """For each module that matches a pattern, or is inside a match: the patterns, and how to convert it anyway."""
    matched: dict[nn.Module, dict[str, list[str]]] = {}
    for argument, pattern in ((argument, pattern) for argument, given in patterns.items() for pattern in given):
        for part in {part for path, module in modules if matches(path, (pattern,)) for part in module.modules()}:
            matched.setdefault(part, {}).setdefault(argument, []).append(repr(pattern))
    return {
        part: f"matches {' and '.join(f'`{argument}`' for argument in found)}: to convert it, remove "
        + " and ".join(pattern for given in found.values() for pattern in given)
        for part, found in matched.items()
    }


def _families() -> list[Family]:
    """The families to which a model's layers may belong."""
    rooms = dict.fromkeys(room for library, room in _OF_LIBRARIES.items() if library in sys.modules)
    return [attention.FAMILY, *(import_module(f"lightning_fp8.modules.{room}").FAMILY for room in rooms), LINEAR]


def family_of(layer: nn.Module) -> Family:
    """The family of a layer that does matrix multiplications; the family of linear layers if no other recognises it."""
    return next((family for family in _families() if family.recognises(layer)), LINEAR)


def _routers(modules: Sequence[nn.Module]) -> set[nn.Module]:
    """The layers whose outputs choose experts."""
    parents = [module for module in modules if "experts" in module._modules]
    if not parents:
        return set()
    from lightning_fp8.modules.experts import find_routers

    return set(find_routers(parents))


def reason_against(layer: nn.Module, is_output: bool) -> str | None:
    """Why this layer is not converted; None if it can be. ``is_output``: ``out_proj`` of a converted attention."""
    if plain_class(layer) is NonDynamicallyQuantizableLinear and not is_output:
        return "nn.MultiheadAttention, which is not converted, reads its weight directly"
    for name, parameter in layer.named_parameters(recurse=is_parametrized(layer)):
        # a converted layer may have been quantized since
        if has_own_operators(type(parameter)):
            return f"its {name} is of the class {type(parameter).__name__}, which has operators of its own"
        if parameter.layout != torch.strided:
            return f"its {name} is sparse ({parameter.layout})"
    if isinstance(layer, Fp8Module):
        return None
    if is_parametrized(layer) and not _has_computed_weight(layer):
        return "is parametrized, other than in the weight of a linear layer"
    if plain_class(layer) is NonDynamicallyQuantizableLinear:
        return None
    if isinstance(layer, LazyModuleMixin) or any(map(is_lazy, layer.parameters(recurse=False))):
        return "is not initialised yet: run a batch through the model before it is converted"
    if isinstance(layer, torch.jit.ScriptModule):
        return "a torch.jit.ScriptModule: a conversion by class would have no effect"
    if "forward" in vars(layer):
        return "its `forward` was replaced on the object, and a conversion by class would have no effect"
    reason = family_of(layer).reason_against(layer)
    if reason is None and any(weight.numel() == 0 for weight in gemm_weights(layer).values()):
        return "has no elements"
    return reason


def _has_computed_weight(layer: nn.Module) -> bool:
    """Whether parametrizations compute the weight of a linear layer, and no other parameter."""
    kind, parametrized = own_class(layer), cast(nn.ModuleDict, layer.parametrizations)
    is_linear = issubclass(kind, nn.Linear) and linear_base(kind) is not None
    # an attention reads the weight of its own projection by itself
    return is_linear and kind is not NonDynamicallyQuantizableLinear and [*parametrized] == ["weight"]


def too_small(layer: nn.Module, min_features: int) -> str | None:
    """Which of a layer's weights are too small for FP8, as a reason not to convert it; None if none are."""
    below = [size for size in sizes(layer) if min(size) < min_features]
    if not below:
        return None
    named = " and ".join(map(str, below))
    return f"fewer than {min_features} features: {named}; `min_features={min(map(min, below))}` converts it"


def gemm_weights(layer: nn.Module) -> dict[str, Tensor]:
    """The GEMM weights that a layer, converted or plain, holds itself, by GEMM name."""
    return family_of(layer).base.gemm_weights(layer)


def sizes(layer: nn.Module) -> list[Sizes]:
    """The sizes of a layer's GEMM weights, whether it stores them as ``[N, K]`` or ``[K, N]``."""
    kind = type(layer) if isinstance(layer, Fp8Module) else family_of(layer).fp8_class(layer)
    return [
        Sizes(*(weight.shape[-2:] if kind.weight_is_k_by_n else reversed(weight.shape[-2:])))
        for weight in gemm_weights(layer).values()
    ]


def check_dtype(path: str, layer: nn.Module) -> None:
    """TypeError for a layer whose parameters cannot be cast."""
    for name, parameter in layer.named_parameters(recurse=is_computed(layer)):
        if parameter.dtype not in CASTABLE_DTYPES:
            raise TypeError(
                f"{path or '(root)'}.{name} is {parameter.dtype}, and FP8 layers take float32, bfloat16 or float16"
                " parameters. Call `model.float()` first, or leave the layer out with `ignore_modules`."
            )
