"""Example models and data: ordinary Lightning classes without FP8 code."""

from lightning_fp8.examples.byte_gpt import ByteGPT
from lightning_fp8.examples.classifiers import EncoderClassifier, VisionTransformer
from lightning_fp8.examples.digits import Digits
from lightning_fp8.examples.loggers import tensorboard_if_present
from lightning_fp8.examples.stdlib_text import StdlibText

__all__ = ["ByteGPT", "Digits", "EncoderClassifier", "StdlibText", "VisionTransformer", "tensorboard_if_present"]
