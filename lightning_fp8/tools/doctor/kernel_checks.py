"""Compiles and tests every kernel with the functions that the package calls at first use, and times both."""

from __future__ import annotations

import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence

import torch

from kernels_cuda.compile import capability, compiled, is_cached
from lightning_fp8.ops.cuda import kernels, plain
from lightning_fp8.ops.formats import E4M3
from lightning_fp8.ops.operand import Fp8Tensor
from lightning_fp8.tools.doctor.diagnosis import NOT_LOADED, SLOWER, Diagnosis, KernelCheck
from lightning_fp8.tools.worker import Answer, Worker

ARCHITECTURES = ("sm_89", "sm_90a", "sm_100a", "sm_120a")
NOT_TRIED = ("not compiled or tested",)
_COMMAND = (sys.executable, "-m", "lightning_fp8.tools.doctor.child")
# number of kernels that a problem names; the list of kernels has all
_NAMED = 4
_MOST_LOST = 2
Progress = Callable[[str], None]


def on_device(device: torch.device, limit_s: float, progress: Progress) -> list[KernelCheck]:
    """Compile or find in the cache, load and test every kernel on a GPU; ends early if the toolchain does not work.

    Kernels run in another process, so that one that hangs costs no more than its time limit. After two kernels of a
    family in a row have hung or crashed, the rest of the family is not tried.
    """
    checks: list[KernelCheck] = []
    lost: Counter[str] = Counter()
    with Worker(_COMMAND) as worker:
        for variant in kernels.variants(torch.cuda.get_device_capability(device)):
            progress(f"{device}: {variant.name}: ")
            if lost[variant.family] < _MOST_LOST:
                answer = worker.answer({"device": str(device), "kernel": variant.name}, limit_s)
            else:
                answer = Answer(None, f"not tried, after {_MOST_LOST} of {variant.family} in a row gave no result")
            lost[variant.family] = 0 if answer.failure is None else lost[variant.family] + 1
            fields = answer.found or {
                **{"compiled": "failed", "compile_s": 0.0, "self_test": NOT_LOADED, "self_test_s": None},
                **{"failure": answer.failure, "unavailable": False},
            }
            is_last = fields.pop("unavailable")
            checks.append(KernelCheck(variant.name, str(device), **fields))
            progress(f"{_said(checks[-1])}\n")
            if is_last:
                break
    return checks


def for_architecture(arch: str, why_no_test: str, every: bool, progress: Progress) -> list[KernelCheck]:
    """Compile every kernel, or find it in the cache; needs no GPU.

    Args:
        arch: such as ``"sm_90a"``.
        why_no_test: why the self-tests do not run.
        every: whether to compile also the kernels of non-default recipes, dtypes and configurations.
        progress: called with pieces of text.
    """
    checks = []
    for variant in kernels.variants(capability(arch), every):
        progress(f"{arch}: {variant.name}: ")
        began, failure, how = time.perf_counter(), None, "compiled"
        try:
            how = "from the cache" if is_cached(variant.family, arch, variant.defines) else "compiled"
            compiled(variant.family, arch, variant.defines)
        # any error is a result: a source that does not compile, a full disk, a broken library
        except Exception as error:
            failure, how = f"{type(error).__name__}: {error}", "failed"
        seconds = time.perf_counter() - began
        checks.append(KernelCheck(variant.name, arch, how, seconds, f"not run: {why_no_test}", None, failure))
        progress(f"{_said(checks[-1])}\n")
    return checks


def _said(check: KernelCheck) -> str:
    """``"compiled 0.71 s, self-test passed 0.02 s, 64 registers, local 0 B, shared 8448 B"``."""
    test = "" if check.self_test_s is None else f" {check.self_test_s:.2f} s"
    text = f"{check.compiled} {check.compile_s:.2f} s, self-test {check.self_test}{test}"
    if check.resources is not None:
        text += f", {_most([check])}"
    return text if check.failure is None else f"{text}: {' '.join(check.failure.split())[:500]}"


def gemm(device: torch.device) -> str | None:
    """What is wrong with a small FP8 product from the function that layers use; None if it equals the fp32 product.

    Source: :func:`lightning_fp8.ops.cuda.plain.scaled_mm`.
    """
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randint(-4, 5, (size, 64), generator=generator).float() for size in (48, 32))
    scale_inv = torch.ones((), device=device)
    operands = [Fp8Tensor(x.to(E4M3.dtype).view(torch.uint8).to(device), scale_inv, "e4m3") for x in (a, b)]
    # sums are integers of at most 64 * 16: exact, and rounded to bf16 once
    got = plain.scaled_mm(operands[0], operands[1], None, torch.bfloat16, False)
    return None if torch.equal(got.cpu(), (a @ b.t()).bfloat16()) else "another result than the same product in fp32"


def note(findings: Diagnosis, checks: Sequence[KernelCheck]) -> None:
    """Add the checks, their table, and one problem for each kind of failure."""
    findings.kernels += checks
    groups, failures = defaultdict(list), defaultdict(list)
    for check in checks:
        family, _, defines = check.kernel.partition(" ")
        groups[check.place, " ".join((family, *defines.split()[:1])).replace("INPUT=", "")].append(check)
        if check.failure is not None:
            failures[check.place, check.self_test == "failed", check.failure].append(check.kernel)
    if checks:
        columns = ("where", "kernels", "compiling", "self-tests", "at most")
        findings.section("Kernels", columns, *(_row(*named, group) for named, group in groups.items()))
    else:
        findings.section("Kernels", NOT_TRIED, ("no GPU here runs them",))
    for (place, tested, failure), names in failures.items():
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        rule = "did not pass on" if tested else "cannot be compiled or loaded for"
        findings.problem(
            SLOWER,
            f"{', '.join(names[:_NAMED])}{more} {rule} {place}: {failure}",
            "torch's own operators take over, with the same results. Please report this with the output of"
            " `python -m lightning_fp8 doctor --json`.",
        )


def _row(place: str, name: str, group: list[KernelCheck]) -> tuple[str, ...]:
    compiling = _counted([check.compiled for check in group], sum(check.compile_s for check in group))
    times = [check.self_test_s for check in group if check.self_test_s is not None]
    tests = _counted([check.self_test for check in group], sum(times) if times else None)
    return place, name, compiling, tests, _most(group)


def _most(group: list[KernelCheck]) -> str:
    """``"64 registers, local 0 B, shared 8448 B"``: the most of each that a kernel takes."""
    taken = [check.resources for check in group if check.resources is not None]
    if not taken:
        return "-"
    registers, local, shared = (
        max(counts[key] for counts in taken) for key in ("registers", "local_bytes", "shared_bytes")
    )
    return f"{registers} registers, local {local} B, shared {shared} B"


def _counted(results: list[str], seconds: float | None) -> str:
    """``"20 passed, 2 failed: 1.25 s"``."""
    counts = Counter(results)
    if seconds is None and len(counts) == 1:
        return results[0]
    text = ", ".join(f"{number} {result}" for result, number in counts.items())
    return text if seconds is None else f"{text}: {seconds:.2f} s"
