"""FP8 in the training loops of other libraries: :class:`Fp8Callback` for ``transformers.Trainer``."""

from lightning_fp8.integrations.transformers_trainer import Fp8Callback

__all__ = ["Fp8Callback"]
