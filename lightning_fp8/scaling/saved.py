"""A scaling state as plain dicts and tensors, and back."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_fp8.scaling.precision import BF16, Choice
from lightning_fp8.scaling.scales import Scales

# the values of a tensor that has not been recorded
_NO_SCALES = {"amax": torch.zeros(()), "amax_history": torch.zeros(0), "scale": torch.ones(())}
TENSORS = ("amax", "amax_history", "scale", "nonfinite_steps")
_DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.bool,
)  # fmt: skip
# for scales of layers that are not converted here
REMEDY = (
    "Convert the same modules as in the run that saved it (`ignore_modules`, `min_features`, `adapters`; versions up to"
    " 0.5 converted layers with fewer than 16 features too, as `min_features=0` does), or load the weights only."
)


def to_entries(state: Scales) -> dict[str, dict[str, Tensor]]:
    """See :meth:`ScalingState.state_dict`."""
    state.fill_sharers(state.amax.data)
    amax, history, scale, nonfinite = (getattr(state, field).detach().to("cpu", copy=True) for field in TENSORS)
    has_scales = state.recipe.from_history
    if has_scales and not state.model.look():
        for values, empty in ((amax, 0), (history, 0), (scale, 1)):
            values.fill_(empty)
    # One entry is pushed at a time from the front, so the filled part is as long as the number of non-zero entries.
    longest = int((history > 0).sum(dim=0).max()) if state.delayed else 0
    columns = history[:longest].t().contiguous()
    moves = [state.precisions[state.module_of(row)].of("move") for row in range(state.delayed)]
    return {
        name: {
            **({"amax": amax[row], "amax_history": columns[row], "scale": scale[row]} if has_scales else {}),
            "nonfinite_steps": nonfinite[row],
            "in_fp8": torch.tensor(not moves[row].is_bf16, device="cpu"),
            **({"is_current": torch.tensor(moves[row].is_current, device="cpu")} if has_scales else {}),
        }
        for row, name in enumerate(state.names[: state.delayed])
    }


@torch.no_grad()
def from_entries(state: Scales, entries: Mapping[str, Mapping[str, Tensor]]) -> None:
    """See :meth:`ScalingState.load_state_dict`; changes nothing if it raises."""
    names = state.names[: state.delayed]
    if misfit := _misfit(state, entries):
        raise ValueError(f"The scaling state does not fit this model.{misfit} {REMEDY}")
    for name in names:
        _check_entry(name, entries[name])
    # the first names are those of the modules' inputs
    state.switch("move", {module: _move(entries[name]) for module, name in enumerate(names[: len(state.module_names)])})
    entries = {name: {**_NO_SCALES, **entries[name]} for name in names}
    history = torch.zeros_like(state.amax_history, device="cpu")
    for row, name in enumerate(names):
        newest = entries[name]["amax_history"][: len(history)]
        history[: len(newest), row] = newest
    state.amax_history.data.copy_(history)
    for field in ("amax", "scale", "nonfinite_steps"):
        values = [entries[name][field].reshape(()).cpu() for name in names]
        getattr(state, field).data[: state.delayed] = torch.stack(values).to(state.device)


def _move(entry: Mapping[str, Tensor]) -> Choice:
    """What the layer of a saved tensor was moved to."""
    # checkpoints up to 0.3.0 lack `in_fp8`; those up to 0.5.0 and those of other recipes lack `is_current`
    in_fp8, is_current = bool(entry.get("in_fp8", True)), bool(entry.get("is_current", False))
    return Choice(is_current=is_current) if in_fp8 else BF16


def load_entries(state: Scales, entries: Mapping[str, Mapping[str, Tensor]], strict: bool, prefix: str = "") -> None:
    """Load the scales of a checkpoint into a state, those of the part of the model whose names begin with ``prefix``.

    Scales of other layers are an error if ``strict``; else one warning names them, and they are skipped.
    """
    if not strict:
        if misfit := _misfit(state, entries, prefix):
            warnings.warn(
                "lightning_fp8: a checkpoint has the FP8 scales of other layers than the model. Those of the layers in"
                f" both are loaded, the others are skipped.{misfit}",
                stacklevel=2,
            )
        common_entries = {name: entries[name] for name in state.names[: state.delayed] if name in entries}
        entries = {**to_entries(state), **common_entries}
    state.load_state_dict(entries)


def _misfit(state: Scales, entries: Mapping[str, Any], prefix: str = "") -> str:
    """The names that the entries and a state do not share, in words; empty if there are none."""
    missing = [name for name in state.names[: state.delayed] if name not in entries and name.startswith(prefix)]
    # checkpoints up to 0.5.0 have entries of weights
    names = set(state.names)
    unexpected = [name for name in entries if name not in names]
    return _listing("In the model but not in the checkpoint", missing) + _listing(
        "In the checkpoint but not in the model", unexpected
    )


def _check_entry(name: str, entry: Any) -> None:
    values = entry if isinstance(entry, Mapping) else {}
    # a recipe without histories saves no scales
    if "nonfinite_steps" in values and values.keys().isdisjoint(_NO_SCALES):
        values = {**_NO_SCALES, **values}
    fields = (*TENSORS, *(field for field in ("in_fp8", "is_current") if field in values))
    wrong = [field for field in fields if not isinstance(values.get(field), Tensor)]
    if wrong:
        raise ValueError(f"The scaling state of {name!r} lacks the tensors {', '.join(wrong)}.")
    unfit = [field for field in fields if not _is_fit(field, values[field])]
    if unfit:
        raise ValueError(
            f"The scaling state of {name!r} must hold single real numbers, and a list of them in `amax_history`, as"
            f" tensors with all of their values, got {', '.join(_in_words(field, values[field]) for field in unfit)}."
        )
    # in float32, as in the state: a float64 value may become inf or 0
    amax, history, scale = (values[field].detach().cpu().float() for field in ("amax", "amax_history", "scale"))
    filled, steps = history > 0, values["nonfinite_steps"].item()
    is_history = history.isfinite().all() and not (history < 0).any() and not (filled[1:] & ~filled[:-1]).any()
    shown = f"{history[:6].tolist()}{'' if len(history) <= 6 else ' ...'}"
    rules = {
        # the inverse of a smaller scale may not be finite; an update gives none below 448 divided by the largest number
        f"have a scale that is a positive normal fp32 number, got {scale.item()}": (
            torch.finfo(torch.float32).tiny <= scale.item() < torch.inf
        ),
        f"have a history of finite amaxes above 0, newest first and zeros only behind them, got {shown}": is_history,
        # inf and NaN are valid recorded values, which the next update leaves out
        f"have an amax of at least 0, got {amax.item()}": not (amax < 0).any(),
        f"count its `nonfinite_steps`, got {steps}": 0 <= steps < 2**63 and steps == int(steps),
    }
    for rule, is_met in rules.items():
        if not is_met:
            raise ValueError(f"The scaling state of {name!r} must {rule}.")


def _is_fit(field: str, tensor: Tensor) -> bool:
    """Whether a tensor can be the value of its field; reads no values, which a file may claim without having them."""
    if type(tensor) is not Tensor or tensor.is_nested or tensor.layout != torch.strided or tensor.is_meta:
        return False
    has_its_shape = tensor.dim() == 1 if field == "amax_history" else tensor.numel() == 1
    is_whole = tensor.untyped_storage().nbytes() >= tensor.numel() * tensor.element_size()
    return has_its_shape and is_whole and tensor.dtype in _DTYPES


def _in_words(field: str, tensor: Tensor) -> str:
    shape = "nested" if tensor.is_nested else list(tensor.shape)
    return f"{field} {tensor.dtype} {shape} ({tensor.layout}, {tensor.device})"


def _listing(title: str, names: Sequence[str], most: int = 10) -> str:
    if not names:
        return ""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    # a file may have escape sequences in its names
    return f" {title}: {', '.join(map(repr, names[:most]))}{more}."
