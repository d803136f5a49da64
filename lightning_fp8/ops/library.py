"""The library of ``torch.ops.lightning_fp8.*``."""

from __future__ import annotations

from typing import Any

import torch

from lightning_fp8.ops import cuda, reference

LIBRARY = torch.library.Library("lightning_fp8", "DEF")
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order)
# where FP8 GEMMs take K-major operands only, so that a transpose has to be a tensor of its own
K_MAJOR_DEVICES = {"cuda"}


def define(schema: str) -> str:
    """Define an operator; returns its qualified name."""
    name = LIBRARY.define(schema, tags=_TAGS)
    return f"lightning_fp8::{name.split('::')[-1].split('(')[0]}"


def implement(name: str) -> Any:
    """Register the CPU's and CUDA's implementation, of the same name; returns what to call the operator by."""
    for key, module in (("CPU", reference), ("CUDA", cuda)):
        LIBRARY.impl(name, getattr(module, name), key)
    return getattr(torch.ops.lightning_fp8, name).default
