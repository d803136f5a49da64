"""Scales: the recipe, the state where they live and change, its place in checkpoints, and what users are told of it."""

from lightning_fp8.scaling.recipe import DelayedScaling
from lightning_fp8.scaling.state import ScalingState

__all__ = ["DelayedScaling", "ScalingState"]
