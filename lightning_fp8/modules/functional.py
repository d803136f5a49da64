"""One linear layer in FP8 as functions: its checks, the casts of weight, input and bias, and its GEMMs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.distributed.tensor import DTensor

from lightning_fp8 import ops
from lightning_fp8.modules.base import Fp8Module, Fp8Rows
from lightning_fp8.modules.frozen_layers import frozen_operand, with_master
from lightning_fp8.modules.frozen_weight import FrozenWeight
from lightning_fp8.modules.gathered_weight import GatheredWeight
from lightning_fp8.ops.amaxes import BLOCK
from lightning_fp8.ops.formats import CASTABLE_DTYPES, PRODUCTS
from lightning_fp8.ops.library import can_keep_copies, is_k_major
from lightning_fp8.ops.operand import Fp8Operand
from lightning_fp8.scaling.switches import Switch


class Fp8Weight(NamedTuple):
    """A weight as a layer multiplies with it.

    Attributes:
        weight: ``[N, K]``, for autograd.
        operand: its FP8 cast, for the GEMMs; None if no product of the layer takes one.
        is_kept: whether later forwards reuse the cast.
    """

    weight: Tensor
    operand: Fp8Operand | None
    is_kept: bool = False

    def rows(self, rows: slice, of: Fp8Rows) -> Fp8Weight:
        """A slice of the N rows, with the scales of the whole weight; cast separately if it splits a block."""
        weight, operand = take_rows(self.weight, rows), self.operand
        if operand is None:
            return Fp8Weight(weight, None)
        if weight is self.weight:
            return self
        if of.weight_scaling.blocks and (rows.start % BLOCK or rows.stop % BLOCK):
            # without the state, which must keep the amax and scale of the whole weight
            slot = of.weight_slot(False)._replace(state=None)
            return Fp8Weight(weight, ops.cast_weight_operand(weight.detach(), slot, torch.is_grad_enabled()))
        if of.weight_scaling.blocks:
            blocks = slice(rows.start // BLOCK, rows.stop // BLOCK)
            by_columns = operand.columns_scale_inv[:, blocks]
            operand = operand._replace(scale_inv=operand.scale_inv[blocks], columns_scale_inv=by_columns)
        # without gradients the payload by columns may be empty
        columns = operand.columns[:, rows] if operand.columns.dim() == 2 else operand.columns
        return self._replace(weight=weight, operand=operand._replace(rows=operand.rows[rows], columns=columns))


def take_rows(tensor: Tensor, rows: slice) -> Tensor:
    """``tensor[rows]``; the tensor itself, without a node in the autograd graph, if the slice is all of it."""
    return tensor if rows.start == 0 and rows.stop == len(tensor) else tensor[rows]


def cast_weight(rows: Fp8Rows, parameter: Tensor, record: bool, part: Tensor | None = None) -> Fp8Weight:
    """The FP8 cast of a weight ``[N, K]``, or ``[K, N]`` if the layer stores it transposed.

    Where the weight is a matrix of a parameter ``[E, N, K]``, ``part`` is that matrix, for autograd.

    Raises:
        NotImplementedError: for a ``DTensor``.
    """
    switch = rows.switch
    if not switch.in_fp8 or (switch.in_bf16 and not _needs_cast(switch)):
        if not switch.in_fp8 and not torch.compiler.is_compiling():
            rows.weight_cache.drop()
        check_whole(rows, parameter)
        return Fp8Weight(rows.n_by_k(parameter if part is None else part), None)
    # Forwards that do not record use the cache only while a context vouches for the weight: in evaluation, weights may
    # be swapped (EMA, averaging) without a trace.
    cache, keep_columns = rows.weight_cache, torch.is_grad_enabled()
    is_kept = rows.keeps_cast and can_keep_copies(parameter) and (record or cache.vouchers > 0)
    made = cache.get(parameter) if is_kept else None
    # while lost values are counted, a frozen weight is cast again, so that each step counts its losses
    must_count = record and not parameter.requires_grad and rows.state.cast_counts.values is not None
    if made is not None and not must_count and (not keep_columns or made.columns.dim() == 2):
        return Fp8Weight(rows.n_by_k(parameter if part is None else part), made, True)
    if isinstance(parameter, FrozenWeight) and parameter.is_fp8:
        return Fp8Weight(*frozen_operand(rows, parameter))
    if rows.fp8_only:
        parameter = with_master(rows, parameter)
    if isinstance(parameter, GatheredWeight):
        place, scale_inv = parameter.place_in_graph(), parameter.scale_inv
        operand = Fp8Operand(*parameter.payloads(rows.k_by_n), scale_inv, scale_inv, rows.formats["weight"])
        return Fp8Weight(place.t() if rows.k_by_n else place, operand)
    check_whole(rows, parameter)
    weight = rows.n_by_k(parameter if part is None else part)
    if rows.is_prepared and is_dynamo_compiling():
        return Fp8Weight(weight, rows.prepared)
    made = rows.group.cast_stale(rows, parameter) if is_kept and record else None
    if made is None:
        with _normal_tensors() if is_kept else nullcontext():
            made = ops.cast_weight_operand(weight.detach(), rows.weight_slot(record), keep_columns)
        if is_kept:
            cache.put(parameter, made)
            if cache.vouchers and not is_k_major(parameter):
                # many small GEMMs follow, as in generation, each of which would dequantize the whole weight
                ops.keep_values(made)
    return Fp8Weight(weight, made, is_kept)


def _needs_cast(switch: Switch) -> bool:
    """Whether a product takes the weight in FP8: in a forward without gradients that is fprop alone."""
    return switch.casts("weight") if torch.is_grad_enabled() else switch.fprop_in_fp8


def check_whole(rows: Fp8Rows, parameter: Tensor) -> None:
    """Raise a NotImplementedError for a ``DTensor``."""
    if isinstance(parameter, DTensor):
        raise NotImplementedError(
            f"{rows.name!r}: the weight is distributed over processes, and only `nn.Linear` computes with a part of"
            " it. Leave the layer out with `ignore_modules`; or, under `fully_shard`, call it as a module, so that"
            " its hooks gather the weight."
        )


@contextmanager
def _normal_tensors() -> Iterator[None]:
    """For copies that outlive an inference mode."""
    with torch.inference_mode(False), torch.no_grad():
        yield


def cast_input(rows: Fp8Rows, x: Tensor, record: bool, keep: bool, by_rows: bool = True) -> Fp8Operand:
    """x ``[*, K]`` in FP8: by rows if forward needs that (``by_rows``), by columns if backward does (``keep``).

    Layers that share x use one cast wherever a change of x would be seen. An inference tensor does not count its
    changes, nor does a trace show them; with gradients, AOTAutograd merges casts that have the same arguments.
    """
    shared = rows.shared_input
    if shared is None or torch.compiler.is_compiling() or x.is_inference():
        return _cast_input(rows, x, record, keep, by_rows)
    made = None if rows.is_first else shared.take(x, rows.state, record, keep, by_rows, rows.is_last)
    if made is None:
        by_columns = keep or (torch.is_grad_enabled() and rows.followers_need_columns())
        made = _cast_input(rows, x, record, by_columns, by_rows)
        if not rows.is_last:
            shared.put(x, rows.state, record, made, rows.is_first)
    return made


def _cast_input(rows: Fp8Rows, x: Tensor, record: bool, keep: bool, by_rows: bool = True) -> Fp8Operand:
    return ops.cast_operand(ops.in_rows(x.detach()), rows.slot("input", record), "none", keep, by_rows)


def fp8_linear(rows: Fp8Rows, x: Tensor, weight: Fp8Weight, bias: Tensor | None, record: bool) -> Tensor:
    """``x @ weight^T + bias`` in FP8: x ``[*, K]`` -> ``[*, N]`` in autocast's dtype, else in that of ``x``.

    A layer that fell back computes in that dtype throughout, and so do those products that are not in FP8.

    Raises:
        ValueError: if the bias does not have one element for each of the N outputs.
    """
    dtype, (parameter, operand, is_kept) = output_dtype(x), weight
    if operand is None or rows.switch.in_bf16:
        return _linear_in_part(rows, x, weight, bias, record, dtype)
    check_bias(rows, bias, operand.rows.shape[0])
    bias_value = rounded_bias(rows, bias, dtype, is_kept)
    x_fp8 = cast_input(rows, x, record, keep=parameter.requires_grad and torch.is_grad_enabled())
    dy = rows.slot("grad_output", record)
    return ops.linear(x, parameter, bias, bias_value, x_fp8, operand, dy, dtype)  # type: ignore[no-any-return]


def _linear_in_part(
    rows: Fp8Rows, x: Tensor, weight: Fp8Weight, bias: Tensor | None, record: bool, dtype: torch.dtype
) -> Tensor:
    """Like :func:`fp8_linear`, for a layer with products that are not in FP8: all of them if it fell back."""
    (parameter, operand, is_kept), switch = weight, rows.switch
    with_gradients = torch.is_grad_enabled()
    if not (switch.in_fp8 and (with_gradients or switch.fprop_in_fp8)):
        let_go_of_input(rows)
        return F.linear(x.to(dtype), parameter.to(dtype), None if bias is None else bias.to(dtype))
    check_bias(rows, bias, len(parameter))
    fprop, dgrad, wgrad = (product in switch.in_bf16 for product in PRODUCTS)
    nothing, unscaled = x.new_empty(0), torch.ones((), device=x.device)
    x_operand = Fp8Operand(nothing, nothing, unscaled, unscaled, rows.formats["input"])
    w_operand = operand or Fp8Operand(nothing, nothing, unscaled, unscaled, rows.formats["weight"])
    keep = with_gradients and parameter.requires_grad
    if not fprop or (keep and not wgrad):
        x_operand = cast_input(rows, x, record, keep and not wgrad, not fprop)
    else:
        let_go_of_input(rows)
    if fprop or (keep and wgrad):
        plain = ops.in_rows(_rounded_input(rows, x, dtype))
        x_operand = x_operand._replace(
            rows=plain if fprop else x_operand.rows, columns=plain.t() if wgrad else x_operand.columns
        )
    if fprop or (with_gradients and dgrad):
        plain = parameter.detach().to(dtype)
        w_operand = w_operand._replace(
            rows=plain if fprop else w_operand.rows, columns=plain.t() if dgrad else w_operand.columns
        )
    bias_value, dy = rounded_bias(rows, bias, dtype, is_kept), rows.slot("grad_output", record)
    return ops.linear(x, parameter, bias, bias_value, x_operand, w_operand, dy, dtype)  # type: ignore[no-any-return]


def _rounded_input(rows: Fp8Rows, x: Tensor, dtype: torch.dtype) -> Tensor:
    shared = rows.shared_input
    # a compiler merges these casts by itself
    if shared is None or x.dtype == dtype or torch.compiler.is_compiling() or x.is_inference():
        return x.detach().to(dtype)
    return shared.rounded(x, dtype, rows.is_last)


def let_go_of_input(rows: Fp8Rows) -> None:
    """For a layer that casts no input of its own: release the shared cast if no later layer shares it."""
    if rows.is_last and rows.shared_input is not None:
        rows.shared_input.drop()


def rounded_bias(rows: Fp8Rows, bias: Tensor | None, dtype: torch.dtype, keep: bool) -> Tensor | None:
    """The bias in the dtype that a GEMM with this output dtype takes; cached (``keep``) if it has to be rounded."""
    if bias is None or bias.dtype == dtype or dtype == torch.float32:
        return None if bias is None else bias.detach()
    if not keep:
        return bias.detach().to(dtype)
    kept = rows.bias_cache.get(bias)
    if kept is None or kept.dtype != dtype:
        with _normal_tensors():
            kept = bias.detach().to(dtype)
        rows.bias_cache.put(bias, kept)
    return kept


def check_input(module: Fp8Module, what: str, x: Tensor, weight: Tensor) -> None:
    """Check that an FP8 layer can take this input.

    As in a plain layer, the shape of the current weight decides, not ``in_features``: the weight may have been replaced
    by one of another shape.

    Raises:
        TypeError: if it is not fp32, bf16 or fp16.
        ValueError: if its last dimension is not that of the weight, or the weight is not ``[N, K]`` with ``K > 0``.
    """
    if x.dtype not in CASTABLE_DTYPES:
        raise TypeError(
            f"{_called(module)}: the {what} must be float32, bfloat16 or float16, got {x.dtype}."
            " Convert it before this layer, or leave the layer unconverted with `ignore_modules`."
        )
    shape, given = weight.shape, x.shape
    features = shape[0 if module.weight_is_k_by_n else 1] if len(shape) == 2 else 0
    if not features:
        raise ValueError(
            f"{_called(module)}: the weight must have two dimensions and at least one input feature, got the shape"
            f" {tuple(shape)}."
        )
    if not given or given[-1] != features:
        raise ValueError(
            f"{_called(module)}: the last dimension of the {what} must be {features}, the input features of the"
            f" weight, got the shape {tuple(given)}."
        )


def check_bias(rows: Fp8Rows, bias: Tensor | None, outputs: int) -> None:
    """Raise a ValueError unless the bias has one element for each output: a kernel would read past its end."""
    if bias is not None and bias.shape != (outputs,):
        raise ValueError(
            f"The bias of {rows.name!r} must have the shape ({outputs},), one element for each output of the weight,"
            f" got {tuple(bias.shape)}."
        )


def _called(module: Fp8Module) -> str:
    # read in errors only: a compiled graph that depends on the name of its layer would serve no other layer
    return f"{type(module).__name__} {next(iter(module.fp8.values())).name!r}"


def output_dtype(x: Tensor) -> torch.dtype:
    """Autocast's dtype where autocast is on, else that of ``x``."""
    device = x.device.type
    # autocast does not support the meta device, which serves for shapes and FLOPs
    return torch.get_autocast_dtype(device) if device != "meta" and torch.is_autocast_enabled(device) else x.dtype
