"""The examination. Its parts are independent: a failure in one is a line of the page, and the others still run."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from lightning_fp8.tools.doctor import hardware, kernel_checks, precisions, software
from lightning_fp8.tools.doctor.diagnosis import CANNOT, FINE, SLOWER, Diagnosis

# for one kernel, including CUDA's initialization for the first one, but not the start of the process
LIMIT_S = 60.0
_Result = TypeVar("_Result")


def examine(
    *,
    compile: bool = True,
    architectures: Sequence[str] | None = None,
    limit_s: float = LIMIT_S,
    progress: Callable[[str], None] = lambda _: None,
) -> Diagnosis:
    """What this machine has, which precisions run on it and on which kernels. Raises nothing.

    The precision strings are registered with Lightning, as by importing the package.

    Args:
        compile: whether to compile, load and test the package's kernels.
        architectures: other architectures to compile every kernel for, without testing, such as ``"sm_90a"``. If left
            out and there is no GPU, the kernels of the default recipe are compiled for ``"sm_90a"``.
        limit_s: seconds for compiling, loading and testing one kernel on a GPU.
        progress: called with pieces of text before and after each kernel is tried.
    """
    findings = Diagnosis()

    def guarded(title: str, part: Callable[[], _Result], otherwise: _Result) -> _Result:
        try:
            return part()
        # any exception is possible on a machine in a bad state, and the other parts may show the cause
        except Exception as error:
            cause = " ".join(f"{type(error).__name__}: {error}".split())
            findings.section(title, ("this part failed",), (cause,))
            what = f"{title} could not be examined: {cause}"
            findings.problem(SLOWER, what, "Please report this with the whole page.")
            return otherwise

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        no_gpus: list[torch.device] = []
        devices = guarded("GPUs", hardware.gpus, no_gpus)
        guarded("Versions", lambda: software.versions(findings), None)
        # without a GPU, CuPy is missed only by those who ask for kernels
        compiles = bool(devices or architectures)
        ready = guarded("GPU and toolchain", lambda: hardware.describe(findings, devices, compiles), False)
        guarded("Settings", lambda: software.settings(findings, bool(devices)), None)
        unfit = hardware.unfit(findings, devices)
        if compile and ready:
            fit = [device for device in devices if device not in unfit]
            wanted = (() if devices else ("sm_90a",)) if architectures is None else architectures
            why_no_test, every = "compiled only" if devices else "no GPU", architectures is not None

            def check() -> None:
                checks = [check for device in fit for check in kernel_checks.on_device(device, limit_s, progress)]
                for arch in wanted:
                    checks += kernel_checks.for_architecture(arch, why_no_test, every, progress)
                kernel_checks.note(findings, checks)

            guarded("Kernels", check, None)
        else:
            why = "--quick compiles nothing" if not compile else "NVRTC cannot be used, see above"
            findings.section("Kernels", kernel_checks.NOT_TRIED, (why,))
        guarded("Precisions", lambda: precisions.describe(findings, devices, unfit, ready, compile), None)
    said = dict.fromkeys(str(w.message) for w in caught if issubclass(w.category, (UserWarning, RuntimeWarning)))
    if said:
        findings.section("Warnings", ("said meanwhile",), *((text,) for text in said))
    findings.problems.sort(key=lambda problem: -problem.status)
    findings.status = max((problem.status for problem in findings.problems), default=FINE)
    findings.verdict = _verdict(findings.status, devices, compile, len(findings.problems))
    return findings


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
