"""The library of ``torch.ops.lightning_fp8.*``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

LIBRARY = torch.library.Library("lightning_fp8", "DEF")
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order)
# where FP8 GEMMs take K-major operands only, so that a transpose has to be a tensor of its own
K_MAJOR_DEVICES = {"cuda"}


def define(schema: str) -> str:
    """Define an operator; returns its qualified name."""
    name = LIBRARY.define(schema, tags=_TAGS)
    return f"lightning_fp8::{name.split('::')[-1].split('(')[0]}"


def implement(name: str, cpu: Callable[..., Any], cuda: Callable[..., Any]) -> Any:
    """Register both devices' implementations of an operator; returns what to call it by."""
    LIBRARY.impl(name, cpu, "CPU")
    LIBRARY.impl(name, cuda, "CUDA")
    return getattr(torch.ops.lightning_fp8, name).default
