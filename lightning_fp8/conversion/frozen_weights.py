"""Which frozen weights of a model are kept in FP8 only, and why others keep their masters."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable, Sequence

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_fp8.modules.base import Fp8Module
from lightning_fp8.modules.fp8_parameter import is_frozen, is_held
from lightning_fp8.modules.frozen_layers import free_masters, gemms_by_weight, give_master, what_was_rounded
from lightning_fp8.modules.gemm import Gemm
from lightning_fp8.runtime.warn_once import warn_once
from lightning_fp8.scaling.precision import Choice


def keep_in_fp8(modules: Sequence[nn.Module]) -> None:
    """Keep only the FP8 cast of the frozen weights of converted layers, except where that is not possible.

    Args:
        modules: all modules of the model, each once.
    """
    uses, layers = _uses(modules), [module for module in modules if isinstance(module, Fp8Module)]
    restore_masters(layer for layer in layers if Choice(layer.in_bf16).needs_weight)
    for layer in layers:
        for gemm, weight in layer.gemms():
            gemm.weight_cast.fp8_only = _reason_against(gemm, weight, uses) is None
        free_masters(layer)
    if not any(gemm.weight_cast.fp8_only for layer in layers for gemm in layer.fp8.values()):
        warn_once(
            "`frozen_weights='fp8'` has no effect: no converted layer has a frozen weight of its own. Freeze the base"
            " (`requires_grad_(False)`) before it is converted; `describe(model)` has the reason for each layer."
        )


def restore_masters(layers: Iterable[Fp8Module]) -> None:
    """Give masters to weights that are kept in FP8 only, and warn: they have rounded values, or take more memory."""
    layers = list(layers)
    weights = [weight for layer in layers for weight, _ in gemms_by_weight(layer)]
    rounded = what_was_rounded(weights)
    if rounded is not None:
        warnings.warn(f"{rounded}. They have masters again, which hold the rounded values.", stacklevel=2)
    published = [weight.content.name for weight in weights if is_frozen(weight) and weight.content.has_own_codes]
    if published:
        warnings.warn(
            f"{len(published)} weights were kept in the FP8 codes that they came in, {published[0]!r} the first. They"
            " have masters now, with the memory of their dtype, and these are cast again. `describe(model)` says what"
            " keeps a weight from being in FP8 only.",
            stacklevel=2,
        )
    for layer in layers:
        for weight, gemms in gemms_by_weight(layer):
            for gemm in gemms:
                gemm.weight_cast.fp8_only = False
            if is_frozen(weight):
                give_master(layer, gemms, weight)


def notes_on_weights(modules: Sequence[nn.Module]) -> dict[nn.Module, str]:
    """For each converted layer with ``frozen_weights="fp8"``, how its weights are kept."""
    uses = _uses(modules)
    return {
        layer: ", ".join(dict.fromkeys(_note(gemm, weight, uses) for gemm, weight in layer.gemms()))
        for layer in modules
        if isinstance(layer, Fp8Module) and layer.scaling_state.config.frozen_weights == "fp8"
    }


def _note(gemm: Gemm, weight: Tensor, uses: Counter[int]) -> str:
    if is_held(weight):
        return f"weight in FP8 only{'' if weight.content.has_both_orders else ', dgrad in bf16 with its values'}"
    reason = _reason_against(gemm, weight, uses)
    if reason is None and weight.is_meta:
        return "weight in FP8 only once it is loaded"
    return f"weight keeps its master: it {reason or 'is new, written or not finite, so call `convert` again'}"


def _reason_against(gemm: Gemm, weight: Tensor, uses: Counter[int]) -> str | None:
    if gemm.precision.of("settings").needs_weight:
        return "is multiplied in bf16"
    if isinstance(weight, DTensor):
        return "is sharded"
    if not isinstance(weight, nn.Parameter):
        return "is computed"
    if weight.requires_grad:
        return "is trained"
    return "is tied" if uses[id(weight)] > 1 else None


def _uses(modules: Sequence[nn.Module]) -> Counter[int]:
    """How many modules hold each parameter, by its ``id``."""
    return Counter(id(parameter) for module in modules for parameter in module._parameters.values())
