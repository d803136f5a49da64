"""The doctor: the examination as a whole, kernels in other processes, the page, the command and its exit status."""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from doctor_pages import TWO, bare_machine, rows, value
from warm import run_warm

import lightning_fp8
from kernels_cuda.cache import cache_folder
from kernels_cuda.compile import CompileError, nvrtc_version
from lightning_fp8.ops.cuda import kernels
from lightning_fp8.tools.doctor import (
    Diagnosis,
    command,
    examine,
    hardware,
    kernel_checks,
    precisions,
    software,
)

GPU = torch.device("cuda:0")
FP8 = ("fp8-delayed", "fp8-current", "fp8-block", "fp8-mx")
needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="says what is found where there is no GPU")


@pytest.fixture(autouse=True)
def _machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    with bare_machine(tmp_path, monkeypatch):
        yield


# --- the examination ---


def test_without_a_gpu_kernels_are_compiled_and_kept() -> None:
    first, second = examine(), examine()
    assert (first.status, first.problems) == (0, [])
    assert first.verdict == "no GPU: fp8-delayed runs as a reference on the CPU."
    titles = ["Versions", "GPU and toolchain", "Settings", "Kernels", "Precisions"]
    assert [section.title for section in first.sections] == titles
    assert value(first, "Versions", "lightning-fp8") == lightning_fp8.__version__
    assert value(first, "Versions", "torch").startswith(torch.__version__)
    assert value(first, "Versions", "precision strings") == (
        "registered with Lightning: bf16-mixed, bf16-true, fp8-block, fp8-current, fp8-delayed, fp8-mx"
    )
    assert value(first, "GPU and toolchain", "GPU") == value(first, "GPU and toolchain", "driver") == "none"
    assert value(first, "GPU and toolchain", "NVRTC") == "{}.{}".format(*nvrtc_version())
    assert value(first, "Settings", "LIGHTNING_FP8_CACHE_DIR") == f"{cache_folder()}: writable"
    cells = [("-",) * 3] * 2 + [("reference (CPU)",) * 3] * len(FP8)
    assert [tuple(row.values()) for row in rows(first, "Precisions")] == [
        ("cpu", precision, "yes", *of_cpu) for precision, of_cpu in zip(("bf16-mixed", "bf16-true", *FP8), cells)
    ]
    for found, how in ((first, "compiled"), (second, "from the cache")):
        assert [check.kernel for check in found.kernels] == [variant.name for variant in TWO]
        assert {(check.place, check.compiled, check.failure) for check in found.kernels} == {("sm_90a", how, None)}
        assert {(check.self_test, check.self_test_s) for check in found.kernels} == {("not run: no GPU", None)}
    assert min(check.compile_s for check in first.kernels) > max(check.compile_s for check in second.kernels) > 0
    assert len(list(cache_folder().glob("*-sm_90a-*.cubin"))) == 2
    version = "{}.{}".format(*nvrtc_version())
    assert value(first, "GPU and toolchain", "compiled kernels") == "none in the cache"
    assert value(second, "GPU and toolchain", "compiled kernels") == f"2 by NVRTC {version}"


BROKEN_PARTS: dict[str, tuple[Any, str]] = {
    "Versions": (software, "versions"),
    "GPU and toolchain": (hardware, "describe"),
    "GPUs": (hardware, "gpus"),
    "Settings": (software, "settings"),
    "Kernels": (kernels, "variants"),
    "Precisions": (precisions, "describe"),
}


@pytest.mark.parametrize("part", BROKEN_PARTS)
def test_what_fails_is_a_line_of_the_page(monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise OSError("the wires\nare cut")

    monkeypatch.setattr(*BROKEN_PARTS[part], broken)
    found = examine(compile=part == "Kernels")
    assert found.status == 1
    assert rows(found, part) == [{"this part failed": "OSError: the wires are cut"}]
    assert found.problems[0].what == f"{part} could not be examined: OSError: the wires are cut"
    # the others still run
    assert rows(found, "Settings" if part == "Versions" else "Versions")


def test_the_gravest_counts_and_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """And warnings are on the page."""

    def settings(findings: Diagnosis, has_gpu: bool) -> None:
        warnings.warn("The NVIDIA driver is too old", stacklevel=1)
        for status in (1, 2, 1):
            findings.problem(status, "what", "do")

    monkeypatch.setattr(software, "settings", settings)
    found = examine(compile=False)
    assert (found.status, [problem.status for problem in found.problems]) == (2, [2, 1, 1])
    assert found.verdict == "fp8-delayed cannot run here: 3 problems, see below."
    assert rows(found, "Warnings") == [{"said meanwhile": "The NVIDIA driver is too old"}]


# --- kernels ---


def test_a_source_that_does_not_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    real = kernel_checks.compiled

    def refusing(family: str, *rest: Any) -> Path:
        if family == "cast_weights":
            raise CompileError("expected a ;")
        return real(family, *rest)

    monkeypatch.setattr(kernel_checks, "compiled", refusing)
    shown: list[str] = []
    checks = kernel_checks.for_architecture("sm_89", "no GPU", False, shown.append)
    assert [(check.compiled, check.failure) for check in checks] == [
        ("failed", "CompileError: expected a ;"),
        ("compiled", None),
    ]
    # each is named before it is tried
    assert shown[0] == "sm_89: cast_weights: "
    assert shown[1].endswith(": CompileError: expected a ;\n")


# the processes of real workers, without torch: a kernel is called by what happens to it
JOBS = """
import os, sys, time, types
package = sys.modules["lightning_fp8"] = types.ModuleType("lightning_fp8")
package.__path__ = ["lightning_fp8"]
from lightning_fp8.tools.worker import serve

def work(job):
    assert job["device"] == "cuda:0"
    if "hangs" in job["kernel"]:
        time.sleep(600)
    if "crashes" in job["kernel"]:
        os.abort()
    return {"compiled": "compiled", "compile_s": 0.25, "self_test": "passed", "self_test_s": 0.5, "failure": None,
            "resources": None, "unavailable": "gone" in job["kernel"]}

serve(work)
"""


@pytest.mark.slow
def test_a_kernel_that_hangs_costs_its_limit_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["right", "crashes", "hangs", "hangs", "hangs", "right", "gone", "right"]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(kernels, "variants", lambda _: [TWO[0]._replace(family=name, defines=()) for name in names])
    monkeypatch.setattr(kernel_checks, "_COMMAND", (sys.executable, "-c", JOBS))
    shown: list[str] = []
    checks = kernel_checks.on_device(GPU, 3.0, shown.append)
    lost = "not run: not loaded"
    assert [(check.kernel, check.self_test, check.failure) for check in checks] == [
        ("right", "passed", None),
        ("crashes", lost, "ended by signal 6"),
        ("hangs", lost, "did not end within 3 s"),
        ("hangs", lost, "did not end within 3 s"),
        ("hangs", lost, "not tried, after 2 of hangs in a row gave no result"),
        ("right", "passed", None),
        # without a toolchain the others would fail alike
        ("gone", "passed", None),
    ]
    assert {check.place for check in checks} == {"cuda:0"}
    # printed before it is tried, so that the last line of a killed run names the kernel that hung
    assert shown[:2] == ["cuda:0: right: ", "compiled 0.25 s, self-test passed 0.50 s\n"]
    assert shown[4] == "cuda:0: hangs: "
    assert shown[5].endswith("did not end within 3 s\n")


# --- the page and the command ---


@pytest.mark.parametrize(
    ("arguments", "places"),
    [
        (["--quick"], []),
        (["--compile", "sm_89", "sm_120a"], ["sm_89", "sm_120a"]),
        (["--compile"], ["sm_89", "sm_90a", "sm_100a", "sm_120a"]),
    ],
)
def test_architectures(arguments: list[str], places: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        command.main([*arguments, "--json"])
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    assert ended.value.code == found["status"] == 0
    assert list(dict.fromkeys(check["place"] for check in found["kernels"])) == places
    # each kernel when it was tried
    assert [line.split(": ")[:2] for line in printed.err.splitlines()] == [
        [check["place"], check["kernel"]] for check in found["kernels"]
    ]
    # looking at the cache leaves nothing there
    assert cache_folder().exists() == bool(places)


@needs_no_gpu
def test_the_command_on_a_machine_in_a_bad_state() -> None:
    bare = "".join(
        f"sys.modules[{name!r}] = None\n" for name in ("rich", "rich.console", "jsonargparse", "cupy_backends")
    )
    program = f"import sys, lightning_fp8.__main__ as entry\n{bare}sys.argv[1:] = ['doctor']\nentry.run()"
    bad = {"LIGHTNING_FP8_BACKEND": "nonsense", "LIGHTNING_FP8_CACHE_DIR": "/dev/null/cache", "COLUMNS": "70"}
    ran = run_warm("-c", program, env={**os.environ, "CUDA_VISIBLE_DEVICES": "", **bad})
    assert ran.returncode == 1
    assert "Traceback" not in ran.stdout + ran.stderr
    for words in ("-> unset LIGHTNING_FP8_BACKEND", "-> export LIGHTNING_FP8_CACHE_DIR=", "Status 1: no GPU"):
        assert words in ran.stdout
    assert "\033" not in ran.stdout
