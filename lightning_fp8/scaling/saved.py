"""A scaling state as plain dicts and tensors, and back.

An entry has the same fields and shapes after any number of steps, so ``torch.distributed.checkpoint`` can load a file
into a model that has made no steps. Scales follow from histories, so they are not saved.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_fp8.scaling.precision import BF16, Choice

if TYPE_CHECKING:
    from lightning_fp8.scaling.state import ScalingState

# the fields of every entry, and the fields under recipes with histories
_ALWAYS = {"nonfinite_steps", "in_fp8"}
_WITH_HISTORIES = _ALWAYS | {"amax_history", "is_current"}
_DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.bool,
)  # fmt: skip
# for scales of layers that are not converted here
REMEDY = (
    "Convert the same modules as in the run that saved it (`ignore_modules`, `min_features`), or load the weights only."
)


def to_entries(state: ScalingState) -> dict[str, dict[str, Tensor]]:
    """See :meth:`ScalingState.state_dict`."""
    columns = state.amax_history.detach().t().to("cpu", copy=True).contiguous()
    nonfinite = state.nonfinite_steps.detach().to("cpu", copy=True)
    entries: dict[str, dict[str, Tensor]] = {}
    for row, name in enumerate(state.names[: state.delayed]):
        move = state.precisions[state.module_of(row)].of("move")
        moved = {"in_fp8": not move.is_bf16, "is_current": move.is_current}
        flags = {field: torch.tensor(flag, device="cpu") for field, flag in moved.items()}
        entry = {"nonfinite_steps": nonfinite[row], "amax_history": columns[row], **flags}
        entries[name] = state.recipe.saved(entry)
    return entries


@torch.no_grad()
def from_entries(state: ScalingState, entries: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Mapping[str, Tensor]]:
    """See :meth:`ScalingState.load_state_dict`; changes nothing if it raises. Returns the entries of other layers."""
    entries = _checked(entries)
    names = state.names[: state.delayed]
    only_here = [name for name in names if name not in entries]
    only_there = [name for name in entries if name not in names]
    differences = _listing("Only in the file", only_there) + _listing("Only in the model", only_here)
    if len(only_here) == len(names):
        raise ValueError(f"The scaling state is that of another model: no layer is in both.{differences} {REMEDY}")
    load_rows(state, dict(enumerate(entries.get(name, {}) for name in names)))
    if differences:
        warnings.warn(
            "lightning_fp8: a scaling state has been loaded for the layers that are in both. Those only in the model"
            f" begin without histories; those only in the file wait for layers of these names.{differences}",
            stacklevel=3,
        )
    return {name: entries[name] for name in only_there}


def load_rows(state: ScalingState, entries: Mapping[int, Mapping[str, Tensor]]) -> None:
    """Load checked entries, by row; an empty one empties the row. Scales are not computed anew."""
    # the entry of its input says what a layer was moved to
    moves = {row: _move(entry) for row, entry in entries.items() if entry and row < len(state.module_names)}
    state.switch("move", moves)
    rows = list(entries)
    history = torch.zeros(len(state.amax_history), len(rows), dtype=torch.float32, device="cpu")
    for column, entry in enumerate(entries.values()):
        newest = entry.get("amax_history", history.new_zeros(0))[: len(history)]
        history[: len(newest), column] = newest
    zero = torch.zeros((), dtype=torch.int64, device="cpu")
    nonfinite = torch.stack([entry.get("nonfinite_steps", zero).reshape(()).cpu() for entry in entries.values()])
    state.amax_history.data[:, rows] = history.to(state.device)
    state.nonfinite_steps.data[rows] = nonfinite.to(state.device, torch.int64)
    state.amax.data[rows] = 0


def _move(entry: Mapping[str, Tensor]) -> Choice:
    """What the layer of a saved tensor was moved to."""
    return Choice(is_current=bool(entry.get("is_current", False))) if entry["in_fp8"] else BF16


def _checked(entries: Any) -> dict[str, Mapping[str, Tensor]]:
    if not isinstance(entries, Mapping) or not all(isinstance(entry, Mapping) for entry in entries.values()):
        raise ValueError(
            "A scaling state must map names of tensors to their entries, as `scaling_state(model).state_dict()` does,"
            f" got {_of_what(entries)}."
        )
    for name, entry in entries.items():
        _check_entry(name, entry)
    return dict(entries)


def _listed(fields: Iterable[Any]) -> str:
    return ", ".join(repr(field) for field in sorted(map(str, fields)))


def _of_what(value: Any) -> str:
    if not isinstance(value, Mapping):
        return type(value).__name__
    return f"a mapping of {', '.join(f'{key!r} to {type(part).__name__}' for key, part in list(value.items())[:3])}"


def _check_entry(name: Any, entry: Mapping[str, Any]) -> None:
    if set(entry) not in (_ALWAYS, _WITH_HISTORIES):
        raise ValueError(
            f"The scaling state of {name!r} is of another form: it has the fields {_listed(entry)}, and this version"
            f" reads {_listed(_WITH_HISTORIES)} or, of a recipe without histories, {_listed(_ALWAYS)}. Load the weights"
            " of such a file only; the histories begin anew."
        )
    unfit = [field for field in entry if not _is_fit(field, entry[field])]
    if unfit:
        raise ValueError(
            f"The scaling state of {name!r} must hold single real numbers, and a list of them in `amax_history`, as"
            f" tensors with all of their values, got {', '.join(_in_words(field, entry[field]) for field in unfit)}."
        )
    steps = entry["nonfinite_steps"].item()
    if not (0 <= steps < 2**63 and steps == int(steps)):
        raise ValueError(f"The scaling state of {name!r} must count its `nonfinite_steps`, got {steps}.")
    # in float32, as in the state: a float64 value may become inf or 0
    history = entry.get("amax_history", torch.zeros(0, device="cpu")).detach().cpu().float()
    filled = history > 0
    if not history.isfinite().all() or (history < 0).any() or (filled[1:] & ~filled[:-1]).any():
        shown = f"{history[:6].tolist()}{'' if len(history) <= 6 else ' ...'}"
        raise ValueError(
            f"The scaling state of {name!r} must have a history of finite amaxes above 0, newest first and zeros only"
            f" behind them, got {shown}."
        )


def _is_fit(field: str, tensor: Any) -> bool:
    """Whether a tensor can be the value of its field. Reads no values: a file may declare values that it lacks."""
    if type(tensor) is not Tensor or tensor.is_nested or tensor.layout != torch.strided or tensor.is_meta:
        return False
    has_its_shape = tensor.dim() == 1 if field == "amax_history" else tensor.numel() == 1
    is_whole = tensor.untyped_storage().nbytes() >= tensor.numel() * tensor.element_size()
    return has_its_shape and is_whole and tensor.dtype in _DTYPES


def _in_words(field: str, tensor: Any) -> str:
    if not isinstance(tensor, Tensor):
        return f"{field} {type(tensor).__name__}"
    shape = "nested" if tensor.is_nested else list(tensor.shape)
    return f"{field} {tensor.dtype} {shape} ({tensor.layout}, {tensor.device})"


def _listing(title: str, names: Sequence[str], most: int = 10) -> str:
    if not names:
        return ""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    # a file may have escape sequences in its names
    return f" {title}: {', '.join(map(repr, names[:most]))}{more}."
