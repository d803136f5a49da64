"""One linear layer in FP8 as functions: its checks, the casts of weight, input and bias, and its GEMMs."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling
from torch.distributed.tensor import DTensor

from lightning_fp8.core import casts
from lightning_fp8.core.linear import in_rows, linear
from lightning_fp8.modules.base import Fp8Module
from lightning_fp8.modules.fp8_parameter import Fp8Parameter, is_frozen, is_held
from lightning_fp8.modules.frozen_layers import fp8_only_cast, with_master
from lightning_fp8.modules.gemm import Gemm
from lightning_fp8.modules.phase import Phase
from lightning_fp8.modules.tensor_classes import has_own_operators, kind_of
from lightning_fp8.modules.weight_cast import normal_tensors
from lightning_fp8.modules.weights_together import cast_stale, cast_together
from lightning_fp8.ops.dequantize import keep_values
from lightning_fp8.ops.formats import CASTABLE_DTYPES
from lightning_fp8.ops.library import (
    backward_may_follow,
    can_keep_copies,
    in_transform,
    is_watched,
    may_get_gradient,
    on_gpu,
)
from lightning_fp8.ops.operand import as_stack
from lightning_fp8.scaling.precision import LayerPrecision
from lightning_fp8.scalings.operand import Cast, Operand, Want
from lightning_fp8.scalings.products import sides_of_weight


class Fp8Weight(NamedTuple):
    """A weight in the form that a layer multiplies with.

    Attributes:
        weight: ``[N, K]``, for autograd.
        cast: its FP8 cast; None if no product of the layer takes it.
        is_kept: whether later forwards reuse the cast.
    """

    weight: Tensor
    cast: Cast | None
    is_kept: bool = False

    def rows(self, rows: slice, of: Gemm) -> Fp8Weight:
        """A slice of the N rows, with the scales of the whole weight; cast separately if it splits a block."""
        weight, cast, count = take_rows(self.weight, rows), self.cast, len(self.weight)
        if cast is None:
            return Fp8Weight(weight, None)
        if weight is self.weight:
            return self
        sides = (cast.rows, False), (cast.columns, True)
        parts = [side and side.scaling.part(side, rows, count, turned) for side, turned in sides]
        if any(side is not None and part is None for (side, _), part in zip(sides, parts, strict=True)):
            if is_held(of.weight):
                split = [side and side.scaling.split_part(side, rows, count, turned) for side, turned in sides]
                return self._replace(weight=weight, cast=Cast(split[0], split[1]))
            # without the state, which must keep the amax and scale of the whole weight
            slot = of.weight_slot(Phase.EVALUATION)._replace(state=None)
            return Fp8Weight(weight, casts.cast_weight(weight.detach(), slot, Want(True, backward_may_follow())))
        return self._replace(weight=weight, cast=Cast(parts[0], parts[1]))


def take_rows(tensor: Tensor, rows: slice) -> Tensor:
    """``tensor[rows]``; the tensor itself, without a node in the autograd graph, if the slice is all of it."""
    return tensor if rows.start == 0 and rows.stop == len(tensor) else tensor[rows]


def cast_weight(gemm: Gemm, parameter: Tensor, phase: Phase, part: Tensor | None = None) -> Fp8Weight:
    """A weight ``[N, K]``, or ``[K, N]`` if the layer stores it transposed, with its FP8 cast.

    If the weight is a matrix of a parameter ``[E, N, K]``, ``part`` is that matrix, for autograd.

    Raises:
        NotImplementedError: for a ``DTensor``.
        RuntimeError: if the weight is on another device than the scales.
        TypeError: if the weight is of a dtype or class that is never converted.
    """
    precision, weight_cast = gemm.precision, gemm.weight_cast
    weight = parameter if part is None else part
    if not precision.in_fp8 or (precision.in_bf16 and not _needs_cast(precision)):
        if not precision.in_fp8 and not torch.compiler.is_compiling():
            weight_cast.drop()
        check_whole(gemm, parameter)
        return Fp8Weight(gemm.n_by_k(weight), None)
    # Forwards that do not record use a kept cast only while a context declares the weight unchanged: in evaluation,
    # weights may be swapped (EMA, averaging) without a trace.
    keep_columns = backward_may_follow()
    trains = phase is Phase.TRAINING
    may_keep = weight_cast.is_kept and (trains or weight_cast.assumptions > 0) and can_keep_copies(parameter)
    kept = weight_cast.get(parameter) if may_keep else None
    if (
        kept is not None
        and (not keep_columns or kept.columns is not None)
        and (parameter.requires_grad or not _must_count(gemm, phase))
    ):
        return Fp8Weight(weight.t() if weight_cast.k_by_n else weight, kept, True)
    check_kind(gemm, parameter)
    check_same_device(gemm, parameter)
    if weight_cast.fp8_only or isinstance(parameter, Fp8Parameter):
        if is_held(parameter):
            return Fp8Weight(*fp8_only_cast(gemm, parameter, cast(Fp8Parameter, weight)))
        if weight_cast.fp8_only or is_frozen(parameter):
            parameter = with_master(gemm, parameter)
            weight = weight.dequantized() if isinstance(weight, Fp8Parameter) else weight
    check_whole(gemm, parameter)
    weight = gemm.n_by_k(weight)
    # `functional_call` may have lent the layer another weight
    if weight_cast.compiled_cast_is_current and is_dynamo_compiling() and parameter is weight_cast.compiled_from:
        return Fp8Weight(weight, weight_cast.compiled_cast)
    made = cast_stale(gemm, parameter) if may_keep and trains else None
    if made is None:
        with normal_tensors() if may_keep else nullcontext():
            made = casts.cast_weight(weight.detach(), gemm.weight_slot(phase), Want(True, keep_columns))
        if may_keep:
            weight_cast.put(parameter, made)
            if weight_cast.assumptions and not on_gpu(parameter) and made.rows is not None:
                # many small GEMMs may follow, as in generation: each would dequantize the whole weight
                keep_values(made.rows.codes, made.rows.scaling.format)
    return Fp8Weight(weight, made, may_keep)


def cast_stack(gemms: Sequence[Gemm], stack: Tensor, phase: Phase) -> Cast:
    """The FP8 casts of all matrices of a stack: codes ``[E, N, K]`` and ``[E, K, N]``, scale_inv ``[E]``.

    Without gradients the operand by columns may be None.
    """
    weight_cast = gemms[0].weight_cast
    trains = phase is Phase.TRAINING
    may_keep = weight_cast.is_kept and isinstance(stack, nn.Parameter) and (trains or weight_cast.assumptions > 0)
    may_keep = may_keep and can_keep_copies(stack)
    if may_keep and (trains or weight_cast.get(stack) is not None):
        parts = zip(gemms, stack.detach().unbind(), strict=True)
        made = [cast(Cast, cast_weight(gemm, stack, phase, part).cast) for gemm, part in parts]
    else:
        check_kind(gemms[0], stack)
        check_same_device(gemms[0], stack)
        together, keep = [(gemm, stack) for gemm in gemms], backward_may_follow()
        with normal_tensors() if may_keep else nullcontext():
            made = cast_together(together, [None] * len(gemms), phase, keep)
        for gemm, one in zip(gemms, made, strict=True) if may_keep else ():
            gemm.weight_cast.put(stack, one)
    return Cast(_stacked([one.rows for one in made]), _stacked([one.columns for one in made]))


def _stacked(operands: Sequence[Operand | None]) -> Operand | None:
    if operands[0] is None:
        return None
    parts = cast(Sequence[Operand], operands)
    codes, scale_inv = [part.codes for part in parts], [part.scale_inv for part in parts]
    return Operand(as_stack(codes), as_stack(scale_inv), operands[0].scaling)


def _must_count(gemm: Gemm, phase: Phase) -> bool:
    """Whether a frozen weight is cast again, so that each step counts its losses."""
    return phase is Phase.TRAINING and gemm.model.counts.values is not None


def _needs_cast(precision: LayerPrecision) -> bool:
    """Whether a product takes the weight in FP8. In a forward without gradients, only fprop counts."""
    return precision.casts("weight") if backward_may_follow() else precision.fprop_in_fp8


def check_whole(gemm: Gemm, parameter: Tensor, what: str = "weight") -> None:
    """Raise a NotImplementedError for a ``DTensor``."""
    if isinstance(parameter, DTensor):
        raise NotImplementedError(
            f"{gemm.name!r}: the {what} is distributed over processes, and only `nn.Linear` computes with a part of"
            " it. Leave the layer out with `ignore_modules`; or, under `fully_shard`, call it as a module, so that"
            " its hooks gather the weight."
        )


def check_kind(gemm: Gemm, tensor: Tensor, what: str = "weight") -> None:
    """Raise a TypeError for a weight, or a bias, that would not have been converted."""
    is_castable = tensor.dtype in CASTABLE_DTYPES or what == "bias"
    if is_castable and (type(tensor) in (nn.Parameter, Tensor) or not has_own_operators(type(tensor))):
        return
    former = gemm.converted_from if what == "weight" else "plain"
    raise TypeError(
        f"{gemm.name!r}: the {what} was {former} when the layer was converted, and is {kind_of(tensor)} now. FP8 layers"
        f" take float32, bfloat16 or float16, and no class of tensors with operators of its own. Assign another {what},"
        " or call `convert` with `ignore_modules`, which makes the layer plain again."
    )


def check_same_device(gemm: Gemm, parameter: Tensor) -> None:
    """Raise a RuntimeError if the weight and its scales are on different devices: a kernel could not read both."""
    device = gemm.model.state.device
    if parameter.device != device and not parameter.is_meta:
        raise RuntimeError(
            f"{gemm.name!r}: the weight is on {parameter.device}, and the scales of the model are on {device}. A"
            " converted model has one device: to divide it among several, convert each part by itself."
        )


def cast_input(
    gemm: Gemm, x: Tensor, phase: Phase, keep: bool, dtype: torch.dtype, rows: bool = True, watched: bool = True
) -> Cast:
    """The cast of x ``[*, K]``: for fprop (``rows``), and for wgrad if backward needs that (``keep``).

    Layers that share x use one cast if a change of x would be noticed. Changes are not noticed for inference tensors,
    which do not count them, nor in a trace or a transform of ``torch.func``. With gradients, AOTAutograd merges casts
    that have the same arguments.
    """
    shared, slot = gemm.shared_input, gemm.slots["input", phase]
    if shared is None or torch.compiler.is_compiling() or x.is_inference() or in_transform():
        return casts.cast(in_rows(x.detach()), slot, Want(rows, keep, False, dtype), watched)
    circumstances = phase, gemm.model.changes, dtype
    # the products of layers may differ, so operands are kept by scaling and by layout
    made: dict[tuple[str, bool], Operand] = shared.take(gemm.module, x, circumstances) or {}
    sides = (slot.rows.name, False), (slot.columns.name, True)
    if (rows and sides[0] not in made) or (keep and sides[1] not in made):
        keep = keep or (backward_may_follow() and gemm.sharers_need_columns())
        new = casts.cast(in_rows(x.detach()), slot, Want(rows, keep, False, dtype), watched)
        made = made | {side: of for side, of in zip(sides, new[:2], strict=True) if of is not None}
        shared.put(gemm.module, x, circumstances, made)
    return Cast(made.get(sides[0]), made.get(sides[1]))


def fp8_linear(gemm: Gemm, x: Tensor, weight: Fp8Weight, bias: Tensor | None, phase: Phase) -> Tensor:
    """``x @ weight^T + bias`` in FP8: x ``[*, K]`` -> ``[*, N]`` in autocast's dtype, else in the dtype of ``x``.

    Products that are not in FP8 run in this output dtype; in a layer that fell back, all products do.

    Raises:
        ValueError: if the bias does not have one element for each of the N outputs.
    """
    dtype, (parameter, kept, is_kept), precision = output_dtype(x), weight, gemm.precision
    with_gradients = backward_may_follow()
    if not (precision.in_fp8 and (with_gradients or precision.fprop_in_fp8)):
        let_go_of_input(gemm)
        return F.linear(x.to(dtype), parameter.to(dtype), None if bias is None else bias.to(dtype))
    bias_value = None if bias is None else rounded_bias(gemm, bias, dtype, is_kept, parameter.shape[0])
    watched, keep = is_watched(x), may_get_gradient(parameter) and with_gradients
    x8 = cast_input(gemm, x, phase, keep, dtype, watched=watched)
    w8 = kept
    if kept is None or precision.in_bf16:
        want = Want(True, with_gradients, dtype=dtype)
        w8 = sides_of_weight(parameter.detach(), kept, gemm.slots["weight", phase], want)
    dy = gemm.slots["grad_output", phase]
    run = linear.watched if watched else linear.run
    return run(x, parameter, bias, bias_value, *x8[:2], *w8[:2], dy, dtype)  # type: ignore[index, no-any-return]


def let_go_of_input(gemm: Gemm) -> None:
    """For a layer that does not cast its input: release the shared cast if no later layer needs it."""
    if gemm.shared_input is not None:
        gemm.shared_input.pass_by(gemm.module)


def rounded_bias(gemm: Gemm, bias: Tensor, dtype: torch.dtype, keep: bool, outputs: int) -> Tensor:
    """The bias in the dtype that a GEMM with this output dtype takes; cached (``keep``) if it has to be rounded.

    Raises:
        ValueError: unless the bias has one element for each output: a kernel would read past its end.
        TypeError: if the bias is of a class that is never converted.
    """
    if bias.shape != (outputs,):
        raise ValueError(
            f"The bias of {gemm.name!r} must have the shape ({outputs},), one element for each output of the weight,"
            f" got {tuple(bias.shape)}."
        )
    kept = gemm.bias_cast.get(bias) if keep else None
    if kept is not None and kept.dtype == dtype:
        return kept
    check_kind(gemm, bias, "bias")
    if bias.dtype == dtype or dtype == torch.float32:
        return bias.detach()
    if not keep:
        return bias.detach().to(dtype)
    with normal_tensors():
        made = bias.detach().to(dtype)
    gemm.bias_cast.put(bias, made)
    return made


def check_input(module: Fp8Module, what: str, x: Tensor, weight: Tensor) -> None:
    """Check that an FP8 layer can take this input.

    As in a plain layer, the shape of the current weight decides, not ``in_features``: a weight of another shape may
    have replaced the original one.

    Raises:
        TypeError: if the input is not fp32, bf16 or fp16, or is nested or sparse.
        ValueError: if the input's last dimension does not match the weight, or the weight is not ``[N, K]`` with
            ``K > 0``.
    """
    if x.dtype not in CASTABLE_DTYPES:
        raise TypeError(
            f"{_called(module)}: the {what} must be float32, bfloat16 or float16, got {x.dtype}."
            " Convert it before this layer, or leave the layer unconverted with `ignore_modules`."
        )
    if x.is_nested or x.layout != torch.strided:
        raise TypeError(
            f"{_called(module)}: the {what} must not be a nested or sparse tensor. Pass `x.to_dense()` or padded"
            " tensors, or `x.values()` of the layout torch.jagged, or leave the layer unconverted with"
            " `ignore_modules`."
        )
    shape, input_shape = weight.shape, x.shape
    features = shape[0 if module.weight_is_k_by_n else 1] if len(shape) == 2 else 0
    if not features:
        raise ValueError(
            f"{_called(module)}: the weight must have two dimensions and at least one input feature, got the shape"
            f" {tuple(shape)}."
        )
    if not input_shape or input_shape[-1] != features:
        raise ValueError(
            f"{_called(module)}: the last dimension of the {what} must be {features}, the input features of the"
            f" weight, got the shape {tuple(input_shape)}."
        )


def _called(module: Fp8Module) -> str:
    # for errors only: a compiled graph that depends on a layer's name could not be reused for other layers
    return f"{type(module).__name__} {next(iter(module.fp8.values())).name!r}"


def output_dtype(x: Tensor) -> torch.dtype:
    """Autocast's dtype if autocast is on, else the dtype of ``x``."""
    device = "cuda" if x.is_cuda else "cpu"
    # autocast does not support the meta device, which serves for shapes and FLOPs
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) and not x.is_meta else x.dtype
