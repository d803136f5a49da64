"""Scales that came with the weights of a plain model: they are kept until its layers are converted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from lightning_fp8.conversion.plan import converted, state_of
from lightning_fp8.scaling.optimizer_steps import watch_optimizers_for
from lightning_fp8.scaling.saved import load_entries
from lightning_fp8.scaling.state import ScalingState


class _Kept:
    """Scales of a plain model; those of weights that an optimizer has changed are nobody's any more."""

    def __init__(self, entries: Mapping[str, Any], model: nn.Module) -> None:
        self.entries = entries
        self.versions = _versions(model)
        # held so that no other weight can get the same id
        self._weights = [*model.parameters()]
        # fused optimizers change weights without a new version
        watch_optimizers_for(self)

    def sources(self) -> Iterator[Tensor]:
        return iter(self._weights)

    def on_step_begins(self) -> None:
        """Nothing: the step decides when it is done."""

    def on_step_ends(self, optimizer: int, weights: AbstractSet[int]) -> None:
        self.entries = {}


# not an attribute: a plain model stays plain, and its pickles need no lightning_fp8
_kept: WeakKeyDictionary[nn.Module, _Kept] = WeakKeyDictionary()


def keep_scales(model: nn.Module, entries: Mapping[str, Any], strict: bool = False) -> None:
    """Load the scales that a checkpoint has for the weights just loaded, or keep them while the model is plain.

    Kept scales are dropped when a weight changes before the conversion.

    Args:
        model: the model; if it is converted, the scales are loaded.
        entries: as from :meth:`ScalingState.state_dict`.
        strict: whether scales of other layers than those converted are an error, or skipped with a warning.

    Raises:
        ValueError: if the model is converted, and an entry is malformed or, with ``strict``, one of another layer.
    """
    layers = [layer for _, layer in converted(model)]
    if layers:
        load_entries(state_of(model, layers), entries, strict)
    else:
        _kept[model] = _Kept(entries, model)


def load_kept_scales(state: ScalingState, modules: Sequence[tuple[str, nn.Module]]) -> None:
    """Load what is kept for a model or its parts into the state of its converted layers.

    Raises:
        ValueError: if an entry is malformed.
    """
    for path, module in modules:
        scales = _kept.pop(module, None)
        if scales is not None and scales.entries and scales.versions.items() <= _versions(module).items():
            prefix = f"{path}." if path else ""
            load_entries(state, {prefix + name: scales.entries[name] for name in scales.entries}, False, prefix)


def _versions(model: nn.Module) -> dict[int, int | None]:
    return {id(weight): None if weight.is_inference() else weight._version for weight in model.parameters()}
