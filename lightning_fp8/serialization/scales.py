"""The scales that an export writes: decides which weights are written in FP8, and which stay as they are."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from lightning_fp8.modules.fp8_parameter import Content, Fp8Parameter, is_held
from lightning_fp8.modules.fp8_parameter import quantized as quantized_by
from lightning_fp8.modules.gemm import Gemm
from lightning_fp8.modules.paths import plain_path
from lightning_fp8.ops import e8m0
from lightning_fp8.ops.amaxes import BLOCK, max_abs, scale_of_current
from lightning_fp8.ops.arithmetic import square_amaxes
from lightning_fp8.ops.formats import E4M3, Role, dtype_name
from lightning_fp8.scalings.base import Scaling
from lightning_fp8.serialization.layouts.base import Kind, Quantized, WritableLayout
from lightning_fp8.serialization.layouts.registry import those_with
from lightning_fp8.serialization.tensors import SCALE_RULE, Scales, codes_of, converted_gemms, is_scale, joined, listed

# the operands of fprop
_ROLES: tuple[Role, ...] = ("input", "weight")


class Plan(NamedTuple):
    """How a weight goes into a file in FP8. A weight that is held in FP8 only keeps its codes and scales.

    Attributes:
        kind: the kind of its scales.
        weight: for a single scale computed here, the weight's multiplier before the cast, ``[] float32`` on the CPU.
        input: the multiplier of the layer's input; None if readers scale the input by its own values.
        scaling: the scaling that computes any other scales.
    """

    kind: Kind
    weight: Tensor | None
    input: Tensor | None
    scaling: Scaling

    @property
    def scales(self) -> Scales | None:
        """The exact scales, for the metadata; None unless the weight has a single scale computed here."""
        return None if self.weight is None else Scales(self.weight, self.input)


def scales_to_write(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Plan | None]:
    """How the weights of all converted GEMMs go into the file; None if fprop is not in FP8."""
    gemms = converted_gemms(model)
    _check_gemms(model, gemms, tensors)
    plans: dict[str, Plan | None] = {}
    is_static = _have_static_scales(gemms, tensors)
    for name, gemm in gemms.items():
        weight = tensors[name]
        _check_formats(gemm)
        check_finite(name, weight)
        plans[name] = None
        if not gemm.precision.fprop_in_fp8:
            continue
        kind = _kind_of(gemm.weight_scaling)
        has_scale = kind == "tensor"
        if is_held(weight):
            kind = kind_of_held(weight)
            has_scale = kind == "tensor" and weight.content.largest is not None
        # readers scale inputs by their own values if weights have scales for blocks
        of_input = _input_scale(gemm) if is_static and kind not in ("block", "group") else None
        plans[name] = Plan(kind, _weight_scale(weight) if has_scale else None, of_input, gemm.weight_scaling)
    wrong = [
        f"{joined(gemms[name].name, role)} ({scale.item():.3g})"
        for name, plan in plans.items()
        if plan is not None
        for role, scale in (("weight", plan.weight), ("input", plan.input))
        if scale is not None and not is_scale(scale)
    ]
    if wrong:
        raise ValueError(
            f"export: a scale in a file must be {SCALE_RULE}, which these are not: {listed(wrong)}. Leave the layers"
            " out of FP8, with `lightning_fp8.conversion.fall_back(model, name)`."
        )
    return plans


def kind_of_held(weight: Fp8Parameter) -> Kind:
    """The kind of the scales of a weight that is held in FP8."""
    return _kind_of(weight.content.scaling)


def _kind_of(scaling: Scaling) -> Kind:
    if scaling.file_kind is None:
        raise ValueError(
            f"export: no layout of files has the scales of {type(scaling).__name__}. Call"
            " `lightning_fp8.unconvert(model)` and save the plain weights, or convert the model with another recipe."
        )
    return cast(Kind, scaling.file_kind)


def as_stored(content: Content) -> tuple[Tensor, Tensor]:
    """The codes of a weight that is held in FP8, in the weight's shape, and its scales, in the shape of their kind."""
    codes, scale_inv = content.payload, content.scale_inv
    scale_inv = e8m0.of_rows(scale_inv, codes.shape[-2]) if scale_inv.dtype == torch.uint8 else scale_inv
    if not content.k_by_n:
        return codes, scale_inv
    return codes.mT, scale_inv.mT if scale_inv.dim() > 1 else scale_inv


def quantized(weight: Tensor, plan: Plan) -> Quantized:
    """The codes and scales of a weight, as its file will hold them.

    A weight of zeros has the scale 1: the largest scale would have a subnormal reciprocal, which some devices flush to
    zero.
    """
    of_input = None if plan.input is None else plan.input.reciprocal()
    if is_held(weight):
        codes, scale_inv = (tensor.contiguous().cpu() for tensor in as_stored(weight.content))
        return Quantized(codes.view(E4M3.dtype), scale_inv, of_input)
    if plan.weight is not None:
        return Quantized(codes_of(weight, plan.weight), plan.weight.reciprocal(), of_input)
    codes, scale_inv, _ = quantized_by(_plain(weight), plan.scaling)
    if plan.kind == "block":
        scale_inv = torch.where(square_amaxes(_plain(weight), BLOCK) > 0, scale_inv, 1.0)
    if plan.kind == "group":
        scale_inv = e8m0.of_rows(scale_inv, len(codes)).contiguous()
    return Quantized(codes.cpu().view(E4M3.dtype), scale_inv.cpu())


def _plain(weight: Tensor) -> Tensor:
    return (weight.dequantized() if isinstance(weight, Fp8Parameter) else weight).detach().contiguous()


def in_whole_blocks(
    plans: dict[str, Plan | None], tensors: Mapping[str, Tensor], plain: Collection[str], layout: WritableLayout
) -> dict[str, Plan | None]:
    """Leave out weights with incomplete blocks, or groups: readers may compute their size from the number of scales.

    Weights in ``plain`` are not written in FP8 anyway. A weight that exists in FP8 only is written with incomplete
    blocks, but not with incomplete groups, because readers of that layout do not accept them.
    """
    kinds = {
        name: plan.kind
        for name, plan in plans.items()
        if plan is not None and (plan.kind == "group" or not is_held(tensors[name]))
    }
    groups, blocks = ([name for name, of in kinds.items() if of == kind] for kind in ("group", "block"))
    left = [name for name in groups if tensors[name].shape[-1] % e8m0.BLOCK]
    left += [name for name in blocks if not layout.ragged and any(size % BLOCK for size in tensors[name].shape)]
    left = [name for name in left if name not in plain]
    if not left:
        return plans
    block = f"{e8m0.BLOCK} elements of a row" if groups else f"a block of {BLOCK} x {BLOCK}"
    rule = f"a scale is for {block} of a weight, and these weights have incomplete ones"
    remedy = "" if groups else f" {those_with(lambda other: other.ragged)} writes them in FP8."
    shapes = listed([f"{name} {tuple(tensors[name].shape)}" for name in left])
    plans = {**plans, **dict.fromkeys(left)}
    if not any(plan is not None for name, plan in plans.items() if name not in plain):
        raise ValueError(
            f"export: {rule}: {shapes}. No weight would be in FP8.{remedy} Convert the model with another recipe"
            " (`unconvert`, then `convert`)."
        )
    warnings.warn(
        f"export: {len(left)} weights are written as they are: {rule}: {shapes}. They ran in FP8 until now, so outputs"
        f" differ.{remedy}",
        stacklevel=3,
    )
    return plans


def check_linear(model: nn.Module, names: Collection[str], layout: WritableLayout) -> None:
    """ValueError for FP8 weights of layers other than ``nn.Linear``, if the layout's readers would not find them."""
    linear = {
        joined(plain_path(path), "weight")
        for path, layer in model.named_modules(remove_duplicate=False)
        if isinstance(layer, nn.Linear)
    }
    wrong = [name for name in names if name not in linear]
    if wrong and layout.linear_only:
        raise ValueError(
            f"export: layout={layout.name!r} is for weights of `nn.Linear`, and these belong to other layers:"
            f" {listed(wrong)}. Pass `layout=None`, or leave them out of FP8"
            " (`lightning_fp8.conversion.fall_back(model, name)`)."
        )


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


def _check_formats(gemm: Gemm) -> None:
    for role in _ROLES:
        fmt = gemm.state.recipe.format_of(role)
        if fmt != E4M3:
            raise ValueError(
                f"export: the layout knows only E4M3, and the recipe casts {joined(gemm.name, role)} to {fmt.name}:"
                f" {gemm.state.recipe}."
            )


def _have_static_scales(gemms: Mapping[str, Gemm], tensors: Mapping[str, Tensor]) -> bool:
    """Whether inputs get static scales: a file has the scales of all inputs or of none; a warning says if none."""
    state = next(iter(gemms.values())).state
    if not state.recipe.from_history:
        return False
    in_fp8 = [gemm for name, gemm in gemms.items() if gemm.precision.fprop_in_fp8 and not _is_in_blocks(tensors[name])]
    has_history = (state.amax_history[0] > 0).tolist()
    without = [
        joined(gemm.name, "input")
        for gemm in in_fp8
        if gemm.precision.is_current or not has_history[state.row_of(gemm.module, "input")]
    ]
    if without:
        warnings.warn(
            "export: readers will scale each input by its own values (`activation_scheme: dynamic`), as evaluation here"
            f" does: these have no history of a training, or are on current scaling: {listed(without)}.",
            stacklevel=4,
        )
    return not without


def _is_in_blocks(weight: Tensor) -> bool:
    return is_held(weight) and kind_of_held(weight) in ("block", "group")


def _input_scale(gemm: Gemm) -> Tensor:
    return gemm.state.scale[gemm.state.row_of(gemm.module, "input")].cpu()


def _weight_scale(weight: Tensor) -> Tensor:
    amax = max_abs(weight.detach())
    return torch.where(amax > 0, scale_of_current(amax, E4M3), 1.0).cpu()


def check_finite(name: str, tensor: Tensor) -> None:
    """Raise a ValueError if the tensor has inf or NaN."""
    if tensor.is_floating_point() and not bool(tensor.detach().isfinite().all()):
        raise ValueError(
            f"export: {name} has values that are not finite in {dtype_name(tensor.dtype)}, so the model is not"
            " usable. Export an earlier checkpoint, or use a wider `dtype`."
        )
