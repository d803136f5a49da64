"""Training in FP8 with PyTorch Lightning, with one argument: ``Trainer(precision="fp8-delayed")``.

Importing the package registers the precision string with Lightning. It also replaces Lightning's bf16 plugins, unless
``LIGHTNING_FP8_REPLACE_BF16=0`` is set; see :func:`lightning_fp8.plugins.register`. The public names are imported when
they are first used.
"""

import warnings
from importlib import import_module as _import_module
from typing import TYPE_CHECKING

import torch

import lightning_fp8.runtime.torch_version  # first, as the others fail with an older torch

# the operators, which programs of `torch.export` call
import lightning_fp8.core  # noqa: F401  # isort: skip
from lightning_fp8.plugins import registration as _registration
from lightning_fp8.runtime.after_import import after_import as _after_import
from lightning_fp8.runtime.lazy import lazy_names as _lazy_names
from lightning_fp8.runtime.version import __version__ as __version__
from lightning_fp8.scalings.recipe import RECIPES as _RECIPES

if TYPE_CHECKING:
    from lightning_fp8.callbacks import (
        DtypeAudit,
        Fp8Monitor,
        Fp8ThroughputMonitor,
        PrecisionSchedule,
        RunRecord,
        ScaleFactorLogger,
    )
    from lightning_fp8.conversion.convert import convert, describe, scaling_state, unconvert
    from lightning_fp8.estimation.estimate import estimate
    from lightning_fp8.modules.feed_forward import feed_forward
    from lightning_fp8.modules.weights_unchanged import weights_unchanged
    from lightning_fp8.plugins import Fp8Precision
    from lightning_fp8.plugins.settings import precision
    from lightning_fp8.scalings.mx import MXScaling
    from lightning_fp8.scalings.per_block import BlockScaling
    from lightning_fp8.scalings.per_tensor import CurrentScaling, DelayedScaling
    from lightning_fp8.serialization.load import load_exported
    from lightning_fp8.serialization.write import export
else:
    # the same names; unseen by type checkers, for which any name would be there
    __getattr__ = _lazy_names(
        __name__,
        {
            "callbacks": (
                "DtypeAudit",
                "Fp8Monitor",
                "Fp8ThroughputMonitor",
                "PrecisionSchedule",
                "RunRecord",
                "ScaleFactorLogger",
            ),
            "conversion.convert": ("convert", "describe", "scaling_state", "unconvert"),
            "estimation.estimate": ("estimate",),
            "modules.feed_forward": ("feed_forward",),
            "modules.weights_unchanged": ("weights_unchanged",),
            "plugins": ("Fp8Precision",),
            "plugins.settings": ("precision",),
            "scalings.mx": ("MXScaling",),
            "scalings.per_block": ("BlockScaling",),
            "scalings.per_tensor": ("CurrentScaling", "DelayedScaling"),
            "serialization.load": ("load_exported",),
            "serialization.write": ("export",),
        },
        packages=("callbacks", "conversion", "dtypes", "integrations", "metrics", "modules", "scaling"),
    )

__all__ = [
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
    "convert",
    "describe",
    "estimate",
    "export",
    "feed_forward",
    "load_exported",
    "precision",
    "scaling_state",
    "unconvert",
    "weights_unchanged",
]


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


# A recipe among hyperparameters holds only plain values, so such checkpoints also load with `weights_only=True`.
torch.serialization.add_safe_globals([*_RECIPES.values()])


def _import_classes() -> None:
    for name in ("callbacks", "plugins.trainer"):
        _import_module(f"{__name__}.{name}")


# A command line finds callbacks and plugins by name, as in `--trainer.callbacks=Fp8Monitor`, once they are imported.
_after_import("jsonargparse", _import_classes)

try:
    _registration.register()
except RuntimeError as error:
    # Everything but the strings still works: the import succeeds, and the warning says what to write instead.
    warnings.warn(str(error), stacklevel=2)
