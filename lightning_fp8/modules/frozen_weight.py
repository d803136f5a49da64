"""A frozen weight that exists only as its FP8 cast: one byte per parameter, and no master."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from lightning_fp8.modules.frozen_content import Content
from lightning_fp8.ops.formats import CASTABLE_DTYPES, E4M3
from lightning_fp8.ops.library import can_keep_copies, is_k_major
from lightning_fp8.ops.operand import by_columns

_aten = torch.ops.aten


def _of_content(field: str) -> property:
    # properties, because dynamo cannot read any attribute of a class with `__getattr__`
    return property(lambda weight: getattr(weight.content, field))


class FrozenWeight(Tensor):
    """A weight without a gradient that looks like its master and holds its FP8 cast, in a :class:`Content`.

    FP8 layers use the payload. Other operators get the dequantized values. Values that are copied into it are
    rounded to FP8 with their own scale; the result of any other operation in place is kept unrounded.
    """

    content: Content
    # the tensors that `__tensor_flatten__` names
    payload, scale_inv, largest = _of_content("payload"), _of_content("scale_inv"), _of_content("largest")
    payload_t, changed = _of_content("payload_t"), _of_content("changed")

    @staticmethod
    def __new__(cls, content: Content, is_parameter: bool = True) -> FrozenWeight:
        """A parameter, or an alias of one, with this content."""
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
        content = self.content
        if content.payload_t is not None:
            return content.payload, content.payload_t
        payload_t = content.payload.t()
        if torch.is_grad_enabled() and is_k_major(content.payload):
            payload_t = by_columns(content.payload)
            if can_keep_copies(content.payload):
                content.payload_t = payload_t
        return content.payload, payload_t

    def place_in_graph(self) -> Tensor:
        """A tensor ``[N, K]`` without memory of its own, which stands for the weight in the autograd graph."""
        shape = self.shape[::-1] if self.content.k_by_n else self.shape
        return torch.empty((), dtype=self.dtype, device=self.device).expand(shape)

    def applied(self, function: Callable[[Tensor], Tensor]) -> nn.Parameter:
        """What ``nn.Module._apply`` makes of it: rounded again after a change of dtype; plain if it has no values."""
        made = function(self) if self.is_fp8 else function(self.dequantized())
        if isinstance(made, FrozenWeight):
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
        if isinstance(values, FrozenWeight):
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
        """Always False."""
        return False

    @requires_grad.setter
    def requires_grad(self, requires_grad: bool) -> None:
        self.requires_grad_(requires_grad)

    def requires_grad_(self, requires_grad: bool = True) -> FrozenWeight:
        """Raise a RuntimeError for True."""
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

    def __deepcopy__(self, memo: dict[int, Any]) -> FrozenWeight:
        if id(self) not in memo:
            memo[id(self)] = FrozenWeight(self.content.mapped(Tensor.clone), isinstance(self, nn.Parameter))
        return memo[id(self)]  # type: ignore[no-any-return]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return FrozenWeight, (self.content, isinstance(self, nn.Parameter))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        held = E4M3.name if self.is_fp8 else "values"
        return f"FrozenWeight({tuple(self.shape)}, {held}, {self.dtype})"

    def __tensor_flatten__(self) -> tuple[list[str], tuple[torch.dtype, bool]]:
        # for `torch.compile`
        fields = [field for field, held in vars(self.content).items() if isinstance(held, Tensor)]
        return fields, (self.dtype, self.content.k_by_n)

    def _stable_hash_for_caching(self) -> str:
        # covers all that a compiled graph depends on
        return repr((type(self).__qualname__, self.shape, self.device, self.__tensor_flatten__()))

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], rest: tuple[torch.dtype, bool], size: object, stride: object
    ) -> FrozenWeight:
        return FrozenWeight(Content("", *rest, **inner), is_parameter=False)  # type: ignore[arg-type]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        weight = args[0] if args else None
        if isinstance(weight, FrozenWeight):
            if func in (_aten.detach.default, _aten.alias.default):
                return FrozenWeight(weight.content, is_parameter=False)
            if func is _aten._to_copy.default and weight.is_fp8 and kwargs.get("dtype") in (None, weight.dtype):
                place = {name: value for name, value in kwargs.items() if name in ("device", "non_blocking")}
                moved = weight.content.mapped(lambda held: func(held, **place))
                return FrozenWeight(moved, is_parameter=False)
        written = {id(one.content): one for one in _written(func, args, kwargs)}
        values: dict[int, Tensor] = {}

        def plain(one: FrozenWeight) -> Tensor:
            return values.setdefault(id(one.content), one.dequantized())

        result = func(*tree_map_only(FrozenWeight, plain, args), **tree_map_only(FrozenWeight, plain, kwargs))
        for key, one in written.items():
            one.content.take(values[key], rounds=func in (_aten.copy_.default, _aten._foreach_copy_.default))
        is_weight = isinstance(weight, FrozenWeight) and result is values.get(id(weight.content))
        return weight if is_weight else result


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[FrozenWeight]:
    """The weights that an operator changes in place."""
    arguments = func._schema.arguments
    given = [*args, *(kwargs.get(argument.name) for argument in arguments[len(args) :])]
    for argument, value in zip(arguments, given, strict=True):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from (one for one in tree_leaves(value) if isinstance(one, FrozenWeight))


def as_parameter(content: Content) -> nn.Parameter:
    """A parameter with this content: torch treats any tensor marked with ``_is_param`` as one."""
    return cast(nn.Parameter, FrozenWeight(content))


def frozen(weight: Tensor, name: str, k_by_n: bool) -> nn.Parameter | None:
    """The FP8 parameter for a plain one; None if it is trained, has no values, or values that are not finite."""
    is_plain = type(weight) is nn.Parameter and weight.dtype in CASTABLE_DTYPES and weight.dim() == 2
    if not is_plain or weight.requires_grad or weight.is_meta:
        return None
    nothing = torch.empty(0, 0, dtype=torch.uint8, device=weight.device)
    content = Content(name, weight.dtype, k_by_n, nothing, nothing, nothing)
    content.take(weight.detach(), rounds=True)
    return as_parameter(content) if content.changed is None else None
