"""The scales that an export writes: which weights have some, and which are written as they are."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping

import torch
from torch import Tensor, nn

from lightning_fp8.export.layout import SCALE_RULE, Scales, converted_gemms, is_scale, joined, listed
from lightning_fp8.modules.gemm import Gemm
from lightning_fp8.ops.amaxes import BLOCK, max_abs, scale_of_current
from lightning_fp8.ops.formats import E4M3, Role, dtype_name
from lightning_fp8.ops.operand import CurrentScale

# the operands of fprop
_ROLES: tuple[Role, ...] = ("input", "weight")


def scales_to_write(model: nn.Module, tensors: Mapping[str, Tensor]) -> Mapping[str, Scales | CurrentScale | None]:
    """The scales of all converted GEMMs, or how their blocks are scaled; None where fprop is not in FP8."""
    gemms = converted_gemms(model)
    _check_gemms(model, gemms, tensors)
    found: dict[str, Scales | CurrentScale | None] = {}
    without: list[str] = []
    for name, gemm in gemms.items():
        _check_formats(gemm)
        check_finite(name, tensors[name])
        recipe = gemm.state.recipe
        found[name] = None
        if gemm.precision.fprop_in_fp8 and recipe.current.blocks:
            found[name] = gemm.weight_scaling
        elif gemm.precision.fprop_in_fp8:
            input_scale = _input_scale(gemm) if recipe.from_history else None
            found[name] = Scales(_weight_scale(tensors[name]), input_scale)
            if recipe.from_history and input_scale is None:
                without.append(joined(gemm.name, "input"))
    if without:
        raise ValueError(
            f"export: {len(without)} tensors have no history, so they have no static scale: {listed(without)}."
            " Train for at least one step in which these layers run (an input that is always zero leaves no history),"
            " or leave the layers out with `ignore_modules`."
        )
    wrong = [
        f"{joined(gemms[name].name, role)} ({scale.item():.3g})"
        for name, scales in found.items()
        for role, scale in (scales.static.items() if isinstance(scales, Scales) else ())
        if not is_scale(scale)
    ]
    if wrong:
        raise ValueError(
            f"export: a scale in a file must be {SCALE_RULE}, which these are not: {listed(wrong)}. Leave the layers"
            " out of FP8, with `lightning_fp8.fall_back(model, name)`."
        )
    return found


def in_whole_blocks(
    gemms: Mapping[str, Scales | CurrentScale | None], tensors: Mapping[str, Tensor], plain: Collection[str]
) -> Mapping[str, Scales | CurrentScale | None]:
    """Leave out weights with incomplete blocks: a reader may compute the size of a block from the number of scales.

    Those in ``plain`` are not written in FP8 in any case.
    """
    left = [
        name
        for name, of in gemms.items()
        if isinstance(of, CurrentScale) and name not in plain and any(size % BLOCK for size in tensors[name].shape)
    ]
    if not left:
        return gemms
    rule = f"a scale is for a whole block of {BLOCK} x {BLOCK} of a weight, and these weights have incomplete ones"
    shapes = listed([f"{name} {tuple(tensors[name].shape)}" for name in left])
    gemms = {**gemms, **dict.fromkeys(left)}
    if not any(of for name, of in gemms.items() if name not in plain):
        raise ValueError(
            f"export: {rule}: {shapes}. No weight would be in FP8. Convert the model with another recipe (`unconvert`,"
            " then `convert`), or save it as any other model."
        )
    warnings.warn(
        f"export: {len(left)} weights are written as they are: {rule}: {shapes}. They ran in FP8 until now, so outputs"
        " differ.",
        stacklevel=3,
    )
    return gemms


def _check_gemms(model: nn.Module, gemms: Mapping[str, Gemm], tensors: Mapping[str, Tensor]) -> None:
    in_fp8 = [gemm for gemm in gemms.values() if gemm.precision.fprop_in_fp8]
    if not in_fp8:
        raise ValueError(
            f"export: {type(model).__name__} has no layers that run in FP8. Convert it (`lightning_fp8.convert`, or"
            " Trainer(precision='fp8-delayed')) and train it, or save it as any other model."
        )
    changed = [name for name in gemms if name not in tensors]
    if changed:
        raise ValueError(
            f"export: no {changed[0]!r} in the model's `state_dict`. Remove parametrizations and hooks that rename or"
            " compute weights of converted layers first."
        )
    state = in_fp8[0].state
    if not state.recipe.from_history and state.recipe.current.margin:
        raise ValueError(
            f"export: {state.recipe} keeps {state.recipe.current.margin} powers of two free above the largest value of"
            " an input, and readers of the layout keep none. Convert the model with `margin=0` (`unconvert`, then"
            " `convert`)."
        )
    current = state.current_modules
    if any(gemm.name in current for gemm in in_fp8):
        raise ValueError(
            f"export: {len(current)} layers are scaled by their own values since `ScaleWatchdog` moved them, so there"
            f" are no static scales to write: {listed(current)}. `lightning_fp8.fall_back(model, name)`"
            " leaves a layer out of FP8."
        )


def _check_formats(gemm: Gemm) -> None:
    for role in _ROLES:
        fmt = gemm.state.recipe.format_of(role)
        if fmt != E4M3:
            raise ValueError(
                f"export: the layout knows only E4M3, and the recipe casts {joined(gemm.name, role)} to {fmt.name}:"
                f" {gemm.state.recipe}."
            )


def _input_scale(gemm: Gemm) -> Tensor | None:
    row = gemm.state.row_of(gemm.module, "input")
    return gemm.state.scale[row].cpu() if bool(gemm.state.amax_history[0, row] > 0) else None


def _weight_scale(weight: Tensor) -> Tensor:
    amax = max_abs(weight.detach())
    # for zeros any scale will do; the largest scale would have a subnormal reciprocal, which some devices flush to zero
    return torch.where(amax > 0, scale_of_current(amax, E4M3), 1.0).cpu()


def check_finite(name: str, tensor: Tensor) -> None:
    """Raise a ValueError if the tensor has inf or NaN."""
    if tensor.is_floating_point() and not bool(tensor.detach().isfinite().all()):
        raise ValueError(
            f"export: {name} has values that are not finite in {dtype_name(tensor.dtype)}, so the model is not"
            " usable. Export an earlier checkpoint, or use a wider `dtype`."
        )
