"""What a forward of a converted layer is part of, which decides how its tensors are cast."""

from __future__ import annotations

from enum import Enum

from lightning_fp8.ops.formats import Role
from lightning_fp8.scalings.operand import Casting


# a `str`, whose hash does not run in Python: slots are found by it
class Phase(str, Enum):
    """What a forward, and its backward, are part of.

    Attributes:
        TRAINING: training with gradients. It casts by histories, and records amaxes.
        REPLAY: training without gradients, as in the first pass of reentrant checkpointing and in Monte Carlo dropout.
            It casts by the same histories, so that recomputation is exact, and records nothing.
        EVALUATION: it casts each tensor by its own values, and records nothing.
    """

    TRAINING = "training"
    REPLAY = "replay"
    EVALUATION = "evaluation"


def casting_of(phase: Phase, role: Role) -> Casting:
    """Which scale a tensor is cast with.

    A gradient that is not recorded belongs to another loss than those of training, as in saliency, attacks and
    guidance, and a history of theirs would clip it.
    """
    if role == "weight":
        return Casting.OWN
    is_training = phase is Phase.TRAINING or (phase is Phase.REPLAY and role == "input")
    return Casting.HISTORY if is_training else Casting.OWN_POWER_OF_2
