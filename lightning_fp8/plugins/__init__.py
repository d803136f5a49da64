"""Lightning precision plugins, and their registration as precision strings."""

from lightning_fp8.plugins.fabric import Fp8FabricPrecision
from lightning_fp8.plugins.fsdp import fsdp2_policy
from lightning_fp8.plugins.registration import register, unregister
from lightning_fp8.plugins.trainer import Bf16MixedPrecision, Bf16TruePrecision, Fp8FSDPPrecision, Fp8Precision

__all__ = [
    "Bf16MixedPrecision",
    "Bf16TruePrecision",
    "Fp8FSDPPrecision",
    "Fp8FabricPrecision",
    "Fp8Precision",
    "fsdp2_policy",
    "register",
    "unregister",
]
