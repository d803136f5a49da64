"""Which layers of a model are converted, and why others are not: by settings, their class, state, sizes or dtypes."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import is_parametrized

from lightning_fp8.conversion.linear_layers import is_named_linear, linear_base, reason_against_linear
from lightning_fp8.modules.adapters import adapted_layer, adapter_modules
from lightning_fp8.modules.attention import Fp8MultiheadAttention
from lightning_fp8.modules.base import Fp8Module, fp8_class
from lightning_fp8.modules.class_swap import own_class
from lightning_fp8.modules.computed_weight import is_computed
from lightning_fp8.modules.experts import Fp8Experts, experts_class, find_routers, is_experts, reason_against_experts
from lightning_fp8.modules.fused_blocks import plain_class
from lightning_fp8.modules.linear import Fp8Linear, linear_class
from lightning_fp8.modules.paths import matches
from lightning_fp8.modules.tensor_classes import has_own_operators
from lightning_fp8.ops.formats import CASTABLE_DTYPES, PRODUCTS, Product
from lightning_fp8.scaling.config import Fp8Config


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
        is_too_small: whether the reason is ``min_features``.
        in_adapter: whether it belongs to an adapter of PEFT.
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

    ``products`` has, by layer, its products in bf16 and the setting that put them there.
    """
    everything = [layer for _, layer in modules]
    routers, of_adapters = set(find_routers(everything)), adapter_modules(everything)
    ignored = {part for path, layer in modules if matches(path, ignore_modules) for part in layer.modules()}
    outputs_of_converted: set[nn.Module] = set()
    for path, layer in modules:
        if not (
            is_experts(layer)
            or isinstance(layer, (*_classes(), nn.Bilinear))
            or layer in routers
            or is_named_linear(layer)
        ):
            continue
        in_adapter, (in_bf16, source) = layer in of_adapters, products[layer]
        if layer in ignored:
            reason: str | None = "matches `ignore_modules`"
        elif in_bf16 == PRODUCTS:
            reason = f"all three products in bf16 by {source}"
        elif in_adapter:
            reason = "belongs to an adapter of PEFT, which stays as it is"
        elif layer in routers:
            reason = "a router: rounded to FP8, its outputs would choose other experts"
        else:
            reason = reason_against(layer, layer in outputs_of_converted)
        of_size = None if reason else too_small(layer, config.min_features)
        becomes = None if reason or of_size else fp8_class_for(layer)
        if becomes is not None and isinstance(layer, nn.MultiheadAttention):
            outputs_of_converted.add(adapted_layer(layer.out_proj))
        yield PlannedLayer(path, layer, becomes, reason or of_size, of_size is not None, in_adapter, in_bf16)


def _classes() -> dict[type[nn.Module], type[Fp8Module]]:
    """The classes that are known by name, each with its FP8 class."""
    classes: dict[type[nn.Module], type[Fp8Module]] = {
        nn.Linear: Fp8Linear,
        nn.MultiheadAttention: Fp8MultiheadAttention,
        # this subclass of nn.Linear only marks the output projection of an attention
        NonDynamicallyQuantizableLinear: Fp8Linear,
    }
    # a model with such a layer has imported its module; other models need no transformers
    hugging_face = sys.modules.get("transformers.pytorch_utils")
    if hasattr(hugging_face, "Conv1D"):
        from lightning_fp8.modules.conv1d import Conv1D, Fp8Conv1D

        classes[Conv1D] = Fp8Conv1D
    return classes


def fp8_class_for(layer: nn.Module) -> type[Fp8Module]:
    """The class of this layer in FP8."""
    kind = plain_class(layer)
    if is_experts(layer):
        return fp8_class(experts_class(layer), kind)
    return _classes().get(kind) or linear_class(kind)


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
    classes, kind = _classes(), own_class(layer)
    base = next((cls for cls in classes if issubclass(kind, cls) and not issubclass(cls, nn.Linear)), None)
    if is_experts(layer):
        reason = reason_against_experts(layer)
    elif base is None:
        reason = None if kind in classes else reason_against_linear(layer)
    else:
        name = f"nn.{base.__name__}" if base is nn.MultiheadAttention else base.__name__
        reason = None if kind is base else f"a {kind.__name__}, a subclass of {name}, which alone is converted"
    if reason is None and any(weight.numel() == 0 for weight in gemm_weights(layer).values()):
        return "has no elements"
    return reason


def _has_computed_weight(layer: nn.Module) -> bool:
    """Whether parametrizations compute the weight, and nothing else, of a linear layer."""
    kind, parametrized = own_class(layer), cast(nn.ModuleDict, layer.parametrizations)
    is_linear = issubclass(kind, nn.Linear) and linear_base(kind) is not None
    # an attention reads the weight of its own projection by itself
    return is_linear and kind is not NonDynamicallyQuantizableLinear and [*parametrized] == ["weight"]


def too_small(layer: nn.Module, min_features: int) -> str | None:
    """Which of a layer's weights are too small for FP8, as a reason not to convert it; None if none are."""
    below = [str(size) for size in sizes(layer) if min(size) < min_features]
    return f"fewer than {min_features} features: {' and '.join(below)} (min_features={min_features})" if below else None


def gemm_weights(layer: nn.Module) -> dict[str, Tensor]:
    """The GEMM weights that a layer, converted or plain, holds itself, by GEMM name."""
    if is_experts(layer):
        return Fp8Experts.gemm_weights(layer)
    kind = Fp8MultiheadAttention if isinstance(layer, nn.MultiheadAttention) else Fp8Module
    return kind.gemm_weights(layer)


def sizes(layer: nn.Module) -> list[Sizes]:
    """The sizes of a layer's GEMM weights, whether it stores them as ``[N, K]`` or ``[K, N]``."""
    kind = type(layer) if isinstance(layer, Fp8Module) else fp8_class_for(layer)
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
