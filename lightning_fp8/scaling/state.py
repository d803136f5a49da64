"""The scaling state of a model: the one place where scales live and change."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_fp8.core.casts import update_scales
from lightning_fp8.ops.amaxes import scale_below
from lightning_fp8.ops.counting import CastCounts
from lightning_fp8.ops.formats import DELAYED_ROLES, Role
from lightning_fp8.scaling.config import Fp8Config
from lightning_fp8.scaling.model import Fp8Model
from lightning_fp8.scaling.precision import AS_SET, Choice, LayerPrecision, Origin
from lightning_fp8.scaling.saved import from_entries, load_rows, to_entries
from lightning_fp8.scalings.recipe import Recipe

# a state's tensors are sorted by role, in this order, then by module
LAYOUT: tuple[Role, ...] = (*DELAYED_ROLES, "weight")
TENSORS = ("amax", "amax_history", "scale", "nonfinite_steps")


class ScalingState:
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
        config: the settings of the model's conversion, the recipe among them.
        module_names: see above.
        precisions: the precision of each module's products.
        input_owners: for each module that records its input in another module's row: that other module. Both are given
            by position.
        fp8_max: ``[R] float32``, the largest value of each tensor's format.
        amax: ``[R] float32``, largest absolute value recorded since the last update. A weight has the amax of its last
            cast.
        amax_history: ``[recipe.window, D] float32``, newest first; 0 where nothing has been pushed yet.
        scale: ``[R] float32``, multiplier before the cast; 1 until a tensor has a history. A weight has the scale of
            its last cast.
        nonfinite_steps: ``[R] int64``, updates at which the tensor's amax was inf or NaN and was left out.
        indices: the position of each of the R tensors, ``[1] int64`` on the device. Casts get these tensor objects.
        updates: how many times :meth:`update` has run.
        has_loaded: whether histories have been loaded since the last update. If so, loading weights keeps them.
        model: the model at run time: what its casts have done, and who watches them. A copy gets its own.
    """

    def __init__(self, module_names: Sequence[str], recipe: Recipe, device: torch.device | str = "cpu") -> None:
        self.config = Fp8Config(recipe)
        self.module_names = tuple(module_names)
        self.precisions = tuple(LayerPrecision() for _ in self.module_names)
        self.input_owners: dict[int, int] = {}
        count = len(LAYOUT) * len(self.module_names)
        # A state made inside `torch.inference_mode()` could never be updated outside of it.
        with torch.inference_mode(False):
            fp8_max = [recipe.format_of(role).max for role in LAYOUT for _ in module_names]
            self.fp8_max = torch.tensor(fp8_max, dtype=torch.float32, device=device)
            self.amax = torch.zeros(count, dtype=torch.float32, device=device)
            self.amax_history = torch.zeros(recipe.window, self.delayed, dtype=torch.float32, device=device)
            self.scale = torch.ones(count, dtype=torch.float32, device=device)
            self.nonfinite_steps = torch.zeros(count, dtype=torch.int64, device=device)
            self.indices = tuple(torch.tensor([row], dtype=torch.int64, device=device) for row in range(count))
        self.updates, self.has_loaded = 0, False
        # entries of a loaded file for layers that the model does not have yet
        self._waiting: dict[str, Mapping[str, Tensor]] = {}
        self.model = Fp8Model(self)

    def __getstate__(self) -> dict[str, Any]:
        # what watches the original does not watch a copy
        return {name: value for name, value in self.__dict__.items() if name != "model"}

    def __setstate__(self, attributes: dict[str, Any]) -> None:
        self.__dict__.update(attributes)
        self.model = Fp8Model(self)
        self.model.on_histories_replaced()
        self.model.notices.on_load(self)

    def __repr__(self) -> str:
        return f"ScalingState({len(self.names)} tensors of {len(self.module_names)} modules, {self.recipe})"

    @property
    def recipe(self) -> Recipe:
        """The recipe that :meth:`update` follows."""
        return self.config.recipe

    def configure(self, config: Fp8Config) -> None:
        """Set the settings of the model's conversion, from its next forward on."""
        if config != self.config:
            self.config = config
            self.model.place()

    @property
    def names(self) -> tuple[str, ...]:
        """R names, ``<module path>.<role>`` with the roles input, grad_output and weight."""
        return tuple(tensor_name(path, role) for role in LAYOUT for path in self.module_names)

    @property
    def delayed(self) -> int:
        """D, the number of tensors with a history."""
        return len(DELAYED_ROLES) * len(self.module_names)

    @property
    def device(self) -> torch.device:
        """Where the tensors live."""
        return self.amax.device

    @property
    def cast_counts(self) -> CastCounts:
        """How many values casts clip or turn to zero, while counting is requested."""
        return self.model.counts

    @property
    def every_tensor_has_history(self) -> bool:
        """Whether the host knows that all inputs and gradients that are cast have a history. With a GPU, it learns this
        a step or two late."""
        return self.model.every_history_is_known

    def row_of(self, module: int, role: Role) -> int:
        """Which of the R tensors has this role in the module at this position."""
        return LAYOUT.index(role) * len(self.module_names) + module

    def module_of(self, row: int) -> int:
        """Position of the module that the tensor in this row belongs to."""
        return row % len(self.module_names)

    @torch.no_grad()
    def to(self, device: torch.device | str) -> ScalingState:
        """Move all tensors to ``device`` and return the state. Dtypes never change."""
        with torch.inference_mode(False):
            for field in (*TENSORS, "fp8_max"):
                setattr(self, field, getattr(self, field).to(device))
            self.indices = tuple(index.to(self.device) for index in self.indices)
        self.model.on_move()
        return self

    @property
    def rows_in_fp8(self) -> Tensor:
        """``[R] bool`` on the CPU: whether each tensor is cast to FP8 for any product of its module."""
        casts = [layer.casts(role) for role in LAYOUT for layer in self.precisions]
        return torch.tensor(casts, dtype=torch.bool, device="cpu")

    @property
    def current_modules(self) -> tuple[str, ...]:
        """Names of the modules that were moved to current scaling, under a recipe with histories."""
        is_current = (layer.of("move").is_current and self.recipe.from_history for layer in self.precisions)
        return tuple(itertools.compress(self.module_names, is_current))

    @property
    def fallbacks(self) -> tuple[str, ...]:
        """Names of the layers that have fallen back."""
        return tuple(itertools.compress(self.module_names, (layer.of("move").is_bf16 for layer in self.precisions)))

    @torch.no_grad()
    def switch(self, origin: Origin, choices: Mapping[int, Choice]) -> None:
        """Set the precisions of modules from their next forward on. Nothing else changes them.

        Modules that record their input in the same row move to current scaling together, and their histories are kept
        up to date, so that a run can go on with them. A tensor that is no longer cast loses its history: if it is cast
        again later, it begins with its own amax. Nothing here waits for the device.

        Args:
            origin: who asks. The choices of other origins stay.
            choices: the new choice of each module, by position. Other modules keep their choices.

        Raises:
            ValueError: if a module does not support its choice; nothing has been changed then.
        """
        for module, choice in choices.items():
            self.precisions[module].check(self.module_names[module], choice)
        owners = self.input_owners
        inputs = {owners.get(module, module) for module, choice in choices.items() if choice.is_current}
        were_kept = self._rows_with_history()
        for module, precision in enumerate(self.precisions):
            choice = choices.get(module, precision.of(origin))
            is_current = choice.is_current or owners.get(module, module) in inputs
            precision.choose({origin: choice._replace(is_current=is_current)})
        self._drop_histories(were_kept & ~self._rows_with_history())
        self.model.on_precisions()

    def _rows_with_history(self) -> Tensor:
        """``[D] bool`` on the CPU: whether a tensor, or an input that shares its row, is cast."""
        owners, count = self.input_owners, len(self.module_names)
        is_cast = self.rows_in_fp8[: self.delayed].tolist()
        inputs = {owners.get(module, module) for module in range(count) if is_cast[module]}
        shared = [owners.get(module, module) in inputs for module in range(count)]
        return torch.tensor(shared + is_cast[count:], dtype=torch.bool, device="cpu")

    def end_schedule(self) -> None:
        """Drop the choices of the schedule, which belongs to one run; settings and moves stay."""
        if any(precision.of("schedule") != AS_SET for precision in self.precisions):
            self.switch("schedule", dict.fromkeys(range(len(self.precisions)), AS_SET))

    def _drop_histories(self, rows: Tensor) -> None:
        """Empty the histories of these tensors, ``[D] bool`` on the CPU."""
        if rows.any():
            pinned = torch.tensor(rows.tolist(), device="cpu", pin_memory=self.device.type == "cuda")
            dropped = pinned.to(self.device, non_blocking=True)
            self.amax_history.data.masked_fill_(dropped, 0.0)
            self.scale.data[: self.delayed].masked_fill_(dropped, 1.0)
            self.amax.data[: self.delayed].masked_fill_(dropped, 0.0)

    def share_inputs(self, owners: Mapping[int, int]) -> None:
        """Let modules with the same input tensor record it in one row: the row of one of them, the owner.

        Each update copies the owner's amax to the others, the sharers. Histories and scales are thus the same as if
        each module had recorded its own input.

        Args:
            owners: the position of each sharer, and of its owner. All other modules record in their own rows.
        """
        if owners != self.input_owners:
            self.fill_sharers(self.amax.data)
            self.input_owners = dict(owners)
            self.model.on_input_owners()
            self._equalise_sharers()
            self._rescale()
            self.model.on_histories_replaced()

    def fill_sharers(self, recorded: Tensor) -> Tensor:
        """Copy what casts recorded, ``[R, ...]``, from the rows of owners to those of their sharers, in place."""
        if self.input_owners:
            sharers, owners = self.model.shared_rows
            recorded.index_copy_(0, sharers, recorded.index_select(0, owners))
        return recorded

    @torch.no_grad()
    def _equalise_sharers(self) -> None:
        """Give sharers and their owner the same history: each entry becomes the largest among these modules.

        They may differ: a module that is new, or that fell back before it shared its input, has no history.
        """
        recorded = self.amax.data, self.amax_history.data.t(), self.nonfinite_steps.data
        for tensor in recorded if self.input_owners else ():
            for sharer, owner in self.input_owners.items():
                mine, its = tensor[self.row_of(owner, "input")], tensor[self.row_of(sharer, "input")]
                mine.copy_(torch.maximum(mine, its))
            self.fill_sharers(tensor)

    def _copy_rows(self, rows: Sequence[int], other: ScalingState, other_rows: Sequence[int]) -> None:
        """Copy tensors of one role."""
        for field in TENSORS if rows else ():
            if field != "amax_history" or rows[0] < self.delayed:
                getattr(self, field).data[..., rows] = getattr(other, field)[..., other_rows].to(self.device)

    def record_weight(self, index: Tensor, amax: Tensor, scale: Tensor) -> None:
        """Store the amax and the scale, ``[] float32``, of the cast of the weight at ``index``, ``[1] int64``."""
        # through `.data`, as in `update`
        self.amax.data.index_copy_(0, index, amax.reshape(1))
        self.scale.data.index_copy_(0, index, scale.reshape(1))

    @torch.no_grad()
    def update(self) -> None:
        """Turn the recorded amaxes into the next step's scales. Call once per optimizer step, after backward.

        For each input and gradient with a finite ``amax > 0``: push ``amax`` into its history, then
        ``scale = FP8_MAX / (m * 2**margin)`` with ``m`` the maximum (or the newest entry) of the history; an infinite
        result becomes the largest finite fp32. A tensor with ``amax == 0`` did not run and keeps everything; a tensor
        with a non-finite ``amax`` keeps everything too, and its ``nonfinite_steps`` goes up. Each ``amax`` is then
        zeroed.

        Under ``torch.distributed`` (and ``reduce_amax``) every rank must call it: one ``all_reduce(MAX)`` of the whole
        vector makes the scales agree bit for bit. Nothing here waits for the device.

        Raises:
            RuntimeError: if the state has no layers any more.
        """
        if self.model.has_ended:
            raise RuntimeError(
                "This scaling state has no layers any more: they are plain again, or belong to the state of a larger"
                " model. Ask for it where you use it: `lightning_fp8.scaling_state(model).update()`."
            )
        recipe = self.config.recipe
        if self.input_owners:
            self.fill_sharers(self.amax.data)
        _, processes = recipe.processes()
        if processes > 1:
            # As integers, the bits of non-negative floats order as finite < inf < NaN, so no non-finite value is lost.
            dist.all_reduce(self.amax[: self.delayed].view(torch.int32), op=dist.ReduceOp.MAX)
        for watch in self.model.before_update:
            watch(self.amax)
        # Through `.data`: a compiled graph may hold these for its backward, which reads them as they are then.
        update_scales(
            self.amax.data,
            self.amax_history.data,
            self.scale.data,
            self.fp8_max,
            self.nonfinite_steps.data,
            recipe.newest_only,
            recipe.margin_factor,
        )
        recipe.scaling("input").show(self.scale.data[: self.delayed], self.amax_history[0])
        if self.model.current_rows is not None:
            self._show_current_scales(self.model.current_rows)
        self.updates += 1
        self.has_loaded = False
        self.model.on_update()

    def _show_current_scales(self, rows: Tensor) -> None:
        """Set the scales of these rows to those of the last step's largest values, as under :class:`CurrentScaling`."""
        newest = self.amax_history[0].index_select(0, rows)
        shown = scale_below(self.fp8_max.index_select(0, rows), newest, self.recipe.margin_factor)
        # scale 1 where nothing has been recorded
        self.scale.data.index_copy_(0, rows, shown.where(newest > 0, 1.0))

    @torch.no_grad()
    def discard(self) -> None:
        """Drop what has been recorded since the last update: for a loop that abandons a step, as after an error."""
        self.amax[: self.delayed] = 0
        self.model.changes += 1

    @torch.no_grad()
    def reset(self) -> None:
        """Empty all histories: the next cast of each tensor uses its own values, as its first one did. Counters of
        non-finite steps stay, and layers stay where they were moved."""
        self.empty_histories(range(len(self.module_names)))

    @torch.no_grad()
    def empty_histories(self, modules: Iterable[int]) -> None:
        """Empty the histories of these modules, and of the inputs that other modules share with them.

        The next cast of each of these tensors uses its own values. Never waits for the device.
        """
        emptied, owners = list(modules), self.input_owners
        firsts = {owners.get(module, module) for module in emptied}
        inputs = firsts.union(sharer for sharer, owner in owners.items() if owner in firsts)
        rows = [self.row_of(module, "input") for module in inputs]
        for row in (*rows, *(self.row_of(module, "grad_output") for module in emptied)):
            self.amax_history.data[:, row].zero_()
            self.scale.data[row].fill_(1)
            self.amax.data[row].zero_()
        self.model.on_emptied()

    def arrange(self, module_names: Sequence[str], sources: Mapping[int, tuple[ScalingState, int]]) -> None:
        """Replace the modules of this state, in place: those who watch the state keep watching it.

        Args:
            module_names: path of each new module, in order.
            sources: for each module that keeps its tensors, by its new position: its state and position so far. All
                other modules begin empty, or with the entries that a loaded file has for their names.
        """
        new = ScalingState(module_names, self.recipe, self.device)
        new._copy_modules(sources)
        for field in ("module_names", "precisions", "fp8_max", "indices", *TENSORS):
            setattr(self, field, getattr(new, field))
        self.input_owners = {}
        self.model.on_arrangement()
        rows = {row: self._waiting.pop(name, {}) for row, name in enumerate(self.names[: self.delayed])}
        came = {row: entry for row, entry in rows.items() if entry and self.module_of(row) not in sources}
        if came:
            load_rows(self, came)
            self._on_load()

    @torch.no_grad()
    def _on_load(self) -> None:
        self._equalise_sharers()
        self.model.on_precisions()
        self._rescale()
        self.model.on_histories_replaced()
        self.model.notices.on_load(self)

    def _rescale(self) -> None:
        """Compute the scales that follow from the histories."""
        delayed, recipe = slice(self.delayed), self.recipe
        amax = recipe.window_amax(self.amax_history)
        scale = scale_below(self.fp8_max[delayed], amax, recipe.margin_factor)
        self.scale.data[delayed] = scale.where(self.amax_history[0] > 0, 1.0)
        if self.model.current_rows is not None:
            self._show_current_scales(self.model.current_rows)

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """What a run needs to go on, copied to the CPU. Each input and gradient has an entry under its name:
        ``amax_history`` (``[recipe.window] float32``, newest first, zeros where nothing has been pushed yet),
        ``nonfinite_steps``, ``in_fp8`` and ``is_current`` (where its layer was moved). A recipe without histories has
        only ``nonfinite_steps`` and ``in_fp8``.

        Names and shapes do not depend on the steps made. Plain dicts and tensors, so ``torch.load(weights_only=True)``
        reads it, and ``torch.distributed.checkpoint`` loads it in place.
        """
        return to_entries(self)

    def load_state_dict(self, state_dict: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Load the values of :meth:`state_dict`, and which modules fell back or moved to current scaling.

        Scales are computed anew, so the recipe may have another margin, window, algorithm or format; a shorter window
        keeps the newest entries. Layers missing in the file begin without histories; entries without a layer wait until
        the model gets a layer of that name; a warning names both. Amaxes that wait for an update are dropped.

        Raises:
            ValueError: if no entry belongs to a tensor of this model, or an entry is malformed or of another version;
                the message names both sides, and nothing has been changed.
        """
        self._waiting = from_entries(self, state_dict)
        self._on_load()
        self.has_loaded = True

    def _copy_modules(self, modules: Mapping[int, tuple[ScalingState, int]]) -> None:
        """Copy the tensors of modules from states with the same recipe; see ``sources`` of :meth:`arrange`."""
        by_state: dict[ScalingState, dict[int, int]] = {}
        for here, (other, there) in modules.items():
            by_state.setdefault(other, {})[here] = there
        for other, positions in by_state.items():
            other.fill_sharers(other.amax.data)
            for role in LAYOUT:
                rows = [self.row_of(here, role) for here in positions]
                self._copy_rows(rows, other, [other.row_of(there, role) for there in positions.values()])
            for here, there in positions.items():
                mine, its = self.precisions[here], other.precisions[there]
                mine.may_fall_back = its.may_fall_back
                mine.choose(its.choices)


def tensor_name(path: str, role: Role) -> str:
    """``<module path>.<role>``; just the role where the converted module is the root itself."""
    return f"{path}.{role}" if path else role
