"""What a scaling is: how a tensor becomes FP8 codes with scales, and how such operands are multiplied.

One class for each kind of scaling, one file each. A kind registers by being defined; nothing outside its file knows how
its scales look. An operand carries its scaling, so nobody infers it from a shape, a dtype or a flag.
"""

from __future__ import annotations

import functools
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from lightning_fp8.ops import arithmetic
from lightning_fp8.ops.amaxes import BLOCK, max_abs
from lightning_fp8.ops.counting import count, note_exponents, note_noise, sample_of
from lightning_fp8.ops.cuda.groups import has_kernels
from lightning_fp8.ops.cuda.layouts import needs_transposed_payload
from lightning_fp8.ops.formats import FORMATS, Fp8Format
from lightning_fp8.ops.library import on_gpu
from lightning_fp8.ops.operand import Groups, columns_shape
from lightning_fp8.scalings.operand import Cast, Computed, Operand, Slot, Source, Want, value_of

if TYPE_CHECKING:
    from lightning_fp8.serialization.values import Scale

CastOperator = Callable[[Tensor, Slot, bool, bool], Sequence[Tensor]]
_KINDS: dict[str, type[Scaling]] = {}
# a value is not lost if it is clipped by no more than the rounding of a scale and its inverse
ROUNDING = 1 - 2**-20
_LARGEST_CODE = 0x7E  # 448 in E4M3


@dataclass(frozen=True)
class Scaling(ABC):
    """How a tensor is scaled: an immutable value without state, so equal scalings are interchangeable.

    A new kind defines ``kind``, :meth:`scale_shape`, :meth:`scale`, :meth:`quantize` and :meth:`emulated_product`.
    Casts of both layouts, recording, slices, counts, fakes, names and the operators for compilers follow; kernels, a
    product on a GPU and codes that both layouts share are optional.

    Attributes:
        kind: the name of the class in operators, exports and messages.
        scale_dtype: the dtype of ``Operand.scale_inv``.
        is_fp8: whether codes are FP8: only these can clip, underflow, or be kept for later forwards.
        has_blocks: whether a tensor has more than one scale, so that the range of their exponents is worth knowing.
        block: how many elements of a dimension share a scale, where it is neither one nor all.
        takes_groups: whether the three methods of groups below are defined.
        file_kind: the name that files use for such scales of a weight: ``"tensor"``, ``"row"``, ``"block"`` or
            ``"group"``; None if no file layout has them.
        format: ``"e4m3"`` or ``"e5m2"``.
        fp8: the format with its numbers, such as the largest value.
        name: the scaling as JSON, for operators and exports; any process can read it.
    """

    kind: ClassVar[str]
    scale_dtype: ClassVar[torch.dtype] = torch.float32
    is_fp8: ClassVar[bool] = True
    has_blocks: ClassVar[bool] = True
    file_kind: ClassVar[str | None] = None
    block: ClassVar[int] = BLOCK
    takes_groups: ClassVar[bool] = False

    name: ClassVar[str]
    fp8: ClassVar[Fp8Format]

    format: str = "e4m3"

    def __post_init__(self) -> None:
        # made once: each product asks for the format, and compilers cannot trace the name
        object.__setattr__(self, "fp8", FORMATS[self.format])
        object.__setattr__(self, "name", json.dumps({"kind": self.kind, **asdict(self)}))

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "kind" in cls.__dict__ and _KINDS.setdefault(cls.kind, cls).__qualname__ != cls.__qualname__:
            raise TypeError(f"Two kinds of scaling are called {cls.kind!r}: {_KINDS[cls.kind]} and {cls}.")

    # What a kind defines

    @abstractmethod
    def scale_shape(self, rows: int, columns: int) -> tuple[int, ...]:
        """The shape of ``scale_inv`` of an operand ``[rows, columns]``."""

    @abstractmethod
    def scale(self, amax: Tensor) -> Tensor:
        """The ``float32`` multiplier for values up to ``amax``, elementwise, for scaling by own values."""

    @abstractmethod
    def quantize(self, x: Tensor, width: int) -> tuple[Operand, Tensor]:
        """x ``[M, K]`` scaled by its own values, in torch's operations on any device; and ``max|x|``, ``[] float32``.

        Codes have ``width`` >= K columns, zeros beyond K.
        """

    @abstractmethod
    def emulated_product(self, a: Operand, b: Operand, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        """``a @ b^T + bias`` where there is no FP8 product: a ``[M, K]``, b ``[N, K]``, bias ``[N]`` -> ``[M, N]`` in
        ``dtype``. The bias is rounded to ``dtype``, then added in fp32 to the scaled sum, which is rounded once."""

    # What it may define

    @property
    def reads_history(self) -> bool:
        """Whether, in training, an input or gradient is scaled by its past values."""
        return False

    def without_history(self) -> Scaling:
        """The same scaling, but by own values."""
        return self

    def show(self, scale: Tensor, newest: Tensor) -> None:
        """After an update, set ``scale [D] float32`` to the scales of the newest amaxes. It stays where these are 0."""
        scale.copy_(torch.where(newest > 0, self.scale(newest), scale))

    def beyond(self, amax: Tensor, scale: Tensor, fp8_max: Tensor) -> Tensor:
        """New amaxes, divided by the largest value that the scale from past values leaves room for; ``[D]`` like each
        argument. 0 for a tensor that is scaled by its own values."""
        return amax * scale / fp8_max if self.reads_history else torch.zeros_like(amax)

    @property
    def layouts_share_codes(self) -> bool:
        """Whether the codes of a tensor's transpose are its codes transposed, so that one cast serves both layouts."""
        return False

    # Weights that exist in FP8 only, and files

    def stored_scales(self, operand: Operand) -> Tensor:
        """``scale_inv`` as a weight ``[N, K]`` without a master keeps it: a matrix if there are several scales."""
        return operand.scale_inv

    def amaxes_of_codes(self, w: Tensor) -> Tensor:
        """The amaxes of w, which its largest codes represent, in the shape of ``stored_scales``. ``[] float32`` if the
        cast of ``code * scale_inv`` has the same codes and scales again."""
        return max_abs(w)

    def casts_again(self, scale: Scale, largest: Sequence[Tensor]) -> bool:
        """Whether casting a weight that a file holds with this scale gives the file's codes again.

        ``largest``: ``[*] uint8`` each, the largest codes of each scale, without signs.
        """
        return scale.kind == self.file_kind and not any(
            ((codes > 0) & (codes < _LARGEST_CODE)).any() for codes in largest
        )

    @property
    def layouts_share_scales(self) -> bool:
        """Whether ``scale_inv`` of the transpose also follows from the tensor's ``scale_inv``."""
        return self.layouts_share_codes

    def is_view(self, device: torch.device, shape: Sequence[int]) -> bool:
        """Whether products on this device take the operand by columns as a view of that by rows."""
        return self.layouts_share_codes and not needs_transposed_payload(device, shape, in_blocks=True)

    def transposed_scales(self, scale_inv: Tensor) -> Tensor:
        """The scales of the transpose, or of each transposed matrix of a stack, if layouts share scales."""
        return scale_inv.mT

    def as_multiplied(self, cast: Cast) -> Cast:
        """The cast in the form that products take on its device: the device may support these blocks only as blocks of
        another kind."""
        return cast

    def multiplied_as(self, device: torch.device) -> Scaling:
        """The scaling of :meth:`as_multiplied`."""
        return self

    def new_scales(self, device: torch.device, rows: int, columns: int) -> Tensor:
        """Uninitialised ``scale_inv`` of an operand ``[rows, columns]``."""
        return torch.empty(self.scale_shape(rows, columns), dtype=self.scale_dtype, device=device)

    def by_reference(self, x: Tensor, slot: Slot, want: Want) -> Cast:
        """:meth:`cast` in torch's own operations, which never wait for a GPU."""
        cast, amax = self.quantized(x, want)
        record(slot, amax)
        return cast

    def by_kernel(self, x: Source, slot: Slot, want: Want) -> Cast | None:
        """:meth:`cast` by a kernel; None if there is none for the device, the dtype and the activation of x."""
        return None

    def pair_by_kernel(self, pair: Computed, slots: Sequence[Slot], want: Want) -> list[Cast] | None:
        """The casts of the gradients of gate and up in one launch, or None."""
        return None

    def weights_by_kernel(
        self, weights: Sequence[Tensor], slots: Sequence[Slot], out: Sequence[Cast | None], want: Want
    ) -> list[Cast] | None:
        """:meth:`cast_weights` by a kernel, or None."""
        return None

    def gpu_product(self, a: Operand, b: Operand, bias: Tensor | None, dtype: torch.dtype, fast: bool) -> Tensor:
        """The product on a GPU. Without ``fast``, partial sums are added up in fp32 at least every 128 along K."""
        return self.emulated_product(a, b, bias, dtype)

    def spread(self, scales: Tensor, like: Tensor) -> Tensor:
        """Numbers in the shape of ``scale_inv``, or ``scale_inv`` itself, as ``float32`` that expands to the shape of
        ``like`` ``[M, K]``."""
        return scales

    def numbers(self, scale_inv: Tensor) -> Tensor:
        """``scale_inv`` of a weight without a master as ``float32``."""
        return scale_inv

    def values(self, operand: Operand) -> Tensor:
        """The values of an operand, ``[M, K'] float32``."""
        return arithmetic.values(operand.codes, self.fp8) * self.spread(operand.scale_inv, operand.codes)

    def multiplies_transposed(self, operand: Operand) -> bool:
        """Whether products can use this weight, which has no master, by columns too, with its scales transposed."""
        return True

    def with_128_blocks(self, operand: Operand, k: int, rows: int) -> Operand | None:
        """The operand with a scale for every 128 elements along K, for products with another kind; None if its blocks
        are smaller. A single scale for all rows is repeated for every ``rows`` rows, 1 or 128."""
        return None

    def takes_gradient(self, operand: Operand, scaling: Scaling) -> Scaling:
        """The scaling of the gradient that is multiplied with this operand, a weight by columns: that of the
        gradient's slot, or :class:`Unscaled` if the gradient is not cast."""
        return scaling

    def part(self, operand: Operand, rows: slice, count: int, by_columns: bool) -> Operand | None:
        """The operand of some of the ``count`` rows of a weight; None if the slice splits what shares a scale."""
        return None

    def split_part(self, operand: Operand, rows: slice, count: int, by_columns: bool) -> Operand:
        """The same if the slice splits what shares a scale: for weights without a master, which are never recast."""
        raise NotImplementedError(
            f"{type(self).__name__} has no `split_part`: a slice of a weight that is kept in FP8 only would split what"
            " shares a scale. Keep these weights in high precision: leave `frozen_weights` out."
        )

    def exact_values(self, operand: Operand, dtype: torch.dtype) -> Tensor:
        """The values of an operand, in a dtype that holds them."""
        return self.values(operand).to(dtype)

    def count(self, x: Tensor, operand: Operand, slot: Slot) -> None:
        """Count what the cast of x ``[M, K]`` to this operand has lost."""
        count(x, self.spread(operand.scale_inv, x).reciprocal() * ROUNDING, slot, self.fp8)

    def exponents(self, operand: Operand) -> Tensor:
        """``scale_inv`` of the blocks, ``[*] float32``."""
        return operand.scale_inv

    def exponent_columns(self, counted: Callable[[], Tensor]) -> tuple[Tensor, ...]:
        """The columns of the exponents counted over all casts, ``[R, 2]``; none where a tensor has one scale."""
        return counted().unbind(dim=1) if self.has_blocks else ()

    # Sorted groups of rows, for experts: each group has its own scale and its own matrix

    def has_group_kernels(
        self, gradient: Scaling, device: torch.device, dtypes: tuple[torch.dtype, ...], sizes: Sequence[int]
    ) -> bool:
        """Whether a device has kernels for the three methods below, see ``has_kernels``; else groups run one by one."""
        return self.takes_groups and has_kernels(device, dtypes, (self.format, gradient.format), sizes)

    def cast_groups(self, x: Tensor, slot: Slot, groups: Groups, want: Want) -> Cast:
        """Cast x ``[T, K]``: codes ``[P, K]``, ``scale_inv [E]``, sums ``[E, K]``; ``slot.index [E]``.

        A group without rows records nothing.
        """
        raise NotImplementedError

    def multiply_groups(
        self, a: Operand, b: Operand, bias: Tensor | None, groups: Groups, dtype: torch.dtype, fast: bool
    ) -> Tensor:
        """Each group's rows times its matrix: a of ``[P, K]``, b ``[E, N, K]``, bias ``[E, N]`` -> ``[T, N]``."""
        raise NotImplementedError

    def multiply_depths(self, a: Operand, b: Operand, groups: Groups, dtype: torch.dtype) -> Tensor:
        """Sums over each group's rows: a ``[M, P]``, b ``[N, P]`` -> ``[E, M, N]``; 0 for a group without rows."""
        raise NotImplementedError

    # What everyone calls

    def cast(self, x: Source, slot: Slot, want: Want) -> Cast:
        """Cast x ``[M, K]``: fp32, bf16 or fp16; any strides; without a graph."""
        first = x if isinstance(x, Tensor) else x.inputs[0]
        cast = None
        if on_gpu(first) and first.numel():
            cast = self.by_kernel(x, slot, want)
            if cast is None and not isinstance(x, Tensor):
                x = x.value
                cast = self.by_kernel(x, slot, want)
        if cast is None:
            cast = self.by_reference(value_of(x), slot, want)
        if slot.counts:
            self.note(value_of(x), cast, slot)
        return cast

    def cast_pair(self, pair: Computed, slots: Sequence[Slot], want: Want, sums: Sequence[bool]) -> list[Cast]:
        """The casts of the gradients of gate and up."""
        parts = [pair._replace(of=number) for number in range(2)]
        made = None
        if on_gpu(pair.inputs[0]) and pair.inputs[0].numel():
            # the kernel sums both or neither
            made = self.pair_by_kernel(pair, slots, want._replace(sums=any(sums)))
        if made is None:
            each = zip(parts, slots, sums, strict=True)
            return [self.cast(part, slot, want._replace(sums=summed)) for part, slot, summed in each]
        for part, cast, slot in zip(parts, made, slots, strict=True):
            if slot.counts:
                self.note(part.value, cast, slot)
        return [cast if summed else cast._replace(sums=None) for cast, summed in zip(made, sums, strict=True)]

    def cast_weight(self, w: Tensor, slot: Slot, want: Want) -> Cast:
        """Cast a weight ``[N, K]``, scaled by its current values, so a change cannot clip it."""
        return self.cast_weights([w], [slot], [None], want)[0]

    def cast_weights(
        self, weights: Sequence[Tensor], slots: Sequence[Slot], out: Sequence[Cast | None], want: Want
    ) -> list[Cast]:
        """The casts of many weights, each scaled by its own values; in one or two launches if there is a kernel.

        Args:
            weights: ``[N, K]`` each, all on one device.
            slots: of one state.
            out: for each weight, a cast for a kernel to overwrite, or None for a new one. Without a kernel, all are
                new.
            want: the layouts of new casts.
        """
        casts = None
        if on_gpu(weights[0]) and all(weight.numel() for weight in weights):
            casts = self.weights_by_kernel(weights, slots, out, want)
        if casts is None:
            casts = []
            for weight, slot in zip(weights, slots, strict=True):
                cast, amax = self.quantized(weight, want)
                if slot.state is not None:
                    slot.state.record_weight(slot.index, amax, self.scale(amax))
                casts.append(cast)
        for weight, cast, slot in zip(weights, casts, slots, strict=True):
            if slot.counts:
                self.note(weight, cast, slot)
        # a kernel writes both
        return casts if want.rows else [cast._replace(rows=None) for cast in casts]

    # What kinds share

    def quantized(self, x: Tensor, want: Want) -> tuple[Cast, Tensor]:
        """The cast of x by its own values in torch's operations, and ``max|x|``."""
        sums = column_sums(x) if want.sums else None
        if self.layouts_share_codes:
            operand, amax = self.quantize(x, x.shape[1])
            return self.both(operand, want)._replace(sums=sums), amax
        rows = columns = None
        amax = x.new_zeros((), dtype=torch.float32)
        if want.columns:
            columns, amax = self.quantize(x.t(), columns_shape(*x.shape)[1])
        if want.rows:
            rows, amax = self.quantize(x, x.shape[1])
        return Cast(rows, columns, sums), amax

    def both(self, operand: Operand, want: Want) -> Cast:
        """The cast, made from its operand by rows, if layouts share codes."""
        columns = None
        if want.columns:
            codes = operand.codes
            turned = codes.t() if self.is_view(codes.device, codes.shape) else arithmetic.by_columns(codes)
            columns = Operand(turned, self.transposed_scales(operand.scale_inv), self)
        return Cast(operand if want.rows else None, columns)

    def note(self, x: Tensor, cast: Cast, slot: Slot) -> None:
        """Count what a cast of x has lost, in the layout by rows if there are both."""
        if not self.is_fp8:
            return
        sides = [(cast.rows, x)] if cast.rows is not None else []
        if cast.columns is not None and (not sides or not self.layouts_share_scales):
            sides.append((cast.columns, x.t()))
        for number, (operand, values) in enumerate(sides):
            if operand is None:
                continue
            if not number:
                self.count(values, operand, slot)
                sample = sample_of(len(values))
                scales = self.spread(operand.scale_inv, operand.codes).expand(operand.codes.shape)
                of_codes = arithmetic.values(operand.codes[sample], self.fp8) * scales[sample]
                note_noise(values[sample], of_codes, slot)
            if self.has_blocks:
                note_exponents(self.exponents(operand), slot)

    def cast_by(self, operator: CastOperator, x: Tensor, slot: Slot, want: Want) -> Cast:
        """The cast of x by an operator, which compilers see; see ``products.as_results`` for the operator's results."""
        codes, turned, scale_inv, turned_inv = operator(x, slot, want.rows, want.columns)
        by_columns, scaling = None, self.multiplied_as(x.device)
        if want.columns:
            turned = codes.t() if scaling.is_view(x.device, x.shape) else turned
            turned_inv = scaling.transposed_scales(scale_inv) if scaling.layouts_share_scales else turned_inv
            by_columns = Operand(turned, turned_inv, scaling)
        return Cast(Operand(codes, scale_inv, scaling) if want.rows else None, by_columns)

    def empty(self, like: Tensor, shape: Sequence[int], want: Want) -> Cast:
        """An uninitialised cast of a tensor of this shape: for fakes of compilers."""
        rows, columns = shape
        device, by_rows, by_columns = like.device, None, None
        is_view = self.is_view(device, shape)
        if want.rows or (want.columns and is_view):
            by_rows = Operand(
                like.new_empty(rows, columns, dtype=torch.uint8), self.new_scales(device, rows, columns), self
            )
        if want.columns and is_view and by_rows is not None:
            by_columns = Operand(by_rows.codes.t(), self.transposed_scales(by_rows.scale_inv), self)
        elif want.columns:
            codes = like.new_empty(columns_shape(rows, columns), dtype=torch.uint8)
            if self.layouts_share_scales:
                scales = self.transposed_scales(
                    self.new_scales(device, rows, columns) if by_rows is None else by_rows.scale_inv
                )
            else:
                scales = self.new_scales(device, columns, rows)
            by_columns = Operand(codes, scales, self)
        sums = like.new_empty(columns, dtype=torch.float32) if want.sums else None
        return Cast(by_rows if want.rows else None, by_columns, sums)

    @staticmethod
    @functools.cache
    def from_json(text: str) -> Scaling:
        """The scaling of this name, see :attr:`name`. Raises a ValueError for an unknown kind."""
        fields = json.loads(text)
        return kind_of(fields.pop("kind"))(**fields)


def kind_of(name: str) -> type[Scaling]:
    """The class of this name. Raises a ValueError that lists all kinds if there is none."""
    if name not in _KINDS:
        raise ValueError(f"There is no kind of scaling {name!r}. The kinds are {', '.join(kinds())}.")
    return _KINDS[name]


def kinds() -> list[str]:
    """The names of all kinds."""
    return sorted(_KINDS)


def record(slot: Slot, amax: Tensor) -> None:
    """Take the maximum of ``amax``, ``[] float32``, into the state's, if the slot records."""
    into = slot.open(reads_history=False).amax
    if into is not None:
        # The bits of non-negative floats as integers: NaN > inf > every finite value, so nothing non-finite is lost.
        into.view(torch.int32).scatter_reduce_(0, slot.index, amax.view(torch.int32)[None], "amax")


def column_sums(x: Tensor) -> Tensor:
    """``[K] float32``, of x ``[M, K]``."""
    return x.sum(dim=0, dtype=torch.float32)
