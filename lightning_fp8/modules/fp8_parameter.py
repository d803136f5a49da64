"""A weight that exists only as its FP8 cast: it is frozen and has no master, or FSDP2 has gathered it in FP8."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeGuard, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from lightning_fp8.ops import e8m0
from lightning_fp8.ops.arithmetic import by_columns, largest_of_blocks
from lightning_fp8.ops.cuda.layouts import needs_transposed_payload
from lightning_fp8.ops.formats import CASTABLE_DTYPES, E4M3, Fp8Format, dtype_name
from lightning_fp8.ops.library import backward_may_follow, can_keep_copies
from lightning_fp8.scalings.base import Scaling
from lightning_fp8.scalings.operand import Operand, Slot, Want
from lightning_fp8.scalings.per_tensor import PerTensor
from lightning_fp8.scalings.stored import scaling_of_stored, shapes_of_scales

_aten = torch.ops.aten


@dataclass(eq=False)
class Content:
    """What a weight and its aliases (``weight.data``, ``weight.detach()``) share.

    A parameter of several experts ``[E, N, K]`` has a leading E in each tensor, and the scales of each matrix.

    Attributes:
        dtype: the dtype of the values.
        k_by_n: whether the layer stores its weight as ``[K, N]``.
        scaling: the scaling of payload and scales.
        payload: ``[N, K] uint8``.
        scale_inv: ``float32``, ``[]`` for the whole weight, ``[ceil(N/128), ceil(K/128)]`` for blocks of 128 x 128, or
            ``[N, 1]`` for rows; in E8M0 ``uint8``, ``[N, ceil(K/32)]`` for 32 of a row, or ``[ceil(N/32), ceil(K/32)]``
            for squares.
        is_frozen: whether there is no master, and no gradient.
        rounding: the scaling that rounds the values again after a change of dtype; None if it is ``scaling``.
        largest: for a frozen weight that was rounded here, the amaxes before rounding, in the shape of ``scale_inv``.
            The largest codes are dequantized to these amaxes, so that a cast of the dequantized values has the same
            scales. ``[]`` for blocks with powers of two, whose values are ``code * scale_inv``: a cast of these gives
            the same values. None for codes that came with their scales, whose values are ``code * scale_inv`` too.
        payload_t: the payload by columns of a frozen weight, if a GPU's GEMMs have needed it; else None.
        changed: the new values, in the shape of the weight, if other values were written; else None. The payload of a
            frozen weight is then empty, and its layer makes it a plain parameter at its next use.
        name: the layer's name, for messages.
        error: relative RMS error of the rounding.
        scale_dtype: the original dtype of scales that came with their codes.
    """

    dtype: torch.dtype
    k_by_n: bool
    scaling: Scaling
    payload: Tensor
    scale_inv: Tensor
    is_frozen: bool = False
    rounding: Scaling | None = None
    largest: Tensor | None = None
    payload_t: Tensor | None = None
    changed: Tensor | None = None
    name: str = ""
    error: float = 0.0
    scale_dtype: torch.dtype = torch.float32

    def dequantized(self) -> Tensor:
        """The values, in the shape of the weight and in its dtype."""
        if self.changed is not None:
            return self.changed
        values = dequantized(self.payload, self.scale_inv, self.largest, self.dtype, self.scaling)
        return values.mT if self.k_by_n else values

    @property
    def has_own_codes(self) -> bool:
        """Whether it still holds the codes and scales that it came with; these are never rounded."""
        return self.is_frozen and self.largest is None and self.changed is None

    @property
    def has_both_orders(self) -> bool:
        """Whether the codes and scales also serve the transposed weight, so that dgrad can multiply with them."""
        return self.changed is not None or self.scaling.multiplies_transposed(self.rows)

    @property
    def rows(self) -> Operand:
        """The weight ``[N, K]`` for fprop, or all matrices."""
        return Operand(self.payload, self.scale_inv, self.scaling)

    def write(self, values: Tensor) -> None:
        """Hold these values unrounded. A frozen weight that already has these values keeps its codes."""
        if self.is_frozen and self.changed is None:
            if torch.equal(self.dequantized(), values):
                return
            self.payload, self.payload_t = self.payload.new_empty(0, 0), None
        # always a new tensor object, so that kept casts of the old values are dropped
        self.changed = values.detach()

    def amax_and_scale(self) -> tuple[Tensor, Tensor]:
        """The largest of the amaxes that belong to scales of one matrix, and its scale, both ``[] float32``."""
        if self.largest is not None:
            # the inverse of `scale_inv` may differ in the last bit
            amax = self.largest.amax()
            return amax, self.scaling.scale(amax)
        # without their signs, codes are ordered like their values, so the whole weight need not be dequantized
        codes, scale_inv = self.payload & 0x7F, self.scaling.numbers(self.scale_inv)
        largest = largest_of_blocks(codes, scale_inv.shape or (1, 1), self.scaling.block)
        amaxes = (largest.view(self.scaling.fp8.dtype).float() * scale_inv).flatten()
        # an index would wait for a GPU
        at = amaxes.argmax()[None]
        return amaxes.index_select(0, at)[0], scale_inv.flatten().index_select(0, at)[0].reciprocal()

    def mapped(self, function: Callable[[Tensor], Tensor]) -> Content:
        """A copy with ``function`` applied to each tensor, for example to move it to another device."""
        tensors: dict[str, Any] = {
            field: function(value) for field, value in vars(self).items() if isinstance(value, Tensor)
        }
        return replace(self, **tensors)


def _of_content(field: str) -> property:
    # properties, because dynamo cannot read any attribute of a class with `__getattr__`
    return property(lambda weight: getattr(weight.content, field))


class Fp8Parameter(Tensor):
    """A weight that looks like one in ``dtype`` and holds its FP8 cast, in a :class:`Content`.

    FP8 layers use the payload. Other operators get the dequantized values. Writing the values that it already has
    changes nothing; other values are kept unrounded.
    """

    content: Content
    # the tensors that `__tensor_flatten__` names
    payload, scale_inv, largest = _of_content("payload"), _of_content("scale_inv"), _of_content("largest")
    payload_t, changed = _of_content("payload_t"), _of_content("changed")

    @staticmethod
    def __new__(cls, content: Content, is_parameter: bool = False) -> Fp8Parameter:
        """A tensor with this content; torch treats any tensor marked with ``_is_param`` as a parameter."""
        tensor = content.payload if content.changed is None else content.changed
        shape = tensor.mT.shape if content.k_by_n and content.changed is None else tensor.shape
        weight = Tensor._make_wrapper_subclass(cls, shape, dtype=content.dtype, device=tensor.device)  # type: ignore[attr-defined]
        weight.content = content
        weight._is_param = is_parameter
        return weight  # type: ignore[no-any-return]

    @property
    def is_fp8(self) -> bool:
        """Whether it is still held as payload; False after other values were written."""
        return self.content.changed is None

    def dequantized(self) -> Tensor:
        """The values as a plain tensor."""
        return self.content.dequantized()

    def codes(self) -> tuple[Tensor, Tensor]:
        """The codes of ``[N, K]``, by rows and by columns; for ``[E, N, K]``, the codes of all matrices."""
        content, payload = self.content, self.content.payload.contiguous()
        turned = content.payload_t
        if turned is None:
            turned = payload.mT
            in_blocks = content.scaling.has_blocks
            is_needed = backward_may_follow() and needs_transposed_payload(payload.device, payload.shape, in_blocks)
            # if the transpose has other codes, dgrad takes the values
            if is_needed and content.has_both_orders:
                turned = by_columns(payload)
                # FSDP frees a gathered payload, and would not free this
                if content.is_frozen and can_keep_copies(payload):
                    content.payload_t = turned
        return payload, turned

    def place_in_graph(self) -> Tensor:
        """A tensor ``[N, K]`` without memory of its own, whose gradient is the weight's."""
        place = _Place.apply(self) if self.requires_grad else _without_memory(self)
        return place.t() if self.content.k_by_n else place

    def applied(self, function: Callable[[Tensor], Tensor]) -> nn.Parameter:
        """The result of ``nn.Module._apply``: rounded again after a change of dtype; plain if it has no values."""
        result = function(self) if self.is_fp8 else function(self.dequantized())
        if isinstance(result, Fp8Parameter):
            return as_parameter(result.content)
        if not self.is_fp8:
            return nn.Parameter(result, requires_grad=False)
        content, is_castable = self.content, result.dtype in CASTABLE_DTYPES and not result.is_meta
        if content.largest is None and is_castable and torch.equal(result, self.dequantized().to(result)):
            # only the dtype changes: codes that came with their scales are never rounded
            return as_parameter(replace(content.mapped(lambda tensor: tensor.to(result.device)), dtype=result.dtype))
        plain = nn.Parameter(result, requires_grad=False)
        again = frozen(plain, content.name, content.k_by_n, content.rounding or content.scaling)
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
        self.content.write(values)

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

    def __getitem__(self, index: Any) -> Tensor:
        # a matrix of a stack; not by `__torch_dispatch__`, as in inference mode torch fails to view such a tensor
        if isinstance(index, int) and self.dim() == 3 and self.is_fp8:
            return Fp8Parameter(self.content.mapped(lambda tensor: tensor[index]))
        return super().__getitem__(index)  # type: ignore[no-any-return]

    def __setitem__(self, index: Any, value: Any) -> None:
        values = self.dequantized().clone()
        values[index] = value
        self.content.write(values)

    def __deepcopy__(self, memo: dict[int, Any]) -> Fp8Parameter:
        if id(self) not in memo:
            memo[id(self)] = Fp8Parameter(self.content.mapped(Tensor.clone), isinstance(self, nn.Parameter))
        return memo[id(self)]  # type: ignore[no-any-return]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return Fp8Parameter, (self.content, isinstance(self, nn.Parameter))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        kind = self.content.scaling.format if self.is_fp8 else "values"
        return f"Fp8Parameter({tuple(self.shape)}, {kind}, {self.dtype})"

    def __tensor_flatten__(self) -> tuple[list[str], tuple[torch.dtype, bool, Scaling, bool]]:
        # for `torch.compile`
        fields = [field for field, value in vars(self.content).items() if isinstance(value, Tensor)]
        return fields, (self.dtype, self.content.k_by_n, self.content.scaling, self.content.is_frozen)

    def _stable_hash_for_caching(self) -> str:
        # covers all that a compiled graph depends on
        return repr((type(self).__qualname__, self.shape, self.device, self.__tensor_flatten__()))

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], rest: tuple[torch.dtype, bool, Scaling, bool], size: object, stride: object
    ) -> Fp8Parameter:
        dtype, k_by_n, scaling, is_frozen = rest
        return Fp8Parameter(Content(dtype, k_by_n, scaling, is_frozen=is_frozen, **inner))  # type: ignore[arg-type]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        weight = args[0] if args else None
        if isinstance(weight, Fp8Parameter):
            if func in (_aten.detach.default, _aten.alias.default) or _is_all_of(weight, func, args):
                return Fp8Parameter(weight.content)
            if func is _aten.split.Tensor and weight.content.has_own_codes:
                raise RuntimeError(
                    f"The weight of {weight.content.name!r} is kept in the FP8 codes that it came in, and cannot be"
                    " split over processes, as by `fully_shard` or `parallelize_module`: use DDP, or call"
                    " `lightning_fp8.convert(model, frozen_weights='master')` first. `weight.dequantized()` gives the"
                    " values."
                )
            if func is _aten._to_copy.default and weight.is_fp8 and kwargs.get("dtype") in (None, weight.dtype):
                place = {name: value for name, value in kwargs.items() if name in ("device", "non_blocking")}
                return Fp8Parameter(weight.content.mapped(lambda tensor: func(tensor, **place)))
        written = {id(parameter.content): parameter for parameter in _written(func, args, kwargs)}
        values: dict[int, Tensor] = {}

        def plain(tensor: Fp8Parameter) -> Tensor:
            return values.setdefault(id(tensor.content), tensor.dequantized())

        result = func(*tree_map_only(Fp8Parameter, plain, args), **tree_map_only(Fp8Parameter, plain, kwargs))
        for key, parameter in written.items():
            parameter.content.write(values[key])
        is_weight = isinstance(weight, Fp8Parameter) and result is values.get(id(weight.content))
        return weight if is_weight else result


def _is_all_of(weight: Fp8Parameter, func: Any, args: tuple[Any, ...]) -> bool:
    """Whether this is the view of the whole weight that FSDP2 takes of a tensor that it receives."""
    return func is _aten.as_strided.default and (*args[1], *args[2]) == (*weight.shape, *weight.stride())


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Fp8Parameter]:
    """The weights that an operator changes in place."""
    arguments = func._schema.arguments
    values = [*args, *(kwargs.get(argument.name) for argument in arguments[len(args) :])]
    for argument, value in zip(arguments, values, strict=True):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from (leaf for leaf in tree_leaves(value) if isinstance(leaf, Fp8Parameter))


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
    """Whether a weight has no master and no gradient. A gathered weight has both, in its shards."""
    return isinstance(weight, Fp8Parameter) and weight.content.is_frozen


def is_held(weight: object) -> TypeGuard[Fp8Parameter]:
    """Whether a weight exists in FP8 only, and has not been changed since."""
    return isinstance(weight, Fp8Parameter) and weight.is_fp8


def as_parameter(content: Content) -> nn.Parameter:
    """A parameter with this content."""
    return cast(nn.Parameter, Fp8Parameter(content, is_parameter=True))


def from_codes(
    codes: Tensor,
    scale_inv: Tensor,
    dtype: torch.dtype,
    name: str,
    k_by_n: bool = False,
    format: Fp8Format = E4M3,
) -> nn.Parameter:
    """A frozen parameter that holds these codes and scales as they are; its values are ``code * scale_inv``.

    Args:
        codes: ``[N, K]``, or ``[E, N, K]`` for the matrices of several experts, uint8 or the dtype of the format.
        scale_inv: what each code is multiplied by: ``[]`` for a whole matrix, ``[ceil(N/128), ceil(K/128)]`` for blocks
            of 128 x 128, or ``[N, 1]`` for rows, of any floating-point dtype. In E8M0, ``uint8``: ``[N, ceil(K/32)]``,
            or ``[ceil(N/32), ceil(K/32)]`` for squares; the former is kept as the latter if its scales are those of
            squares. With a leading E for experts.
        dtype: the dtype of the values: fp32, bf16 or fp16. The product ``code * scale_inv`` is computed in fp32.
        name: the layer's name, for messages.
        k_by_n: whether the layer stores its weight as ``[K, N]``, or ``[E, K, N]``.
        format: the format of the codes.

    Raises:
        TypeError: for codes or a ``dtype`` of another dtype.
        ValueError: for other shapes, and for scales that are not finite and above zero, or NaN in E8M0.
    """
    if codes.dtype not in (torch.uint8, format.dtype) or dtype not in CASTABLE_DTYPES:
        raise TypeError(
            f"The FP8 codes of {name!r} must be uint8 or {dtype_name(format.dtype)}, and their values float32, bfloat16"
            f" or float16; got {dtype_name(codes.dtype)} and {dtype_name(dtype)}."
        )
    in_e8m0 = scale_inv.dtype == torch.uint8
    scaling = None
    if codes.dim() in (2, 3) and codes.numel():
        scaling = scaling_of_stored(codes.shape, scale_inv, format.name)
    if scaling is None:
        *experts, n, k = codes.shape if codes.dim() in (2, 3) else (0, 0, 0)
        shapes = [(*experts, *shape) for shape, _ in shapes_of_scales(n, k, in_e8m0)]
        raise ValueError(
            f"The FP8 codes of {name!r} must be [N, K] or [E, N, K], and not empty; their scales must be one for each"
            f" matrix, row, block or group: {str(shapes)[1:-1]}."
            f" Got codes {tuple(codes.shape)} and scales {tuple(scale_inv.shape)}."
        )
    exact = scale_inv.detach() if in_e8m0 else scale_inv.detach().to(torch.float32)
    if not exact.is_meta:
        numbers = e8m0.values_of(exact) if in_e8m0 else exact
        if not bool((numbers.isfinite() & (numbers > 0)).all()):
            raise ValueError(
                f"The scales of {name!r} must be finite and above zero: from {numbers.min()} to {numbers.max()}."
            )
        exact = e8m0.of_squares(exact) if in_e8m0 and exact.shape[-2] == codes.shape[-2] else exact
    payload = codes.detach().contiguous().view(torch.uint8)
    return as_parameter(
        Content(dtype, k_by_n, scaling, payload, exact, is_frozen=True, name=name, scale_dtype=scale_inv.dtype)
    )


def frozen(weight: Tensor, name: str, k_by_n: bool, scaling: Scaling) -> nn.Parameter | None:
    """The FP8 parameter for a plain weight; None if the weight is trained, has no values, or is not finite."""
    is_plain = type(weight) is nn.Parameter and weight.dtype in CASTABLE_DTYPES and weight.dim() in (2, 3)
    if not is_plain or weight.requires_grad or weight.is_meta:
        return None
    values = weight.detach().mT if k_by_n else weight.detach()
    payload, scale_inv, amax = quantized(values, scaling)
    if not bool(amax.isfinite().all()):
        return None
    error = _relative_error(dequantized(payload, scale_inv, amax, weight.dtype, scaling), values)
    content = Content(weight.dtype, k_by_n, scaling, payload, scale_inv, True, None, amax, name=name, error=error)
    return as_parameter(replace(content, scale_dtype=scale_inv.dtype))


def quantized(weight: Tensor, scaling: Scaling = PerTensor()) -> tuple[Tensor, Tensor, Tensor]:  # noqa: B008, a value
    """A weight ``[N, K]`` -> payload ``[N, K] uint8``, its inverse scales and its amaxes, see :class:`Content`; for
    ``[E, N, K]`` all have a leading E."""
    if weight.dim() == 3:
        return tuple(map(torch.stack, zip(*(quantized(mat, scaling) for mat in weight))))  # type: ignore[return-value]
    with torch.inference_mode(False), torch.no_grad():
        weight = weight.detach().contiguous()
        index = torch.zeros(1, dtype=torch.int64, device=weight.device)
        rows = cast(Operand, scaling.cast_weight(weight, Slot(index, None, scaling, scaling), Want()).rows)
        return rows.codes, scaling.stored_scales(rows), scaling.amaxes_of_codes(weight)


def dequantized(
    payload: Tensor,
    scale_inv: Tensor,
    amax: Tensor | None,
    dtype: torch.dtype,
    scaling: Scaling = PerTensor(),  # noqa: B008, a value
) -> Tensor:
    """The values of a payload. If an ``amax`` for each scale is given, a cast of the values has the same payload and
    scale, provided that ``dtype`` represents the amax.
    """
    if payload.dim() == 3:
        # one by one, to save memory for the fp32 values
        out = torch.empty(payload.shape, dtype=dtype, device=payload.device)
        for at, matrix in enumerate(payload):
            out[at] = dequantized(matrix, scale_inv[at], None if amax is None else amax[at], dtype, scaling)
        return out
    codes = payload.view(scaling.fp8.dtype).float()
    values = codes * scaling.spread(scale_inv, codes)
    if amax is not None and amax.dim() == scale_inv.dim():
        values = torch.where(codes.abs() == scaling.fp8.max, codes.sign() * scaling.spread(amax, codes), values)
    return values.to(dtype)


def _matrices(weight: Tensor) -> Tensor:
    """``[E, N, K]`` of ``[N, K]`` or ``[E, N, K]``."""
    return weight if weight.dim() == 3 else weight[None]


def _relative_error(rounded: Tensor, values: Tensor) -> float:
    """Relative RMS error of ``rounded``."""
    if torch.equal(rounded, values):
        return 0.0
    norms = [
        (float((matrix.float() - exact.float()).norm()), float(exact.float().norm()))
        for matrix, exact in zip(_matrices(rounded), _matrices(values), strict=True)
    ]
    error, whole = (math.hypot(*of) for of in zip(*norms, strict=True))
    return error / whole
