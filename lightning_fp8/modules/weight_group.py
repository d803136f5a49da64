"""The weights of a model, cast together: one launch per optimizer step where the device has a kernel for it."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING

from torch import Tensor, nn

from lightning_fp8 import ops
from lightning_fp8.modules.optimizer_steps import count_step, note_layer
from lightning_fp8.ops.formats import CASTABLE_DTYPES

if TYPE_CHECKING:
    from lightning_fp8.modules.base import Fp8Rows
    from lightning_fp8.ops.operand import Fp8Operand
    from lightning_fp8.scaling.state import ScalingState


class WeightGroup:
    """All layers that share a scaling state, by their rows. It holds weak references to them.

    Attributes:
        histories_fit: whether the histories belong to the weights, as last seen.
    """

    def __init__(self) -> None:
        self._members: weakref.WeakValueDictionary[int, Fp8Rows] = weakref.WeakValueDictionary()
        # warnings about weights that are kept in FP8 only, each given once
        self.told_rounding = self.told_master = False
        self.histories_fit = True
        self._must_empty = False
        # modules that have cast their input since the last look, and how many steps there had been
        self._cast: set[int] = set()
        self._looked_at: tuple[int, int] | None = None
        # steps of optimizers of torch, and whether one is in progress or, if none has stepped, one by hand is due
        self._steps = 0
        self._is_stepping = False

    def __reduce__(self) -> tuple[type[WeightGroup], tuple[()]]:
        # the rows of copied layers join the copy
        return WeightGroup, ()

    def join(self, rows: Fp8Rows) -> None:
        """Add one layer's rows."""
        self._members[rows.module] = rows
        rows.state.weights = self
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

    # Which weights the histories belong to. All weights are looked at when a forward of the model begins: when a module
    # casts its input again, or after an event. Nothing waits for a device, and sharded weights are known by their
    # parameters, so all processes decide alike.

    def see_cast(self, state: ScalingState, module: int, record: bool) -> bool:
        """See :class:`lightning_fp8.scaling.state.Weights`."""
        if module in self._cast:
            self._cast.clear()
        if not self._cast or (self.histories_fit and not self._is_known(module)):
            self.look(state)
            # one by hand has been made; those of torch end by themselves
            self._is_stepping &= self._steps > 0
        self._cast.add(module)
        if record and not self.histories_fit:
            self._begin_again(state)
        return self.histories_fit

    def _is_known(self, module: int) -> bool:
        rows = self._members.get(module)
        if rows is None or rows.shared_input is None:
            return rows is None or rows.is_known()
        return all(one.is_known() for one in map(self._members.get, rows.shared_input.modules) if one is not None)

    def look(self, state: ScalingState) -> bool:
        """See :class:`lightning_fp8.scaling.state.Weights`."""
        has_stepped = self._looked_at not in (None, (state.updates, self._steps))
        self._looked_at, self.histories_fit, self._must_empty = (state.updates, self._steps), True, False
        for rows in self.members:
            if rows.reference is None:
                rows.refer()
            elif not rows.is_known():
                records = state.input_leaders.get(rows.module, rows.module) in state.recording
                # a module that never records, as a target network, may follow others by any means at each step
                if self._is_stepping or (has_stepped and not records):
                    rows.refer()
                else:
                    self.histories_fit = False
                    self._must_empty |= records
        return self.histories_fit

    def _begin_again(self, state: ScalingState) -> None:
        """A forward records with other weights: empty the histories that belong to the former ones."""
        if self._must_empty:
            state.empty_histories()
        self.take_as_known()
        self.histories_fit = True

    def scales_updated(self) -> None:
        """See :class:`lightning_fp8.scaling.state.Weights`; without an optimizer of torch, the weights change next."""
        count_step()
        self._is_stepping = not self._steps
        self._cast.clear()

    def scales_loaded(self) -> None:
        """See :class:`lightning_fp8.scaling.state.Weights`; the weights may be loaded later, and broadcast by DDP."""
        for rows in self.members:
            rows.reference = None
        self._cast.clear()

    def take_as_known(self) -> None:
        """See :class:`lightning_fp8.scaling.state.Weights`."""
        for rows in self.members:
            rows.refer()

    def step_begins(self, state: ScalingState) -> None:
        """An optimizer steps, and may run forwards between changes of its own: until it ends, changes are its own."""
        self._is_stepping &= not self._steps
        if state.recipe.from_history:
            self.look(state)
        self._steps += 1
        self._is_stepping = self.histories_fit

    def step_ends(self, weights: AbstractSet[int]) -> None:
        """An optimizer has changed these parameters, given by their ``id``: the histories remain valid for them."""
        self._is_stepping = False
        for rows in self.members:
            if not weights.isdisjoint(map(id, rows.sources())):
                # compiled code casts it from now on, until it is prepared again
                rows.is_prepared = False
                rows.refer()

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
        operands = cast_together(due, [None] * len(due))
        for (rows, tensor), operand in zip(due, operands, strict=True):
            rows.weight_cache.put(tensor, operand, used=rows is first)
        return operands[0]


def cast_together(weights: Sequence[tuple[Fp8Rows, Tensor]], out: Sequence[Fp8Operand | None]) -> list[Fp8Operand]:
    """The casts of weights of one model, as :func:`lightning_fp8.ops.cast_weights` makes them."""
    for rows, weight in weights:
        rows.to(weight.device)
    tensors = [rows.n_by_k(rows.matrix(weight.detach())) for rows, weight in weights]
    return ops.cast_weights(tensors, [rows.weight_slot(True) for rows, _ in weights], out)


def _records(rows: Fp8Rows) -> bool:
    return rows.layer is not None and rows.layer.records and rows.switch.casts("weight")


def is_plain(weight: Tensor, device: object) -> bool:
    """Whether a weight is a parameter with its own storage, on this device."""
    # subclasses of Parameter are sharded or computed
    if type(weight) is not nn.Parameter or weight.dtype not in CASTABLE_DTYPES or weight.device != device:
        return False
    owns_storage = weight.untyped_storage().nbytes() == weight.numel() * weight.element_size()
    return owns_storage and weight.is_contiguous() and not weight.is_inference()
