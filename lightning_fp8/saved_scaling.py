"""A scaling state as plain dicts and tensors, and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_fp8.formats import ROLES

if TYPE_CHECKING:
    from lightning_fp8.scaling import ScalingState

TENSORS = ("amax", "amax_history", "scale", "nonfinite_steps")


def to_entries(state: ScalingState) -> dict[str, dict[str, Tensor]]:
    """See :meth:`ScalingState.state_dict`."""
    amax, history, scale, nonfinite = (getattr(state, field).detach().to("cpu", copy=True) for field in TENSORS)
    # One entry is pushed at a time from the front, so the filled part is as long as the number of non-zero entries.
    longest = int((history > 0).sum(dim=0).max()) if len(state.names) else 0
    columns = history[:longest].t().contiguous()
    return {
        name: {
            "amax": amax[row],
            "amax_history": columns[row],
            "scale": scale[row],
            "nonfinite_steps": nonfinite[row],
            "in_fp8": torch.tensor(state.switches[row // len(ROLES)].in_fp8),
        }
        for row, name in enumerate(state.names)
    }


@torch.no_grad()
def from_entries(state: ScalingState, entries: Mapping[str, Mapping[str, Tensor]]) -> None:
    """See :meth:`ScalingState.load_state_dict`; changes nothing where it raises."""
    _check_names(state.names, entries)
    for name in state.names:
        _check_entry(name, entries[name])
    history = torch.zeros(state.amax_history.shape)
    for row, name in enumerate(state.names):
        newest = entries[name]["amax_history"][: len(history)]
        history[: len(newest), row] = newest
    state.amax_history.data.copy_(history)
    for field in ("amax", "scale", "nonfinite_steps"):
        values = [entries[name][field].reshape(()).cpu() for name in state.names]
        getattr(state, field).data.copy_(torch.stack(values))
    for switch, first in zip(state.switches, state.names[:: len(ROLES)], strict=True):
        # checkpoints of 0.3.0 and before do not have it
        switch.in_fp8 = bool(entries[first].get("in_fp8", True))


def _check_names(names: Sequence[str], entries: Mapping[str, Any]) -> None:
    known = set(names)
    missing = [name for name in names if name not in entries]
    unexpected = [name for name in entries if name not in known]
    if missing or unexpected:
        raise ValueError(
            "The scaling state does not fit this model."
            + _listing("In the model but not in the checkpoint", missing)
            + _listing("In the checkpoint but not in the model", unexpected)
            + " Convert the same modules as in the run that saved it (`ignore_modules`,"
            " `min_features`), or load the weights only."
        )


def _check_entry(name: str, entry: Any) -> None:
    values = entry if isinstance(entry, Mapping) else {}
    fields = (*TENSORS, "in_fp8") if "in_fp8" in values else TENSORS
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
    history, scale = values["amax_history"], values["scale"]
    if not (history.isfinite().all() and (history >= 0).all() and scale.isfinite().all() and (scale > 0).all()):
        largest = history.max().item() if history.numel() else 0
        raise ValueError(
            f"The scaling state of {name!r} must have a finite scale above 0 and finite amaxes, got the scale"
            f" {scale.item()} and amaxes up to {largest}."
        )


def _has_its_shape(field: str, tensor: Tensor) -> bool:
    return not tensor.is_complex() and (tensor.dim() == 1 if field == "amax_history" else tensor.numel() == 1)


def _listing(title: str, names: Sequence[str], most: int = 10) -> str:
    if not names:
        return ""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f" {title}: {', '.join(names[:most])}{more}."
