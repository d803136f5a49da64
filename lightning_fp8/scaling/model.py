"""A converted model at run time: what its casts have done, whether its histories fit its weights, who watches them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from collections.abc import Set as AbstractSet
from itertools import chain, islice
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_fp8.ops.counting import CastCounts
from lightning_fp8.ops.operand import CurrentScale, take_handle
from lightning_fp8.scaling.notices import Notices
from lightning_fp8.scaling.optimizer_steps import count_step, watch_optimizers_for
from lightning_fp8.scaling.precision import LayerPrecision
from lightning_fp8.scaling.scales import Scales

_WITH_HISTORY = CurrentScale()


class WeightedGemm(Protocol):
    """A GEMM of a layer, as far as its weight decides whether the model's histories are valid.

    Attributes:
        module: position of the module in the scaling state.
        reference: what the weight was when the histories were recorded; None until it is known.
    """

    module: int
    reference: Any

    def place(self) -> None:
        """The state, its precisions or its settings have changed."""

    def refer(self) -> None:
        """The histories belong to the weight as it is now."""

    def is_known(self) -> bool:
        """Whether the weight is the one that the histories belong to, as far as it can be known."""

    @property
    def is_lent(self) -> bool:
        """Whether a tensor that is no parameter takes the place of the weight, as in ``functional_call``."""

    @property
    def is_trained(self) -> bool:
        """Whether a step may change the weight: whether it is not frozen, or still has a gradient."""

    def sources(self) -> list[Tensor]:
        """The parameters that the weight is, or is computed from."""

    def on_step(self, changed: AbstractSet[int]) -> None:
        """An optimizer has changed these parameters, given by ``id``: the histories remain valid for the weight."""


class Fp8Model:
    """A converted model at run time. Nothing of it is saved or copied, and nothing here waits for a device.

    Histories belong to the weights that they were recorded with. All weights are looked at when a forward of the model
    begins, which is when a module casts its input again, and after an event such as a load. Sharded weights are known
    by their parameters, so all processes decide alike.

    Attributes:
        state: the scales.
        gemms: the GEMMs of the layers that still exist, by position in the state.
        notices: the warnings, each given once.
        counts: how many values casts clip or turn to zero, while counting is requested.
        before_update: called by each update with the amaxes of all processes, ``[R] float32``, before they are used.
        handle: the number by which operators find the state, see :func:`lightning_fp8.ops.operand.state_of`.
        changes: goes up when scales, histories or recorded amaxes change by anything other than a cast.
        has_recorded: whether an amax has been recorded since the last update.
        has_scales: whether any history has been filled.
        recording: the modules, by position, whose tensors have been recorded.
        histories_fit: whether the histories belong to the weights, as last seen.
        no_history: ``[1, D] float32`` zeros, for casts that use no history.
        shared_rows: rows of inputs that are recorded in another row, and that row, each ``[S] int64``.
        current_rows: rows of the tensors that are on the scales of their own values; None if there are none.
    """

    def __init__(self, state: Scales) -> None:
        self.state = state
        self.gemms: weakref.WeakValueDictionary[int, WeightedGemm] = weakref.WeakValueDictionary()
        self.notices = Notices()
        self.counts = CastCounts(len(state.amax), state.device)
        self.before_update: list[Callable[[Tensor], None]] = []
        self.handle = take_handle(state)
        self.changes = 0
        self.has_recorded = self.has_scales = False
        self.recording: set[int] = set()
        self.histories_fit, self._must_empty = True, False
        # the first row of inputs that has been cast since the last update, then those since the last look; and how many
        # updates and steps there had been then
        self._cast: dict[int, None] = {}
        self._looked_at: tuple[int, int] | None = None
        # steps of optimizers of torch, and whether one is in progress or, if none has stepped, one by hand is due
        self._steps = 0
        self._is_stepping = False
        self._of_groups: dict[tuple[int, int], Tensor] = {}
        self.on_move()

    # The tensors that depend on the device

    def on_move(self) -> None:
        """The state has been moved to its device."""
        self._of_groups.clear()
        self.counts.to(self.state.device)
        with torch.inference_mode(False):
            self.no_history = torch.zeros(1, self.state.delayed, dtype=torch.float32, device=self.state.device)
        self.on_input_owners()
        self.on_precisions()

    def place(self) -> None:
        """The GEMMs' slots are to be made again."""
        for gemm in list(self.gemms.values()):
            gemm.place()

    def on_input_owners(self) -> None:
        """Other modules record their input in the row of another one."""
        row_of, owners = self.state.row_of, self.state.input_owners
        rows = [(row_of(sharer, "input"), row_of(owner, "input")) for sharer, owner in owners.items()]
        with torch.inference_mode(False):
            self.shared_rows = torch.tensor(rows, dtype=torch.int64, device=self.state.device).view(-1, 2).t()

    def on_precisions(self) -> None:
        """Modules run in something else than before."""
        self.changes += 1
        self.forget_histories()
        state = self.state
        is_current = [precision.is_current and state.recipe.from_history for precision in state.precisions]
        rows = [row for row in range(state.delayed) if is_current[state.module_of(row)]]
        with torch.inference_mode(False):
            # pinned, so that nothing waits
            pinned = torch.tensor(rows, dtype=torch.int64, device="cpu", pin_memory=state.device.type == "cuda")
            self.current_rows = pinned.to(state.device, non_blocking=True) if rows else None
        self.place()

    # Which tensors have a history. Each update asks the device, which answers a step or two later. A tensor that is
    # not known to have one may still have it, so its cast must leave the decision to the device.

    def forget_histories(self) -> None:
        """It is not known any more which tensors have a history."""
        state = self.state
        delayed = slice(state.delayed)
        # by address, which the host knows
        self._row_at = {index.data_ptr(): row for row, index in enumerate(state.indices[delayed])}
        self._row_at |= {index.data_ptr(): row for (row, _), index in self._of_groups.items()}
        with torch.inference_mode(False):
            pin = state.device.type == "cuda"
            answer = torch.zeros(state.delayed, dtype=torch.bool, device="cpu", pin_memory=pin)
        # the same memory
        self._answer, self._known = answer, answer.numpy()
        # tensors that are never cast get no history, so none is waited for
        self._awaited = state.rows_in_fp8[delayed].numpy()

    @property
    def every_history_is_known(self) -> bool:
        """Whether all tensors that are cast are known to have a history."""
        return bool(self._known[self._awaited].all())

    # The casts

    def index_of(self, row: int, count: int) -> Tensor:
        """Consecutive rows of inputs or gradients, ``[count] int64``, for the cast of a tensor of these groups."""
        index = self._of_groups.get((row, count))
        if index is None:
            with torch.inference_mode(False):
                index = torch.arange(row, row + count, device=self.state.device)
            self._of_groups[row, count] = index
            self._row_at[index.data_ptr()] = row
        return index

    def scaling_of(
        self, precision: LayerPrecision, group: str, from_history: bool = True
    ) -> tuple[Tensor, CurrentScale]:
        """How the input or gradient of a module is cast.

        Args:
            precision: the module's.
            group: the name of the process group that the tensor is split over; empty for a whole one.
            from_history: whether this cast may use the history of a recipe that has one.

        Returns:
            The history for the slot, zeros ``[1, D]`` if the tensor is scaled by its own values, and how that scaling
            is done. Histories cover all processes anyway, so they need no group.
        """
        recipe = self.state.recipe
        if from_history and recipe.from_history and not precision.is_current:
            return self.state.amax_history, _WITH_HISTORY
        current = recipe.current
        # each process scales the blocks of its own part, which needs no group
        return self.no_history, current._replace(group="" if current.blocks else group, always=True)

    def open_cast(self, record: bool, index: Tensor | None) -> tuple[Tensor | None, bool, bool]:
        """Called before each cast of an input or gradient.

        Returns:
            The ``amax`` to record in, None if the cast is not to be recorded; whether the histories may be used, not in
            an evaluation of other weights than theirs; and whether, in addition, the tensor at ``index`` is known to
            have one: False if ``index`` is None.
        """
        row, rows = (None, 1) if index is None else (self._row_at.get(index.data_ptr()), index.numel())
        # inputs come before gradients
        if row is not None and 2 * row < len(self._known):
            if row in self._cast or not self._cast:
                # A module casts its input again: a forward of the model begins. Or the module runs more than once in a
                # forward, so the first one stays known: else the next forward would not be seen to begin with it.
                self._cast = dict.fromkeys(islice(self._cast, 1))
                self.look()
                # a step by hand has been made; those of torch end by themselves
                self._is_stepping &= self._steps > 0
            self._cast[row] = None
            if record:
                self.recording.update(range(row, row + rows))
                if not self.histories_fit:
                    self._begin_anew()
        if record:
            if not self.has_recorded:
                self.state.check_join()
            self.has_recorded = True
        elif not (self.has_scales and self.histories_fit) and self.state.recipe.from_history:
            self.notices.on_cast_without_scales(self.state, index)
        may_use_history = record or self.histories_fit
        has_history = may_use_history and row is not None and self._known.item(row)
        if has_history and rows > 1 and row is not None:
            has_history = bool(self._known[row : row + rows].all())
        return self.state.amax if record else None, may_use_history, has_history

    def on_export(self) -> None:
        """A program is exported or traced: the scales become constants in it."""
        if self.state.recipe.from_history and not self.has_scales:
            self.notices.on_export_without_scales(self.state)

    # The weights

    def join(self, gemm: WeightedGemm) -> None:
        """Add the GEMM of a layer."""
        self.gemms[gemm.module] = gemm
        watch_optimizers_for(self)

    def _begin_anew(self) -> None:
        """A forward records, and the histories belong to other weights."""
        if self._must_empty:
            self.state.empty_histories()
        self.take_as_known()
        self.histories_fit = True

    def on_stale_weight(self, gemm: WeightedGemm) -> None:
        """A weight is about to be cast, as its last cast may be stale: it may have changed within a forward."""
        if self.histories_fit and self._cast and self.state.recipe.from_history and not gemm.is_known():
            self.look()

    def look(self) -> bool:
        """Find weights that something other than an optimizer has changed.

        Returns:
            Whether the histories belong to the weights as they are now.
        """
        now = self.state.updates, self._steps
        has_stepped = self._looked_at not in (None, now)
        self._looked_at, self.histories_fit, self._must_empty = now, True, False
        # each forward of the model comes here, and a weak dictionary's own iteration takes several times as long
        for reference in self.gemms.valuerefs():
            gemm = reference()
            if gemm is None:
                continue
            if gemm.reference is None:
                gemm.refer()
            elif not gemm.is_known():
                records = self.state.input_owners.get(gemm.module, gemm.module) in self.recording
                # a module that never records, as a target network, may follow others by any means at each step
                if (self._is_stepping and gemm.is_trained) or (has_stepped and not records):
                    gemm.refer()
                else:
                    self.histories_fit = False
                    # a lent weight may be computed in each forward: training with it keeps the histories
                    self._must_empty |= records and not gemm.is_lent
        return self.histories_fit

    def take_as_known(self) -> None:
        """The histories belong to the weights as they are now."""
        for gemm in list(self.gemms.values()):
            gemm.refer()

    def sources(self) -> Iterator[Tensor]:
        """All parameters that the GEMMs' weights are, or are computed from."""
        return chain.from_iterable(gemm.sources() for gemm in list(self.gemms.values()))

    # Events

    def on_update(self) -> None:
        """The scales have been updated, which is done once per optimizer step; one by hand is made next."""
        # casts under other recipes use no histories, so these need not fit the weights
        if self.state.config.recipe.from_history and not self.every_history_is_known:
            self._answer.copy_(self.state.amax_history[0] > 0, non_blocking=True)
        count_step()
        self._is_stepping = not self._steps
        self._cast.clear()
        self.changes += 1
        self.has_scales |= self.has_recorded
        self.has_recorded = False
        self.notices.on_update(self.state)

    def on_step_begins(self) -> None:
        """An optimizer steps, and may run forwards between changes of its own: until it ends, changes are its own."""
        self._is_stepping &= not self._steps
        if self.state.config.recipe.from_history:
            self.look()
        self._steps += 1
        self._is_stepping = self.histories_fit

    def on_step_ends(self, optimizer: int, weights: AbstractSet[int]) -> None:
        """An optimizer has changed these parameters, all given by ``id``: the histories remain valid for them."""
        self._is_stepping = False
        for gemm in list(self.gemms.values()):
            gemm.on_step(weights)
        if self.has_recorded:
            self.notices.on_step_without_update(self.state, optimizer)

    def on_emptied(self) -> None:
        """The histories have been emptied."""
        self.changes += 1
        self.has_scales = False
        self.forget_histories()
        self.notices.on_emptied(self.state)

    def on_scales_loaded(self) -> None:
        """Histories have been loaded: they belong to the weights of the next forward, which may be loaded later, and
        broadcast by DDP."""
        for gemm in list(self.gemms.values()):
            gemm.reference = None
        self._cast.clear()

    def on_histories_replaced(self) -> None:
        """The state has other histories. Waits for the device."""
        self.changes += 1
        self.forget_histories()
        filled = (self.state.amax_history[0] > 0).nonzero().flatten().tolist()
        self.has_scales = bool(filled)
        self.recording = {self.state.module_of(row) for row in filled}
        # amaxes that wait for their update may have come with the histories
        self.has_recorded = bool((self.state.amax[: self.state.delayed] != 0).any())
