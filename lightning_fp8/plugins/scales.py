"""The scales of models in the checkpoints of the Trainer and of Fabric."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from lightning_fp8.conversion.checkpoint_scales import SCALES, scaling_states
from lightning_fp8.conversion.kept_scales import keep_scales
from lightning_fp8.modules.base import Fp8Module
from lightning_fp8.plugins.fp8 import Fp8Precision
from lightning_fp8.scaling.state import ScalingState


def add_scales(checkpoint: dict[str, Any], connector: Any, *_: Any, **__: Any) -> None:
    """Add the scales to a checkpoint of the Trainer: with ``weights_only``, Lightning leaves out the plugin's state."""
    plugin = connector.trainer.precision_plugin
    key = type(plugin).__qualname__
    if isinstance(plugin, Fp8Precision) and key not in checkpoint and (scales := plugin.state_dict()):
        checkpoint[key] = scales


def keep_loaded_scales(model: Any, kind: type[Any], checkpoint: dict[str, Any], *_: Any, **__: Any) -> None:
    """Keep the scales of a checkpoint for a model that ``load_from_checkpoint`` has made from it."""
    states = list(scaling_states(checkpoint).values())
    if isinstance(model, nn.Module) and len(states) == 1:
        keep_scales(model, states[0])


def with_scales(saved: Any) -> Any:
    """What ``fabric.save`` is given, and the scales of each converted model in it under ``<its key>_fp8_scales``.

    Scales that are among it already are not added a second time.
    """
    states: dict[str, ScalingState] = {}
    for key, state in _states(saved):
        if state not in states.values() and not any(_is_of(value, state) for value in saved.values()):
            states[f"{key}_{SCALES}"] = state
    return {**saved, **{key: state.state_dict() for key, state in states.items()}} if states else saved


def take_scales(asked: Mapping[str, Any], loaded: Any, rest: dict[str, Any], strict: bool) -> None:
    """Load the scales of the models that ``fabric.load`` has loaded, or keep them while a model is plain.

    Args:
        asked: what ``fabric.load`` was given: models, optimizers and values.
        loaded: the same dictionary after the load.
        rest: the entries of the checkpoint that were not asked for; those of :func:`with_scales` are removed.
        strict: whether scales of other layers are an error, or skipped with a warning.

    Raises:
        ValueError: if the scales are malformed, or do not fit a model and ``strict`` is set.
    """
    for key, value in asked.items():
        # strategies that load sharded checkpoints replace objects that are not models with their saved values
        if isinstance(value, ScalingState) and loaded[key] is not value:
            value.load_state_dict(loaded[key])
            loaded[key] = value
    saved, states = scaling_states(rest), dict(_states(asked))
    for key in [key for key, value in asked.items() if isinstance(value, nn.Module)]:
        state, name = states.get(key), f"{key}_{SCALES}"
        matches = [scales for scales in saved.values() if state is not None and _is_of(scales, state)]
        if name in saved:
            keep_scales(asked[key], saved[name], strict)
            del rest[name]
        # saved under a key of the user's own
        elif len(matches) == 1 and all(value is not state for value in asked.values()):
            keep_scales(asked[key], matches[0], strict)


def _states(values: Any) -> Iterator[tuple[str, ScalingState]]:
    """Key and scaling state of each converted model among the values, wrapped or not."""
    for key, value in values.items() if isinstance(values, Mapping) else ():
        modules = value.modules() if isinstance(value, nn.Module) else ()
        states = {module.scaling_state for module in modules if isinstance(module, Fp8Module)}
        if len(states) == 1:
            yield key, states.pop()


def _is_of(value: Any, state: ScalingState) -> bool:
    """Whether a value is this scaling state or its ``state_dict``; that of a model has no names of inputs."""
    return value is state or (isinstance(value, Mapping) and state.names[0] in value)
