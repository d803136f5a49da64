"""The cast of a weight: made once per optimizer step, whatever the number of micro-batches, and never stale."""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import _len_torch_dispatch_stack

from lightning_fp8.device import is_capturing

_optimizer_steps = 0


def _count_step(*_: Any) -> None:
    # An optimizer that writes through `.data` leaves no trace in the parameter's version counter.
    global _optimizer_steps
    _optimizer_steps += 1


register_optimizer_step_post_hook(_count_step)


class _Entry(NamedTuple):
    weight: weakref.ref[Tensor]
    # keeps the storage alive, so that another tensor cannot come to lie at the same address
    alias: Tensor
    key: tuple[Any, ...]
    fingerprint: tuple[Tensor, ...]
    cast: tuple[Tensor, ...]


class WeightCache:
    """Holds what was made of one weight for as long as weight and scales are surely the same.

    A copy is dropped after any optimizer step, any update of the scales, a change in place, a new ``.data``, a move, or
    another parameter in its place. On the CPU the bits themselves are compared as well, which also catches changes in
    place through ``.data``. Copies and pickles of a model start with an empty cache.
    """

    def __init__(self) -> None:
        self._entry: _Entry | None = None
        self._used = False

    def get(self, weight: Tensor, scaling_version: int) -> tuple[Tensor, ...] | None:
        """The copy of ``weight`` under these scales, or None where there is none or a doubt."""
        entry = self._entry
        if entry is None or entry.weight() is not weight:
            return None
        if entry.key != _key(weight, scaling_version) or entry.alias.data_ptr() != weight.data_ptr():
            return None
        if not all(map(torch.equal, entry.fingerprint, _fingerprint(weight))):
            return None
        self._used = True
        return entry.cast

    def was_used(self, weight: Tensor) -> bool:
        """Whether what was last kept of ``weight``, stale or not, has been asked for."""
        return self._used and self._entry is not None and self._entry.weight() is weight

    def drop(self) -> None:
        """Let go of the copy, and of its memory."""
        self._entry = None

    def put(self, weight: Tensor, scaling_version: int, cast: tuple[Tensor, ...], used: bool = True) -> None:
        """Keep ``cast``, made of ``weight`` just now, for a forward that uses it or, if not ``used``, in advance."""
        # Only a parameter is known to be the same tensor at the next call; a parametrized weight is made each time.
        if isinstance(weight, nn.Parameter) and not weight.is_inference():
            key = _key(weight, scaling_version)
            self._entry = _Entry(weakref.ref(weight), weight.detach(), key, _fingerprint(weight), cast)
            self._used = used

    def __getstate__(self) -> dict[str, Any]:
        return {"_entry": None, "_used": False}


def can_keep_copies(device: torch.device) -> bool:
    """Whether what runs now can tell a stale copy, and may run other operators where a copy is at hand.

    Nothing in a compiled or captured graph can see whether a copy is stale. A dispatch mode, such as that of selective
    checkpointing, has to meet the same operators when a forward is done again.
    """
    return not (torch.compiler.is_compiling() or is_capturing(device) or _len_torch_dispatch_stack())


def _key(weight: Tensor, scaling_version: int) -> tuple[Any, ...]:
    layout = (weight.dtype, weight.device, weight.shape, weight.stride(), weight.storage_offset())
    return (weight._version, scaling_version, _optimizer_steps, *layout)


def _fingerprint(weight: Tensor) -> tuple[Tensor, ...]:
    """Sums of the bits over rows, modulo 2**32, and of the values over columns. On a GPU comparing would wait."""
    if weight.device.type != "cpu":
        return ()
    bits = weight.detach().view(torch.int32 if weight.element_size() == 4 else torch.int16)
    # a change of sign is a multiple of 2**31, which the first sum may miss and the second does not
    return bits.sum(dim=0, dtype=torch.int32), weight.detach().sum(dim=1)
