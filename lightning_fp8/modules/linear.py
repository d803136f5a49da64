"""``Fp8Linear``: ``nn.Linear`` with its three GEMMs in FP8."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_fp8.modules.base import Fp8Module
from lightning_fp8.modules.functional import cast_weight, check_input, fp8_linear
from lightning_fp8.modules.tensor_parallel import parallel_linear
from lightning_fp8.ops.formats import CASTABLE_DTYPES


class Fp8Linear(Fp8Module, nn.Linear):
    """``y = x @ weight^T + bias`` with FP8 operands and fp32 accumulation.

    Never constructed: :func:`lightning_fp8.convert` turns an ``nn.Linear`` into it by class, on the same object, so
    parameters, hooks, ties and ``state_dict`` keys stay what they are.

    Shape:
        x ``[*, in_features]`` fp32, bf16 or fp16, any strides, any number of leading dimensions, including empty ones;
        y ``[*, out_features]``, in autocast's dtype where autocast is on, else in the dtype of ``x``.

    A forward records amaxes exactly when the module is in training mode and gradients are enabled; its backward records
    exactly when its forward did. Backward keeps the FP8 input, one byte per element. Gradients come in the dtypes of
    ``x``, ``weight`` and ``bias``.

    Raises:
        TypeError: for an input that is not fp32, bf16 or fp16.
        ValueError: for an input whose last dimension is not that of the weight, or a bias of another length.
    """

    def forward(self, x: Tensor) -> Tensor:
        """x ``[*, in_features]`` -> y ``[*, out_features]``; see the class."""
        weight, gemm, record = self.weight, self.fp8[""], self.training and torch.is_grad_enabled()
        fits = weight.dim() == 2 and x.shape[-1:] == weight.shape[1:] and weight.numel()
        if not fits or x.dtype not in CASTABLE_DTYPES:
            check_input(self, "input", x, weight)
        if isinstance(weight, DTensor):
            return parallel_linear(gemm, x, weight, self.bias, record)
        return fp8_linear(gemm, x, cast_weight(gemm, weight, record), self.bias, record)


# the classes that are one linear layer; `conv1d` adds its own, where `transformers` has been imported
LINEAR_CLASSES: list[type[Fp8Module]] = [Fp8Linear]
