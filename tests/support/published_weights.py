"""FP8 weights with their scales, as checkpoints have them, and their values and products by numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from fp8_numpy import DEFINITIONS, cast_in_blocks, code_values, saturating_cast
from mx_numpy import in_mx
from torch import Tensor, nn

from lightning_fp8 import BlockScaling, MXScaling
from lightning_fp8.modules.fp8_parameter import from_codes
from lightning_fp8.scalings.recipe import Recipe

# the last two in E8M0: for 32 of a row, and for squares of 32 x 32
KINDS = ("tensor", "blocks", "rows", "mx", "squares")


def published(kind: str, *shape: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Codes of all finite values, and scales that differ by up to 64, none of them a power of two."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, shape, generator=generator, dtype=torch.int16).to(torch.uint8)
    codes[(codes & 0x7F) == 0x7F] = 0x7E
    *experts, n, k = shape
    if kind in ("mx", "squares"):
        sizes = *experts, n if kind == "mx" else -(-n // 32), -(-k // 32)
        return codes, torch.randint(105, 112, sizes, generator=generator, dtype=torch.uint8)
    of_matrix = {"tensor": (), "blocks": (-(-n // 128), -(-k // 128)), "rows": (n, 1)}[kind]
    scale_inv = 2.0 ** (6 * torch.rand((*experts, *of_matrix), generator=generator)) * 1.3e-5
    return codes, scale_inv


def in_numpy(codes: Tensor, scale_inv: Tensor) -> np.ndarray:
    """``code * scale`` in fp32, in the shape of the codes, element by element."""
    scales, (*_, n, k) = scale_inv.float().numpy(), codes.shape
    if scale_inv.dtype == torch.uint8:
        down = 1 if scales.shape[-2] == n else 32
        scales = np.exp2(scales - 127).repeat(down, -2)[..., :n, :].repeat(32, -1)[..., :k]
    elif scales.ndim == codes.dim() - 2:
        scales = scales[..., None, None]
    elif scales.shape[-2:] != (n, 1):
        scales = scales.repeat(128, -2)[..., :n, :].repeat(128, -1)[..., :k]
    return code_values("e4m3").astype(np.float32)[codes.numpy()] * scales


def gradient_in_numpy(dy: Tensor, recipe: Recipe, kind: str) -> np.ndarray:
    """The gradient ``[M, N]`` as dgrad takes it: without a cast if no blocks of the weight are along N."""
    is_cast = kind != "mx" or dy.shape[1] == 1
    return cast_in_numpy(dy, recipe, "grad_output") if is_cast else dy.double().numpy()


def with_codes(
    layer: nn.Module,
    kind: str,
    name: str = "weight",
    dtype: torch.dtype = torch.float32,
    device: torch.device | None = None,
) -> Any:
    """The layer with such a weight."""
    weight = getattr(layer, name)
    k_by_n = type(layer).__name__ == "Conv1D"
    codes, scale_inv = (tensor.to(device) for tensor in published(kind, *weight.shape[:: -1 if k_by_n else 1]))
    setattr(layer, name, from_codes(codes, scale_inv, dtype, name, k_by_n))
    return layer


def cast_in_numpy(x: Tensor, recipe: Recipe, role: str) -> np.ndarray:
    """x ``[M, K]`` as a product takes it that sums over K, scaled by its own values, in fp64."""
    fmt, values = recipe.format_of(role).name, x.detach().float().numpy()  # type: ignore[arg-type]
    if isinstance(recipe, MXScaling):
        return in_mx(x)
    if isinstance(recipe, BlockScaling):
        codes, scale_inv = cast_in_blocks(values, fmt, 1)
        scale = scale_inv.astype(np.float64).repeat(128, 1)[:, : x.shape[1]]
    else:
        used = np.float32(DEFINITIONS[fmt][3]) / np.abs(values).max()
        codes, scale = saturating_cast(values, used, fmt), np.float64(np.float32(1) / used)
    return code_values(fmt)[codes] * scale
