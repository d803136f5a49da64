"""Payloads by columns, whose rows are padded with zeros to a multiple of 16."""

from __future__ import annotations

import math

from torch import Tensor


def padded(rows: int) -> int:
    """The next multiple of 16."""
    return 16 * math.ceil(rows / 16)


def unpadded(payload_t: Tensor, rows: int) -> Tensor:
    """The codes by columns of a tensor with this many rows; fails unless all others are zeros."""
    assert payload_t.is_contiguous()
    assert payload_t.shape[1] == padded(rows)
    assert not payload_t[:, rows:].any()
    return payload_t[:, :rows]
