"""fp32 masters with a bf16 copy of each linear and attention weight, cast once per optimizer step.

Autocast casts a weight at every use of it. Here the copy outlives the forward, so that gradient accumulation and
activation recomputation pay for the cast once; it costs two bytes per parameter.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.utils.parametrize import is_parametrized
from typing_extensions import Self

from lightning_fp8.modules.attention import SdpaMultiheadAttention, in_gemms
from lightning_fp8.modules.class_swap import exchange_class, own_class
from lightning_fp8.modules.functional import take_rows
from lightning_fp8.modules.weight_cast import KeptCast
from lightning_fp8.ops.library import can_keep_copies


class WeightCopyModule(nn.Module):
    """A module that multiplies with copies of its weights in autocast's dtype. Never constructed.

    Attributes:
        copies: the copy of each of its own GEMM weights, by parameter name.
        plain_class: the class before the conversion, which :func:`drop_copies` restores.
    """

    copies: dict[str, KeptCast[Tensor]]
    plain_class: type[nn.Module]

    def train(self, mode: bool = True) -> Self:
        """Switch between training and evaluation, where weights may be swapped: no copy outlives a switch."""
        if mode != self.training:
            for cache in self.copies.values():
                cache.drop()
        return super().train(mode)

    def copied(self, name: str) -> Tensor:
        """The weight in autocast's dtype, connected to the parameter; without autocast the parameter itself."""
        parameter: Tensor = getattr(self, name)
        device = parameter.device.type
        # In evaluation, weights may be swapped (averaging) without a trace: there autocast casts, as without a copy.
        if not (self.training and torch.is_grad_enabled() and torch.is_autocast_enabled(device)):
            return parameter
        dtype = torch.get_autocast_dtype(device)
        if not can_keep_copies(parameter) or parameter.dtype == dtype:
            return parameter
        cache = self.copies[name]
        copy = cache.get(parameter)
        if copy is None or copy.dtype != dtype:
            copy = parameter.detach().to(dtype)
            cache.put(parameter, copy)
        return _CopyOf.apply(parameter, copy)


class WeightCopyLinear(WeightCopyModule, nn.Linear):
    """``nn.Linear`` that multiplies with a copy of its weight."""

    def forward(self, input: Tensor) -> Tensor:
        """input ``[*, in_features]`` -> y ``[*, out_features]``."""
        if not isinstance(self, WeightCopyModule):
            # plain again, with a forward of the user's around this one
            return type(self).forward(self, input)
        return F.linear(input, self.copied("weight"), self.bias)


class WeightCopyMultiheadAttention(WeightCopyModule, SdpaMultiheadAttention):
    """``nn.MultiheadAttention`` that projects with copies of its weights."""

    def _in_operand(self, gemm: str) -> Tensor:
        return self.copied(f"{gemm}_weight")

    def _project(self, gemm: str, x: Tensor, operand: Tensor, rows: slice, bias: Tensor | None) -> Tensor:
        return F.linear(x, take_rows(operand, rows), bias)


class _CopyOf(torch.autograd.Function):
    """The copy, with the gradient of the parameter: the same as a differentiable cast."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, copy: Tensor) -> Tensor:
        ctx.dtype = parameter.dtype
        return copy.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.to(ctx.dtype), None


class _Change(NamedTuple):
    layer: nn.Module
    new_class: type[WeightCopyModule]
    weights: tuple[str, ...]


def keep_copies(module: nn.Module, leave_alone: set[nn.Module]) -> None:
    """Give every plain linear and attention layer copies of its weights: in place, by class, same parameters."""
    changes: list[_Change] = []
    for layer in module.modules():
        if layer in leave_alone or "forward" in vars(layer) or is_parametrized(layer):
            continue
        if own_class(layer) is nn.Linear:
            changes.append(_Change(layer, WeightCopyLinear, ("weight",)))
        elif own_class(layer) is nn.MultiheadAttention:
            names = tuple(f"{gemm}_weight" for gemm in in_gemms(layer))
            changes.append(_Change(layer, WeightCopyMultiheadAttention, names))
            out_proj = cast(nn.Module, layer.out_proj)
            if own_class(out_proj) is NonDynamicallyQuantizableLinear and not is_parametrized(out_proj):
                changes.append(_Change(out_proj, WeightCopyLinear, ("weight",)))
    for layer, new_class, weights in changes:
        changed = cast(WeightCopyModule, layer)
        changed.plain_class = own_class(layer)
        changed.copies = {name: KeptCast() for name in weights}
        exchange_class(layer, new_class)


def drop_copies(module: nn.Module) -> None:
    """Undo :func:`keep_copies`."""
    for layer in module.modules():
        if isinstance(layer, WeightCopyModule):
            plain_class = layer.plain_class
            del layer.copies, layer.plain_class
            exchange_class(layer, plain_class)
