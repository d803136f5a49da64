"""Statistics of the tensors of a scaling state: scales, amaxes, headroom, and fractions of lost numbers."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lightning_fp8.scaling.state import LAYOUT, ScalingState

QUANTITIES = (
    "scale",
    "amax",
    "amax_history_max",
    "headroom_bits",
    "saturated_fraction",
    "underflowed_fraction",
    "nonfinite_steps",
)


def tensor_statistics(state: ScalingState, reduce: Callable[[Tensor, str], Tensor]) -> dict[str, Tensor]:
    """Each of ``QUANTITIES`` as ``[R] float64`` on the CPU, NaN where a tensor does not have it; under recipes with
    blocks also ``smallest_exponent`` and ``largest_exponent``.

    It takes one copy from the device.

    Args:
        state: the scaling state; fractions and exponents come from ``state.cast_counts``.
        reduce: takes a tensor that this process has counted, and ``"sum"`` or ``"max"``; returns the sum or maximum
            over all processes. Amaxes are already reduced.
    """
    of_weights = state.amax[state.delayed :]
    columns = (
        state.scale,
        torch.cat([state.amax_history[0], of_weights]),
        torch.cat([state.amax_history.amax(dim=0), torch.full_like(of_weights, float("nan"))]),
        state.nonfinite_steps,
        state.fp8_max,
        *reduce(cast_counts(state), "sum").unbind(dim=1),
        *_exponents(state, reduce),
    )
    copied = torch.stack([column.double() for column in columns]).cpu()
    scale, amax, largest, nonfinite, fp8_max, numbers, saturated, nonzero, underflowed, *exponents = copied
    nothing = torch.full_like(scale, float("nan"))
    quantities = {
        "scale": scale,
        "amax": amax,
        "amax_history_max": largest,
        # a weight has current scaling, so it has no history and no headroom
        "headroom_bits": headroom_bits(fp8_max, amax, scale).where(largest.isfinite(), nothing),
        # 0 / 0 is NaN: the tensor was not cast
        "saturated_fraction": saturated / numbers,
        "underflowed_fraction": torch.where(numbers > 0, underflowed / nonzero.clamp(min=1), nothing),
        "nonfinite_steps": nonfinite,
    }
    for name, sign, ends in zip(("smallest_exponent", "largest_exponent"), (-1, 1), exponents):
        quantities[name] = torch.where(ends.isfinite(), sign * ends, nothing)
    # the last values of a layer that fell back say nothing about the run
    in_fp8 = state.rows_in_fp8
    return {quantity: values.where(in_fp8, nothing) for quantity, values in quantities.items()}


def _exponents(state: ScalingState, reduce: Callable[[Tensor, str], Tensor]) -> tuple[Tensor, ...]:
    """The two columns of ``state.cast_counts.exponents``; none if no cast is in blocks."""
    exponents = state.cast_counts.exponents
    if exponents is None:
        return ()
    return state.recipe.scaling("input").exponent_columns(lambda: reduce(state.fill_sharers(exponents), "max"))


def cast_counts(state: ScalingState) -> Tensor:
    """The values of ``state.cast_counts``, ``[R, 4] int64``, zeros if counting is off; a shared input has the
    same counts in each of its layers."""
    return _of_sharers(state, state.cast_counts.values, 4, torch.int64)


def cast_noise(state: ScalingState) -> Tensor:
    """The values of ``state.cast_counts.noise``, ``[R, 2] float64``; see :func:`cast_counts`."""
    return _of_sharers(state, state.cast_counts.noise, 2, torch.float64)


def _of_sharers(state: ScalingState, counted: Tensor | None, columns: int, dtype: torch.dtype) -> Tensor:
    if counted is None:
        return torch.zeros(len(state.names), columns, dtype=dtype, device=state.device)
    return state.fill_sharers(counted)


def headroom_bits(fp8_max: Tensor, amax: Tensor, scale: Tensor) -> Tensor:
    """``log2(FP8_MAX / (amax * scale))``, ``[R]`` like each argument; NaN where there is no amax yet."""
    return (fp8_max / (amax * scale)).log2().where(amax > 0, float("nan"))


def by_role(values: Tensor) -> dict[str, Tensor]:
    """Split values of all tensors, ``[R]``, by role, in module order. Drops NaN, and roles without values."""
    chunks = zip(LAYOUT, values.chunk(len(LAYOUT)), strict=True)
    return {role: present for role, some in chunks if len(present := some[~some.isnan()])}


def scales_in_words(state: ScalingState) -> list[str]:
    """The scales of the first module's three tensors, one line each; skips a tensor that was not cast."""
    lines = []
    for role in LAYOUT:
        row = state.row_of(0, role)
        amax, scale, fp8_max = (float(x[row]) for x in (state.amax, state.scale, state.fp8_max))
        largest = float(state.amax_history[:, row].max()) if row < state.delayed else amax
        if largest > 0:
            when = "in the window" if row < state.delayed else "now"
            lines.append(
                f"{state.names[row]}: the largest value {when}, {largest:.3g}, times the scale, {scale:.3g}, is"
                f" {largest * scale:.0f}, and {state.recipe.format_of(role).name.upper()} holds up to {fp8_max:.0f}"
            )
    return lines
