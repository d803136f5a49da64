"""Loads the scales of a checkpoint into a model whose weights came from it."""

from __future__ import annotations

import base64
import glob
import io
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lightning_fp8.conversion.convert import convert, scaling_state, unconvert
from lightning_fp8.conversion.plan import conversion_plan
from lightning_fp8.scaling.recipe import Recipe
from lightning_fp8.scaling.saved import TENSORS
from lightning_fp8.scaling.state import ScalingState

# Lightning's sharded checkpoints are folders; this file holds what is not sharded
_META_FILE = "meta.pt"
# so are those of transformers.Trainer; its callbacks save their state in this file, as plain values
_CALLBACKS_FILE = "trainer_state.json"
# the attribute of the callback that holds the scales as text
SCALES = "fp8_scales"


def load_scales(
    model: nn.Module, checkpoint: str | os.PathLike[str] | Mapping[str, Any], recipe: Recipe | None = None
) -> nn.Module:
    """Load the scales of inputs and gradients, and which layers fell back, from a checkpoint of the same model.

    Use it for a model whose weights were loaded manually, or by ``load_from_checkpoint``;
    ``Trainer.validate(ckpt_path=...)`` and ``Trainer.fit(ckpt_path=...)`` load the scales themselves. If the model is
    not converted yet, the layers for which the checkpoint has scales are converted.

    Args:
        model: a model with the same module paths as the saved one.
        checkpoint: a file or folder written by the Trainer, Fabric, ``transformers.Trainer`` or ``torch.save``, or
            the object loaded from one. The scales are those that the precision plugin or ``Fp8Callback`` wrote, or a
            ``scaling_state(model)`` saved under any key.
        recipe: for a model that is not converted yet; see :func:`lightning_fp8.convert`.

    Returns:
        The same object.

    Raises:
        FileNotFoundError: if there is no such checkpoint.
        ValueError: if it has no scales, or those of other layers; the message names them, and nothing is changed.
        pickle.UnpicklingError: if the file holds objects that ``torch.load(weights_only=True)`` refuses: load the
            file yourself and pass the result.
    """
    entries = _entries(_loaded(checkpoint), checkpoint)
    plan = conversion_plan(model)
    was_plain = not plan.converted
    if was_plain:
        others = [one.path for one in plan.layers if not _has_scales(one.path, entries)]
        convert(model, recipe, [glob.escape(path) for path in others], min_features=0)
    try:
        scaling_state(model).load_state_dict(entries)
    except ValueError:
        if was_plain:
            unconvert(model)
        raise
    return model


def _loaded(checkpoint: str | os.PathLike[str] | Mapping[str, Any]) -> Any:
    if isinstance(checkpoint, Mapping):
        return checkpoint
    path = Path(checkpoint)
    if (path / _CALLBACKS_FILE).is_file():
        return scales_of_callbacks(path)
    if path.is_dir():
        path = path / _META_FILE
    if not path.is_file():
        raise FileNotFoundError(f"load_scales: there is no checkpoint {path}.")
    return torch.load(path, map_location="cpu", weights_only=True)


def as_text(state: ScalingState) -> str:
    """A scaling state as one string, for JSON; exact, and shorter than decimal numbers."""
    buffer = io.BytesIO()
    torch.save(state.state_dict(), buffer)
    return base64.b64encode(buffer.getvalue()).decode("ascii")


def scales_of_callback(saved: Any) -> Any:
    """The scales that :func:`as_text` wrote into the state of a ``transformers.Trainer`` callback; None if absent."""
    attributes = saved.get("attributes", {}) if isinstance(saved, Mapping) else {}
    if SCALES not in attributes:
        return None
    return torch.load(io.BytesIO(base64.b64decode(attributes[SCALES])), map_location="cpu", weights_only=True)


def scales_of_callbacks(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """The scales of all callbacks in a checkpoint folder of ``transformers.Trainer``, by callback class name."""
    text = (Path(folder) / _CALLBACKS_FILE).read_text(encoding="utf-8")
    found = {name: scales_of_callback(saved) for name, saved in json.loads(text)["stateful_callbacks"].items()}
    return {name: scales for name, scales in found.items() if scales is not None}


def _entries(loaded: Any, checkpoint: Any) -> Mapping[str, Any]:
    """The scaling state in a checkpoint, in the form of :meth:`ScalingState.state_dict`."""
    parts = [loaded, *loaded.values()] if isinstance(loaded, Mapping) else []
    found = [part for part in parts if _is_scaling_state(part)]
    if len(found) != 1:
        what = "no scales" if not found else f"{len(found)} scaling states: pass the one that belongs to this model"
        where = "the mapping" if isinstance(checkpoint, Mapping) else os.fspath(checkpoint)
        held = f" Its keys are {', '.join(map(repr, list(loaded)[:8]))}." if isinstance(loaded, Mapping) else ""
        raise ValueError(
            f'load_scales: {where} has {what}. Scales are in checkpoints of a Trainer with `precision="fp8-delayed"`,'
            " of `transformers.Trainer` with `Fp8Callback`, and of Fabric or a plain loop that saved"
            f' `{{"scaling": scaling_state(model)}}`.{held}'
        )
    return found[0]


def _is_scaling_state(part: Any) -> bool:
    if not isinstance(part, Mapping) or not part:
        return False
    return all(isinstance(entry, Mapping) and not set(TENSORS).isdisjoint(entry) for entry in part.values())


def _has_scales(path: str, entries: Mapping[str, Any]) -> bool:
    # the layer's own tensors, or those of an attention's projections
    return any(name.startswith(f"{path}." if path else "") for name in entries)
