"""Casts that outlive a forward. They are made again only when the tensor has changed, and are never stale.

The stamp of a tensor identifies its current state. A cast is stale once the stamp of its source has changed.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_fp8.modules.fp8_parameter import Fp8Parameter
from lightning_fp8.scaling import optimizer_steps
from lightning_fp8.scalings.operand import Cast

_LOCK = threading.Lock()
T = TypeVar("T")


def stamp(tensor: Tensor) -> tuple[Hashable, ...]:
    """Identity, version, address and layout of a tensor: equal while it is the same tensor with the same values.

    A change in place, a new ``.data`` and another tensor all change the stamp. A change in place through ``.data`` does
    not, nor does any change of an inference tensor, which has no version. The stamp of a sharded parameter has two
    versions: its own, and that of the part that this process holds.
    """
    if isinstance(tensor, DTensor):
        return id(tensor), tensor._version, *stamp(tensor._local_tensor)
    if isinstance(tensor, Fp8Parameter):
        return id(tensor), id(tensor.content.scale_inv), id(tensor.content.changed)
    version = None if tensor.is_inference() else tensor._version
    # FSDP1 moves parameters between their own shard and views of the gathered whole
    address = 0 if getattr(tensor, "_fsdp_flattened", False) else tensor.data_ptr()
    return id(tensor), version, address, tensor.dtype, tensor.shape, tensor.stride()


def is_sharded(tensor: Tensor | None) -> bool:
    """Whether this process holds only a part of a parameter, except while the whole is gathered."""
    return isinstance(tensor, DTensor) or getattr(tensor, "_fsdp_flattened", False)


class Stamped:
    """A kept stamp, with references to all objects whose ``id`` or address it has, so that no other can get the same.

    Attributes:
        key: the stamp.
        plain: a plain parameter, and the parts of its stamp; None for any other tensor.
    """

    __slots__ = ("_held", "key", "plain")

    def __init__(self, tensor: Tensor) -> None:
        self.key: tuple[Hashable, ...] = stamp(tensor)
        self.plain: tuple[Tensor, int, int, torch.dtype, torch.Size, tuple[int, ...]] | None = None
        if type(tensor) is nn.Parameter and not (tensor.is_inference() or is_sharded(tensor)):
            self.plain = tensor, tensor._version, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
        self._held = _held(tensor)

    def is_of(self, tensor: Tensor) -> bool:
        """Whether this is the stamp of ``tensor`` as it is now."""
        if self.plain is None or self.plain[0] is not tensor or tensor.is_inference():
            return self.key == stamp(tensor)
        # a short path for the usual case, because each forward checks weight and bias
        _, version, address, dtype, shape, strides = self.plain
        return (
            tensor._version == version
            and tensor.data_ptr() == address
            and tensor.dtype == dtype
            and tensor.shape == shape
            and tensor.stride() == strides
        )


def _held(tensor: Tensor) -> object:
    # not weak references: `torch.utils.swap_tensors` refuses to swap a weight that has any
    if isinstance(tensor, Fp8Parameter):
        return tensor, tensor.content.scale_inv, tensor.content.changed
    if getattr(tensor, "_fsdp_flattened", False):
        return tensor
    # an alias keeps the memory, too, when `.data` is replaced
    return tensor, (tensor._local_tensor if isinstance(tensor, DTensor) else tensor).detach()


class KeptCast(Generic[T]):
    """Keeps the cast of one tensor for as long as the tensor is certain to be the same.

    A cast is stale after a change that leaves a trace (see :func:`stamp`) and, unless the tensor is frozen, after an
    optimizer step. Copies and pickles of a model start without casts.

    Attributes:
        assumptions: how many open contexts declare that the tensor changes only with a trace.
    """

    def __init__(self) -> None:
        self._made_of: Stamped | None = None
        # an optimizer changes what has a gradient; it may do so through `.data`
        self._steps = 0
        self._cast: T | None = None
        self._last_used = 0
        self.assumptions = 0

    def get(self, tensor: Tensor) -> T | None:
        """The cast of ``tensor``; None if there is none, or it may be stale."""
        made_of = self._made_of
        if made_of is None or not made_of.is_of(tensor):
            return None
        if self._steps != optimizer_steps.count and (tensor.requires_grad or tensor.grad is not None):
            return None
        self._last_used = id(tensor)
        return self._cast

    def was_used(self, tensor: Tensor) -> bool:
        """Whether the last cast of ``tensor``, stale or not, has been used."""
        return self._last_used == id(tensor)

    def drop(self) -> None:
        """Drop the cast and free its memory."""
        self._made_of = self._cast = None

    def put(self, tensor: Tensor, cast: T, used: bool = True) -> None:
        """Keep ``cast``, just made from ``tensor``, for a forward that uses it now or, if not ``used``, later."""
        # Only a parameter is sure to be the same tensor at the next call; a parametrized weight is made each time.
        if isinstance(tensor, nn.Parameter) and not tensor.is_inference():
            self._made_of, self._steps, self._cast = Stamped(tensor), optimizer_steps.count, cast
            self._last_used = id(tensor) if used else 0

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_made_of": None, "_cast": None, "_last_used": 0, "assumptions": 0}


class WeightCast(KeptCast[Cast]):
    """The FP8 cast of a weight, and the form of the weight.

    Attributes:
        is_kept: whether the cast outlives a forward. False for a sharded weight: the cast would hold the whole weight.
        part: which matrix of a parameter ``[E, N, K]`` is the weight; None if the weight is the whole parameter.
        k_by_n: whether the layer stores the weight as ``[K, N]``.
        sharded: the weight's parameter, or those it is computed from, if this process holds parts of them; else empty.
        fp8_only: whether the weight is kept as its FP8 cast only, as long as it is frozen.
        frozen_seen: the scale of such a weight when a forward last used it.
        compiled_cast: the cast that compiled code reads, in tensors that stay the same objects; None if there is none.
        compiled_from: the weight that ``compiled_cast`` was made from.
        compiled_cast_is_current: whether ``compiled_cast`` is from the current weight; see
            :mod:`lightning_fp8.modules.compiled_casts`.
        may_have_compiled_cast: False after a change that came too late for compiled code.
        compiled_cast_users: how many open contexts keep ``compiled_cast`` current.
    """

    def __init__(self) -> None:
        super().__init__()
        self.is_kept = True
        self.part: int | None = None
        self.k_by_n = False
        self.sharded: Sequence[Tensor | None] = ()
        self.fp8_only = False
        self.frozen_seen: Tensor | None = None
        self.compiled_cast: Cast | None = None
        self.compiled_from: Tensor | None = None
        self.compiled_cast_is_current = False
        self.may_have_compiled_cast = True
        self.compiled_cast_users = 0

    def __getstate__(self) -> dict[str, Any]:
        emptied = {
            "sharded": None,
            "frozen_seen": None,
            "compiled_cast": None,
            "compiled_from": None,
            "compiled_cast_is_current": False,
            "compiled_cast_users": 0,
        }
        return {**super().__getstate__(), **emptied}


@contextmanager
def normal_tensors() -> Iterator[None]:
    """Make normal tensors inside inference mode, for casts that outlive it."""
    with torch.inference_mode(False), torch.no_grad():
        yield


@contextmanager
def assume_unchanged(casts: Iterable[KeptCast[Any]]) -> Iterator[None]:
    """Declare that these tensors change only in ways that leave a trace, in all threads, until all such contexts end.

    It does not drop casts made before it or inside it: the caller knows how long they are valid.
    """
    casts = list(casts)
    with _LOCK:
        for cast in casts:
            cast.assumptions += 1
    try:
        yield
    finally:
        with _LOCK:
            for cast in casts:
                cast.assumptions -= 1
