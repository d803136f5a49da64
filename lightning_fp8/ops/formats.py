"""The two FP8 formats, and the roles and products of tensors in a linear layer. Plain values, no ``torch.nn``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch

Role = Literal["input", "weight", "grad_output"]
ROLES: tuple[Role, ...] = ("input", "weight", "grad_output")
# scaled by their past values; a weight is scaled by its current values
DELAYED_ROLES: tuple[Role, ...] = ("input", "grad_output")
# y = x @ w^T, dx = dy @ w and dw = dy^T @ x
Product = Literal["fprop", "dgrad", "wgrad"]
PRODUCTS: tuple[Product, ...] = get_args(Product)
# the products that a tensor is an operand of
OPERAND_OF: dict[Role, frozenset[Product]] = {
    "input": frozenset(("fprop", "wgrad")),
    "weight": frozenset(("fprop", "dgrad")),
    "grad_output": frozenset(("dgrad", "wgrad")),
}


@dataclass(frozen=True)
class Fp8Format:
    """One 8-bit floating point format.

    Attributes:
        name: its name in operators and messages, ``"e4m3"`` or ``"e5m2"``.
        dtype: the torch dtype of one element.
        max: largest finite value; the cast saturates to it.
        smallest: smallest value above zero, a subnormal; half of it and less becomes zero.

    Source: Micikevicius et al., "FP8 Formats for Deep Learning", arXiv 2209.05433, table 1.
    """

    name: str
    dtype: torch.dtype
    max: float
    smallest: float


E4M3 = Fp8Format("e4m3", torch.float8_e4m3fn, 448.0, 2.0**-9)
E5M2 = Fp8Format("e5m2", torch.float8_e5m2, 57344.0, 2.0**-16)
# the input dtypes of a cast: wider types would be rounded twice
CASTABLE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FORMATS = {fmt.name: fmt for fmt in (E4M3, E5M2)}


def dtype_name(dtype: torch.dtype) -> str:
    """``"bfloat16"`` for ``torch.bfloat16``."""
    return str(dtype).removeprefix("torch.")
