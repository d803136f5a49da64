"""The weights of a model, cast together: one launch per optimizer step where the device has a kernel for it."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from torch import Tensor, nn

from lightning_fp8 import ops
from lightning_fp8.modules.frozen_weight import FrozenWeight
from lightning_fp8.modules.optimizer_steps import note_layer
from lightning_fp8.ops.formats import CASTABLE_DTYPES
from lightning_fp8.ops.library import is_k_major

if TYPE_CHECKING:
    from lightning_fp8.modules.base import Fp8Rows
    from lightning_fp8.ops.operand import Fp8Operand
    from lightning_fp8.scaling.state import ScalingState


class WeightGroup:
    """All layers that share a scaling state, by their rows. It holds weak references only."""

    def __init__(self) -> None:
        self._members: weakref.WeakValueDictionary[int, Fp8Rows] = weakref.WeakValueDictionary()
        # warnings about weights that are kept in FP8 only, each given once
        self.told_rounding = self.told_master = False

    def __reduce__(self) -> tuple[type[WeightGroup], tuple[()]]:
        # the rows of copied layers join the copy
        return WeightGroup, ()

    def join(self, rows: Fp8Rows) -> None:
        """Add one layer's rows."""
        self._members[rows.module] = rows
        note_layer(self)

    def get(self, module: int) -> Fp8Rows | None:
        """The rows of the layer at this position; None if it no longer exists."""
        return self._members.get(module)

    def states(self) -> list[ScalingState]:
        """The state that they share; empty if no layer exists any more."""
        return [rows.state for rows in self.members[:1]]

    @property
    def members(self) -> list[Fp8Rows]:
        """The rows of the layers that still exist."""
        return list(self._members.values())

    def weights_stepped(self, weights: Collection[int]) -> None:
        """An optimizer has changed these weights, given by their ``id``: the histories remain valid for them."""
        seen: dict[int, Tensor] = {}
        for rows in self.members:
            weight = rows.weight
            if id(weight) in weights:
                # compiled code casts it from now on, until it is prepared again
                rows.is_prepared = False
            if isinstance(weight, FrozenWeight) or not rows.state.recipe.from_history:
                continue
            if type(weight) is not nn.Parameter or weight.dim() != rows.weight_dims:
                # FSDP's shards have one dimension or are of a class of their own; others are computed
                rows.state.weight_changes.note_sharding(rows.module, True)
            elif id(weight) in weights:
                rows.note_trace(weight)
                # on a GPU, weights are compared only after another change that leaves a trace
                if not is_k_major(weight):
                    seen[rows.module] = rows.matrix(weight.detach())
        if seen:
            self.states()[0].weight_changes.see_optimizer_step([*seen], ops.measure_weights([*seen.values()]))

    def see_changes(self, first: Fp8Rows, weight: Tensor, record: bool) -> None:
        """Compare this weight, and all others with a trace of a change, with their references. Waits for the device."""
        changed = {first.module: first.matrix(weight.detach())}
        for rows in self.members:
            other = rows.weight
            if rows is not first and rows.keeps_cast and other is not None and rows.note_trace(other):
                changed[rows.module] = rows.matrix(other.detach())
        amaxes = ops.measure_weights([*changed.values()]).tolist()
        first.state.see_weights(dict(zip(changed, amaxes, strict=True)), record)

    def cast_stale(self, first: Fp8Rows, weight: Tensor) -> Fp8Operand | None:
        """Cast ``weight``, the weight of ``first``, together with every other stale weight whose last copy was used.

        Returns the operand of ``first``, or None if nothing was cast: on a device without a kernel, and for a weight
        that is not a plain parameter with its own storage. The values of a shard or of a view of a flat buffer may not
        have been gathered yet, or may have been replaced by another layer's.
        """
        state = first.state
        if not is_plain(weight, state.device) or not ops.casts_weights_together(weight, first.weight_scaling):
            return None
        due = [(first, weight)]
        for rows in self.members:
            other = rows.weight if rows is not first and _records(rows) else None
            if other is None or not is_plain(other, state.device):
                continue
            # experts run one after the other: the first to run casts all slices of its parameter
            if not (rows.weight_cache.was_used(other) or (other is weight and rows.weight_cache.part is not None)):
                continue
            if rows.weight_cache.get(other) is None:
                due.append((rows, other))
        for rows, _ in due:
            # drop the old copies first, so that the new ones can use their memory
            rows.weight_cache.drop()
        operands = cast_together(due)
        for (rows, tensor), operand in zip(due, operands, strict=True):
            rows.weight_cache.put(tensor, operand, used=rows is first)
        return operands[0]


def cast_together(
    weights: Sequence[tuple[Fp8Rows, Tensor]], out: Sequence[tuple[Tensor, Tensor] | None] = ()
) -> list[Fp8Operand]:
    """The casts of weights of one model, as :func:`lightning_fp8.ops.cast_weights` makes them."""
    (first, _), *_ = weights
    indices = [first.state.row_of(rows.module, "weight") for rows, _ in weights]
    tensors = [rows.matrix(weight.detach()) for rows, weight in weights]
    made = ops.cast_weights(first.state, tensors, indices, first.formats["weight"], out)
    return [rows.weight_operand(*cast) for (rows, _), cast in zip(weights, made, strict=True)]


def _records(rows: Fp8Rows) -> bool:
    return rows.layer is not None and rows.layer.records and rows.switch.casts("weight")


def is_plain(weight: Tensor, device: object) -> bool:
    """Whether a weight is a parameter with its own storage, on this device."""
    # subclasses of Parameter are sharded or computed
    if type(weight) is not nn.Parameter or weight.dtype not in CASTABLE_DTYPES or weight.device != device:
        return False
    owns_storage = weight.untyped_storage().nbytes() == weight.numel() * weight.element_size()
    return owns_storage and weight.is_contiguous() and not weight.is_inference()
