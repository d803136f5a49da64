"""The scaling state of a model: the one place where scales live and change."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_fp8.ops.basic import update_scales
from lightning_fp8.ops.formats import DELAYED_ROLES, Role
from lightning_fp8.ops.operand import take_handle
from lightning_fp8.scaling.notices import Notices
from lightning_fp8.scaling.recipe import DelayedScaling
from lightning_fp8.scaling.saved import TENSORS, from_entries, to_entries

# the tensors of a state are in this order, and of each role in that of the modules
LAYOUT: tuple[Role, ...] = (*DELAYED_ROLES, "weight")
# a weight whose largest value is more times larger or smaller than the one that histories go with is another one
_OTHER_WEIGHT = 2**0.5


@dataclass
class Switch:
    """Whether the GEMMs of one module run in FP8. Read at each forward, by layers that know nothing of their name."""

    in_fp8: bool = True
    may_fall_back: bool = True


class ScalingState:
    """Scales and amax histories of all R tensors of a model together, three tensors for each converted module.

    The D tensors whose scale is delayed come first: all inputs, then all gradients of outputs; the weights follow. Of
    the former, forward and backward only read ``scale`` and only max into ``amax``; everything else happens in
    :meth:`update`, once per optimizer step. So activation recomputation sees the scales of the first pass, and
    recording a tensor twice changes nothing. A weight is scaled by what it holds: each of its casts measures it, and
    leaves here what it used.

    The state is not made of module buffers: ``.to(bfloat16)`` would cast them, DDP would broadcast them, and the
    model's ``state_dict`` would no longer be the plain model's.

    Args:
        module_names: path of each converted module, in order.
        recipe: the recipe that :meth:`update` follows.
        device: where the tensors live.

    Attributes:
        names: R names, ``<module path>.<role>`` with the roles input, grad_output and weight.
        delayed: D, the number of tensors with a history.
        fp8_max: ``[R] float32``, the largest value of each tensor's format; ``fp8_max_on_host`` the same on the CPU.
        amax: ``[R] float32``, largest absolute value recorded since the last update; of a weight, that of its last
            cast.
        amax_history: ``[amax_history_len, D] float32``, newest first; 0 where nothing has been pushed yet.
        scale: ``[R] float32``, multiplier before the cast; 1 until a tensor has a history. Of a weight, that of its
            last cast.
        held: for each converted module, ``[R / 3] float32``, the largest absolute value of the weight that the
            histories go with; 0 where that is not known.
        nonfinite_steps: ``[R] int64``, updates at which the tensor's amax was inf or NaN; such a one is left out.
        counts: ``[R, 4] int64`` while counting, else None: numbers, saturated ones, numbers other than zero, and
            those of them that became zero, of all casts that recorded since :meth:`start_counting`.
        updates: how many times :meth:`update` has run.
        switches: for each converted module, whether it runs in FP8; see :meth:`fall_back`.
        has_scales: whether any history has been filled, as far as the host knows.
        before_update: called by :meth:`update` with the amaxes of all processes, ``[R] float32``, before they are used.
        notices: what the user is told, each once.
        handle: by which operators find the state, see :func:`lightning_fp8.ops.operand.state_of`.
    """

    counts: Tensor | None

    def __init__(self, module_names: Sequence[str], recipe: DelayedScaling, device: torch.device | str = "cpu") -> None:
        self.recipe = recipe
        self.module_names = tuple(module_names)
        self.names = tuple(tensor_name(path, role) for role in LAYOUT for path in module_names)
        self.delayed = len(DELAYED_ROLES) * len(self.module_names)
        count = len(self.names)
        # A state made inside `torch.inference_mode()` could never be updated outside of it.
        with torch.inference_mode(False):
            fp8_max = [recipe.format_of(role).max for role in LAYOUT for _ in module_names]
            self.fp8_max_on_host = torch.tensor(fp8_max, dtype=torch.float32)
            self.fp8_max = self.fp8_max_on_host.to(device)
            self.amax = torch.zeros(count, dtype=torch.float32, device=device)
            self.amax_history = torch.zeros(recipe.amax_history_len, self.delayed, dtype=torch.float32, device=device)
            self.scale = torch.ones(count, dtype=torch.float32, device=device)
            self.nonfinite_steps = torch.zeros(count, dtype=torch.int64, device=device)
            self.held = torch.zeros(len(self.module_names), dtype=torch.float32, device=device)
        # whose `held` follows the optimizer's steps, and whose stays unknown
        self._followed: set[int] = set()
        self._sharded: set[int] = set()
        # whose weight is another one, and whose has been cast in this pass through the model
        self._other: set[int] = set()
        self._cast: set[int] = set()
        self._emptied = False
        self.updates = 0
        self.switches = tuple(Switch() for _ in module_names)
        self.has_scales = False
        # of modules, the weights or the scales, if these were loaded last, and nothing has run since
        self._loaded: dict[int, Literal["weights", "scales"]] = {}
        self._let_go_of_watchers()
        self._watch_histories()
        self.handle = take_handle(self)

    def __getstate__(self) -> dict[str, Any]:
        # whoever counts, watches or has been told is no part of a copy
        left_out = ("counts", "_counting_for", "before_update", "notices")
        return {name: value for name, value in self.__dict__.items() if name not in left_out}

    def __setstate__(self, attributes: dict[str, Any]) -> None:
        # copies and unpickled states record in themselves
        self.__dict__.update(attributes)
        self._let_go_of_watchers()
        self.notices.see_load(self)
        self._watch_histories()
        self.handle = take_handle(self)

    def __repr__(self) -> str:
        return f"ScalingState({len(self.names)} tensors of {len(self.module_names)} modules, {self.recipe})"

    @property
    def device(self) -> torch.device:
        """Where the tensors live."""
        return self.amax.device

    def row_of(self, module: int, role: Role) -> int:
        """Which of the R tensors is the one with this role of the module at this position."""
        return LAYOUT.index(role) * len(self.module_names) + module

    def module_of(self, row: int) -> int:
        """Position of the module that this of the R tensors belongs to."""
        return row % len(self.module_names)

    @torch.no_grad()
    def to(self, device: torch.device | str) -> ScalingState:
        """Move all tensors to ``device`` and return the state. Dtypes never change."""
        with torch.inference_mode(False):
            for field in (*TENSORS, "fp8_max", "held"):
                setattr(self, field, getattr(self, field).to(device))
            self.counts = None if self.counts is None else self.counts.to(device)
        # only a CPU's are
        self._followed.clear()
        self._watch_histories()
        return self

    def _watch_histories(self) -> None:
        self._every_tensor_has_history = False
        with torch.inference_mode(False):
            self._seen_from_host = torch.zeros((), dtype=torch.bool, pin_memory=self.device.type == "cuda")

    @property
    def every_tensor_has_history(self) -> bool:
        """True once that is known here; on a GPU the news comes a step or two late, as nobody waits for it.

        So False means that a tensor may lack one: whoever casts it lets the device find out.
        """
        if not self._every_tensor_has_history:
            self._every_tensor_has_history = bool(self._seen_from_host)
        return self._every_tensor_has_history

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
        self._reduce_amax()
        for watch in self.before_update:
            watch(self.amax)
        # Through `.data`: a compiled graph may hold these for its backward, which reads them as they are then.
        update_scales(
            self.amax.data,
            self.amax_history.data,
            self.scale.data,
            self.fp8_max,
            self.nonfinite_steps.data,
            self.recipe.amax_compute_algo == "most_recent",
            2.0**self.recipe.margin,
        )
        if not self._every_tensor_has_history:
            self._seen_from_host.copy_((self.amax_history[0] > 0).all(), non_blocking=True)
        self._hold_weights()
        self.updates += 1
        self._loaded.clear()
        self._emptied = False
        self.notices.see_update(self)

    def _hold_weights(self) -> None:
        """From now on histories go with the weights that were cast last, where not with what an optimizer has made."""
        cast_last = self.amax.data[self.delayed :]
        if not self._followed:
            # as on a GPU, where a list of others would be waited for
            self.held.copy_(cast_last)
        else:
            others = [module for module in range(len(cast_last)) if module not in self._followed]
            self.held[others] = cast_last[others]

    def _reduce_amax(self) -> None:
        if self.recipe.reduce_amax and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            # As integers, the bits of non-negative floats order as finite < inf < NaN, so no non-finite value is lost.
            dist.all_reduce(self.amax[: self.delayed].view(torch.int32), op=dist.ReduceOp.MAX)

    @torch.no_grad()
    def discard(self) -> None:
        """Forget what has been recorded since the last update: for a loop that gives up a step, as after an error."""
        self.amax[: self.delayed] = 0

    def weights_loaded(self, module: int) -> None:
        """The weight of one module has been loaded: its history belonged to another one, and is emptied.

        Not where scales have been loaded just before, with no forward in between: they came with the weights.
        """
        self.held[module] = 0
        self._other.discard(module)
        if self._loaded.get(module) == "scales":
            del self._loaded[module]
        else:
            self._loaded[module] = "weights"
            self._forget([self.row_of(module, role) for role in DELAYED_ROLES])

    @torch.no_grad()
    def _forget(self, rows: Sequence[int] | slice) -> None:
        """Let tensors start as at first use, with their own current amax."""
        self.amax_history.data[:, rows] = 0
        self.scale.data[rows] = 1
        self.amax.data[rows] = 0
        self._watch_histories()
        self.has_scales = bool((self.amax_history[0] > 0).any())

    def note_sharding(self, module: int, is_sharded: bool) -> None:
        """Each process may hold another part of this weight, so none decides by it what histories are worth."""
        (self._sharded.add if is_sharded else self._sharded.discard)(module)

    def weights_stepped(self, modules: Sequence[int], amax: Tensor) -> None:
        """An optimizer has made these weights what they are, with ``amax`` ``[len(modules)] float32``."""
        self._followed.update(modules)
        self.held[modules] = amax

    def see_weights(self, amaxes: Mapping[int, float], record: bool) -> None:
        """Compare weights, by their modules, with those that the histories go with.

        Where a weight has been replaced by other means than an optimizer, by one that is much larger or smaller, other
        layers get other inputs than before. So histories are emptied by a forward that records, and not used by others
        for as long as the weight is there.
        """
        modules = [module for module in amaxes if module not in self._sharded]
        for module, held in zip(modules, self.held[modules].tolist()):
            now = amaxes[module]
            self._other.discard(module)
            if held == 0:
                self.held[module] = now
            elif now * _OTHER_WEIGHT < held or held * _OTHER_WEIGHT < now < math.inf:
                if not record:
                    self._other.add(module)
                    continue
                # what this forward has recorded before stays
                if not self._emptied:
                    self._forget(slice(self.delayed))
                    self._emptied = True
                self.held[module] = now

    def see_weight_cast(self, row: int, amax: float, record: bool) -> None:
        """The same for one of a pass through the model, in which no weight is cast twice; by its tensor's number."""
        module = self.module_of(row)
        if module in self._cast:
            self._cast.clear()
            self._other.clear()
        self._cast.add(module)
        self.see_weights({module: amax}, record)

    def held_another(self, module: int) -> bool:
        """Whether the histories did not go with this module's weight when it was last seen."""
        return module in self._other

    def open_cast(self, record: bool) -> tuple[Tensor | None, bool, bool]:
        """An input or gradient is cast.

        Returns:
            The ``amax`` to record in, None where nothing is to be recorded; whether histories go with the weights that
            are there, see :meth:`see_weights`; and whether, besides, every tensor is known to have one.
        """
        if self._loaded:
            self._loaded.clear()
        if record:
            self.notices.has_recorded = True
        else:
            self.notices.see_unrecorded_cast(self)
        goes_with_weights = record or not self._other
        has_history = goes_with_weights and (self._every_tensor_has_history or self.every_tensor_has_history)
        return self.amax if record else None, goes_with_weights, has_history

    def note_weight(self, index: Tensor, amax: Tensor, scale: Tensor) -> None:
        """Keep what the weight at ``index``, ``[1] int64``, was cast with; amax and scale ``[] float32``."""
        # through `.data`, as in `update`
        self.amax.data.index_copy_(0, index, amax.reshape(1))
        self.scale.data.index_copy_(0, index, scale.reshape(1))

    def start_counting(self, asker: object) -> None:
        """Count what casts clip and what they turn to zero, from now on; that takes further passes over each tensor.

        Several may ask; the first of them sets ``counts`` to zero, the last to stop drops them.
        """
        if self.counts is None:
            with torch.inference_mode(False):
                self.counts = torch.zeros(len(self.names), 4, dtype=torch.int64, device=self.device)
        self._counting_for.add(id(asker))

    def stop_counting(self, asker: object) -> None:
        """See :meth:`start_counting`."""
        self._counting_for.discard(id(asker))
        if not self._counting_for:
            self.counts = None

    def _let_go_of_watchers(self) -> None:
        self.counts = None
        self._counting_for: set[int] = set()
        self.before_update: list[Callable[[Tensor], None]] = []
        self.notices = Notices()

    def fall_back(self, module_name: str) -> None:
        """Let one module's GEMMs run without FP8 from its next forward on: in bf16 under autocast, else as its input.

        Its tensors keep their scales and their place. That it fell back is part of :meth:`state_dict`. The way back is
        to convert the model anew.

        Raises:
            ValueError: if no converted module is called so, or its weight is gathered in FP8.
        """
        if module_name not in self.module_names:
            raise ValueError(
                f"There is no converted module {module_name!r} to fall back. The first ones are:"
                f" {', '.join(map(repr, self.module_names[:6]))}."
            )
        switch = self.switches[self.module_names.index(module_name)]
        if not switch.may_fall_back:
            raise ValueError(f"{module_name!r} cannot fall back: its weight is gathered in FP8 (`fp8_all_gather`).")
        switch.in_fp8 = False

    @property
    def fallbacks(self) -> tuple[str, ...]:
        """Names of the modules that do not run in FP8 any more."""
        return tuple(name for name, switch in zip(self.module_names, self.switches, strict=True) if not switch.in_fp8)

    @property
    def rows_in_fp8(self) -> Tensor:
        """``[R] bool`` on the CPU: whose module runs in FP8."""
        return torch.tensor([switch.in_fp8 for _ in LAYOUT for switch in self.switches], dtype=torch.bool)

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """A copy on the CPU, keyed by tensor name, of inputs and gradients: ``amax``, ``scale``, ``nonfinite_steps``,
        the filled part of ``amax_history``, newest first, and ``in_fp8``.

        Plain dicts and tensors, so ``torch.load(weights_only=True)`` reads it.
        """
        return to_entries(self)

    def load_state_dict(self, state_dict: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Take over the values of :meth:`state_dict`, and which modules fell back. A shorter window keeps the newest
        entries; entries of weights, which versions up to 0.5.0 wrote, are left out of account.

        Raises:
            ValueError: if the tensors are not the same ones, or an entry is not well formed; the message names them,
                and nothing has been changed.
        """
        from_entries(self, state_dict)
        self._watch_histories()
        self.has_scales = bool((self.amax_history[0] > 0).any())
        self.notices.see_load(self)
        with_weights = {module for module, part in self._loaded.items() if part == "weights"}
        self._loaded = {module: "scales" for module in range(len(self.module_names)) if module not in with_weights}
        # of the weights that they go with
        self.held.zero_()
        self._other.clear()
        self._emptied = False

    def copy_module(self, module: int, other: ScalingState, other_module: int) -> None:
        """Take over one module's three tensors from another state with the same recipe."""
        for role in LAYOUT:
            mine, theirs = self.row_of(module, role), other.row_of(other_module, role)
            for field in TENSORS:
                if field != "amax_history" or role in DELAYED_ROLES:
                    getattr(self, field)[..., mine] = getattr(other, field)[..., theirs].to(self.device)
        self.held[module] = other.held[other_module].to(self.device)
        self.switches[module].in_fp8 = other.switches[other_module].in_fp8
        self.has_scales |= other.has_scales
        self.notices.see_load(self)


def tensor_name(path: str, role: Role) -> str:
    """``<module path>.<role>``; just the role where the converted module is the root itself."""
    return f"{path}.{role}" if path else role
