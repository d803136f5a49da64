"""Counts the optimizer steps of this process: each makes copies of weights stale, and requires an update of scales."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

if TYPE_CHECKING:
    from lightning_fp8.modules.weight_group import WeightGroup

_steps = 0
_groups: weakref.WeakSet[WeightGroup] = weakref.WeakSet()
_joined = 0
# for each optimizer: how many layers had joined at the last look-up, the models whose weights it changes, and the ids
# of these weights
_changed_by: weakref.WeakKeyDictionary[Optimizer, tuple[int, list[tuple[weakref.ref[WeightGroup], set[int]]]]] = (
    weakref.WeakKeyDictionary()
)


def optimizer_steps() -> int:
    """How many steps all optimizers together have made. Some write through ``.data``, which leaves no other trace."""
    return _steps


def count_step() -> None:
    """Count a step: of an optimizer of torch, or one by hand, by the update of the scales that belongs to it."""
    global _steps
    _steps += 1


def note_layer(group: WeightGroup) -> None:
    """A layer has joined this group."""
    global _joined
    _groups.add(group)
    _joined += 1


def _changed_groups(optimizer: Optimizer) -> Iterator[tuple[WeightGroup, set[int]]]:
    """The models whose weights an optimizer changes, with the ids of these weights."""
    joined, changed = _changed_by.get(optimizer, (-1, []))
    if joined != _joined:
        parameters = {id(parameter) for part in optimizer.param_groups for parameter in part["params"]}
        changed = []
        for group in list(_groups):
            weights = parameters & {id(source) for rows in group.members for source in rows.sources()}
            if weights:
                changed.append((weakref.ref(group), weights))
        _changed_by[optimizer] = _joined, changed
    for reference, weights in changed:
        known = reference()
        if known is not None:
            yield known, weights


def _before_step(optimizer: Optimizer, *_: Any) -> None:
    for group, _weights in _changed_groups(optimizer):
        for state in group.states():
            group.step_begins(state)


def _after_step(optimizer: Optimizer, *_: Any) -> None:
    count_step()
    for group, weights in _changed_groups(optimizer):
        group.step_ends(weights)
        for state in group.states():
            state.notices.see_optimizer_step(state, id(optimizer))


register_optimizer_step_pre_hook(_before_step)
register_optimizer_step_post_hook(_after_step)
