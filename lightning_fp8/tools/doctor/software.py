"""Versions and settings: what is installed, whether it fits, and what the environment asks for."""

from __future__ import annotations

import os
import platform
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

import torch

from kernels_cuda.cache import Untrusted, cache_folder, check_folder
from lightning_fp8.ops.cuda.kernels import backend
from lightning_fp8.plugins.registration import register, registered
from lightning_fp8.runtime.environment import package_version
from lightning_fp8.runtime.version import __version__
from lightning_fp8.tools.doctor.diagnosis import CANNOT, SLOWER, Diagnosis

# severity if a required package is too old
_REQUIRED = {"torch": CANNOT, "lightning": SLOWER, "torchmetrics": SLOWER}
# optional packages, with pip's arguments to install them
_OPTIONAL = {
    "jsonargparse": "'jsonargparse[signatures]'",
    **{name: name for name in ("rich", "plotly", "matplotlib", "safetensors", "torchao")},
}


def asked(question: Callable[[], object]) -> str:
    """The answer, or why there is none: a failed question does not end the examination."""
    try:
        answer = question()
        return "not installed" if answer is None else str(answer)
    # a package or driver in a bad state may raise anything, which the page then shows
    except Exception as error:
        return f"not known ({' '.join(f'{type(error).__name__}: {error}'.split())})"


def versions(findings: Diagnosis) -> None:
    """What is installed, whether it is new enough, and whether Lightning knows the precision strings."""
    rows = [
        ("lightning-fp8", __version__),
        ("Python", asked(lambda: f"{platform.python_version()}, {platform.system()} {platform.machine()}")),
        ("torch", asked(lambda: f"{torch.__version__}, {_built_for()}")),
    ]
    for package in ("lightning", "torchmetrics"):
        rows.append((package, asked(partial(package_version, package))))
    rows.append(("precision strings", _registration(findings)))
    for package, wanted in _OPTIONAL.items():
        version = package_version(package)
        rows.append((package, version or f"not installed (optional: pip install {wanted})"))
    findings.section("Versions", ("what", "found"), *rows)
    _check_requirements(findings)


def _built_for() -> str:
    toolkits = {"CUDA": torch.version.cuda, "ROCm": torch.version.hip}
    return "built for " + next((f"{name} {version}" for name, version in toolkits.items() if version), "the CPU")


def _registration(findings: Diagnosis) -> str:
    try:
        # importing the package registers them; if that failed, this raises the reason
        if not registered():
            register()
    except Exception as error:
        findings.problem(
            CANNOT,
            f'Lightning does not know `precision="fp8-delayed"`: {error}',
            "Pass the plugin instead, `Trainer(plugins=lightning_fp8.Fp8Precision())`, or install the Lightning that"
            " this was tested with: `pip install 'lightning==2.6.6'`.",
        )
        return "not registered with Lightning"
    ours = registered()
    theirs = " and ".join(sorted({"bf16-mixed", "bf16-true"} - ours))
    return f"registered with Lightning: {', '.join(sorted(ours))}" + (f"; {theirs}: Lightning's own" if theirs else "")


def _check_requirements(findings: Diagnosis) -> None:
    """Compare what is installed with this package's metadata, if it is installed itself."""
    from packaging.requirements import Requirement

    try:
        needed = [Requirement(text) for text in requires("lightning-fp8") or ()]
    except PackageNotFoundError:
        return
    for requirement in needed:
        # the others belong to extras
        if requirement.marker is not None:
            continue
        package, text = requirement.name, f"{requirement.name}{requirement.specifier}"
        # not torch's metadata, which lacks what torch was built for and does not exist for a build from source
        version = torch.__version__ if package == "torch" else package_version(package)
        if version is not None and requirement.specifier.contains(str(version), prereleases=True):
            continue
        findings.problem(
            _REQUIRED.get(package, SLOWER),
            f"lightning-fp8 needs {text}, and {version or 'none'} was found.",
            f"pip install --upgrade '{text}'",
        )


def settings(findings: Diagnosis, has_gpu: bool) -> None:
    """The environment variables, and whether the cache can be written."""
    rows = [("LIGHTNING_FP8_BACKEND", _backend(findings, has_gpu)), ("LIGHTNING_FP8_CACHE_DIR", _cache(findings))]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    rows.append(("CUDA_VISIBLE_DEVICES", "not set" if visible is None else repr(visible)))
    rows.append(("python", sys.executable or "not known"))
    findings.section("Settings", ("what", "found"), *rows)


def _backend(findings: Diagnosis, has_gpu: bool) -> str:
    value = os.environ.get("LIGHTNING_FP8_BACKEND")
    try:
        chosen = backend()
    except ValueError as error:
        findings.problem(CANNOT if has_gpu else SLOWER, str(error), "unset LIGHTNING_FP8_BACKEND")
        return f"{value!r}: no such backend"
    if chosen != "reference":
        return "not set: auto" if value is None else chosen
    if not has_gpu:
        return "reference: torch's operators on every GPU; nothing changes on the CPU"
    findings.problem(
        SLOWER,
        "LIGHTNING_FP8_BACKEND=reference: torch's own operators run in place of the package's kernels.",
        "unset LIGHTNING_FP8_BACKEND",
    )
    return "reference: torch's operators"


def _cache(findings: Diagnosis) -> str:
    folder = cache_folder()
    origin = "" if os.environ.get("LIGHTNING_FP8_CACHE_DIR") else " (not set)"
    fix = "export LIGHTNING_FP8_CACHE_DIR=/a/folder/that/you/may/write"
    try:
        check_folder(folder)
    except Untrusted as error:
        findings.problem(SLOWER, f"{error} Until then every process compiles and tests kernels again.", fix)
        return f"{folder}{origin}: not trusted"
    except OSError:
        # reported below
        pass
    trouble = _why_not_writable(folder)
    if trouble is None:
        return f"{folder}{origin}: writable"
    findings.problem(
        SLOWER,
        f"Compiled kernels cannot be kept in {folder} ({trouble}), so every process compiles and tests them again.",
        fix,
    )
    return f"{folder}{origin}: not writable ({trouble})"


def _why_not_writable(folder: Path) -> str | None:
    if str(folder).startswith("~"):
        return "the user has no home folder"
    try:
        place = folder.absolute()
        while not place.exists():
            place = place.parent
        # try a temporary file: permissions alone do not tell, and the folder itself may not exist yet
        with tempfile.TemporaryFile(dir=place):
            return None
    except OSError as error:
        return str(error)
