"""Moves single layers of a converted model out of FP8."""

from __future__ import annotations

from torch import nn

from lightning_fp8.conversion.convert import scaling_state


def fall_back(module: nn.Module, name: str) -> None:
    """Run one layer's GEMMs without FP8 from its next forward on: in bf16 under autocast, else in its input's dtype.

    The layer keeps its scales. ``scaling_state(model).fallbacks`` names such layers, and checkpoints record them. To
    undo it, call ``unconvert`` and then ``convert``.

    Args:
        module: a converted model.
        name: path of the layer; for an attention, that of one projection, such as ``"blocks.3.attn.in_proj"``.

    Raises:
        ValueError: if the model is not converted, no converted layer has this name, or its weight is gathered in FP8.
    """
    scaling_state(module).fall_back(name)
