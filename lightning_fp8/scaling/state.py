"""The scaling state of a model: the one place where scales live and change."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_fp8.ops.amaxes import power_of_2, scale_below
from lightning_fp8.ops.basic import update_scales
from lightning_fp8.ops.counting import CastCounts
from lightning_fp8.ops.formats import DELAYED_ROLES, Product, Role
from lightning_fp8.ops.operand import OwnScaling, take_handle
from lightning_fp8.scaling.known_histories import KnownHistories
from lightning_fp8.scaling.notices import Notices
from lightning_fp8.scaling.recipe import Recipe
from lightning_fp8.scaling.saved import TENSORS, from_entries, to_entries
from lightning_fp8.scaling.switches import Switch, Switches
from lightning_fp8.scaling.uneven_inputs import JoinableState

# the order of a state's tensors by role; those of one role are in the order of the modules
LAYOUT: tuple[Role, ...] = (*DELAYED_ROLES, "weight")
_WITH_HISTORY = OwnScaling()


class Weights(Protocol):
    """The weights of a model's layers, for which the histories of its inputs and gradients were recorded.

    Attributes:
        histories_fit: whether the histories belong to the weights, as last seen.
    """

    histories_fit: bool

    def see_cast(self, state: ScalingState, module: int, record: bool) -> bool:
        """The input of this module is about to be cast; empties the histories if they belong to other weights and this
        forward records. Returns whether they belong to the weights.
        """

    def scales_updated(self) -> None:
        """The scales have been updated, which is done once per optimizer step."""

    def scales_loaded(self) -> None:
        """Histories have been loaded: they belong to the weights of the next forward."""

    def look(self, state: ScalingState) -> bool:
        """Find weights that something other than an optimizer has changed. Returns whether the histories belong to the
        weights as they are now.
        """

    def take_as_known(self) -> None:
        """The histories belong to the weights as they are now."""


class ScalingState(JoinableState):
    """Scales and amax histories of all R tensors of a model together, three tensors for each converted module.

    The D tensors with a history come first: all inputs, then all gradients of outputs. Forward and backward only read
    their ``scale`` and take the maximum into their ``amax``. Once per optimizer step, :meth:`update` pushes ``amax``
    into ``amax_history`` and computes the next ``scale``. So activation recomputation sees the scales of the first
    pass, and recording a tensor twice changes nothing. The weights follow, with current scaling: each cast measures
    its weight, and stores the amax and scale that it used.

    The state is not made of module buffers: ``.to(bfloat16)`` would cast them, DDP would broadcast them, and the
    model's ``state_dict`` would no longer be the plain model's.

    Args:
        module_names: path of each converted module, in order.
        recipe: the recipe that :meth:`update` follows.
        device: where the tensors live.

    Attributes:
        names: R names, ``<module path>.<role>`` with the roles input, grad_output and weight.
        delayed: D, the number of tensors with a history.
        fp8_max: ``[R] float32``, the largest value of each tensor's format.
        amax: ``[R] float32``, largest absolute value recorded since the last update; for a weight, that of its last
            cast.
        amax_history: ``[recipe.window, D] float32``, newest first; 0 where nothing has been pushed yet.
        scale: ``[R] float32``, multiplier before the cast; 1 until a tensor has a history. For a weight, that of its
            last cast.
        nonfinite_steps: ``[R] int64``, updates at which the tensor's amax was inf or NaN and was left out.
        updates: how many times :meth:`update` has run.
        changes: goes up when scales, histories or recorded amaxes change by anything other than a cast.
        input_leaders: maps each module that records its input in another module's row to that module, both by position.
        has_recorded: whether an amax has been recorded since the last update.
        has_scales: whether any history has been filled, known on the host without a sync.
        recording: the modules, by position, whose tensors have been recorded.
        switches: which modules run in FP8.
        weights: the layers' weights; None for a state without layers.
        cast_counts: how many values casts clip or turn to zero, while counting is requested.
        known_histories: which tensors have a history, known on the host without a sync.
        indices: the position of each of the R tensors, ``[1] int64`` on the device: casts are given these very tensors.
        before_update: called by :meth:`update` with the amaxes of all processes, ``[R] float32``, before they are used.
        notices: the warnings, each given once.
        handle: the number by which operators find the state, see :func:`lightning_fp8.ops.operand.state_of`.
    """

    def __init__(self, module_names: Sequence[str], recipe: Recipe, device: torch.device | str = "cpu") -> None:
        self.recipe = recipe
        self.module_names = tuple(module_names)
        self.names = tuple(tensor_name(path, role) for role in LAYOUT for path in module_names)
        self.delayed = len(DELAYED_ROLES) * len(self.module_names)
        count = len(self.names)
        # A state made inside `torch.inference_mode()` could never be updated outside of it.
        with torch.inference_mode(False):
            fp8_max = [recipe.format_of(role).max for role in LAYOUT for _ in module_names]
            self.fp8_max = torch.tensor(fp8_max, dtype=torch.float32, device=device)
            self.amax = torch.zeros(count, dtype=torch.float32, device=device)
            self.amax_history = torch.zeros(recipe.window, self.delayed, dtype=torch.float32, device=device)
            self._no_history = torch.zeros(1, self.delayed, dtype=torch.float32, device=device)
            self.scale = torch.ones(count, dtype=torch.float32, device=device)
            self.nonfinite_steps = torch.zeros(count, dtype=torch.int64, device=device)
            self.indices = tuple(torch.tensor([row], dtype=torch.int64, device=device) for row in range(count))
        self.input_leaders: dict[int, int] = {}
        self.switches = Switches(self.module_names)
        self.updates = self.changes = 0
        self.has_recorded = self.has_scales = False
        self.recording: set[int] = set()
        self._drop_observers()

    def _drop_observers(self) -> None:
        self.cast_counts = CastCounts(len(self.names), self.device)
        self.before_update: list[Callable[[Tensor], None]] = []
        self.notices = Notices()
        self.weights: Weights | None = None
        JoinableState.__init__(self)
        self._forget_histories()
        self._find_leaders()
        self._see_switches()
        self.handle = take_handle(self)

    def __getstate__(self) -> dict[str, Any]:
        # observers stay with the original
        left_out = ("cast_counts", "before_update", "notices", "known_histories", "weights", "_row_at", "_join_config")
        return {name: value for name, value in self.__dict__.items() if name not in left_out}

    def __setstate__(self, attributes: dict[str, Any]) -> None:
        self.__dict__.update(attributes)
        # with a handle of its own, so that a copy records in itself
        self._drop_observers()
        self._see_load()

    def __repr__(self) -> str:
        return f"ScalingState({len(self.names)} tensors of {len(self.module_names)} modules, {self.recipe})"

    @property
    def device(self) -> torch.device:
        """Where the tensors live."""
        return self.amax.device

    def how_cast(self, switch: Switch, group: str, from_history: bool = True) -> tuple[Tensor, OwnScaling]:
        """How the input or gradient of a module is cast.

        Args:
            switch: the module's switch.
            group: the name of the process group that the tensor is split over; empty for a whole one.
            from_history: whether this cast may use the history of a recipe that has one.

        Returns:
            The history for the slot, zeros ``[1, D]`` if the tensor is scaled by its own values, and how that scaling
            is done. Histories cover all processes anyway, so they need no group.
        """
        if from_history and self.recipe.from_history and not switch.is_current:
            return self.amax_history, _WITH_HISTORY
        own = self.recipe.own
        # each process scales the blocks of its own part, which needs no group
        return self._no_history, own._replace(group="" if own.blocks else group, always=True)

    def row_of(self, module: int, role: Role) -> int:
        """Which of the R tensors has this role in the module at this position."""
        return LAYOUT.index(role) * len(self.module_names) + module

    def module_of(self, row: int) -> int:
        """Position of the module that this one of the R tensors belongs to."""
        return row % len(self.module_names)

    @torch.no_grad()
    def to(self, device: torch.device | str) -> ScalingState:
        """Move all tensors to ``device`` and return the state. Dtypes never change."""
        with torch.inference_mode(False):
            for field in (*TENSORS, "fp8_max", "_no_history"):
                setattr(self, field, getattr(self, field).to(device))
            self.cast_counts.to(self.device)
            self.indices = tuple(index.to(self.device) for index in self.indices)
        self._forget_histories()
        self._find_leaders()
        self._see_switches()
        return self

    @property
    def rows_in_fp8(self) -> Tensor:
        """``[R] bool`` on the CPU: whether each tensor is cast to FP8 for any product of its module."""
        return torch.tensor([switch.casts(role) for role in LAYOUT for switch in self.switches], dtype=torch.bool)

    @property
    def current_modules(self) -> tuple[str, ...]:
        """Names of the modules that have moved from histories to the scales of their own values."""
        is_current = (switch.is_current and self.recipe.from_history for switch in self.switches)
        return tuple(itertools.compress(self.module_names, is_current))

    def use_current_scaling(self, modules: Iterable[int]) -> None:
        """Scale inputs and gradients of modules by their own values from their next cast on.

        Modules that record their input in the same row switch together. Histories are kept up to date, so that a
        run can go on with them from a checkpoint.
        """
        inputs = {self.input_leaders.get(module, module) for module in modules}
        for module, switch in enumerate(self.switches):
            switch.is_current |= self.input_leaders.get(module, module) in inputs
        self._see_switches()

    def _see_switches(self) -> None:
        self.changes += 1
        rows = [row for row in range(self.delayed) if self.switches[self.module_of(row)].is_current]
        with torch.inference_mode(False):
            self._current_rows = torch.tensor(rows, dtype=torch.int64, device=self.device) if rows else None

    def set_products(self, in_bf16: Mapping[int, tuple[Product, ...]]) -> None:
        """Compute these products of modules, given by position, in bf16, and the modules' other products in FP8."""
        for module, products in in_bf16.items():
            self.switches[module].in_bf16 = products
        self._forget_histories()

    def share_inputs(self, leaders: Mapping[int, int]) -> None:
        """Let modules record their input in the row of another module, their leader, whose input is the same tensor.

        At each update they get its amax, so their histories and scales are the same as if each had recorded its own.

        Args:
            leaders: maps the position of each such module to that of its leader. All other modules record in their own
                rows.
        """
        if leaders != self.input_leaders:
            self.fill_followers(self.amax.data)
            self.input_leaders = dict(leaders)
            self._find_leaders()
            self._join_histories()
            self._see_histories_replaced()

    def fill_followers(self, recorded: Tensor) -> Tensor:
        """Copy what casts recorded, ``[R, ...]``, from the rows of leaders to those of their followers, in place."""
        if self.input_leaders:
            recorded.index_copy_(0, self._followers, recorded.index_select(0, self._leaders))
        return recorded

    def _find_leaders(self) -> None:
        rows = [(self.row_of(one, "input"), self.row_of(other, "input")) for one, other in self.input_leaders.items()]
        with torch.inference_mode(False):
            self._followers, self._leaders = torch.tensor(rows, dtype=torch.int64, device=self.device).view(-1, 2).t()

    @torch.no_grad()
    def _join_histories(self) -> None:
        """Give inputs that are the same tensor the same history: the leader's or, if that is empty, a follower's.

        In a checkpoint of layers that recorded separately, the history of a layer that never ran in FP8 is empty.
        """
        pairs = list(zip(self._followers.tolist(), self._leaders.tolist(), strict=True))
        filled = (self.amax_history[0] > 0).tolist()
        for follower, leader in pairs:
            # these may be amaxes of micro-batches that wait for their update; inf and NaN stay
            self.amax.data[leader] = torch.maximum(self.amax[leader], self.amax[follower])
            if filled[follower] and not filled[leader]:
                self._copy_row(leader, self, follower)
                filled[leader] = True
        for follower, leader in pairs:
            self._copy_row(follower, self, leader)

    def _copy_row(self, row: int, other: ScalingState, other_row: int) -> None:
        for field in TENSORS:
            if field != "amax_history" or row < self.delayed:
                getattr(self, field).data[..., row] = getattr(other, field)[..., other_row].to(self.device)

    def _forget_histories(self) -> None:
        rows = slice(self.delayed)
        # by address, which the host knows
        self._row_at = {index.data_ptr(): row for row, index in enumerate(self.indices[rows])}
        self.known_histories = KnownHistories(self.delayed, self.rows_in_fp8[rows], self.device)

    @property
    def every_tensor_has_history(self) -> bool:
        """Whether all tensors that are cast are known to have a history, see :class:`KnownHistories`."""
        return self.known_histories.see_answer()

    def open_cast(self, record: bool, index: Tensor | None) -> tuple[Tensor | None, bool, bool]:
        """Called before each cast of an input or gradient.

        Returns:
            The ``amax`` to record in, None if the cast is not to be recorded; whether the histories may be used, not in
            an evaluation of other weights than theirs; and whether, in addition, the tensor at ``index`` is known to
            have one: False if ``index`` is None.
        """
        row = None if index is None else self._row_at.get(index.data_ptr())
        fit = self.histories_fit
        if row is not None and row < len(self.module_names) and self.weights is not None:
            if record:
                self.recording.add(row)
            fit = self.weights.see_cast(self, row, record)
        if record:
            if not self.has_recorded:
                self.check_join()
            self.has_recorded = True
        elif self.recipe.from_history and not (self.has_scales and fit):
            self.notices.see_cast_without_scales(self, index)
        may_use_histories = record or fit
        known = self.known_histories
        has_history = may_use_histories and index is not None and (known.every or known.has(row))
        return self.amax if record else None, may_use_histories, has_history

    @property
    def histories_fit(self) -> bool:
        """Whether the histories belong to the weights, as last seen."""
        return self.weights is None or self.weights.histories_fit

    def see_export(self) -> None:
        """Called when a program is exported or traced: the scales become constants in it."""
        if self.recipe.from_history and not self.has_scales:
            self.notices.see_export_without_scales(self)

    def note_weight(self, index: Tensor, amax: Tensor, scale: Tensor) -> None:
        """Store what the weight at ``index``, ``[1] int64``, was cast with; amax and scale ``[] float32``."""
        # through `.data`, as in `update`
        self.amax.data.index_copy_(0, index, amax.reshape(1))
        self.scale.data.index_copy_(0, index, scale.reshape(1))

    @torch.no_grad()
    def update(self) -> None:
        """Turn the recorded amaxes into the next step's scales. Call once per optimizer step, after backward.

        For each input and gradient with a finite ``amax > 0``: push ``amax`` into its history, then
        ``scale = FP8_MAX / (m * 2**margin)`` with ``m`` the maximum (or the newest entry) of the history; an infinite
        result becomes the largest finite fp32. A tensor with ``amax == 0`` did not run and keeps everything; one with a
        non-finite ``amax`` keeps everything and counts in ``nonfinite_steps``. ``amax`` is zeroed at the end.

        Under ``torch.distributed`` (and ``reduce_amax``) every rank must call it: one ``all_reduce(MAX)`` of the whole
        vector makes the scales agree bit for bit. Nothing here waits for the device.
        """
        self.fill_followers(self.amax.data)
        self._reduce_amax()
        for watch in self.before_update:
            watch(self.amax)
        own = self.recipe.own
        # Through `.data`: a compiled graph may hold these for its backward, which reads them as they are then.
        update_scales(
            self.amax.data,
            self.amax_history.data,
            self.scale.data,
            self.fp8_max,
            self.nonfinite_steps.data,
            self.recipe.newest_only,
            2.0**own.margin,
        )
        if own.blocks == "power of 2":
            self.scale.data.copy_(power_of_2(self.scale))
        # casts under other recipes use no histories, so these need not fit the weights
        if self.recipe.from_history:
            self.known_histories.ask(self.amax_history[0])
            if self._current_rows is not None:
                self._show_current_scales(self._current_rows)
        if self.weights is not None:
            self.weights.scales_updated()
        self.updates += 1
        self.changes += 1
        self.has_scales |= self.has_recorded
        self.has_recorded = False
        self.notices.see_update(self)

    def _show_current_scales(self, rows: Tensor) -> None:
        """Set the scales of these rows to those of the last step's largest values, as under :class:`CurrentScaling`."""
        newest = self.amax_history[0].index_select(0, rows)
        shown = scale_below(self.fp8_max.index_select(0, rows), newest, 2.0**self.recipe.own.margin)
        # scale 1 where nothing has been recorded
        self.scale.data.index_copy_(0, rows, shown.where(newest > 0, 1.0))

    def _reduce_amax(self) -> None:
        if self.recipe.reduce_amax and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            # As integers, the bits of non-negative floats order as finite < inf < NaN, so no non-finite value is lost.
            dist.all_reduce(self.amax[: self.delayed].view(torch.int32), op=dist.ReduceOp.MAX)

    @torch.no_grad()
    def discard(self) -> None:
        """Drop what has been recorded since the last update: for a loop that abandons a step, as after an error."""
        self.amax[: self.delayed] = 0
        self.changes += 1

    @torch.no_grad()
    def empty_histories(self) -> None:
        """The next cast of each tensor uses its own current amax, as its first one did. Never waits for the device."""
        self.amax_history.data.zero_()
        self.scale.data[: self.delayed].fill_(1)
        self.amax.data[: self.delayed].zero_()
        self.changes += 1
        self.has_scales = False
        self._forget_histories()
        self.notices.see_emptied(self)

    def _see_histories_replaced(self) -> None:
        self.changes += 1
        self._forget_histories()
        filled = (self.amax_history[0] > 0).nonzero().flatten().tolist()
        self.has_scales = bool(filled)
        self.recording = {self.module_of(row) for row in filled}

    def _see_load(self) -> None:
        self._see_histories_replaced()
        self._see_switches()
        # amaxes that wait for their update may have come with the histories
        self.has_recorded = bool((self.amax[: self.delayed] != 0).any())
        self.notices.see_load(self)

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """A copy on the CPU, keyed by tensor name, of inputs and gradients: ``amax``, ``scale``, ``nonfinite_steps``,
        the filled part of ``amax_history``, newest first, ``in_fp8`` and ``is_current``. With a recipe without
        histories, only ``nonfinite_steps`` and ``in_fp8``: its casts need nothing else. Histories of other weights than
        those that the model has now are left out.

        Plain dicts and tensors, so ``torch.load(weights_only=True)`` reads it.
        """
        return to_entries(self)

    def load_state_dict(self, state_dict: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Load the values of :meth:`state_dict`, and which modules fell back or moved to current scaling.

        A shorter window keeps the newest entries; entries of weights, which versions up to 0.5.0 wrote, are ignored.

        Raises:
            ValueError: if the entries are not those of this model's tensors, or one is malformed; the message names
                them, and nothing has been changed.
        """
        from_entries(self, state_dict)
        self._join_histories()
        if self.weights is not None:
            self.weights.scales_loaded()
        self._see_load()

    def copy_module(self, module: int, other: ScalingState, other_module: int) -> None:
        """Take over one module's three tensors from another state with the same recipe."""
        other.fill_followers(other.amax.data)
        for role in LAYOUT:
            self._copy_row(self.row_of(module, role), other, other.row_of(other_module, role))
        mine, others = self.switches[module], other.switches[other_module]
        mine.in_fp8, mine.may_fall_back, mine.is_current = others.in_fp8, others.may_fall_back, others.is_current
        self._see_load()


def tensor_name(path: str, role: Role) -> str:
    """``<module path>.<role>``; just the role where the converted module is the root itself."""
    return f"{path}.{role}" if path else role
