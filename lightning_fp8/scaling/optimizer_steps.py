"""Counts the optimizer steps of this process: each makes casts of weights stale, and requires an update of scales."""

from __future__ import annotations

import weakref
from itertools import chain
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

if TYPE_CHECKING:
    from lightning_fp8.scaling.model import Fp8Model


# the number of steps of all optimizers together; optimizers that write through `.data` leave no other trace
count = 0
_models: weakref.WeakSet[Fp8Model] = weakref.WeakSet()
_joined = 0
# for each optimizer, at the last look-up: how many layers had joined, and how many parameters it had; also the models
# whose weights it changes, and the ids of these weights
_Changed = list[tuple["weakref.ref[Fp8Model]", set[int]]]
_changed_by: weakref.WeakKeyDictionary[Optimizer, tuple[tuple[int, int], _Changed]] = weakref.WeakKeyDictionary()


def count_step() -> None:
    """Count a step of a torch optimizer, or a manual step; the latter is noticed by its update of the scales."""
    global count
    count += 1


def watch_optimizers_for(model: Fp8Model) -> None:
    """A layer has joined this model."""
    global _joined
    _models.add(model)
    _joined += 1


def _models_of(optimizer: Optimizer) -> _Changed:
    """The models whose weights an optimizer changes, with the ids of these weights."""
    parameters = [*chain.from_iterable(map(itemgetter("params"), optimizer.param_groups))]
    now = _joined, len(parameters)
    looked_at, changed = _changed_by.get(optimizer, (None, []))
    if looked_at != now:
        ids = {*map(id, parameters)}
        weights = ((model, ids.intersection(map(id, model.sources()))) for model in list(_models))
        changed = [(weakref.ref(model), model_ids) for model, model_ids in weights if model_ids]
        _changed_by[optimizer] = now, changed
    return changed


def _after_step(optimizer: Optimizer, *_: Any) -> None:
    count_step()
    for model, weights in _models_of(optimizer):
        if (stepped := model()) is not None:
            stepped.on_step_ends(id(optimizer), weights)


register_optimizer_step_post_hook(_after_step)
