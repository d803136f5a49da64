"""What a forward of a converted layer is part of, which decides how its tensors are cast."""

from __future__ import annotations

from enum import Enum

from lightning_fp8.ops.formats import Role


class Phase(Enum):
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


def uses_training_scale(phase: Phase, role: Role) -> bool:
    """Whether a tensor is scaled as the recipe says for training.

    A gradient that is not recorded belongs to another loss than those of training, as in saliency, attacks and
    guidance, and a history of theirs would clip it.
    """
    return phase is Phase.TRAINING or (phase is Phase.REPLAY and role == "input")
