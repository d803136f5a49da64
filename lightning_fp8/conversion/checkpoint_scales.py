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

    Use it for a model whose weights were loaded by ``load_state_dict``. ``load_from_checkpoint``, ``ckpt_path=...`` and
    ``fabric.load`` load the scales themselves. If the model is not converted yet, the layers for which the checkpoint
    has scales are converted.

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
        ValueError: if it has no scales, those of other layers or malformed ones, if the file is damaged, or holds
            objects that ``torch.load(weights_only=True)`` refuses; the message names them, and nothing is changed.
    """
    entries = _entries(_loaded(checkpoint), checkpoint)
    plan = conversion_plan(model)
    was_plain = not plan.converted
    if was_plain:
        # a layer's own tensors, or those of an attention's projections
        prefixes = {name[:at] for name in entries for at, letter in enumerate(name) if letter == "."}
        unscaled = [layer.path for layer in plan.layers if layer.path and layer.path not in prefixes]
        if unscaled and len(unscaled) == len(plan.layers):
            raise ValueError(
                f"load_scales: the checkpoint has the scales of {', '.join(map(repr, list(entries)[:3]))}, ..., and"
                f" {type(model).__name__} has the layers {', '.join(map(repr, unscaled[:3]))}, .... Pass the model that"
                " was trained, or a part of it at the path that it had there: `nn.ModuleDict({'module': part})`."
            )
        convert(model, recipe, [glob.escape(path) for path in unscaled], min_features=0)
    try:
        scaling_state(model).load_state_dict(entries)
    except BaseException:
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
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    # which errors torch raises depends on where the file is damaged
    except Exception as error:
        raise _unreadable(path, error) from None


def _unreadable(path: Path, error: Exception) -> ValueError:
    """Why torch refused a file; names and torch's messages by ``repr``, as they may have escape sequences."""
    try:
        refused = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    except Exception:
        refused = []
    if not refused:
        return ValueError(f"load_scales: {path} is damaged, or was not written by torch.save: {_in_words(error)}.")
    names = ", ".join(map(repr, refused))
    return ValueError(
        f"load_scales: {path} holds more than tensors and plain values, and loading such objects can run any code:"
        f' {names}. If you trust the file, pass `torch.load({str(path)!r}, "cpu", weights_only=False)` in place of its'
        " path, or call load_scales inside `with torch.serialization.safe_globals([...])` with what is named here."
    )


def _in_words(error: Exception) -> str:
    return f"{type(error).__name__} {str(error).partition('. ')[0]!r}"


def as_text(state: ScalingState) -> str:
    """A scaling state as one string, for JSON; exact, and shorter than decimal numbers."""
    buffer = io.BytesIO()
    torch.save(state.state_dict(), buffer)
    return base64.b64encode(buffer.getvalue()).decode("ascii")


def scales_of_callback(saved: Any) -> Any:
    """The scales that :func:`as_text` wrote into the state of a ``transformers.Trainer`` callback; None if absent.

    Raises:
        ValueError: if the text is damaged.
    """
    attributes = saved.get("attributes") if isinstance(saved, Mapping) else None
    if not isinstance(attributes, Mapping) or SCALES not in attributes:
        return None
    try:
        content = io.BytesIO(base64.b64decode(attributes[SCALES], validate=True))
        scales = torch.load(content, map_location="cpu", weights_only=True)
        if not _is_scaling_state(scales):
            raise ValueError("it holds something else")
    # of many kinds, as for a file
    except Exception as error:
        raise ValueError(f"{SCALES!r} in the state of a callback is damaged: {_in_words(error)}.") from None
    return scales


def scales_of_callbacks(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """The scales of all callbacks in a checkpoint folder of ``transformers.Trainer``, by callback class name.

    Raises:
        ValueError: if the file of callbacks is damaged.
    """
    path = Path(folder) / _CALLBACKS_FILE
    try:
        callbacks = json.loads(path.read_text(encoding="utf-8")).get("stateful_callbacks", {}).items()
    except (ValueError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: {_in_words(error)}.") from None
    by_name = {name: scales_of_callback(saved) for name, saved in callbacks}
    return {name: scales for name, scales in by_name.items() if scales is not None}


def scaling_states(checkpoint: Any) -> dict[str, Mapping[str, Any]]:
    """The scaling states in a checkpoint by key, in the form of :meth:`ScalingState.state_dict`."""
    parts = checkpoint.items() if isinstance(checkpoint, Mapping) else ()
    return {key: part for key, part in parts if _is_scaling_state(part)}


def _entries(loaded: Any, checkpoint: Any) -> Mapping[str, Any]:
    """The one scaling state of a checkpoint, which may be all of it."""
    states = [loaded] if _is_scaling_state(loaded) else [*scaling_states(loaded).values()]
    if len(states) == 1:
        return states[0]
    contents = f"{len(states)} scaling states: pass the one that belongs to this model" if states else "no scales"
    where = "the mapping" if isinstance(checkpoint, Mapping) else os.fspath(checkpoint)
    hint = f" Its keys are {', '.join(map(repr, list(loaded)[:8]))}." if isinstance(loaded, Mapping) else ""
    raise ValueError(
        f"load_scales: {where} has {contents}. Scales are in checkpoints of a Trainer or Fabric with"
        ' `precision="fp8-delayed"`, of `transformers.Trainer` with `Fp8Callback`, and of a plain loop that saved'
        ' `{"scaling": scaling_state(model).state_dict()}`. Weights without scales are for'
        f' `precision="bf16-mixed"`, after `lightning_fp8.unconvert(model)`.{hint}'
    )


def _is_scaling_state(part: Any) -> bool:
    if not isinstance(part, Mapping) or not part or not all(isinstance(name, str) for name in part):
        return False
    return all(isinstance(entry, Mapping) and not set(TENSORS).isdisjoint(entry) for entry in part.values())
