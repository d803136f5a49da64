"""Which CPUs emulate bf16 products: by their flags, and by what oneDNN does."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from warm import run_warm

from lightning_fp8.runtime import cpu
from lightning_fp8.runtime.environment import environment

# per CPU: whether oneDNN accepts bf16, the end of its flags in /proc/cpuinfo, and our result
CPUS = {
    "Haswell": (False, "flags : fma avx2", True),
    "Cascade Lake": (True, "flags : avx2 avx512f avx512_vnni", True),
    "Cooper Lake, Zen 4": (True, "flags : avx2 avx512f avx512_bf16", False),
    "Sapphire Rapids": (True, "flags : avx512f avx512_bf16 amx_bf16 amx_tile", False),
    "Sapphire Rapids, oneDNN held at AVX2": (False, "flags : avx512f avx512_bf16 amx_bf16", True),
    "Arm with bf16": (True, "Features : asimd bf16", False),
    "Arm without": (False, "Features : asimd", True),
    "a system that shows no flags": (True, None, False),
}


@pytest.fixture(autouse=True)
def asked_anew() -> Iterator[None]:
    cpu.emulates_bf16.cache_clear()
    yield
    cpu.emulates_bf16.cache_clear()


@pytest.mark.parametrize("name", CPUS)
def test_which_cpus_emulate(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    accepted, flags, expected = CPUS[name]
    info = tmp_path / "cpuinfo"
    if flags is not None:
        # not UTF-8
        info.write_bytes(f"model name : {name}\xae\n{flags}\n".encode("latin-1"))
    monkeypatch.setattr(cpu, "_INFO", info)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: accepted)
    assert cpu.emulates_bf16() is expected
    assert environment()["emulates_bf16"] is expected


@pytest.mark.skipif(platform.machine() != "x86_64", reason="names of oneDNN's kernels for x86")
@pytest.mark.parametrize("limit", ["", "AVX2"])
def test_onednn_does_what_we_say(limit: str) -> None:
    """oneDNN names the kernel of each product: ``brg_matmul`` has bf16 instructions, ``gemm:jit:bf16`` converts.

    If oneDNN is not used, torch multiplies in a plain loop.
    """
    program = """
import torch
from lightning_fp8.runtime.cpu import emulates_bf16
x = torch.ones(64, 64, dtype=torch.bfloat16)
x @ x
print("emulated:", emulates_bf16())
"""
    ran = run_warm("-c", program, env={**os.environ, "ONEDNN_VERBOSE": "1", "ONEDNN_MAX_CPU_ISA": limit}, check=True)
    products = [line for line in ran.stdout.splitlines() if ",exec,cpu,matmul," in line]
    multiplied = any("brg_matmul" in line for line in products)
    assert f"emulated: {not multiplied}" in ran.stdout
    assert not (limit and multiplied)
