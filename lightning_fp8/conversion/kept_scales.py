"""Scales that came with the weights of a plain model: they are kept until its layers are converted."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from lightning_fp8.conversion.plan import converted, state_of
from lightning_fp8.scaling.saved import load_entries
from lightning_fp8.scaling.state import ScalingState


class _Kept(NamedTuple):
    entries: Mapping[str, Any]
    # of each weight that they belong to, by its id
    versions: dict[int, int | None]
    # held so that no other weight can get the same id
    weights: list[Tensor]


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
        _watch_steps()
        _kept[model] = _Kept(entries, _versions(model), [*model.parameters()])


def load_kept_scales(state: ScalingState, modules: Sequence[tuple[str, nn.Module]]) -> None:
    """Load what is kept for a model or its parts into the state of its converted layers.

    Raises:
        ValueError: if an entry is malformed.
    """
    for path, module in modules:
        kept = _kept.pop(module, None)
        if kept is not None and kept.versions.items() <= _versions(module).items():
            prefix = f"{path}." if path else ""
            load_entries(state, {prefix + name: kept.entries[name] for name in kept.entries}, False, prefix)


def _versions(model: nn.Module) -> dict[int, int | None]:
    return {id(weight): None if weight.is_inference() else weight._version for weight in model.parameters()}


def _after_step(optimizer: Optimizer, *_: Any) -> None:
    # fused optimizers change weights without a new version
    if _kept:
        stepped = {id(weight) for group in optimizer.param_groups for weight in group["params"]}
        for model, kept in list(_kept.items()):
            if not stepped.isdisjoint(kept.versions):
                del _kept[model]


@functools.cache
def _watch_steps() -> None:
    register_optimizer_step_post_hook(_after_step)
