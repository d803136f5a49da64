"""The phase of a forward: training, replay or evaluation. It decides how tensors are cast."""

from __future__ import annotations

from enum import Enum

from lightning_fp8.ops.formats import Role
from lightning_fp8.scalings.operand import Casting


# a `str`, because its hash does not run in Python code; slots are looked up by phase
class Phase(str, Enum):
    """What a forward and its backward belong to.

    Attributes:
        TRAINING: training with gradients. Tensors are cast by histories, and amaxes recorded.
        REPLAY: training without gradients, as in the first pass of reentrant checkpointing and in Monte Carlo dropout.
            Tensors are cast by the same histories, so that recomputation is exact, and nothing is recorded.
        EVALUATION: each tensor is cast by its own values, and nothing is recorded.
    """

    TRAINING = "training"
    REPLAY = "replay"
    EVALUATION = "evaluation"


def casting_of(phase: Phase, role: Role) -> Casting:
    """Which scale a tensor is cast with.

    A gradient that is not recorded belongs to a loss other than the training loss, as in saliency, attacks and
    guidance. The history of training gradients could clip it.
    """
    if role == "weight":
        return Casting.OWN
    is_training = phase is Phase.TRAINING or (phase is Phase.REPLAY and role == "input")
    return Casting.HISTORY if is_training else Casting.OWN_POWER_OF_2
