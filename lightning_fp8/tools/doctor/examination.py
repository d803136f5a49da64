"""The examination. Its parts are independent: a failure in one is a line of the page, and the others still run."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import torch

from lightning_fp8.tools.doctor import hardware, kernel_checks, precisions, software
from lightning_fp8.tools.doctor.diagnosis import CANNOT, FINE, SLOWER, Diagnosis, Section

# for one kernel, including CUDA's initialization for the first one, but not the start of the process
LIMIT_S = 60.0
_Result = TypeVar("_Result")


def examine(
    device: torch.device | str | None = None,
    *,
    compile: bool = True,
    architectures: Sequence[str] | None = None,
    limit_s: float = LIMIT_S,
    progress: Callable[[str], None] = lambda _: None,
) -> Diagnosis:
    """What this machine has, which precisions run on it and on which kernels. Raises nothing.

    The precision strings are registered with Lightning, as by importing the package.

    Args:
        device: one GPU; every visible one if left out; ``"cpu"`` leaves GPUs out.
        compile: whether to compile, load and test the package's kernels.
        architectures: other architectures to compile every kernel for, without testing, such as ``"sm_90a"``. If left
            out and there is no GPU, the kernels of the default recipe are compiled for ``"sm_90a"``.
        limit_s: seconds for compiling, loading and testing one kernel on a GPU.
        progress: called with pieces of text before and after each kernel is tried.
    """
    findings = Diagnosis()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        no_gpus: list[torch.device] = []
        devices = _guarded(findings, "GPUs", lambda: _devices(device), no_gpus)
        _examine(findings, devices, compile, architectures, limit_s, progress)
    said = dict.fromkeys(str(one.message) for one in caught if issubclass(one.category, (UserWarning, RuntimeWarning)))
    if said:
        findings.sections.append(Section("Warnings", ("said meanwhile",), tuple((text,) for text in said)))
    findings.problems.sort(key=lambda problem: -problem.status)
    findings.status = max((problem.status for problem in findings.problems), default=FINE)
    findings.verdict = _verdict(findings.status, devices, compile, len(findings.problems))
    return findings


def _examine(
    findings: Diagnosis,
    devices: list[torch.device],
    compile: bool,
    architectures: Sequence[str] | None,
    limit_s: float,
    progress: Callable[[str], None],
) -> None:
    _guarded(findings, "Versions", lambda: software.versions(findings), None)
    # without a GPU, CuPy is missed only by those who ask for kernels
    compiles = bool(devices or architectures)
    ready = _guarded(findings, "GPU and toolchain", lambda: hardware.describe(findings, devices, compiles), False)
    _guarded(findings, "Settings", lambda: software.settings(findings, bool(devices)), None)
    unfit = hardware.unfit(devices)
    hardware.note_unfit(findings, devices, unfit)
    if compile and ready:
        fit = [device for device in devices if device not in unfit]
        kernels = partial(_kernels, findings, fit, bool(devices), architectures, limit_s, progress)
        _guarded(findings, "Kernels", kernels, None)
    else:
        why = "--quick compiles nothing" if not compile else "NVRTC cannot be used, see above"
        findings.sections.append(Section("Kernels", kernel_checks.NOT_TRIED, ((why,),)))
    _guarded(findings, "Precisions", lambda: precisions.describe(findings, devices, unfit, ready, compile), None)


def _kernels(
    findings: Diagnosis,
    devices: list[torch.device],
    has_gpu: bool,
    architectures: Sequence[str] | None,
    limit_s: float,
    progress: Callable[[str], None],
) -> None:
    checks = [check for device in devices for check in kernel_checks.on_device(device, limit_s, progress)]
    wanted = (() if has_gpu else ("sm_90a",)) if architectures is None else architectures
    for arch in wanted:
        why = "compiled only" if has_gpu else "no GPU"
        checks += kernel_checks.for_architecture(arch, why, architectures is not None, progress)
    kernel_checks.note(findings, checks)


def _devices(device: torch.device | str | None) -> list[torch.device]:
    if device is None:
        return hardware.gpus()
    chosen = torch.device(device)
    if chosen.type == "cuda" and chosen.index is None:
        chosen = torch.device("cuda", torch.cuda.current_device())
    return [] if chosen.type == "cpu" else [chosen]


def _guarded(findings: Diagnosis, title: str, part: Callable[[], _Result], otherwise: _Result) -> _Result:
    try:
        return part()
    # any exception is possible on a machine in a bad state, and the other parts may show the cause
    except Exception as error:
        cause = " ".join(f"{type(error).__name__}: {error}".split())
        findings.sections.append(Section(title, ("this part failed",), ((cause,),)))
        findings.problem(SLOWER, f"{title} could not be examined: {cause}", "Please report this with the whole page.")
        return otherwise


def _verdict(status: int, devices: list[torch.device], compile: bool, problems: int) -> str:
    trouble = f"{problems} problem{'s' if problems > 1 else ''}, see below"
    if status == CANNOT:
        return f"fp8-delayed cannot run here: {trouble}."
    if not devices:
        return "no GPU: fp8-delayed runs as a reference on the CPU" + (f"; {trouble}." if problems else ".")
    if status == SLOWER:
        return f"fp8-delayed runs, but not with all its kernels on every GPU, or not as it should: {trouble}."
    tested = "" if compile else ", as far as is known without compiling them (--quick)"
    return f"fp8-delayed runs with its own kernels on every GPU ({', '.join(map(str, devices))}){tested}."
