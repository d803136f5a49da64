"""Warnings where the scales of a converted model would not be updated, or not be saved in a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.plugins.precision.precision import Precision
from lightning.fabric.utilities.rank_zero import rank_zero_only, rank_zero_warn
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn
from torch.optim import Optimizer

from lightning_fp8.conversion.plan import converted
from lightning_fp8.modules.base import Fp8Module
from lightning_fp8.plugins.core import PrecisionCore
from lightning_fp8.runtime.warn_once import warn_once
from lightning_fp8.scaling.state import ScalingState, tensor_name


def warn_of_trainer(model: pl.LightningModule, plugin: Precision) -> None:
    """At each run, warn if layers run in FP8 although the Trainer has another precision."""
    in_fp8 = _in_fp8("Trainer", model, plugin)
    if in_fp8 is None:
        return
    if model.trainer.state.fn == TrainerFn.FITTING:
        rank_zero_warn(
            f"{in_fp8} This Trainer neither updates their scales nor saves them. Train with"
            ' `Trainer(precision="fp8-delayed")`, make the layers plain again with `lightning_fp8.unconvert(model)`,'
            " or call `lightning_fp8.scaling_state(model).update()` in your own `on_before_optimizer_step`."
        )
    else:
        rank_zero_warn(
            f"{in_fp8} Their scales stay as they are, and this Trainer loads none from a checkpoint. For those of a"
            ' checkpoint use `Trainer(precision="fp8-delayed")`; for results without FP8 call'
            " `lightning_fp8.unconvert(model)` first."
        )


def warn_of_fabric(model: nn.Module, plugin: Precision) -> None:
    """Whenever a model is set up, warn if layers run in FP8 although Fabric has another precision."""
    in_fp8 = _in_fp8("Fabric", model, plugin)
    if in_fp8 is not None:
        rank_zero_warn(
            f"{in_fp8} This Fabric does not update their scales. Use"
            ' `Fabric(precision="fp8-delayed")`, make the layers plain again with `lightning_fp8.unconvert(model)`, or,'
            " in training, call `lightning_fp8.scaling_state(model).update()` before each `optimizer.step()`."
        )


def warn_of_unsaved_scales(saved: Any) -> None:
    """Warn, once, about models whose scales ``fabric.save`` leaves out.

    Args:
        saved: what ``fabric.save`` is given: a dictionary of models, optimizers and values.
    """
    for key, states in _converted_models(saved):
        if not all(_holds(saved, state) for state in states):
            warn_first_process_once(
                f"fabric.save: the model under {key!r} has layers in FP8, but its scales are not saved: they are not"
                " part of a model's state_dict, so a run resumed from this checkpoint starts with new ones."
                f" Save them too: `{{{key!r}: model, 'scaling': lightning_fp8.scaling_state(model), ...}}`."
            )


def warn_of_unloaded_scales(asked: Any, rest: Mapping[str, Any]) -> None:
    """Warn, once, about scales that ``fabric.load`` does not load: not asked for, or not in the checkpoint.

    A load without an optimizer does not warn about missing scales: it may begin a new training run.

    Args:
        asked: what ``fabric.load`` is given: a dictionary of models, optimizers and values.
        rest: the entries of the checkpoint that were not asked for.
    """
    for key, states in _converted_models(asked):
        missing = [state for state in states if not _holds(asked, state)]
        found = [name for name, entry in rest.items() if any(_holds(entry, state) for state in missing)]
        if missing and not found and any(isinstance(value, Optimizer) for value in asked.values()):
            warn_first_process_once(
                f"fabric.load: the model under {key!r} has layers in FP8, but the checkpoint has no scales. They start"
                " anew, so the first steps differ from those of an uninterrupted run. Save them with the model:"
                f" `fabric.save(path, {{{key!r}: model, 'scaling': lightning_fp8.scaling_state(model), ...}})`."
            )
        for name in found:
            warn_first_process_once(
                f"fabric.load: the model under {key!r} has layers in FP8, and the checkpoint holds their scales under"
                f" {name!r}, which were not asked for and are not loaded. Load them too:"
                f" `{{{key!r}: model, {name!r}: lightning_fp8.scaling_state(model), ...}}`; or pass them to"
                " `lightning_fp8.scaling_state(model).load_state_dict`: `fabric.load` has returned them under"
                f" {name!r}."
            )


def _in_fp8(runner: str, model: nn.Module, plugin: Precision) -> str | None:
    """Which layers run in FP8 under a plugin of another package, as a sentence; None if there are none."""
    paths = [path or "(root)" for path, layer in converted(model) if layer.in_fp8]
    if isinstance(plugin, PrecisionCore) or not paths:
        return None
    layers = "1 converted layer" if len(paths) == 1 else f"{len(paths)} converted layers"
    more = f" and {len(paths) - 6} more" if len(paths) > 6 else ""
    return (
        f"{runner}, precision {getattr(plugin, 'precision', None)!r} ({type(plugin).__name__}): {type(model).__name__}"
        f" has {layers}, which this precision leaves in FP8: {', '.join(paths[:6])}{more}."
    )


def _converted_models(values: Any) -> Iterator[tuple[str, set[ScalingState]]]:
    """Key and scaling states of each converted model among the values, wrapped or not."""
    for key, value in values.items() if isinstance(values, Mapping) else ():
        modules = value.modules() if isinstance(value, nn.Module) else ()
        states = {module.scaling_state for module in modules if isinstance(module, Fp8Module)}
        if states:
            yield key, states


def _holds(value: Any, state: ScalingState) -> bool:
    """Whether a value is this scaling state or its ``state_dict``, or contains one of them."""
    if isinstance(value, Mapping):
        # a model's own `state_dict` may contain the names of weights, but not those of inputs
        inputs = {tensor_name(path, "input") for path in state.module_names}
        return not inputs.isdisjoint(value) or any(_holds(inner, state) for inner in value.values())
    if isinstance(value, (list, tuple)):
        return any(_holds(inner, state) for inner in value)
    return value is state


@rank_zero_only
def warn_first_process_once(message: str) -> None:
    """Warn in the process of rank 0, once, at a line of this package."""
    warn_once(message)
