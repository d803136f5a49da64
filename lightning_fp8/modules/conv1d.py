"""``Fp8Conv1D``: the linear layer of Hugging Face's GPT-2, whose weight is kept transposed. Needs ``transformers``."""

from __future__ import annotations

from torch import Tensor
from transformers.pytorch_utils import Conv1D

from lightning_fp8.modules.base import Fp8Module
from lightning_fp8.modules.family import of_class
from lightning_fp8.modules.functional import cast_weight, check_input, fp8_linear
from lightning_fp8.modules.linear import LinearForward


class Fp8Conv1D(Fp8Module, Conv1D):
    """``y = x @ weight + bias`` as :class:`~lightning_fp8.Fp8Linear` computes it; weight ``[nx, nf]``.

    Shape:
        x ``[*, nx]`` fp32, bf16 or fp16; y ``[*, nf]``, in autocast's dtype if autocast is on, else in the dtype of x.

    Raises:
        TypeError: for an input that is not fp32, bf16 or fp16, or is nested.
        ValueError: if the last dimension of the input does not match the weight, or the bias has another length.
    """

    weight_is_k_by_n = True

    def forward(self, x: Tensor) -> Tensor:
        """x ``[*, nx]`` -> y ``[*, nf]``; see the class."""
        weight, gemm, phase = self.weight, self.fp8[""], self.phase
        check_input(self, "input", x, weight)
        return fp8_linear(gemm, x, cast_weight(gemm, weight, phase), self.bias, phase)

    def __repr__(self) -> str:
        return f"Fp8Conv1D(nf={self.nf}, nx={self.nx}, {self.extra_repr()})"


LinearForward.family.add(Fp8Conv1D)
FAMILY = of_class(Conv1D, Fp8Conv1D, "Conv1D")
