"""A converted model at run time: what its casts have done, and who watches them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from itertools import chain
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_fp8.ops.counting import CastCounts
from lightning_fp8.ops.operand import take_handle
from lightning_fp8.scaling.notices import Notices
from lightning_fp8.scaling.optimizer_steps import count_step, watch_optimizers_for
from lightning_fp8.scalings.operand import Opened

if TYPE_CHECKING:
    from lightning_fp8.modules.gemm import Gemm
    from lightning_fp8.scaling.state import ScalingState
    from lightning_fp8.scalings.recipe import Recipe


class Fp8Model:
    """A converted model at run time. Nothing of it is saved or copied, and nothing here waits for a device.

    Attributes:
        state: the scales.
        gemms: the GEMMs of the layers that still exist, by position in the state.
        notices: the warnings, each given once.
        counts: how many values casts clip or turn to zero, while counting is requested.
        before_update: called by each update with the amaxes of all processes, ``[R] float32``, before they are used.
        handle: the number by which operators find the state, see :func:`lightning_fp8.ops.operand.state_of`.
        generation: how often the state's rows have been arranged anew.
        changes: goes up when scales, histories or recorded amaxes change by anything other than a cast.
        has_recorded: whether an amax has been recorded since the last update.
        scanned: the modules that a conversion has decided about, or that a warning has named since.
        last_scan: the number of modules that were last looked at, and the sum of their identities.
        ignored: the patterns of modules that the last conversion left alone.
        left_out: the layers that these match, each with the reason.
        shared_rows: the rows of sharers and of their owners, each ``[S] int64``; see ``ScalingState.share_inputs``.
        current_rows: the rows of tensors with current scaling, under a recipe with histories; None if there are none.
    """

    def __init__(self, state: ScalingState) -> None:
        self.state = state
        self.gemms: weakref.WeakValueDictionary[int, Gemm] = weakref.WeakValueDictionary()
        self.notices = Notices()
        self.counts = CastCounts(len(state.amax), state.device)
        self.before_update: list[Callable[[Tensor], None]] = []
        self.handle = take_handle(state)
        self.generation = self.changes = 0
        self.scanned: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self.last_scan = (0, 0)
        self.ignored: Sequence[str] = ()
        self.left_out: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self.has_recorded = self._was_left = False
        self._of_groups: dict[tuple[int, int], Tensor] = {}
        self.on_move()

    # The tensors that depend on the device

    def on_arrangement(self) -> None:
        """The state's rows have changed: layers join again, and passes that began with the old rows record nothing."""
        self.generation += 1
        self.handle = take_handle(self.state, self.handle)
        self.gemms.clear()
        self.counts.resize(len(self.state.amax))
        self.notices.on_load(self.state)
        self.on_move()
        self.on_histories_replaced()

    def on_move(self) -> None:
        """The state has been moved to its device."""
        self._of_groups.clear()
        # for casts in training whose history is known
        self._trained = Opened(self.state.amax, self.state, True)
        self.counts.to(self.state.device)
        # by address, which the host knows
        self._row_at = {index.data_ptr(): row for row, index in enumerate(self.state.indices[: self.state.delayed])}
        self.on_input_owners()
        self.on_precisions()

    def place(self) -> None:
        """Make the GEMMs' slots again."""
        for gemm in list(self.gemms.values()):
            gemm.place()

    def on_input_owners(self) -> None:
        """The modules that record their input in another module's row have changed."""
        row_of, owners = self.state.row_of, self.state.input_owners
        rows = [(row_of(sharer, "input"), row_of(owner, "input")) for sharer, owner in owners.items()]
        with torch.inference_mode(False):
            self.shared_rows = torch.tensor(rows, dtype=torch.int64, device=self.state.device).view(-1, 2).t()

    def on_precisions(self) -> None:
        """The precisions of modules have changed."""
        self.changes += 1
        self.forget_histories()
        state = self.state
        # don't wait for histories of tensors that are never cast
        self._awaited = state.rows_in_fp8[: state.delayed].numpy()
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
        """Forget which tensors have a history."""
        state = self.state
        with torch.inference_mode(False):
            pin = state.device.type == "cuda"
            answer = torch.zeros(state.delayed, dtype=torch.bool, device="cpu", pin_memory=pin)
        # both share memory
        self._answer, self._known = answer, answer.numpy()

    @property
    def every_history_is_known(self) -> bool:
        """Whether all tensors that are cast are known to have a history."""
        return bool(self._known[self._awaited].all())

    # The casts

    def index_of(self, row: int, count: int) -> Tensor:
        """``count`` consecutive rows from ``row`` on, ``[count] int64``, for the cast of groups of rows."""
        index = self._of_groups.get((row, count))
        if index is None:
            with torch.inference_mode(False):
                index = torch.arange(row, row + count, device=self.state.device)
            self._of_groups[row, count] = index
            self._row_at[index.data_ptr()] = row
        return index

    def open_cast(self, record: bool, index: Tensor | None) -> Opened:
        """Called before each cast of an input or gradient: whether it is recorded, and which history it reads."""
        state = self.state
        if record and not self.has_recorded:
            _refuse_join(state.recipe)
            self.has_recorded = True
        row = None if index is None else self._row_at.get(index.data_ptr())
        is_known = row is not None and self._known.item(row)
        if is_known and index is not None and row is not None and index.numel() > 1:
            is_known = bool(self._known[row : row + index.numel()].all())
        if is_known and record:
            return self._trained
        return Opened(state.amax if record else None, None if index is None else state, is_known)

    # The weights

    def join(self, gemm: Gemm) -> None:
        """Add the GEMM of a layer."""
        self.gemms[gemm.module] = gemm
        watch_optimizers_for(self)

    def leave(self, gemm: Gemm) -> None:
        """Remove the GEMM of a layer that is plain again, or belongs to the state of a larger model."""
        self.gemms.pop(gemm.module, None)
        self._was_left = True

    @property
    def has_ended(self) -> bool:
        """Whether layers have left the state, and none remains."""
        return self._was_left and not self.gemms

    def sources(self) -> Iterator[Tensor]:
        """All parameters that the GEMMs' weights are, or are computed from."""
        return chain.from_iterable(gemm.sources() for gemm in list(self.gemms.values()))

    # Events

    def on_update(self) -> None:
        """The scales have been updated, once per optimizer step. Counts a step, as a manual one may follow."""
        if not self.every_history_is_known:
            self.state.recipe.note_histories(self._answer, self.state.amax_history[0])
        count_step()
        self.changes += 1
        self.has_recorded = False
        self.notices.on_update(self.state)

    def on_step_ends(self, optimizer: int, weights: AbstractSet[int]) -> None:
        """An optimizer has changed these parameters, all given by ``id``."""
        for gemm in list(self.gemms.values()):
            gemm.on_step(weights)
        if self.has_recorded:
            self.notices.on_step_without_update(self.state, optimizer)

    def on_emptied(self) -> None:
        """The histories have been emptied."""
        self.changes += 1
        self.forget_histories()

    def on_histories_replaced(self) -> None:
        """The state has other histories. Waits for the device."""
        self.changes += 1
        self.forget_histories()
        # amaxes that wait for their update may have come with the histories
        self.has_recorded = bool((self.state.amax[: self.state.delayed] != 0).any())


def _refuse_join(recipe: Recipe) -> None:
    """RuntimeError inside ``ddp.join()``: a process without inputs would miss the reductions that others wait for."""
    _, processes = recipe.processes()
    ddp = DistributedDataParallel._get_active_ddp_module()  # type: ignore[no-untyped-call]
    if ddp is not None and ddp._join_config.enable and processes > 1:
        raise RuntimeError(
            "Join: a model with FP8 layers cannot train with uneven inputs, because each update reduces amaxes over all"
            " processes. Give all processes as many batches (`drop_last=True`), or use a recipe that reduces nothing:"
            " `DelayedScaling(reduce_amax=False)`."
        )
