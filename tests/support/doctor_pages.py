"""A machine without a GPU, as far as the doctor can tell, and what is on its page."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kernels_cuda import compile as kernels_compile
from kernels_cuda.compile import nvrtc_version
from lightning_fp8.ops.cuda import gemm_table, kernels
from lightning_fp8.tools.doctor import Diagnosis, hardware

TWO = [variant for variant in kernels.variants((10, 0)) if variant.family in ("cast_weights", "update_scales")]


@contextmanager
def bare_machine(folder: Path, patch: pytest.MonkeyPatch) -> Iterator[None]:
    """No GPU or driver, an empty cache in ``folder``, no settings, and two small kernels in place of all."""
    for name in ("LIGHTNING_FP8_BACKEND", "CUDA_VISIBLE_DEVICES", "COLUMNS"):
        patch.delenv(name, raising=False)
    patch.setenv("LIGHTNING_FP8_CACHE_DIR", str(folder / "cache"))
    patch.setattr(kernels_compile, "_private_folders", {})
    patch.setattr(kernels, "variants", lambda capability, every=False: TWO)
    patch.setattr(hardware, "gpus", list)
    patch.setattr(hardware, "driver_cuda", lambda: 0)
    patch.setattr(hardware, "driver_version", lambda: None)
    cached = (kernels.backend, nvrtc_version, gemm_table.rows)
    for function in cached:
        function.cache_clear()
    yield
    for function in cached:
        function.cache_clear()


def rows(diagnosis: Diagnosis, title: str) -> list[dict[str, str]]:
    """The rows of a section, by column."""
    return diagnosis.as_dict()["sections"][title]  # type: ignore[no-any-return]


def value(diagnosis: Diagnosis, title: str, label: str) -> str:
    """What a section says was found."""
    (answer,) = (row["found"] for row in rows(diagnosis, title) if row["what"] == label)
    return answer
