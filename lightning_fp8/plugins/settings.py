"""The settings that all our precision plugins share: their values, defaults and rules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

import torch

from lightning_fp8.conversion.min_features import check_min_features
from lightning_fp8.dtypes.attention import DTYPE_MISMATCH
from lightning_fp8.ops.cuda.gemm_choice import check_gemm
from lightning_fp8.scaling.recipe import DelayedScaling

PrecisionString = Literal["fp8-delayed", "bf16-mixed", "bf16-true"]
GemmString = Literal["auto", "rawkernel", "cublaslt"]
PRECISIONS: tuple[PrecisionString, ...] = get_args(PrecisionString)
# fp16 is refused everywhere: without loss scaling its gradients underflow
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def check_precision(precision: Any) -> None:
    """Refuse another string than ours."""
    if precision not in PRECISIONS:
        raise ValueError(f"`precision` must be one of {', '.join(map(repr, PRECISIONS))}, got {precision!r}.")


def as_recipe(recipe: Any) -> DelayedScaling | None:
    """A recipe, from one or from a mapping of its fields."""
    if isinstance(recipe, Mapping):
        return DelayedScaling(**recipe)
    if recipe is None or isinstance(recipe, DelayedScaling):
        return recipe
    raise TypeError(f"`recipe` must be a DelayedScaling or a mapping of its fields, got {recipe!r}.")


def as_torch_dtype(argument: str, dtype: torch.dtype | str) -> torch.dtype:
    """``torch.float32`` or ``torch.bfloat16``, from itself or its name."""
    name = str(dtype).removeprefix("torch.")
    if name not in _DTYPES:
        raise ValueError(f"`{argument}` must be torch.float32 or torch.bfloat16, got {dtype!r}.")
    return _DTYPES[name]


def check_dtypes(precision: str, param_dtype: torch.dtype, compute_dtype: torch.dtype) -> None:
    """Refuse dtypes that contradict the precision, or each other."""
    if precision == "bf16-true" and param_dtype != torch.bfloat16:
        raise ValueError(
            "`bf16-true` stores parameters in bfloat16, got `param_dtype=torch.float32`."
            " For fp32 parameters and bf16 computation use `bf16-mixed`; for some modules in fp32, `keep_fp32`."
        )
    if precision != "fp8-delayed" and compute_dtype != torch.bfloat16:
        raise ValueError(f"`{precision}` computes in bfloat16, got `compute_dtype={compute_dtype}`.")
    if compute_dtype == torch.float32 and param_dtype == torch.bfloat16:
        raise ValueError("`compute_dtype=torch.float32` needs `param_dtype=torch.float32`, got torch.bfloat16.")


def check_weight_copy(precision: str, param_dtype: torch.dtype, weight_copy: bool) -> None:
    """Refuse copies where there is nothing to copy."""
    if weight_copy and (precision != "bf16-mixed" or param_dtype != torch.float32):
        raise ValueError(
            "`weight_copy=True` keeps bf16 copies of fp32 weights and belongs to `bf16-mixed` with fp32 parameters,"
            f" got {precision!r} with `param_dtype={param_dtype}`. (`fp8-delayed` keeps FP8 copies by itself.)"
        )


def check_fp8_all_gather(precision: str, fp8_all_gather: bool) -> None:
    """Refuse a gather in FP8 where there are no scales."""
    if fp8_all_gather and precision != "fp8-delayed":
        raise ValueError(f"`fp8_all_gather=True` belongs to `fp8-delayed`, got {precision!r}.")


def check_gemm_of(precision: str, gemm: Any) -> None:
    """Refuse another word than ours, and a choice of FP8 GEMMs where there are none."""
    check_gemm(gemm)
    if gemm != "auto" and precision != "fp8-delayed":
        raise ValueError(f"`gemm={gemm!r}` belongs to `fp8-delayed`, got {precision!r}.")


def check_min_features_of(precision: str, min_features: Any) -> None:
    """Refuse what is no size, and a choice of FP8 layers where there are none."""
    check_min_features(min_features)
    if min_features != 0 and precision != "fp8-delayed":
        raise ValueError(f"`min_features={min_features!r}` belongs to `fp8-delayed`, got {precision!r}.")


def check_dtype_mismatch(dtype_mismatch: Any) -> None:
    """Refuse another word than ours."""
    if dtype_mismatch not in DTYPE_MISMATCH:
        allowed = ", ".join(map(repr, DTYPE_MISMATCH))
        raise ValueError(f"`dtype_mismatch` must be one of {allowed}, got {dtype_mismatch!r}.")
