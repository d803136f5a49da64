"""The cast of a weight: made when the weight has changed, and only then; never stale."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling
from torch.utils._python_dispatch import _len_torch_dispatch_stack

from lightning_fp8.modules.optimizer_steps import optimizer_steps
from lightning_fp8.ops.library import is_k_major
from lightning_fp8.runtime.device import is_capturing

_BLOCK_ELEMENTS = 1 << 16
_LOCK = threading.Lock()


T = TypeVar("T")


class _Entry(NamedTuple):
    # not a weak reference, with which `torch.utils.swap_tensors` would refuse to swap it
    weight: Tensor
    # keeps the storage alive, so that no other tensor can get the same address
    alias: Tensor
    key: tuple[Any, ...]
    # on a GPU, comparing would wait for the device
    is_compared: bool
    fingerprint: Tensor | None
    copy: Any


class WeightCache(Generic[T]):
    """Keeps a copy derived from one weight for as long as the weight is certain to be the same.

    A copy is stale after a change in place, a new ``.data``, a move, another parameter in its place, or, unless the
    weight is frozen, an optimizer step. On the CPU a hash of the bits is compared as well, which also catches changes
    in place through ``.data``; not while a context vouches for the weight, see :func:`vouching`.
    Copies and pickles of a model start with an empty cache.

    Attributes:
        vouchers: how many contexts vouch for the weight.
        part: which matrix of a parameter ``[E, N, K]`` the copy is made from; None if it is made from all of it.
    """

    def __init__(self) -> None:
        self._entry: _Entry | None = None
        self._last_used = 0
        self.vouchers = 0
        self.part: int | None = None

    def matrix(self, weight: Tensor) -> Tensor:
        """The part of ``weight`` that the copy is made from."""
        return weight if self.part is None else weight[self.part]

    def get(self, weight: Tensor) -> T | None:
        """The copy of ``weight``; None if there is none, or it may be stale."""
        entry = self._entry
        if entry is None or entry.weight is not weight or entry.key != _key(weight):
            return None
        kept = entry.fingerprint
        # a copy kept while somebody vouched has no fingerprint
        is_compared = entry.is_compared and not self.vouchers
        if is_compared and (kept is None or not torch.equal(kept, self._fingerprint(weight))):
            return None
        self._last_used = id(weight)
        return entry.copy  # type: ignore[no-any-return]

    def holds(self, weight: Tensor, copy: T) -> bool:
        """Whether ``copy`` is the one that is kept, and nothing that leaves a trace has changed the weight since."""
        entry = self._entry
        return entry is not None and entry.copy is copy and entry.weight is weight and entry.key == _key(weight)

    def was_used(self, weight: Tensor) -> bool:
        """Whether the last copy of ``weight``, stale or not, has been used."""
        return self._last_used == id(weight)

    def drop(self) -> None:
        """Drop the copy and free its memory."""
        self._entry = None

    def put(self, weight: Tensor, copy: T, used: bool = True) -> None:
        """Keep ``copy``, just made from ``weight``, for a forward that uses it now or, if not ``used``, later."""
        # Only a parameter is known to be the same tensor at the next call; a parametrized weight is made each time.
        if isinstance(weight, nn.Parameter) and not weight.is_inference():
            is_compared = not is_k_major(weight)
            fingerprint = self._fingerprint(weight) if is_compared and not self.vouchers else None
            self._entry = _Entry(weight, weight.detach(), _key(weight), is_compared, fingerprint, copy)
            self._last_used = id(weight) if used else 0

    def __getstate__(self) -> dict[str, Any]:
        return {"_entry": None, "_last_used": 0, "vouchers": 0, "part": self.part}

    def _fingerprint(self, weight: Tensor) -> Tensor:
        return _fingerprint(self.matrix(weight.detach()))


@contextmanager
def vouching(caches: Iterable[WeightCache[Any]]) -> Iterator[None]:
    """Declare that these weights change only in ways that leave a trace, in all threads, until all such contexts end.

    It does not drop the copies made before it or in it: the caller knows for how long they are valid.
    """
    caches = list(caches)
    with _LOCK:
        for cache in caches:
            cache.vouchers += 1
    try:
        yield
    finally:
        with _LOCK:
            for cache in caches:
                cache.vouchers -= 1


def can_keep_copies(weight: Tensor) -> bool:
    """Whether the current context can detect a stale copy, and may run different operators when there is a copy.

    Nothing in a compiled or captured graph can see whether a copy is stale. A dispatch mode, such as that of selective
    checkpointing, must see the same operators when a forward is recomputed.
    """
    return not (is_dynamo_compiling() or _len_torch_dispatch_stack() or is_capturing(weight.is_cuda))


def _key(weight: Tensor) -> tuple[Any, ...]:
    # the address identifies the device and the place in the storage, which is kept alive
    where, layout = weight.data_ptr(), weight.stride()
    # an optimizer changes what has a gradient; it may do so through `.data`
    steps = optimizer_steps() if weight.requires_grad or weight.grad is not None else None
    return weight._version, steps, where, weight.dtype, weight.shape, layout


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
