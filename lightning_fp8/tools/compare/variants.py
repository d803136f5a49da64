"""The precisions that are compared, and what of a user's own plugin holds for which."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

REFERENCE = "bf16-mixed"
# class and arguments of the plugin
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "bf16-mixed": ("Bf16MixedPrecision", {}),
    "bf16-mixed+weight_copy": ("Bf16MixedPrecision", {"weight_copy": True}),
    "bf16-true": ("Bf16TruePrecision", {}),
    "fp8-delayed": ("Fp8Precision", {}),
}
_FOR_ALL = ("keep_fp32", "dtype_mismatch", "reduce_dtype")
# dtypes too: the bf16 precisions are to be what their names say
_FOR_FP8 = (
    "recipe",
    "ignore_modules",
    "param_dtype",
    "compute_dtype",
    "fp8_all_gather",
    "gemm",
    "min_features",
    "adapters",
)


def plugin_settings(variant: str, own: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of a variant's plugin, with those of the user's ``own`` that hold for it.

    ``keep_fp32``, ``dtype_mismatch`` and ``reduce_dtype`` hold for all; ``recipe``, ``ignore_modules``,
    ``param_dtype``, ``compute_dtype``, ``fp8_all_gather``, ``gemm``, ``min_features`` and ``adapters`` for
    ``fp8-delayed`` only.

    >>> plugin_settings("bf16-true", {"keep_fp32": ["norm"], "ignore_modules": ["head"]})
    {'keep_fp32': ['norm']}
    """
    names = _FOR_ALL + (_FOR_FP8 if variant == "fp8-delayed" else ())
    return {**{name: own[name] for name in names if name in own}, **VARIANTS[variant][1]}
