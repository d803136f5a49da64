"""The CPU: its name, and whether it multiplies bf16 matrices or emulates that."""

from __future__ import annotations

import platform
from functools import cache
from pathlib import Path

import torch

_INFO = Path("/proc/cpuinfo")


def cpu_name() -> str:
    """The CPU's name, with its extension for bf16 matrix products if it has one."""
    text = _info()
    if not text:
        return platform.processor()
    name = next((line.split(":")[1].strip() for line in text.splitlines() if line.startswith("model name")), "")
    return f"{name} with {extension}" if (extension := _bf16_extension(text)) else name


@cache
def emulates_bf16() -> bool:
    """Whether torch emulates bf16 matrix products on this CPU. They then take several times as long as in fp32.

    oneDNN respects its own limit, ``ONEDNN_MAX_CPU_ISA``, but accepts bf16 on every CPU with AVX-512. Only some of
    these CPUs multiply bf16; on the others, oneDNN converts. The CPU's flags, where the system shows them, say which.
    """
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return True
    text = _info()
    return "avx512f" in text and not _bf16_extension(text)


def _info() -> str:
    return _INFO.read_text(encoding="utf-8", errors="replace") if _INFO.exists() else ""


def _bf16_extension(text: str) -> str:
    return next((flag for flag in ("amx_bf16", "avx512_bf16") if flag in text), "")
