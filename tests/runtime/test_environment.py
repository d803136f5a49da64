from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch

from lightning_fp8.runtime import environment

# the first line that nvidia-smi prints
SMI = """\
+-----------------------------------------------------------------------------------------+
| NVIDIA-SMI 580.65.06              Driver Version: 580.65.06      CUDA Version: 13.0     |
+-----------------------------------------+------------------------+----------------------+"""


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A fake `nvidia-smi`, which the test writes, first on the path."""
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    return tmp_path / "nvidia-smi"


@pytest.mark.parametrize(
    ("program", "number"),
    [(f"echo '{SMI}'", "580.65.06"), (f"echo '{SMI}'; exit 9", None), ("echo NVIDIA-SMI has failed", None)],
)
def test_the_drivers_version(program: str, number: str | None, smi: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    smi.write_text(f"#!/bin/sh\n{program}\n")
    smi.chmod(0o755)
    assert environment.driver_version() == number
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H200")
    monkeypatch.setattr(environment, "driver_cuda", lambda: 13000)
    row = environment.gpu_environment(torch.device("cuda"))
    assert (row["gpu"], row["driver"]) == ("NVIDIA H200", "580.65.06, CUDA 13.0" if number else "CUDA 13.0")


def test_a_broken_driver_costs_its_limit_and_no_more(smi: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "_LIMIT_S", 0.2)
    smi.write_text("#!/bin/sh\nexec sleep 60\n")
    smi.chmod(0o755)
    began = time.monotonic()
    assert environment.driver_version() is None
    assert time.monotonic() - began < 30


def test_without_the_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert environment.driver_version() is None
    assert environment.environment()["commit"] == ""
