"""Scales: the recipe, the state that holds and updates them, its form in checkpoints, and warnings about it."""

from lightning_fp8.scaling.state import ScalingState
from lightning_fp8.scalings.per_tensor import DelayedScaling

__all__ = ["DelayedScaling", "ScalingState"]
