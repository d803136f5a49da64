"""The scaling of a weight that comes with codes and scales, as from a file: known by the shape of its scales, once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from lightning_fp8.ops import e8m0
from lightning_fp8.ops.amaxes import BLOCK
from lightning_fp8.scalings.base import Scaling
from lightning_fp8.scalings.mx import MX
from lightning_fp8.scalings.per_block import PerBlock
from lightning_fp8.scalings.per_row import PerRow
from lightning_fp8.scalings.per_tensor import PerTensor


def shapes_of_scales(n: int, k: int, in_e8m0: bool) -> list[tuple[tuple[int, ...], Scaling]]:
    """Each shape that the scales of a weight ``[N, K]`` may have, ``float32`` or E8M0, with its scaling. If a shape
    occurs twice, the first one counts."""
    if in_e8m0:
        down, across = (-(-size // e8m0.BLOCK) for size in (n, k))
        return [((n, across), MX()), ((down, across), MX(squares=True))]
    down, across = (-(-size // BLOCK) for size in (n, k))
    return [((), PerTensor()), ((down, across), PerBlock(squares=True)), ((n, 1), PerRow())]


def scaling_of_stored(codes: Sequence[int], scale_inv: Tensor, format: str) -> Scaling | None:
    """The scaling of codes of this shape, ``[N, K]`` or ``[E, N, K]``; None where these scales do not fit."""
    *experts, n, k = codes
    for shape, scaling in shapes_of_scales(n, k, scale_inv.dtype == torch.uint8):
        if tuple(scale_inv.shape) == (*experts, *shape):
            return replace(scaling, format=format)
    return None
