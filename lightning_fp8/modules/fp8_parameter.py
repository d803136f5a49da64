"""A weight that exists only as its FP8 cast: a frozen one without a master, or one that FSDP2 has gathered in FP8."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeGuard, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from lightning_fp8 import ops
from lightning_fp8.ops.amaxes import max_abs
from lightning_fp8.ops.formats import CASTABLE_DTYPES, E4M3, Fp8Format
from lightning_fp8.ops.library import can_keep_copies, needs_transposed_payload
from lightning_fp8.ops.operand import WeightSlot, by_columns

_aten = torch.ops.aten


@dataclass(eq=False)
class Content:
    """What a weight and its aliases (``weight.data``, ``weight.detach()``) share.

    Attributes:
        dtype: the dtype of the values.
        k_by_n: whether the layer stores its weight as ``[K, N]``.
        format: the FP8 format of the payload.
        payload: ``[N, K] uint8``.
        scale_inv: ``[] float32``.
        largest: ``[] float32``, amax of the values that a frozen weight was rounded from. The largest codes are
            dequantized to it, so that a cast of the dequantized values has the same scale. None for a gathered weight.
        payload_t: the payload by columns of a frozen weight, where a GPU's GEMMs have needed it; else None.
        changed: values in the shape of the weight, after a change in place to values that FP8 would round; then the
            payload of a frozen weight is empty. Else None.
        name: the layer's name, for messages.
        error: relative RMS error of the rounding.
    """

    dtype: torch.dtype
    k_by_n: bool
    format: Fp8Format
    payload: Tensor
    scale_inv: Tensor
    largest: Tensor | None = None
    payload_t: Tensor | None = None
    changed: Tensor | None = None
    name: str = ""
    error: float = 0.0

    def dequantized(self) -> Tensor:
        """The values, in the shape of the weight and in its dtype."""
        if self.changed is not None:
            return self.changed
        values = dequantized(self.payload, self.scale_inv, self.largest, self.dtype, self.format)
        return values.t() if self.k_by_n else values

    def take(self, values: Tensor, rounds: bool) -> None:
        """Hold other values: as payload if that is lossless, or if ``rounds`` and they are finite; else as they are."""
        if self.largest is None:
            self.changed = values
            return
        payload, scale_inv, amax = quantized(values.t() if self.k_by_n else values)
        rounded = dequantized(payload, scale_inv, amax, self.dtype)
        rounded = rounded.t() if self.k_by_n else rounded
        is_same = torch.equal(rounded, values)
        if not (is_same or (rounds and bool(amax.isfinite()))):
            self.changed = values
            self.payload, self.payload_t = self.payload.new_empty(0, 0), None
            return
        if rounds or self.changed is not None:
            difference = (rounded.float() - values.float()).norm() / values.float().norm()
            self.error = 0.0 if is_same else float(difference)
        self.payload, self.scale_inv, self.largest = payload, scale_inv, amax
        self.payload_t = self.changed = None

    def mapped(self, function: Callable[[Tensor], Tensor]) -> Content:
        """A copy with ``function`` applied to each tensor, for example to move it to another device."""
        tensors: dict[str, Any] = {
            field: function(held) for field, held in vars(self).items() if isinstance(held, Tensor)
        }
        return replace(self, **tensors)


def _of_content(field: str) -> property:
    # properties, because dynamo cannot read any attribute of a class with `__getattr__`
    return property(lambda weight: getattr(weight.content, field))


class Fp8Parameter(Tensor):
    """A weight that looks like one in ``dtype`` and holds its FP8 cast, in a :class:`Content`.

    FP8 layers use the payload. Other operators get the dequantized values. Values that are copied into a frozen weight
    are rounded to FP8 with their own scale; the result of any other operation in place is kept unrounded.
    """

    content: Content
    # the tensors that `__tensor_flatten__` names
    payload, scale_inv, largest = _of_content("payload"), _of_content("scale_inv"), _of_content("largest")
    payload_t, changed = _of_content("payload_t"), _of_content("changed")

    @staticmethod
    def __new__(cls, content: Content, is_parameter: bool = False) -> Fp8Parameter:
        """A tensor with this content; torch treats any tensor marked with ``_is_param`` as a parameter."""
        held = content.payload if content.changed is None else content.changed
        shape = held.shape[::-1] if content.k_by_n and content.changed is None else held.shape
        weight = Tensor._make_wrapper_subclass(cls, shape, dtype=content.dtype, device=held.device)  # type: ignore[attr-defined]
        weight.content = content
        weight._is_param = is_parameter
        return weight  # type: ignore[no-any-return]

    @property
    def is_fp8(self) -> bool:
        """Whether it is held as payload; not after a change in place that FP8 would round."""
        return self.content.changed is None

    def dequantized(self) -> Tensor:
        """The values as a plain tensor."""
        return self.content.dequantized()

    def operand_payloads(self) -> tuple[Tensor, Tensor]:
        """The payloads of ``[N, K]``, by rows and by columns."""
        content, payload = self.content, self.content.payload.contiguous()
        if content.payload_t is not None:
            return payload, content.payload_t
        if not (torch.is_grad_enabled() and needs_transposed_payload(payload)):
            return payload, payload.t()
        payload_t = by_columns(payload)
        # FSDP frees a gathered payload, and would not free this
        if content.largest is not None and can_keep_copies(payload):
            content.payload_t = payload_t
        return payload, payload_t

    def place_in_graph(self) -> Tensor:
        """A tensor ``[N, K]`` without memory of its own, whose gradient is the weight's."""
        place = _Place.apply(self) if self.requires_grad else _without_memory(self)
        return place.t() if self.content.k_by_n else place

    def applied(self, function: Callable[[Tensor], Tensor]) -> nn.Parameter:
        """What ``nn.Module._apply`` makes of it: rounded again after a change of dtype; plain if it has no values."""
        made = function(self) if self.is_fp8 else function(self.dequantized())
        if isinstance(made, Fp8Parameter):
            return as_parameter(made.content)
        if not self.is_fp8:
            return as_parameter(replace(self.content, changed=made, dtype=made.dtype))
        plain = nn.Parameter(made, requires_grad=False)
        again = frozen(plain, self.content.name, self.content.k_by_n)
        return plain if again is None else again

    @property
    def data(self) -> Tensor:  # type: ignore[override]
        """An alias."""
        return self.detach()

    @data.setter
    def data(self, values: Tensor) -> None:
        if isinstance(values, Fp8Parameter):
            if values.content is self.content:
                # `weight.data += delta` has changed it already
                return
            values = values.dequantized()
        if (values.shape, values.dtype, values.device) != (self.shape, self.dtype, self.device):
            raise RuntimeError(
                f"The weight of {self.content.name!r} is kept in FP8 only: its `.data` can only be replaced by"
                f" {tuple(self.shape)}, {self.dtype} on {self.device}; got {tuple(values.shape)}, {values.dtype} on"
                f" {values.device}. Replace the parameter, or call `convert(model, frozen_weights='master')` first."
            )
        self.content.take(values.detach(), rounds=False)

    @property
    def requires_grad(self) -> bool:  # type: ignore[override]
        """False for a frozen weight."""
        return not is_frozen(self) and Tensor.requires_grad.__get__(self)  # type: ignore[attr-defined, no-any-return]

    @requires_grad.setter
    def requires_grad(self, requires_grad: bool) -> None:
        self.requires_grad_(requires_grad)

    def requires_grad_(self, requires_grad: bool = True) -> Fp8Parameter:
        """Raise a RuntimeError if a frozen weight is to be trained."""
        if not is_frozen(self):
            return super().requires_grad_(requires_grad)  # type: ignore[return-value]
        if requires_grad:
            raise RuntimeError(
                f"The weight of {self.content.name!r} is kept in FP8 only and cannot be trained. Call"
                " `lightning_fp8.convert(model, frozen_weights='master')` first, which gives it a master with its"
                " rounded values, and load the weights again if you need them without rounding."
            )
        return self

    def __setitem__(self, index: Any, value: Any) -> None:
        values = self.dequantized().clone()
        values[index] = value
        self.content.take(values, rounds=False)

    def __deepcopy__(self, memo: dict[int, Any]) -> Fp8Parameter:
        if id(self) not in memo:
            memo[id(self)] = Fp8Parameter(self.content.mapped(Tensor.clone), isinstance(self, nn.Parameter))
        return memo[id(self)]  # type: ignore[no-any-return]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return Fp8Parameter, (self.content, isinstance(self, nn.Parameter))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        held = self.content.format.name if self.is_fp8 else "values"
        return f"Fp8Parameter({tuple(self.shape)}, {held}, {self.dtype})"

    def __tensor_flatten__(self) -> tuple[list[str], tuple[torch.dtype, bool, Fp8Format]]:
        # for `torch.compile`
        fields = [field for field, held in vars(self.content).items() if isinstance(held, Tensor)]
        return fields, (self.dtype, self.content.k_by_n, self.content.format)

    def _stable_hash_for_caching(self) -> str:
        # covers all that a compiled graph depends on
        return repr((type(self).__qualname__, self.shape, self.device, self.__tensor_flatten__()))

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], rest: tuple[torch.dtype, bool, Fp8Format], size: object, stride: object
    ) -> Fp8Parameter:
        return Fp8Parameter(Content(*rest, **inner))  # type: ignore[arg-type]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        weight = args[0] if args else None
        if isinstance(weight, Fp8Parameter):
            if func in (_aten.detach.default, _aten.alias.default) or _is_all_of(weight, func, args):
                return Fp8Parameter(weight.content)
            if func is _aten._to_copy.default and weight.is_fp8 and kwargs.get("dtype") in (None, weight.dtype):
                place = {name: value for name, value in kwargs.items() if name in ("device", "non_blocking")}
                return Fp8Parameter(weight.content.mapped(lambda held: func(held, **place)))
        written = {id(one.content): one for one in _written(func, args, kwargs)}
        values: dict[int, Tensor] = {}

        def plain(one: Fp8Parameter) -> Tensor:
            return values.setdefault(id(one.content), one.dequantized())

        result = func(*tree_map_only(Fp8Parameter, plain, args), **tree_map_only(Fp8Parameter, plain, kwargs))
        for key, one in written.items():
            one.content.take(values[key], rounds=func in (_aten.copy_.default, _aten._foreach_copy_.default))
        is_weight = isinstance(weight, Fp8Parameter) and result is values.get(id(weight.content))
        return weight if is_weight else result


def _is_all_of(weight: Fp8Parameter, func: Any, args: tuple[Any, ...]) -> bool:
    """Whether this is the view of the whole weight that FSDP2 takes of a tensor that it receives."""
    return func is _aten.as_strided.default and (*args[1], *args[2]) == (*weight.shape, *weight.stride())


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Fp8Parameter]:
    """The weights that an operator changes in place."""
    arguments = func._schema.arguments
    given = [*args, *(kwargs.get(argument.name) for argument in arguments[len(args) :])]
    for argument, value in zip(arguments, given, strict=True):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from (one for one in tree_leaves(value) if isinstance(one, Fp8Parameter))


class _Place(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        return _without_memory(weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def _without_memory(weight: Tensor) -> Tensor:
    return torch.empty((), dtype=weight.dtype, device=weight.device).expand(weight.shape)


def is_frozen(weight: object) -> TypeGuard[Fp8Parameter]:
    """Whether a weight has no master and no gradient; a gathered one has both, in its shards."""
    return isinstance(weight, Fp8Parameter) and weight.content.largest is not None


def as_parameter(content: Content) -> nn.Parameter:
    """A parameter with this content."""
    return cast(nn.Parameter, Fp8Parameter(content, is_parameter=True))


def frozen(weight: Tensor, name: str, k_by_n: bool) -> nn.Parameter | None:
    """The FP8 parameter for a plain one; None if it is trained, has no values, or values that are not finite."""
    is_plain = type(weight) is nn.Parameter and weight.dtype in CASTABLE_DTYPES and weight.dim() == 2
    if not is_plain or weight.requires_grad or weight.is_meta:
        return None
    nothing = torch.empty(0, 0, dtype=torch.uint8, device=weight.device)
    content = Content(weight.dtype, k_by_n, E4M3, nothing, nothing, nothing, name=name)
    content.take(weight.detach(), rounds=True)
    return as_parameter(content) if content.changed is None else None


def quantized(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A weight ``[N, K]`` -> payload ``[N, K] uint8``, its inverse scale and its amax, both ``[] float32``."""
    with torch.inference_mode(False), torch.no_grad():
        weight = weight.detach().contiguous()
        index = torch.zeros(1, dtype=torch.int64, device=weight.device)
        payload, _, scale_inv = ops.cast_weight(weight, WeightSlot(index, E4M3.name, None, False), "rows")
        return payload, scale_inv, max_abs(weight)


def dequantized(
    payload: Tensor, scale_inv: Tensor, amax: Tensor | None, dtype: torch.dtype, format: Fp8Format = E4M3
) -> Tensor:
    """The values of a payload. With ``amax``, their cast has the same payload and scale, if ``dtype`` represents it."""
    codes = payload.view(format.dtype).float()
    values = codes * scale_inv
    return (values if amax is None else torch.where(codes.abs() == format.max, codes.sign() * amax, values)).to(dtype)
