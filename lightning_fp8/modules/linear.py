"""``Fp8Linear``: ``nn.Linear`` with its three GEMMs in FP8."""

from __future__ import annotations

import inspect
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from lightning_fp8.modules.base import Fp8Module, fp8_class
from lightning_fp8.modules.functional import cast_weight, check_input, fp8_linear
from lightning_fp8.modules.tensor_parallel import parallel_linear
from lightning_fp8.ops.formats import CASTABLE_DTYPES


class LinearForward(Fp8Module):
    """The forward of all converted linear layers ``[N, K]``: :class:`Fp8Linear`, and classes made from others."""

    weight: Tensor
    bias: Any
    family: ClassVar[set[type[Fp8Module]]] = set()
    # the plain class's name for its argument
    argument_name: ClassVar[str] = "input"

    def forward(self, input: Tensor | None = None, **named: Tensor) -> Tensor:
        """input ``[*, in_features]`` -> y ``[*, out_features]``; see :class:`Fp8Linear`."""
        if not isinstance(self, Fp8Module):
            # the layer is plain again, but a user's forward still calls this one
            return type(self).forward(self, *(() if input is None else (input,)), **named)
        x = named.pop(self.argument_name, None) if input is None else input
        if x is None or named:
            raise TypeError(f"{self.plain_class.__name__}.forward takes one argument, `{self.argument_name}`.")
        weight, gemm, phase = self.weight, self.fp8[""], self.phase
        is_dense = x.layout == torch.strided and not x.is_nested
        fits = is_dense and weight.dim() == 2 and x.dim() and x.size(-1) == weight.size(1) and weight.numel()
        if not fits or x.dtype not in CASTABLE_DTYPES:
            check_input(self, "input", x, weight)
        if isinstance(weight, DTensor):
            return parallel_linear(gemm, x, weight, self.bias, phase)
        return fp8_linear(gemm, x, cast_weight(gemm, weight, phase), self.bias, phase)


class Fp8Linear(LinearForward, nn.Linear):
    """``y = x @ weight^T + bias`` with FP8 operands and fp32 accumulation.

    Never constructed: :func:`lightning_fp8.convert` turns an ``nn.Linear`` into it by class, on the same object, so
    parameters, hooks, ties and ``state_dict`` keys stay the same. Other linear layers get a class that combines this
    forward with their own class.

    Shape:
        x ``[*, in_features]`` fp32, bf16 or fp16, any strides, any number of leading dimensions, including empty ones;
        y ``[*, out_features]``, in autocast's dtype if autocast is on, else in the dtype of ``x``.

    A forward records amaxes exactly when the module is in training mode and gradients are enabled; its backward records
    exactly when its forward did. Backward keeps the FP8 input, one byte per element. Gradients come in the dtypes of
    ``x``, ``weight`` and ``bias``.

    Raises:
        TypeError: for an input that is not fp32, bf16 or fp16, or is nested.
        ValueError: if the last dimension of the input does not match the weight, or the bias has another length.
    """


def linear_class(plain: type[nn.Module]) -> type[LinearForward]:
    """The FP8 class for linear layers of this class."""
    # the subclass only marks the output projection of an attention
    if plain in (nn.Linear, NonDynamicallyQuantizableLinear):
        return Fp8Linear
    kind = cast(type[LinearForward], fp8_class(LinearForward, plain))
    names = [*inspect.signature(plain.forward).parameters]
    kind.argument_name = names[1] if names[1:] else LinearForward.argument_name
    return kind


# `conv1d` adds its own, where `transformers` has been imported
LinearForward.family.add(Fp8Linear)
