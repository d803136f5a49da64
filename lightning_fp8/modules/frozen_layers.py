"""Layers whose weights exist as FP8 casts only: how a forward uses them, and how frozen weights are saved."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from lightning_fp8.modules.fp8_parameter import Fp8Parameter, frozen, is_frozen
from lightning_fp8.modules.gemm import Gemm
from lightning_fp8.modules.phase import Phase
from lightning_fp8.runtime.warn_once import warn_once
from lightning_fp8.scalings.operand import Cast, Operand

if TYPE_CHECKING:
    from lightning_fp8.modules.base import Fp8Module


def fp8_only_cast(gemm: Gemm, parameter: Fp8Parameter, weight: Fp8Parameter) -> tuple[Tensor, Cast]:
    """``[N, K]`` for autograd, and its cast. After each change of the weight, updates the state as a cast does.

    ``weight`` is the parameter, or the matrix in it that the GEMM multiplies with.
    """
    scale_inv = parameter.scale_inv
    if not torch.compiler.is_compiling() and gemm.weight_cast.frozen_seen is not scale_inv and is_frozen(parameter):
        gemm.weight_cast.frozen_seen = scale_inv
        _note(gemm, parameter)
    codes, turned = parameter.codes()
    part, scaling = gemm.weight_cast.part, parameter.content.scaling
    if part is not None:
        codes, turned, scale_inv = codes[part], turned[part], scale_inv[part]
    columns = Operand(turned, scaling.transposed_scales(scale_inv), scaling)
    return weight.place_in_graph(), Cast(Operand(codes, scale_inv, scaling), columns)


def _note(gemm: Gemm, parameter: Fp8Parameter) -> None:
    # a change of dtype rounds as the recipe says
    parameter.content.rounding = gemm.weight_scaling
    weight = cast(Fp8Parameter, gemm.matrix(parameter))
    gemm.state.record_weight(gemm.slots["weight", Phase.TRAINING].index, *weight.content.amax_and_scale())


def with_master(gemm: Gemm, weight: Tensor) -> Tensor:
    """A weight that should be in FP8 only but no longer can be, as a plain tensor. Warns once for each model.

    If the weight has been written, it becomes a plain parameter of its layer.
    """
    if not (torch.compiler.is_compiling() or weight.requires_grad) and gemm.model.notices.is_first("master"):
        is_changed = isinstance(weight, Fp8Parameter)
        what = "changed in place, as by merging an adapter" if is_changed else "replaced, as by `fully_shard`"
        warnings.warn(
            f"The weight of {gemm.name!r} was to be kept in FP8 only and has been {what}, or is not finite. It, and any"
            f" other to which this happens, has {weight.dtype} values again, with their memory. To round whole weights"
            " to FP8 again, call `lightning_fp8.convert(model, frozen_weights='fp8')`.",
            stacklevel=2,
        )
    if not isinstance(weight, Fp8Parameter):
        return weight
    layer = gemm.layer
    if layer is not None and not torch.compiler.is_compiling():
        for own, gemms in gemms_by_weight(layer):
            if own is weight:
                return give_master(layer, gemms, weight)
    return weight.dequantized()


def give_master(layer: Fp8Module, gemms: Sequence[Gemm], weight: Fp8Parameter) -> nn.Parameter:
    """Replace one of the layer's FP8 parameters by a plain one with its values."""
    plain = nn.Parameter(weight.dequantized().contiguous(), requires_grad=False)
    replace_weight(layer, gemms, weight, plain)
    return plain


def free_masters(layer: Fp8Module) -> None:
    """Replace the masters of frozen weights by their FP8 casts, for weights to be kept in FP8 only."""
    for weight, gemms in gemms_by_weight(layer):
        if is_frozen(weight) and not weight.is_fp8:
            if weight.content.largest is None:
                warn_once(
                    "FP8 codes that came with their scales were replaced by other values, which are rounded;"
                    " `state_dict` names the worst weight. Load checkpoints of this model only."
                )
            weight = give_master(layer, gemms, weight)
        first = gemms[0]
        fp8_only = all(gemm.weight_cast.fp8_only for gemm in gemms)
        parameter = frozen(weight, first.weight_name, first.k_by_n, first.weight_scaling) if fp8_only else None
        if parameter is not None:
            replace_weight(layer, gemms, weight, parameter)
    for gemm, weight in layer.gemms():
        if is_frozen(weight) and weight.is_fp8:
            # compiled code does not store it in the state
            _note(gemm, weight)


def gemms_by_weight(layer: Fp8Module) -> list[tuple[Tensor, list[Gemm]]]:
    """Each of the layer's own weights, with the GEMMs that use it: several for experts."""
    groups: dict[int, tuple[Tensor, list[Gemm]]] = {}
    for gemm, weight in layer.gemms():
        groups.setdefault(id(weight), (weight, []))[1].append(gemm)
    return list(groups.values())


def save_values(layer: Fp8Module, saved: dict[str, Any], prefix: str) -> None:
    """Replace the layer's frozen FP8 parameters in a ``state_dict`` by their values. Warns once for each model."""
    parameters = frozen_parameters(layer)
    for name, weight in parameters.items():
        saved[f"{prefix}{name}"] = weight.dequantized()
    model = next(iter(layer.fp8.values())).model
    if what_was_rounded(parameters.values()) is not None and model.notices.is_first("rounding"):
        warnings.warn(
            f"state_dict: {what_was_rounded(gemm.weight for gemm in model.gemms.values())}. It holds the"
            " rounded values, in the dtypes of the masters. Where that is not what you want, save the adapters only,"
            " or convert with `frozen_weights='master'`.",
            stacklevel=2,
        )


def frozen_parameters(layer: nn.Module) -> dict[str, Fp8Parameter]:
    """The frozen FP8 parameters that a layer holds itself, by name."""
    own: dict[str, Any] = layer._parameters
    return {name: weight for name, weight in own.items() if is_frozen(weight)}


def applied(
    layer: nn.Module, apply: Callable[..., nn.Module], fn: Callable[[Tensor], Tensor], recurse: bool
) -> nn.Module:
    """``nn.Module._apply`` without the FP8 parameters, because it would replace their ``.data``; these come after."""
    parameters = frozen_parameters(layer)
    layer._parameters.update(dict.fromkeys(parameters))
    try:
        module = apply(fn, recurse)
    finally:
        layer._parameters.update(cast(dict[str, nn.Parameter], parameters))
    layer._parameters.update({name: weight.applied(fn) for name, weight in parameters.items()})
    return module


def replace_weight(layer: nn.Module, gemms: Sequence[Gemm], former: Tensor, new: nn.Parameter) -> None:
    """Replace a parameter of the layer, used by these GEMMs, by a parameter with the same casts."""
    for name, parameter in layer._parameters.items():
        if parameter is former:
            layer._parameters[name] = new
    for gemm in gemms:
        gemm.on_sharding(new)


def what_was_rounded(weights: Iterable[Tensor | None]) -> str | None:
    """How many of these weights are rounded to FP8, and by how much; None if no weight is."""
    errors = {
        weight.content.name: weight.content.error
        for weight in weights
        if is_frozen(weight) and weight.is_fp8 and weight.content.error > 0
    }
    if not errors:
        return None
    worst = max(errors, key=errors.__getitem__)
    return (
        f"{len(errors)} frozen weights are rounded to FP8 (`frozen_weights='fp8'`): relative RMS error"
        f" {errors[worst]:.2%} at most, in {worst!r}"
    )
