"""The settings of our precision plugins: values, defaults and rules."""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch

from lightning_fp8.runtime.did_you_mean import closest
from lightning_fp8.scaling.recipe import RECIPES

PrecisionString = Literal["fp8-delayed", "fp8-current", "fp8-block", "bf16-mixed", "bf16-true"]
GemmString = Literal["auto", "rawkernel", "cublaslt"]
PRECISIONS: tuple[PrecisionString, ...] = get_args(PrecisionString)
FP8_PRECISIONS = tuple(RECIPES)
# fp16 is refused everywhere: without loss scaling its gradients underflow
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def suggestion(precision: Any) -> str:
    """A sentence, after a space, with the one of our precision strings that was probably meant; empty if none was."""
    if not isinstance(precision, str):
        return ""
    if precision.lower().startswith(("fp8", "float8")):
        return f" Did you mean {closest(precision, FP8_PRECISIONS) or FP8_PRECISIONS[0]!r}?"
    # Lightning's own are among the choices: if one of them is closer, Lightning's message suffices
    found = closest(precision, (*PRECISIONS, "16-mixed", "16-true", "32-true", "64-true"))
    return f" Did you mean {found!r}?" if found in PRECISIONS else ""


def as_torch_dtype(argument: str, dtype: torch.dtype | str) -> torch.dtype:
    """``torch.float32`` or ``torch.bfloat16``, from the dtype or its name."""
    name = str(dtype).removeprefix("torch.")
    if name not in _DTYPES:
        raise ValueError(f"`{argument}` must be torch.float32 or torch.bfloat16, got {dtype!r}.")
    return _DTYPES[name]
