"""One scale for each tensor, from its past values (delayed) or from its own (current)."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group
from typing_extensions import override

from lightning_fp8.ops.amaxes import BLOCK, FP32_MAX, max_abs, power_of_2, scale_of_current
from lightning_fp8.ops.arithmetic import saturated
from lightning_fp8.ops.counting import count
from lightning_fp8.ops.cuda import gemm
from lightning_fp8.ops.formats import Role
from lightning_fp8.ops.operand import Groups
from lightning_fp8.scalings import emulation, launches
from lightning_fp8.scalings.base import ROUNDING, column_sums, record
from lightning_fp8.scalings.launches import WeightScales
from lightning_fp8.scalings.one_scale import OneScale
from lightning_fp8.scalings.operand import Cast, Casting, Computed, Opened, Operand, Slot, Source, Want
from lightning_fp8.scalings.recipe import Recipe, is_int, knows_its_fields

FormatChoice = Literal["HYBRID", "E4M3"]
AmaxAlgorithm = Literal["max", "most_recent"]


@dataclass(frozen=True)
class PerTensor(OneScale):
    """``scale = FP8_MAX / (amax * 2**margin)``; ``scale_inv`` is ``[] float32``.

    Attributes:
        delayed: whether, in training, amax comes from past steps, once there are any.
        margin: powers of two kept free above the largest value. With ``delayed``, only above past values, because own
            values cannot clip. Never in evaluation.
    """

    kind: ClassVar[str] = "per_tensor"

    delayed: bool = False
    margin: int = 0

    @property
    @override
    def reads_history(self) -> bool:
        return self.delayed

    @override
    def without_history(self) -> PerTensor:
        return replace(self, delayed=False)

    @override
    def scale(self, amax: Tensor) -> Tensor:
        return scale_of_current(amax, self.fp8)

    @override
    def quantize(self, x: Tensor, width: int) -> tuple[Operand, Tensor]:
        amax = max_abs(x)
        return self.with_scale(x, self.scale(amax), amax), amax

    def with_scale(self, x: Tensor, scale: Tensor, amax: Tensor | None = None) -> Operand:
        """x ``[M, K]`` times this scale, ``[] float32``, as an operand by rows. ``amax`` of x saves time, if known."""
        return Operand(saturated(x, scale, self.fp8, amax), scale.reciprocal(), self)

    @override
    def by_reference(self, x: Tensor, slot: Slot, want: Want) -> Cast:
        amax, opened = max_abs(x), slot.open(self.delayed)
        record(slot, amax)
        cast = self.both(self.with_scale(x, self._scale_to_use(amax, slot, opened), amax), want)
        return cast._replace(sums=column_sums(x)) if want.sums else cast

    def _scale_to_use(self, amax: Tensor, slot: Slot, opened: Opened) -> Tensor:
        if slot.casting is Casting.OWN_POWER_OF_2:
            # the next number after 7 * 2^n is far enough from it that the rounded quotient stays below the power of two
            return torch.where(amax > 0, power_of_2(self.scale(amax)), 1.0)
        own = self.scale(self._asked(amax, slot))
        if opened.history is None:
            return own
        # the device decides, so that nothing waits for it
        history = opened.history
        newest = history.amax_history[0].index_select(0, slot.index)[0]
        return torch.where(newest > 0, history.scale.index_select(0, slot.index)[0], own)

    def _adjusts(self, slot: Slot) -> bool:
        """Whether a scale by own values is computed from another amax than this tensor's."""
        return not self.delayed and slot.casting is Casting.HISTORY and bool(self.margin or slot.group)

    def _asked(self, amax: Tensor, slot: Slot) -> Tensor:
        """The amax, ``[] float32``, from which a scale by own values is computed: the tensor's amax, or the largest in
        its process group, times ``2**margin``."""
        if not self._adjusts(slot):
            return amax
        if slot.group:
            amax = amax.reshape(1).clone()
            # as integers, the bits of non-negative floats order as finite < inf < NaN
            dist.all_reduce(amax.view(torch.int32), dist.ReduceOp.MAX, group=_resolve_process_group(slot.group))  # type: ignore[arg-type]
            amax = amax[0]
        # a finite amax stays finite: a scale of 0 would turn the whole tensor into NaN
        return torch.where(amax.isfinite(), (amax * 2.0**self.margin).clamp(max=FP32_MAX), amax)

    @override
    def count(self, x: Tensor, operand: Operand, slot: Slot) -> None:
        opened, scale = slot.open(self.delayed), operand.scale_inv.reciprocal() * ROUNDING
        if opened.history is not None:
            newest = opened.history.amax_history[0].index_select(0, slot.index)[0]
            # exact, unlike the inverse of an inverse
            scale = torch.where(newest > 0, opened.history.scale.index_select(0, slot.index)[0] * ROUNDING, scale)
        count(x, scale, slot, self.fp8)

    @override
    def emulated_product(self, a: Operand, b: Operand, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        return emulation.product_of_tensors(a, b, bias, dtype)

    @override
    def with_128_blocks(self, operand: Operand, k: int, rows: int) -> Operand | None:
        count = -(-len(operand.codes) // rows)
        return operand._replace(scale_inv=operand.scale_inv.expand(count, -(-k // BLOCK)))

    # On a GPU

    @override
    def by_kernel(self, x: Source, slot: Slot, want: Want) -> Cast | None:
        adjust = None if self.delayed or not self._adjusts(slot) else functools.partial(self._replace_amax, slot)
        return launches.one_scale(x, self, slot, slot.open(self.delayed), want, adjust)

    @override
    def pair_by_kernel(self, pair: Computed, slots: Sequence[Slot], want: Want) -> list[Cast] | None:
        opened = [slot.open(self.delayed) for slot in slots]
        adjust = functools.partial(self._replace_amax, slots[0]) if self._adjusts(slots[0]) else None
        return launches.one_scale_of_pair(pair, self, slots, opened, want, adjust)

    def _replace_amax(self, slot: Slot, amax: Tensor) -> None:
        amax.copy_(self._asked(amax, slot))

    @override
    def weights_by_kernel(
        self, weights: Sequence[Tensor], slots: Sequence[Slot], out: Sequence[Cast | None], want: Want
    ) -> list[Cast] | None:
        return launches.weights(weights, self, slots, out, WeightScales(), want) if self.format == "e4m3" else None

    # without a call in between, as each layer makes three
    gpu_product = staticmethod(gemm.one_scale)  # type: ignore[assignment]

    @override
    def _groups_by_kernel(self, x: Tensor, slot: Slot, groups: Groups, want: Want) -> Cast:
        made = launches.one_scale_of_groups(x, self, slot, slot.open(self.delayed), want, groups)
        if made is None:
            raise RuntimeError(f"There is no cast of groups of rows for {x.dtype} on {x.device}.")
        return made


@dataclass(frozen=True, repr=False)
class _TensorScaling(Recipe):
    """One scale for each tensor: ``FP8_MAX / (amax * 2**margin)``. The recipes below document the fields."""

    margin: int = 0
    fp8_format: FormatChoice = "HYBRID"

    def __post_init__(self) -> None:
        super().__post_init__()
        # 2**127 is the largest power of two that fp32 holds
        self.require("margin", "an integer from 0 to 127", is_int(self.margin) and 0 <= self.margin <= 127)
        self.require_choice("fp8_format", get_args(FormatChoice))

    def scaling(self, role: Role) -> PerTensor:
        """See :class:`Recipe`."""
        if role == "weight":
            # scaled by its current values: nothing can clip it, so it needs no margin
            return PerTensor("e4m3")
        is_wide = role == "grad_output" and self.fp8_format == "HYBRID"
        return PerTensor("e5m2" if is_wide else "e4m3", self.from_history, self.margin)

    @property
    def margin_factor(self) -> float:
        """See :class:`Recipe`."""
        return 2.0**self.margin

    def check_gather(self) -> None:
        """See :class:`Recipe`."""
        if not self.reduce_amax:
            raise ValueError("Weights are gathered in FP8 with one scale on all processes: set `reduce_amax=True`.")


@knows_its_fields
@dataclass(frozen=True, repr=False)
class DelayedScaling(_TensorScaling):
    """Scales from past steps: ``scale = FP8_MAX / (amax * 2**margin)``, with ``amax`` from a window of them.

    In evaluation, a tensor is scaled by its own values instead: by the largest power of two up to ``FP8_MAX / amax``.

    The fields have the names that the usual reference implementation gives them, so a recipe can be copied. The default
    window was chosen by measurement (``docs/recipes.md``); in the reference it is 1024.

    Args:
        margin: powers of two kept free above the largest past value, an integer from 0 to 127.
        fp8_format: ``"HYBRID"``: E4M3 forward, E5M2 for the gradient of the output. ``"E4M3"``: E4M3 everywhere.
        amax_history_len: optimizer steps that the window holds, an integer of at least 1.
        amax_compute_algo: ``"max"``: the largest value in the window; ``"most_recent"``: the newest one, as with a
            window of 1.
        reduce_amax: under ``torch.distributed``, take the maximum over all ranks, so that scales agree on every rank.
        fprop: the precision of the product for the output, ``"fp8"`` or ``"bf16"``.
        dgrad: the precision of the product for the gradient of the input.
        wgrad: the precision of the product for the gradient of the weight. In ``"bf16"``, this product takes the
            unrounded gradient and the unrounded input; backward keeps the latter in 2 bytes per element instead of 1.

    Raises:
        ValueError: for an invalid field; the message has the field, the rule and the value.
        TypeError: for a field of another name; the message has the right ones.

    >>> DelayedScaling(amax_history_len=16).amax_compute_algo
    'max'
    """

    precision: ClassVar[str] = "fp8-delayed"
    from_history: ClassVar[bool] = True

    amax_history_len: int = 16
    amax_compute_algo: AmaxAlgorithm = "max"
    reduce_amax: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(
            "amax_history_len",
            "an integer of at least 1",
            is_int(self.amax_history_len) and self.amax_history_len >= 1,
        )
        self.require_choice("amax_compute_algo", get_args(AmaxAlgorithm))
        self.require("reduce_amax", "True or False", isinstance(self.reduce_amax, bool))

    @property
    def window(self) -> int:
        """See :class:`Recipe`."""
        return self.amax_history_len

    @property
    def newest_only(self) -> bool:
        """See :class:`Recipe`."""
        return self.amax_compute_algo == "most_recent"

    @property
    def precisions(self) -> dict[str, bool]:
        """See :class:`Recipe`."""
        return {**super().precisions, CurrentScaling.precision: True}


@knows_its_fields
@dataclass(frozen=True, repr=False)
class CurrentScaling(_TensorScaling):
    """Scales each tensor by its own values: ``scale = FP8_MAX / (amax * 2**margin)``.

    A cast first measures the tensor, which is one more read of it. Nothing depends on earlier steps: no value is
    clipped, and a spike affects no later step. In evaluation the scale is rounded down to a power of two, without a
    margin. The logged ``scale`` and ``amax`` belong to the largest values of the last step.

    Args:
        margin: powers of two kept free above the largest value of an input or gradient, an integer from 0 to 127.
        fp8_format: ``"HYBRID"``: E4M3 forward, E5M2 for the gradient of the output. ``"E4M3"``: E4M3 everywhere.
        fprop: as in :class:`DelayedScaling`.
        dgrad: as in :class:`DelayedScaling`.
        wgrad: as in :class:`DelayedScaling`.

    Raises:
        ValueError: for an invalid field; the message has the field, the rule and the value.
        TypeError: for a field of another name; the message has the right ones.

    >>> CurrentScaling().format_of("grad_output").name
    'e5m2'
    """

    precision: ClassVar[str] = "fp8-current"
