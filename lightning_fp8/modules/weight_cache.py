"""The cast of a weight: made once per optimizer step, whatever the number of micro-batches, and never stale."""

from __future__ import annotations

import functools
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling
from torch.utils._python_dispatch import _len_torch_dispatch_stack

from lightning_fp8.modules.optimizer_steps import optimizer_steps
from lightning_fp8.ops.library import is_k_major
from lightning_fp8.runtime.device import is_capturing

_BLOCK_ELEMENTS = 1 << 16


T = TypeVar("T")


class _Entry(NamedTuple):
    # not a weak reference, with which `torch.utils.swap_tensors` would refuse to swap it
    weight: Tensor
    # keeps the storage alive, so that no other tensor can get the same address
    alias: Tensor
    key: tuple[Any, ...]
    fingerprint: Tensor | None
    copy: Any


class WeightCache(Generic[T]):
    """Keeps a copy derived from one weight for as long as the weight is certain to be the same.

    A copy is dropped after any optimizer step, a change in place, a new ``.data``, a move, or another parameter in its
    place. On the CPU a hash of the bits is compared as well, which also catches changes in place through ``.data``.
    Copies and pickles of a model start with an empty cache.
    """

    def __init__(self) -> None:
        self._entry: _Entry | None = None
        self._used = False

    def get(self, weight: Tensor) -> T | None:
        """The copy of ``weight``; None if there is none, or it may be stale."""
        entry = self._entry
        if entry is None or entry.weight is not weight or entry.key != _key(weight):
            return None
        if entry.fingerprint is not None and not torch.equal(entry.fingerprint, _fingerprint(weight)):
            return None
        self._used = True
        return entry.copy  # type: ignore[no-any-return]

    def was_used(self, weight: Tensor) -> bool:
        """Whether the last copy of ``weight``, stale or not, has been used."""
        return self._used and self._entry is not None and self._entry.weight is weight

    def drop(self) -> None:
        """Drop the copy and free its memory."""
        self._entry = None

    def put(self, weight: Tensor, copy: T, used: bool = True) -> None:
        """Keep ``copy``, just made from ``weight``, for a forward that uses it now or, if not ``used``, later."""
        # Only a parameter is known to be the same tensor at the next call; a parametrized weight is made each time.
        if isinstance(weight, nn.Parameter) and not weight.is_inference():
            # on a GPU, comparing would wait for the device
            fingerprint = None if is_k_major(weight) else _fingerprint(weight)
            self._entry = _Entry(weight, weight.detach(), _key(weight), fingerprint, copy)
            self._used = used

    def __getstate__(self) -> dict[str, Any]:
        return {"_entry": None, "_used": False}


def can_keep_copies(weight: Tensor) -> bool:
    """Whether the current context can detect a stale copy, and may run different operators when there is a copy.

    Nothing in a compiled or captured graph can see whether a copy is stale. A dispatch mode, such as that of selective
    checkpointing, must see the same operators when a forward is recomputed.
    """
    return not (is_dynamo_compiling() or _len_torch_dispatch_stack() or is_capturing(weight.is_cuda))


def _key(weight: Tensor) -> tuple[Any, ...]:
    # the address identifies the device and the place in the storage, which is kept alive
    where, layout = weight.data_ptr(), weight.stride()
    return weight._version, optimizer_steps(), where, weight.dtype, weight.shape, layout


def _fingerprint(weight: Tensor) -> Tensor:
    """A 64-bit hash of the bits of each row: sums modulo 2**64 of bits times random odd numbers, one for each column.

    So it detects permutations and changes of sign, which plain sums may miss.
    """
    bits = weight.detach().view(torch.int32 if weight.element_size() == 4 else torch.int16)
    bits = bits if bits.dim() == 2 else bits[None]
    multipliers = _multipliers(bits.shape[1])
    # in blocks that stay in the processor's cache
    return torch.cat([block.long().mv(multipliers) for block in bits.split(max(1, _BLOCK_ELEMENTS // bits.shape[1]))])


@functools.cache
def _multipliers(count: int) -> Tensor:
    generator = torch.Generator().manual_seed(count)
    with torch.inference_mode(False):
        return torch.randint(-(2**63), 2**63 - 1, (count,), generator=generator, dtype=torch.int64) | 1
