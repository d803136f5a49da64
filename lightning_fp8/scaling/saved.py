"""A scaling state as plain dicts and tensors, and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from lightning_fp8.scaling.state import ScalingState

# the values of a tensor that has not been recorded
_NO_SCALES = {"amax": torch.zeros(()), "amax_history": torch.zeros(0), "scale": torch.ones(())}
TENSORS = ("amax", "amax_history", "scale", "nonfinite_steps")
# for scales of layers that are not converted here
REMEDY = (
    "Convert the same modules as in the run that saved it (`ignore_modules`, `min_features`, `adapters`; versions up to"
    " 0.5 converted layers with fewer than 16 features too, as `min_features=0` does), or load the weights only."
)


def to_entries(state: ScalingState) -> dict[str, dict[str, Tensor]]:
    """See :meth:`ScalingState.state_dict`."""
    state.fill_followers(state.amax.data)
    amax, history, scale, nonfinite = (getattr(state, field).detach().to("cpu", copy=True) for field in TENSORS)
    # One entry is pushed at a time from the front, so the filled part is as long as the number of non-zero entries.
    longest = int((history > 0).sum(dim=0).max()) if state.delayed else 0
    columns = history[:longest].t().contiguous()
    has_scales = state.recipe.from_history
    switches = [state.switches[state.module_of(row)] for row in range(state.delayed)]
    return {
        name: {
            **({"amax": amax[row], "amax_history": columns[row], "scale": scale[row]} if has_scales else {}),
            "nonfinite_steps": nonfinite[row],
            "in_fp8": torch.tensor(switches[row].in_fp8),
            **({"is_current": torch.tensor(switches[row].is_current)} if has_scales else {}),
        }
        for row, name in enumerate(state.names[: state.delayed])
    }


@torch.no_grad()
def from_entries(state: ScalingState, entries: Mapping[str, Mapping[str, Tensor]]) -> None:
    """See :meth:`ScalingState.load_state_dict`; changes nothing if it raises."""
    names = state.names[: state.delayed]
    _check_names(names, entries, of_weights=state.names[state.delayed :])
    for name in names:
        _check_entry(name, entries[name])
    entries = {name: {**_NO_SCALES, **entries[name]} for name in names}
    history = torch.zeros(state.amax_history.shape)
    for row, name in enumerate(names):
        newest = entries[name]["amax_history"][: len(history)]
        history[: len(newest), row] = newest
    state.amax_history.data.copy_(history)
    for field in ("amax", "scale", "nonfinite_steps"):
        values = [entries[name][field].reshape(()).cpu() for name in names]
        getattr(state, field).data[: state.delayed] = torch.stack(values).to(state.device)
    for module in range(len(state.module_names)):
        # checkpoints up to 0.3.0 lack `in_fp8`; those up to 0.5.0 and those of other recipes lack `is_current`
        state.switches[module].in_fp8 = bool(entries[names[module]].get("in_fp8", True))
        state.switches[module].is_current = bool(entries[names[module]].get("is_current", False))


def _check_names(names: Sequence[str], entries: Mapping[str, Any], of_weights: Sequence[str]) -> None:
    # checkpoints up to 0.5.0 have entries of weights
    known = {*names, *of_weights}
    missing = [name for name in names if name not in entries]
    unexpected = [name for name in entries if name not in known]
    if missing or unexpected:
        raise ValueError(
            "The scaling state does not fit this model."
            + _listing("In the model but not in the checkpoint", missing)
            + _listing("In the checkpoint but not in the model", unexpected)
            + f" {REMEDY}"
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
    misshapen = [field for field in fields if not _has_its_shape(field, values[field])]
    if misshapen:
        found = ", ".join(f"{field} {values[field].dtype} {list(values[field].shape)}" for field in misshapen)
        raise ValueError(
            f"The scaling state of {name!r} must hold single real numbers, and a list of them in `amax_history`, got"
            f" {found}."
        )
    # in float32, as in the state: a float64 value may become inf or 0
    amax, history, scale = (values[field].detach().cpu().float() for field in ("amax", "amax_history", "scale"))
    filled = history > 0
    if not (scale.isfinite().all() and (scale > 0).all()):
        raise ValueError(f"The scaling state of {name!r} must have a finite scale above 0, got {scale.item()}.")
    if not history.isfinite().all() or (history < 0).any() or (filled[1:] & ~filled[:-1]).any():
        raise ValueError(
            f"The scaling state of {name!r} must have a history of finite amaxes above 0, newest first and zeros only"
            f" behind them, got {history[:6].tolist()}{'' if len(history) <= 6 else ' ...'}."
        )
    # inf and NaN are valid recorded values, which the next update leaves out
    if (amax < 0).any():
        raise ValueError(f"The scaling state of {name!r} must have an amax of at least 0, got {amax.item()}.")
    steps = values["nonfinite_steps"].item()
    if not 0 <= steps < 2**63 or steps != int(steps):
        raise ValueError(f"The scaling state of {name!r} must count its `nonfinite_steps`, got {steps}.")


def _has_its_shape(field: str, tensor: Tensor) -> bool:
    return not tensor.is_complex() and (tensor.dim() == 1 if field == "amax_history" else tensor.numel() == 1)


def _listing(title: str, names: Sequence[str], most: int = 10) -> str:
    if not names:
        return ""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f" {title}: {', '.join(names[:most])}{more}."
