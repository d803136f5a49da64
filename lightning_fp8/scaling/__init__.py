"""Scales: the recipe, the state that holds and updates them, its form in checkpoints, and warnings about it."""

from lightning_fp8.scaling.recipe import DelayedScaling
from lightning_fp8.scaling.state import ScalingState

__all__ = ["DelayedScaling", "ScalingState"]
