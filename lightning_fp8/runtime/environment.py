"""Machine, versions and commit: what is needed to interpret a result later."""

from __future__ import annotations

import ctypes
import shlex
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch.utils.collect_env import get_nvidia_driver_version

from lightning_fp8.runtime.cpu import cpu_name, emulates_bf16

_PACKAGE = Path(__file__).parent.parent
CUPY = ("cupy-cuda13x", "cupy-cuda12x", "cupy")
# nvidia-smi may hang with a broken driver
_LIMIT_S = 30.0


def environment(*packages: str, command: str | None = None) -> dict[str, Any]:
    """CPU, whether it emulates bf16 products, threads, versions of torch and of further packages, commit and command.

    The command is this program's own if left out.
    """
    return {
        "cpu": cpu_name(),
        "emulates_bf16": emulates_bf16(),
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
        "cupy": next(filter(None, map(package_version, CUPY)), None),
    }


def package_version(package: str) -> str | None:
    """The installed version, or None."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _commit() -> str:
    """The commit of this package's repository, with ``-dirty`` if files differ from it; empty outside a repository."""
    # an installed package may lie inside another project's repository, which does not track it
    git = ("git", "--no-optional-locks", "-C", str(_PACKAGE))
    if output_of(*git, "ls-files", "--error-unmatch", "__init__.py"):
        return output_of(*git, "describe", "--always", "--dirty", "--exclude=*")
    return ""


def driver_cuda() -> int:
    """The newest CUDA that the driver supports, as the driver reports it: 12080 for 12.8; 0 without a driver."""
    try:
        library = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError:
        return 0
    version = ctypes.c_int(0)
    return 0 if library.cuDriverGetVersion(ctypes.byref(version)) else version.value


def driver_version() -> str | None:
    """The driver's version as ``nvidia-smi`` gives it, such as ``"580.65.06"``; None without either."""
    return get_nvidia_driver_version(_run)


def _driver() -> str | None:
    """``"580.65.06, CUDA 13.0"``: the driver's version and the newest CUDA that it supports, as far as known."""
    number, cuda = driver_version(), driver_cuda()
    return ", ".join([*filter(None, [number]), *([f"CUDA {cuda // 1000}.{cuda % 1000 // 10}"] if cuda else [])]) or None


def output_of(*command: str) -> str:
    """What a command prints; nothing where it fails, hangs or does not exist."""
    status, printed, _ = _run(shlex.join(command))
    return "" if status else printed.strip()


def _run(command: str) -> tuple[int, str, str]:
    """Status, output and errors, in place of collect_env's own ``run``, which waits for a program that hangs."""
    try:
        ran = subprocess.run(shlex.split(command), capture_output=True, text=True, check=False, timeout=_LIMIT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return 1, "", str(error)
    return ran.returncode, ran.stdout, ran.stderr
