"""Tensors whose blocks differ, a layer, and quantization in blocks from its definition."""

from __future__ import annotations

import numpy as np
import torch
from fp8_numpy import cast_in_blocks, code_values
from torch import Tensor, nn

from lightning_fp8 import BlockScaling, convert
from lightning_fp8.scalings.recipe import Recipe


def spread(*shape: int, seed: int) -> Tensor:
    """Numbers whose blocks differ by powers of ten: a single scale for all of them would lose most."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator) * 10.0 ** torch.randint(-3, 4, shape, generator=generator)


def in_fp8(x: Tensor, rows: int, recipe: BlockScaling) -> np.ndarray:
    """A tensor quantized to FP8 in blocks of ``rows`` x 128, in fp64."""
    codes, scale_inv = cast_in_blocks(x.detach().float().numpy(), "e4m3", rows, power_of_2=recipe.power_of_2_scales)
    scales = scale_inv.astype(np.float64).repeat(rows, 0).repeat(128, 1)[: x.shape[0], : x.shape[1]]
    return code_values("e4m3")[codes] * scales


def linear(recipe: Recipe, inputs: int, outputs: int, bias: bool = False) -> nn.Linear:
    torch.manual_seed(1)
    return convert(nn.Linear(inputs, outputs, bias), recipe, min_features=0)  # type: ignore[return-value]
