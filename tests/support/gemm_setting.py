"""Which GEMMs a converted model runs, as benchmarks and tests choose them."""

from __future__ import annotations

import dataclasses
from typing import TypeVar

from torch import nn

from lightning_fp8 import scaling_state

ModuleT = TypeVar("ModuleT", bound=nn.Module)


def with_gemm(model: ModuleT, gemm: str) -> ModuleT:
    """The same converted model, with its GEMMs by ``"auto"``, ``"rawkernel"`` or ``"cublaslt"``."""
    state = scaling_state(model)
    state.configure(dataclasses.replace(state.config, gemm=gemm))
    return model
