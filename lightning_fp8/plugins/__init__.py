"""Lightning precision plugins, and their registration as precision strings."""

from lightning_fp8.plugins.bf16 import Bf16MixedPrecision, Bf16TruePrecision
from lightning_fp8.plugins.fp8 import Fp8Precision
from lightning_fp8.plugins.registration import register, unregister
from lightning_fp8.plugins.trainer import fsdp2_policy

__all__ = ["Bf16MixedPrecision", "Bf16TruePrecision", "Fp8Precision", "fsdp2_policy", "register", "unregister"]
