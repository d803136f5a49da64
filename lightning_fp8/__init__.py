"""Training in FP8 with PyTorch Lightning, with one argument: ``Trainer(precision="fp8-delayed")``.

Importing the package registers the precision string with Lightning. It also replaces Lightning's bf16 plugins, unless
``LIGHTNING_FP8_REPLACE_BF16=0`` is set; see :func:`lightning_fp8.plugins.register`.
"""

import warnings

import torch

import lightning_fp8.runtime.torch_version  # noqa: F401, first, as the others fail with an older torch
from lightning_fp8.callbacks import (
    DtypeAudit,
    Fp8Monitor,
    Fp8ThroughputMonitor,
    PrecisionSchedule,
    RunRecord,
    ScaleFactorLogger,
)
from lightning_fp8.conversion.convert import convert, describe, fall_back, scaling_state, unconvert
from lightning_fp8.conversion.linear_layers import register_linear
from lightning_fp8.dtypes.audit import audit
from lightning_fp8.estimation.estimate import estimate
from lightning_fp8.modules.feed_forward import feed_forward
from lightning_fp8.modules.weights_unchanged import weights_unchanged
from lightning_fp8.plugins import Bf16MixedPrecision, Bf16TruePrecision, Fp8Precision, fsdp2_policy, registration
from lightning_fp8.plugins.settings import precision
from lightning_fp8.runtime.version import __version__ as __version__
from lightning_fp8.scalings.mx import MXScaling
from lightning_fp8.scalings.per_block import BlockScaling
from lightning_fp8.scalings.per_tensor import CurrentScaling, DelayedScaling
from lightning_fp8.scalings.recipe import RECIPES
from lightning_fp8.serialization.load import load_exported
from lightning_fp8.serialization.write import export

# A recipe among hyperparameters holds only plain values, so such checkpoints also load with `weights_only=True`.
torch.serialization.add_safe_globals([*RECIPES.values()])

__all__ = [
    "Bf16MixedPrecision",
    "Bf16TruePrecision",
    "BlockScaling",
    "CurrentScaling",
    "DelayedScaling",
    "DtypeAudit",
    "Fp8Monitor",
    "Fp8Precision",
    "Fp8ThroughputMonitor",
    "MXScaling",
    "PrecisionSchedule",
    "RunRecord",
    "ScaleFactorLogger",
    "audit",
    "convert",
    "describe",
    "estimate",
    "export",
    "fall_back",
    "feed_forward",
    "fsdp2_policy",
    "load_exported",
    "precision",
    "register_linear",
    "scaling_state",
    "unconvert",
    "weights_unchanged",
]

try:
    registration.register()
except RuntimeError as error:
    # Everything but the strings still works: the import succeeds, and the warning says what to write instead.
    warnings.warn(str(error), stacklevel=2)
