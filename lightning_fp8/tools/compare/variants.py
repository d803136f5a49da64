"""The precisions that are compared, and what of a user's own plugin holds for which."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_fp8.plugins.arguments import ARGUMENTS

REFERENCE = "bf16-mixed"
# class and arguments of the plugin
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "bf16-mixed": ("Bf16MixedPrecision", {}),
    "bf16-mixed+weight_copy": ("Bf16MixedPrecision", {"weight_copy": True}),
    "bf16-true": ("Bf16TruePrecision", {}),
    "fp8-delayed": ("Fp8Precision", {}),
}


def plugin_settings(variant: str, own: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of a variant's plugin, with those of the user's ``own`` that hold for it.

    Those that all plugins have hold for all, and all that its plugin has for ``fp8-delayed``. Dtypes hold for that one
    only: the bf16 precisions are to be what their names say.

    >>> plugin_settings("bf16-true", {"keep_fp32": ["norm"], "ignore_modules": ["head"]})
    {'keep_fp32': ['norm']}
    """
    of_fp8 = ARGUMENTS["fp8-delayed"]
    in_all = [name for name in of_fp8 if all(name in taken for taken in ARGUMENTS.values())]
    names = of_fp8 if variant == "fp8-delayed" else in_all
    return {**{name: own[name] for name in names if name in own}, **VARIANTS[variant][1]}
