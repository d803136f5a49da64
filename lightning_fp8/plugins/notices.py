"""Warnings where the scales of a converted model would not be updated in training."""

from __future__ import annotations

from typing import Any

from lightning.fabric import Fabric
from lightning.fabric.plugins.precision.precision import Precision
from lightning.fabric.utilities.rank_zero import rank_zero_warn
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn

from lightning_fp8.conversion.plan import converted
from lightning_fp8.plugins.core import PrecisionCore
from lightning_fp8.plugins.fabric import FabricPrecision


def warn_of_trainer(result: None, strategy: Strategy) -> None:
    """At each run, warn if layers run in FP8 although the Trainer has another precision."""
    # by now the plugin has converted the model
    model = strategy.lightning_module
    in_fp8 = None if model is None else _in_fp8("Trainer", model, strategy.precision_plugin)
    if model is None or in_fp8 is None:
        return
    if model.trainer.state.fn == TrainerFn.FITTING:
        rank_zero_warn(
            f"{in_fp8} This Trainer neither updates their scales nor saves them. Train with"
            ' `Trainer(precision="fp8-delayed")`, make the layers plain again with `lightning_fp8.unconvert(model)`,'
            " or call `lightning_fp8.scaling_state(model).update()` in your own `on_before_optimizer_step`."
        )


def warn_of_fabric(result: Any, fabric: Fabric, module: nn.Module, *_: Any, **__: Any) -> None:
    """Whenever a model is set up, warn if layers run in FP8 although Fabric has another precision."""
    in_fp8 = _in_fp8("Fabric", module, fabric.strategy.precision)
    if in_fp8 is not None:
        rank_zero_warn(
            f"{in_fp8} This Fabric does not update their scales. Use"
            ' `Fabric(precision="fp8-delayed")`, make the layers plain again with `lightning_fp8.unconvert(model)`, or,'
            " in training, call `lightning_fp8.scaling_state(model).update()` before each `optimizer.step()`."
        )


def _in_fp8(runner: str, model: nn.Module, plugin: Precision) -> str | None:
    """Which layers run in FP8 under a plugin of another package, as a sentence; None if there are none."""
    paths = [path or "(root)" for path, layer in converted(model) if layer.in_fp8]
    if isinstance(plugin, PrecisionCore | FabricPrecision) or not paths:
        return None
    layers = "1 converted layer" if len(paths) == 1 else f"{len(paths)} converted layers"
    more = f" and {len(paths) - 6} more" if len(paths) > 6 else ""
    return (
        f"{runner}, precision {getattr(plugin, 'precision', None)!r} ({type(plugin).__name__}): {type(model).__name__}"
        f" has {layers}, which this precision leaves in FP8: {', '.join(paths[:6])}{more}."
    )
