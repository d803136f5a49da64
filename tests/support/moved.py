"""Layers that are moved as `Fp8Monitor` moves them."""

from __future__ import annotations

from lightning_fp8.scaling import ScalingState
from lightning_fp8.scaling.precision import BF16, Choice


def to_current(state: ScalingState, *modules: int) -> None:
    """To the scales of their own values."""
    state.switch("move", dict.fromkeys(modules, Choice(is_current=True)))


def to_bf16(state: ScalingState, *names: str) -> None:
    state.switch("move", {state.module_names.index(name): BF16 for name in names})
