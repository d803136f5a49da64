"""Scaling states in Fabric checkpoints: Fabric does not save the state of a precision plugin."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from lightning.fabric.utilities.rank_zero import rank_zero_warn
from torch import nn

from lightning_fp8.conversion.convert import is_converted, scaling_state
from lightning_fp8.scaling.state import ScalingState

_SUFFIX = "_fp8_scales"


def with_scales(saved: Any) -> Any:
    """Add the scales of each converted model to what ``fabric.save`` is given, as ``<key of the model>_fp8_scales``."""
    models = [(key, model) for key, model in _models(saved) if is_converted(model)]
    scales = {f"{key}{_SUFFIX}": scaling_state(model).state_dict() for key, model in models}
    return {**saved, **scales} if scales else saved


def take_scales(asked: Mapping[str, Any], loaded: Any, rest: dict[str, Any]) -> None:
    """Load the scales of the models that ``fabric.load`` has loaded.

    Args:
        asked: what ``fabric.load`` was given: models, optimizers and values.
        loaded: the same dictionary after the load.
        rest: entries of the checkpoint that were not asked for. The scales that :func:`with_scales` added are removed.

    Raises:
        ValueError: if the scales are malformed or belong to another model.
    """
    for key, value in asked.items():
        # strategies that load sharded checkpoints replace objects that are not models with their saved values
        if isinstance(value, ScalingState) and loaded[key] is not value:
            value.load_state_dict(loaded[key])
            loaded[key] = value
    for key, model in _models(asked):
        scales = rest.pop(f"{key}{_SUFFIX}", None)
        if scales is None:
            continue
        if is_converted(model):
            scaling_state(model).load_state_dict(scales)
        else:
            rank_zero_warn(
                f"fabric.load: the checkpoint has FP8 scales for {key!r}, but its layers are not in FP8 yet, so"
                " training begins without these scales. Call `fabric.load` after `fabric.setup`."
            )


def _models(values: Any) -> Iterator[tuple[str, nn.Module]]:
    for key, value in values.items() if isinstance(values, Mapping) else ():
        if isinstance(value, nn.Module):
            yield key, value
