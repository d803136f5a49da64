"""Lightning precision plugins, and their registration as precision strings.

The plugins are imported when they are first used, as the registration needs none of them.
"""

from typing import TYPE_CHECKING

from lightning_fp8.plugins.registration import register, unregister
from lightning_fp8.runtime.lazy import lazy_names as _lazy_names

if TYPE_CHECKING:
    from lightning_fp8.plugins.trainer import Bf16MixedPrecision, Bf16TruePrecision, Fp8Precision, fsdp2_policy
else:
    __getattr__ = _lazy_names(
        __name__, {"trainer": ("Bf16MixedPrecision", "Bf16TruePrecision", "Fp8Precision", "fsdp2_policy")}
    )

__all__ = ["Bf16MixedPrecision", "Bf16TruePrecision", "Fp8Precision", "fsdp2_policy", "register", "unregister"]
