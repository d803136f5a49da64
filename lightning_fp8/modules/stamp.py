"""Stamps of tensors: a copy is stale once the stamp of its source has changed."""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Parameter

from lightning_fp8.modules.fp8_parameter import Fp8Parameter


def stamp(tensor: Tensor) -> tuple[Hashable, ...]:
    """Equal for as long as a tensor is the same one with the same values: its identity, version, address and layout.

    A change in place, a new ``.data`` and another tensor all change it. A change in place through ``.data`` does not,
    nor does one of an inference tensor, which has no version. The stamp of a sharded parameter has both versions, its
    own and that of the part that this process holds.
    """
    if isinstance(tensor, DTensor):
        return id(tensor), tensor._version, *stamp(tensor._local_tensor)
    if isinstance(tensor, Fp8Parameter):
        return id(tensor), id(tensor.content.scale_inv), id(tensor.content.changed)
    version = None if tensor.is_inference() else tensor._version
    # FSDP1 moves its parameters between a part of their own and one of the gathered whole
    address = 0 if getattr(tensor, "_fsdp_flattened", False) else tensor.data_ptr()
    return id(tensor), version, address, tensor.dtype, tensor.shape, tensor.stride()


def is_sharded(tensor: Tensor | None) -> bool:
    """Whether this process holds only a part of a parameter, except while the whole is gathered."""
    return isinstance(tensor, DTensor) or getattr(tensor, "_fsdp_flattened", False)


class Stamped:
    """A stamp that is kept, with all whose ``id`` or address is in it, so that nothing else can get the same.

    Attributes:
        key: the stamp.
        plain: a plain parameter, and what its stamp is made of; None for anything else.
    """

    __slots__ = ("_held", "key", "plain")

    def __init__(self, tensor: Tensor) -> None:
        self.key: tuple[Hashable, ...] = stamp(tensor)
        self.plain: tuple[Tensor, int, int, torch.dtype, torch.Size, tuple[int, ...]] | None = None
        if type(tensor) is Parameter and not (tensor.is_inference() or is_sharded(tensor)):
            self.plain = tensor, tensor._version, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
        self._held = _held(tensor)

    def is_of(self, tensor: Tensor) -> bool:
        """Whether this is the stamp of ``tensor`` as it is now."""
        if self.plain is None or self.plain[0] is not tensor or tensor.is_inference():
            return self.key == stamp(tensor)
        # the usual case takes a short path, as each forward asks this of weight and bias
        _, version, address, dtype, shape, strides = self.plain
        return (
            tensor._version == version
            and tensor.data_ptr() == address
            and tensor.dtype == dtype
            and tensor.shape == shape
            and tensor.stride() == strides
        )


def _held(tensor: Tensor) -> object:
    # not weak references, with which `torch.utils.swap_tensors` would refuse to swap a weight
    if isinstance(tensor, Fp8Parameter):
        return tensor, tensor.content.scale_inv, tensor.content.changed
    if getattr(tensor, "_fsdp_flattened", False):
        return tensor
    # an alias keeps the memory, too, when `.data` is replaced
    return tensor, (tensor._local_tensor if isinstance(tensor, DTensor) else tensor).detach()
