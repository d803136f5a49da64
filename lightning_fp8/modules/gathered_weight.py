"""A weight that exists only as its FP8 cast, as after an all-gather in FP8."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from lightning_fp8.ops.formats import Fp8Format
from lightning_fp8.ops.library import is_k_major
from lightning_fp8.ops.operand import by_columns


class GatheredWeight(Tensor):
    """A whole weight that exists only as its FP8 cast. FP8 layers use the cast; other operators get its values.

    Attributes:
        payload: ``uint8``, in the shape of the weight.
        scale_inv: ``[] float32``.
        format: the FP8 format of the payload.
    """

    payload: Tensor
    scale_inv: Tensor
    format: Fp8Format

    @staticmethod
    def __new__(cls, payload: Tensor, scale_inv: Tensor, format: Fp8Format, dtype: torch.dtype) -> GatheredWeight:
        """A weight that reports ``dtype``."""
        weight = Tensor._make_wrapper_subclass(cls, payload.shape, dtype=dtype, device=payload.device)  # type: ignore[attr-defined]
        return weight.hold(payload, scale_inv, format)  # type: ignore[no-any-return]

    def hold(self, payload: Tensor, scale_inv: Tensor, format: Fp8Format) -> GatheredWeight:
        """Replace payload, scale and format by newly gathered ones."""
        self.payload, self.scale_inv, self.format = payload, scale_inv, format
        return self

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"GatheredWeight({tuple(self.shape)}, {self.format.name}, {self.dtype})"

    def __tensor_flatten__(self) -> tuple[list[str], tuple[Fp8Format, torch.dtype]]:
        # for `torch.compile`
        return ["payload", "scale_inv"], (self.format, self.dtype)

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], rest: tuple[Fp8Format, torch.dtype], size: object, stride: object
    ) -> GatheredWeight:
        return GatheredWeight(inner["payload"], inner["scale_inv"], *rest)

    def dequantized(self) -> Tensor:
        """The values of the payload, in the dtype of the weight."""
        return (self.payload.view(self.format.dtype).float() * self.scale_inv).to(self.dtype)

    def place_in_graph(self) -> Tensor:
        """A tensor without memory of its own, of the same shape and dtype, whose gradient is the weight's."""
        return _Place.apply(self)

    def payloads(self, k_by_n: bool) -> tuple[Tensor, Tensor]:
        """The payloads of ``[N, K]``, by rows and by columns; ``k_by_n`` if the weight is stored transposed."""
        payload = self.payload.t() if k_by_n else self.payload
        is_copied = torch.is_grad_enabled() and is_k_major(payload)
        return payload.contiguous(), by_columns(payload) if is_copied else payload.t()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        weight = args[0] if args else None
        # what FSDP and `nn.Parameter` do to a tensor that they receive
        if isinstance(weight, GatheredWeight) and _keeps_the_tensor(func, weight, args):
            return GatheredWeight(weight.payload, weight.scale_inv, weight.format, weight.dtype)
        args, kwargs = tree_map_only(GatheredWeight, GatheredWeight.dequantized, (args, kwargs or {}))
        return func(*args, **kwargs)


def _keeps_the_tensor(func: Any, weight: GatheredWeight, args: tuple[Any, ...]) -> bool:
    if func is torch.ops.aten.detach.default:
        return True
    return func is torch.ops.aten.as_strided.default and list(args[1]) == list(weight.shape)


class _Place(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: GatheredWeight) -> Tensor:
        return torch.empty((), dtype=weight.dtype, device=weight.device).expand(weight.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad
