"""Rows of results: what they need to be read later, how they are shown, and where they are kept."""

from __future__ import annotations

import json
import platform
import statistics
import subprocess
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

_PACKAGE = Path(__file__).parent.parent
_CUPY = ("cupy-cuda13x", "cupy-cuda12x", "cupy")


def environment(*packages: str, command: str | None = None) -> dict[str, Any]:
    """CPU, threads, versions of torch and of further packages, commit and command (this program's own if left out)."""
    return {
        "cpu": cpu_name(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        **{package: package_version(package) for package in packages},
        "commit": _commit(),
        "command": command or " ".join(["python", *sys.argv]),
    }


def gpu_environment(device: torch.device) -> dict[str, Any]:
    """GPU, driver and CuPy; None where there is none, or where it is not used."""
    on_gpu = device.type == "cuda"
    return {
        "gpu": torch.cuda.get_device_name(device) if on_gpu else None,
        "driver": _driver() if on_gpu else None,
        "cupy": next(filter(None, map(package_version, _CUPY)), None),
    }


def cpu_name() -> str:
    """The CPU, with the matrix extension that bf16 speed depends on."""
    info = Path("/proc/cpuinfo")
    if not info.exists():
        return platform.processor()
    text = info.read_text()
    name = next((line.split(":")[1].strip() for line in text.splitlines() if line.startswith("model name")), "")
    return name + (" with amx_bf16" if "amx_bf16" in text else " with avx512_bf16" if "avx512_bf16" in text else "")


def package_version(package: str) -> str | None:
    """The version that is installed, or None."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def percentiles(times: Sequence[float]) -> tuple[float, float, float]:
    """The 20th, 50th and 80th."""
    if len(times) == 1:
        return times[0], times[0], times[0]
    p20, p50, p80 = statistics.quantiles(times, n=10, method="inclusive")[1::3]
    return p20, p50, p80


def append(rows: list[dict[str, Any]], path: Path | None) -> None:
    """Append the rows to a file of JSON lines, where there is one."""
    if path is not None:
        with path.open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)


def table(rows: list[dict[str, Any]], columns: dict[str, tuple[str, float, str]], markdown: bool = False) -> str:
    """The rows, aligned; ``columns`` has title, unit and format of each number, None becomes ``-``."""
    cells = [["variant", *(title for title, _, _ in columns.values())]]
    for row in rows:
        numbers = [(row[key], unit, form) for key, (_, unit, form) in columns.items()]
        cells.append([row["variant"], *("-" if x is None else format(x / unit, form) for x, unit, form in numbers)])
    widths = [max(map(len, column)) for column in zip(*cells)]
    lines = [[line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])] for line in cells]
    if not markdown:
        return "\n".join("  ".join(line) for line in lines)
    lines.insert(1, ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _commit() -> str:
    """Of the repository that has this package, with ``-dirty`` where files differ from it; empty outside of one."""
    # an installed package may lie inside another project's repository, which does not track it
    git = ("git", "--no-optional-locks", "-C", str(_PACKAGE))
    if _output(*git, "ls-files", "--error-unmatch", "__init__.py"):
        return _output(*git, "describe", "--always", "--dirty", "--exclude=*")
    return ""


def _driver() -> str | None:
    """``"580.65.06, CUDA 13.0"``: the driver's own version and the newest CUDA that it serves, as far as known."""
    found = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").splitlines()[:1]
    try:
        cuda = int(import_module("cupy_backends.cuda.api.runtime").driverGetVersion())
        found.append(f"CUDA {cuda // 1000}.{cuda % 1000 // 10}")
    # a broken CuPy raises what it likes, and its version is all that is lost
    except Exception:
        pass
    return ", ".join(found) or None


def _output(*command: str) -> str:
    """What a command prints; nothing where it fails or does not exist."""
    try:
        ran = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return ran.stdout.strip() if ran.returncode == 0 else ""
