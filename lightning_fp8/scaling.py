"""The scaling state of a model: the one place where scales live and change."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_fp8.formats import ROLES, Role
from lightning_fp8.recipe import DelayedScaling

_TENSORS = ("amax", "amax_history", "scale", "nonfinite_steps")
_handles = itertools.count(1)
_states: weakref.WeakValueDictionary[int, ScalingState] = weakref.WeakValueDictionary()


class ScalingState:
    """Scales and amax histories of all R tensors of a model together, three tensors for each converted module.

    Forward and backward only read ``scale`` and only max into ``amax``; everything else happens in :meth:`update`,
    once per optimizer step. So activation recomputation sees the scales of the first pass, and recording a tensor twice
    changes nothing. The state is not made of module buffers: ``.to(bfloat16)`` would cast them, DDP would broadcast
    them, and the model's ``state_dict`` would no longer be the plain model's.

    Args:
        module_names: path of each converted module, in order.
        recipe: the recipe that :meth:`update` follows.
        device: where the tensors live.

    Attributes:
        names: R names, ``<module path>.<role>`` with the roles input, weight and grad_output.
        fp8_max: ``[R] float32``, the largest value of each tensor's format; ``fp8_max_on_host`` the same on the CPU.
        amax: ``[R] float32``, largest absolute value recorded since the last update.
        amax_history: ``[amax_history_len, R] float32``, newest first; 0 where nothing has been pushed yet.
        scale: ``[R] float32``, multiplier before the cast; 1 until a tensor has a history.
        nonfinite_steps: ``[R] int64``, updates at which the tensor's amax was inf or NaN and was left out.
        counts: ``[R, 4] int64`` while counting, else None: numbers, saturated ones, numbers other than zero, and
            those of them that became zero, of all casts that recorded since :meth:`start_counting`.
        version: counts the changes of ``scale``; what was cast under an older version is stale.
        handle: by which operators find the state, see :func:`state_of`.
    """

    counts: Tensor | None

    def __init__(self, module_names: Sequence[str], recipe: DelayedScaling, device: torch.device | str = "cpu") -> None:
        self.recipe = recipe
        self.module_names = tuple(module_names)
        self.names = tuple(tensor_name(path, role) for path in module_names for role in ROLES)
        count = len(self.names)
        # A state made inside `torch.inference_mode()` could never be updated outside of it.
        with torch.inference_mode(False):
            fp8_max = [recipe.format_of(role).max for _ in module_names for role in ROLES]
            self.fp8_max_on_host = torch.tensor(fp8_max, dtype=torch.float32)
            self.fp8_max = self.fp8_max_on_host.to(device)
            self.amax = torch.zeros(count, dtype=torch.float32, device=device)
            self.amax_history = torch.zeros(recipe.amax_history_len, count, dtype=torch.float32, device=device)
            self.scale = torch.ones(count, dtype=torch.float32, device=device)
            self.nonfinite_steps = torch.zeros(count, dtype=torch.int64, device=device)
        self.version = 0
        self._stop_all_counting()
        self._recorded_ahead: set[int] = set()
        self._watch_histories()
        self._take_handle()

    def _take_handle(self) -> None:
        self.handle = next(_handles)
        _states[self.handle] = self

    def __getstate__(self) -> dict[str, Any]:
        # whoever counts is no part of a copy
        return {name: value for name, value in self.__dict__.items() if name not in ("counts", "_counting_for")}

    def __setstate__(self, attributes: dict[str, Any]) -> None:
        # copies and unpickled states record in themselves
        self.__dict__.update(attributes)
        self._stop_all_counting()
        self._watch_histories()
        self._take_handle()

    def __repr__(self) -> str:
        return f"ScalingState({len(self.names)} tensors of {len(self.module_names)} modules, {self.recipe})"

    @property
    def device(self) -> torch.device:
        """Where the tensors live."""
        return self.amax.device

    @torch.no_grad()
    def to(self, device: torch.device | str) -> ScalingState:
        """Move all tensors to ``device`` and return the state. Dtypes never change."""
        with torch.inference_mode(False):
            for field in (*_TENSORS, "fp8_max"):
                setattr(self, field, getattr(self, field).to(device))
            self.counts = None if self.counts is None else self.counts.to(device)
        self._watch_histories()
        self.version += 1
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

    def record_ahead(self, row: int) -> None:
        """The amax of tensor ``row`` has been recorded although its module has not run yet in this step."""
        self._recorded_ahead.add(row)

    def confirm(self, row: int) -> None:
        """The module of tensor ``row`` has run."""
        self._recorded_ahead.discard(row)

    @torch.no_grad()
    def update(self) -> None:
        """Turn the recorded amaxes into the next step's scales. Call once per optimizer step, after backward.

        For each tensor with a finite ``amax > 0``: push ``amax`` into its history, then
        ``scale = FP8_MAX / (m * 2**margin)`` with ``m`` the maximum (or the newest entry) of the history; an infinite
        result becomes the largest finite fp32. A tensor with ``amax == 0`` did not run and keeps everything; one with a
        non-finite ``amax`` keeps everything and counts in ``nonfinite_steps``. ``amax`` is zeroed at the end.

        Under ``torch.distributed`` (and ``reduce_amax``) every rank must call it: one ``all_reduce(MAX)`` of the whole
        vector makes the scales agree bit for bit. Nothing here waits for the device.
        """
        self._forget_unconfirmed()
        self._reduce_amax()
        # By name, as the operators are built on this module. Through `.data`: a compiled graph may hold these for its
        # backward, which reads them as they are then.
        torch.ops.lightning_fp8.update_scales(
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
        self.version += 1

    def _forget_unconfirmed(self) -> None:
        if self._recorded_ahead:
            self.amax[sorted(self._recorded_ahead)] = 0
            self._recorded_ahead.clear()

    def _reduce_amax(self) -> None:
        if self.recipe.reduce_amax and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            # As integers, the bits of non-negative floats order as finite < inf < NaN, so no non-finite value is lost.
            dist.all_reduce(self.amax.view(torch.int32), op=dist.ReduceOp.MAX)

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

    def _stop_all_counting(self) -> None:
        self.counts = None
        self._counting_for: set[int] = set()

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """A copy on the CPU, keyed by tensor name: ``amax``, ``scale``, ``nonfinite_steps`` and the filled part of
        ``amax_history``, newest first. Plain dicts and tensors, so ``torch.load(weights_only=True)`` reads it."""
        amax, history, scale, nonfinite = (getattr(self, field).detach().to("cpu", copy=True) for field in _TENSORS)
        # One entry is pushed at a time from the front, so the filled part is as long as the number of non-zero entries.
        longest = int((history > 0).sum(dim=0).max()) if len(self.names) else 0
        columns = history[:longest].t().contiguous()
        return {
            name: {
                "amax": amax[row],
                "amax_history": columns[row],
                "scale": scale[row],
                "nonfinite_steps": nonfinite[row],
            }
            for row, name in enumerate(self.names)
        }

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Take over the values of :meth:`state_dict`. A shorter window keeps the newest entries.

        Raises:
            ValueError: if the tensors are not the same ones, or an entry is not well formed; the message names them,
                and nothing has been changed.
        """
        missing = [name for name in self.names if name not in state_dict]
        unexpected = [name for name in state_dict if name not in set(self.names)]
        if missing or unexpected:
            raise ValueError(
                "The scaling state does not fit this model."
                + _listing("In the model but not in the checkpoint", missing)
                + _listing("In the checkpoint but not in the model", unexpected)
                + " Convert the same modules as in the run that saved it (`ignore_modules`), or load the weights only."
            )
        fresh = ScalingState(self.module_names, self.recipe, "cpu")
        for row, name in enumerate(self.names):
            _load_row(fresh, row, name, state_dict[name])
        for field in _TENSORS:
            getattr(self, field).data.copy_(getattr(fresh, field))
        self._watch_histories()
        self._recorded_ahead.clear()
        self.version += 1

    def copy_rows(self, row: int, other: ScalingState, other_row: int) -> None:
        """Take over one module's three tensors from another state with the same recipe."""
        mine, theirs = slice(row, row + len(ROLES)), slice(other_row, other_row + len(ROLES))
        for field in _TENSORS:
            getattr(self, field)[..., mine] = getattr(other, field)[..., theirs].to(self.device)


def state_of(handle: int) -> ScalingState | None:
    """The state with this handle; None where it is gone with its model, or the handle is 0.

    Recording goes by handle and not by tensor: to a compiled graph it is no mutation of an input, which would order all
    layers' graphs one after the other and fail where their backward passes interleave. A maximum may be taken twice,
    and in any order, so nothing is lost by that.
    """
    return _states.get(handle)


def amax_of(handle: int, record: bool) -> Tensor | None:
    """The ``amax`` to record in, ``[R] float32``; None where nothing is to be recorded."""
    state = state_of(handle) if record else None
    return None if state is None else state.amax


def tensor_name(path: str, role: Role) -> str:
    """``<module path>.<role>``; just the role where the converted module is the root itself."""
    return f"{path}.{role}" if path else role


def _load_row(state: ScalingState, row: int, name: str, entry: Mapping[str, Any]) -> None:
    wrong = [field for field in _TENSORS if not isinstance(entry.get(field), Tensor)]
    if wrong:
        raise ValueError(f"The scaling state of {name!r} lacks the tensors {', '.join(wrong)}.")
    history = entry["amax_history"].flatten()[: state.recipe.amax_history_len]
    state.amax_history[: len(history), row] = history
    for field in ("amax", "scale", "nonfinite_steps"):
        getattr(state, field)[row] = entry[field].reshape(())


def _listing(title: str, names: Sequence[str], most: int = 10) -> str:
    if not names:
        return ""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f" {title}: {', '.join(names[:most])}{more}."
