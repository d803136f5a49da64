"""An H200 as far as torch can tell, with tables of measured GEMMs of its own: :func:`h200`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kernels_cuda.gemm_variants import configurations
from lightning_fp8.ops.cuda import gemm_choice, gemm_table, kernels
from lightning_fp8.runtime.warn_once import warn_once

GPU, NAME, HOPPER = torch.device("cuda", 0), "NVIDIA H200", (9, 0)
FAST = {config.name: config for config in configurations(HOPPER, promote=False)}
PROMOTED = {config.name: config for config in configurations(HOPPER, promote=True)}


def forget() -> None:
    """As in a new process."""
    gemm_choice._first_choices.clear()
    for function in (gemm_choice.choose, warn_once, gemm_table.rows, kernels.backend, gemm_table._versions):
        function.cache_clear()


@contextmanager
def h200(folder: Path, patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Its own table and the shipped one are in ``folder``, and there is no other setting."""
    patch.setenv("LIGHTNING_FP8_CACHE_DIR", str(folder / "own"))
    patch.setattr(gemm_table, "_SHIPPED", folder / "shipped")
    patch.delenv("LIGHTNING_FP8_BACKEND", raising=False)
    for name in ("own", "shipped"):
        (folder / name).mkdir()
    be(patch)
    forget()
    yield
    forget()


def be(patch: pytest.MonkeyPatch, capability: tuple[int, int] = HOPPER, name: str = NAME) -> None:
    """The GPU is one of this capability and name."""
    size = {"multi_processor_count": 132, "L2_cache_size": 50 << 20}
    properties = SimpleNamespace(name=name, major=capability[0], minor=capability[1], **size)
    patch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    patch.setattr(torch.cuda, "get_device_name", lambda *_: name)


def row(m: int, n: int, k: int, ours: float | None, theirs: float | None, **columns: Any) -> dict[str, Any]:
    """A row without promotion, of the configuration "128x256 s4 c2"."""
    fields = {"promote": False, "output": "bfloat16", "configuration": "128x256 s4 c2", "splits": 1}
    return {"m": m, "n": n, "k": k, **fields, "p50_us": ours, "cublaslt_p50_us": theirs, **columns}


def promoted(m: int, n: int, k: int, ours: float | None, theirs: float | None, **columns: Any) -> dict[str, Any]:
    """A row with promotion, of the configuration "256x128 s4 c1"."""
    return row(m, n, k, ours, theirs, **{"promote": True, "configuration": "256x128 s4 c1", **columns})


def given(*rows: dict[str, Any], own: bool = True) -> Path:
    """Writes rows into the user's table or into the shipped one; gives its path."""
    path = gemm_table.own_path(NAME) if own else gemm_table.shipped_path(NAME)
    gemm_table.write(path, {"gpu": NAME}, rows)
    forget()
    return path
