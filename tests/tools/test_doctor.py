"""The doctor: what it finds, on this machine and on simulated ones, and its exit status."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from broken_kernels import Broken, poke
from forked_workers import fork_workers
from gemm_cases import FORMAT_PAIRS
from host_kernels import VARIANTS, HostKernel
from lightning.fabric import Fabric
from warm import run_warm

import lightning_fp8
from kernels_cuda import casts
from kernels_cuda import compile as kernels_compile
from kernels_cuda.cache import cache_folder
from kernels_cuda.compile import CompileError, KernelsUnavailable, nvrtc_version
from kernels_cuda.gemm_variants import OUTPUTS, configurations
from lightning_fp8 import __main__ as entry
from lightning_fp8.ops.cuda import gemm_table, kernels
from lightning_fp8.tools.doctor import (
    Diagnosis,
    child,
    command,
    diagnosis,
    examine,
    hardware,
    kernel_checks,
    page,
    software,
)
from lightning_fp8.tools.worker import Answer, Job, serve

CPU = torch.device("cpu")
kernels_of = kernels.variants
EVERY = kernels_of((9, 0))
FEW = [variant for variant in EVERY if variant.defines[:3] in ((), casts.variant(torch.bfloat16, "e4m3", "none")[:3])]
SECTIONS = ["Versions", "GPU and toolchain", "Settings", "Kernels", "Precisions"]
needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="says what is found where there is no GPU")


compile_really = kernels_compile.compile_source
_cubins: dict[object, tuple[bytes, str]] = {}


def compile_once(family: str, text: str, arch: str, defines: Sequence[str], included: Mapping[str, str]) -> Any:
    """Reuses what an earlier test has compiled, because every test starts with an empty cache."""
    key = family, text, arch, *defines, *included.items()
    if key not in _cubins:
        _cubins[key] = compile_really(family, text, arch, defines, included)
    return _cubins[key]


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An empty cache, no settings, and three kernels in place of all."""
    monkeypatch.setattr(kernels_compile, "compile_source", compile_once)
    for name in ("LIGHTNING_FP8_BACKEND", "CUDA_VISIBLE_DEVICES", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("LIGHTNING_FP8_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr("kernels_cuda.compile._private_folders", {})
    monkeypatch.setattr(kernels, "variants", lambda capability, every=False: FEW)
    kernels.backend.cache_clear()
    nvrtc_version.cache_clear()
    gemm_table.rows.cache_clear()
    yield  # type: ignore[misc]
    kernels.backend.cache_clear()
    nvrtc_version.cache_clear()
    gemm_table.rows.cache_clear()


def rows(found: Diagnosis, title: str) -> list[dict[str, str]]:
    return found.as_dict()["sections"][title]  # type: ignore[no-any-return]


def value(found: Diagnosis, title: str, what: str) -> str:
    (answer,) = (row["found"] for row in rows(found, title) if row["what"] == what)
    return answer


def fp8(found: Diagnosis, device: str, precision: str = "fp8-delayed") -> dict[str, str]:
    return next(row for row in rows(found, "Precisions") if row["device"] == device and row["precision"] == precision)


def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "gpus", list)
    monkeypatch.setattr(hardware, "driver_cuda", lambda: 0)
    monkeypatch.setattr(hardware, "driver_version", lambda: None)


def with_gpus(
    monkeypatch: pytest.MonkeyPatch, *capabilities: tuple[int, int], driver: int = 13000, name: str = "NVIDIA H200"
) -> None:
    """GPUs of these capabilities, as torch and the driver would report them; nothing can run on them."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
    monkeypatch.setattr(
        torch.cuda, "get_device_capability", lambda device: capabilities[torch.device(device).index or 0]
    )
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: name)
    monkeypatch.setattr(hardware, "driver_cuda", lambda: driver)
    monkeypatch.setattr(hardware, "driver_version", lambda: "580.65.06")
    monkeypatch.setattr("lightning_fp8.tools.doctor.precisions.gemm", lambda _: None)


def without_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy_backends.cuda.libs.nvrtc", None)
    version = hardware.package_version
    monkeypatch.setattr(hardware, "package_version", lambda name: None if "cupy" in name else version(name))


class InProcess:
    """Replaces a ``Worker``: the jobs run in this process, where kernels and torch are simulated."""

    def __init__(self, _: list[str]) -> None:
        pass

    def __enter__(self) -> InProcess:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def answer(self, job: Job, limit_s: float) -> Answer:
        return Answer(json.loads(json.dumps(child.test(job))), None)


@pytest.fixture
def host_gpu(host_kernels: list[str], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """One GPU whose kernels run on the CPU, from their own sources, under the CPU's name; gives forgotten passes."""
    with_gpus(monkeypatch, (9, 0))
    monkeypatch.setattr(hardware, "gpus", lambda: [CPU])
    monkeypatch.setattr(kernel_checks, "Worker", InProcess)
    forgotten: list[str] = []
    monkeypatch.setattr(kernels.load, "forget_pass", lambda family, *_: forgotten.append(family))
    return forgotten


# --- without a GPU ---


def test_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    without_gpu(monkeypatch)
    found = examine()
    assert (found.status, found.problems) == (0, [])
    assert found.verdict == "no GPU: fp8-delayed runs as a reference on the CPU."
    assert [section.title for section in found.sections] == SECTIONS
    assert value(found, "Versions", "lightning-fp8") == lightning_fp8.__version__
    assert value(found, "Versions", "torch").startswith(torch.__version__)
    assert value(found, "Versions", "precision strings") == (
        "registered with Lightning: bf16-mixed, bf16-true, fp8-block, fp8-current, fp8-delayed"
    )
    assert value(found, "GPU and toolchain", "GPU") == "none"
    assert value(found, "GPU and toolchain", "driver") == "none"
    assert value(found, "GPU and toolchain", "NVRTC") == "{}.{}".format(*nvrtc_version())
    assert value(found, "Settings", "LIGHTNING_FP8_CACHE_DIR") == f"{cache_folder()}: writable"
    assert [(row["device"], row["precision"], row["runs"]) for row in rows(found, "Precisions")] == [
        ("cpu", "bf16-mixed", "yes"),
        ("cpu", "bf16-true", "yes"),
        ("cpu", "fp8-delayed", "yes"),
        ("cpu", "fp8-current", "yes"),
        ("cpu", "fp8-block", "yes"),
    ]
    for precision in ("fp8-delayed", "fp8-current", "fp8-block"):
        assert {fp8(found, "cpu", precision)[key] for key in ("casts", "scales", "GEMMs")} == {"reference (CPU)"}


def test_kernels_are_compiled_without_a_gpu_and_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels_compile, "compile_source", compile_really)
    without_gpu(monkeypatch)
    first, second = examine().kernels, examine().kernels
    assert [check.kernel for check in first] == [variant.name for variant in FEW]
    for checks, how in ((first, "compiled"), (second, "from the cache")):
        assert {(check.place, check.compiled, check.failure) for check in checks} == {("sm_90a", how, None)}
        assert {(check.self_test, check.self_test_s) for check in checks} == {("not run: no GPU", None)}
        assert {check.resources for check in checks} == {None}
    assert all(check.compile_s > 0 for check in first)
    assert sum(check.compile_s for check in second) < sum(check.compile_s for check in first)
    assert len(list(cache_folder().glob("*-sm_90a-*.cubin"))) == len(FEW)


def test_cubins_that_were_carried_here_are_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    without_gpu(monkeypatch)
    assert value(examine(compile=False), "GPU and toolchain", "compiled kernels") == "none in the cache"
    examine(architectures=["sm_90a"])
    carried = tmp_path / "carried"
    shutil.copytree(cache_folder(), carried)
    monkeypatch.setenv("LIGHTNING_FP8_CACHE_DIR", str(carried))
    version = "{}.{}".format(*nvrtc_version())
    found = examine(architectures=["sm_90a"])
    assert value(found, "GPU and toolchain", "compiled kernels") == f"{len(FEW)} by NVRTC {version}"
    assert {check.compiled for check in found.kernels} == {"from the cache"}


def test_cubins_of_another_nvrtc_are_said_to_be_of_no_use(monkeypatch: pytest.MonkeyPatch) -> None:
    without_gpu(monkeypatch)
    real = nvrtc_version()
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr("kernels_cuda.compile.nvrtc_version", lambda: (12, 9))
        examine(architectures=["sm_90a"])
    found = examine(architectures=["sm_90a"])
    expected = f"{len(FEW)} by NVRTC 12.9, which is not used here: NVRTC {real[0]}.{real[1]} compiles its own"
    assert value(found, "GPU and toolchain", "compiled kernels") == expected
    assert {check.compiled for check in found.kernels} == {"compiled"}


def test_every_kernel_there_is_can_be_compiled_ahead() -> None:
    """For any formats, dtypes and configurations that a recipe or a table requires."""
    names = {variant.name for variant in kernels_of((9, 0), every=True)}
    assert {variant.name for variant in EVERY} < names
    for promote in (False, True):
        for one in configurations((9, 0), promote):
            made = [kernels._gemm_variant(one, *pair, output, promote) for pair in FORMAT_PAIRS for output in OUTPUTS]
            assert {variant.name for variant in made} <= names
    for capability in ((8, 9), (9, 0), (12, 0)):
        names = {variant.name for variant in kernels_of(capability, every=True)}
        in_blocks = [*map(kernels._block_cast_variant, casts.INPUTS), kernels._weights_variant(True)]
        in_blocks += [
            kernels._gemm_variant(one, "e4m3", "e4m3", output, True, rows)
            for one in configurations(capability, True)
            for output in OUTPUTS
            for rows in (1, 128)
        ]
        # at least one GEMM for each output and kind of scales
        assert len(in_blocks) >= 10
        assert {variant.name for variant in in_blocks} <= names


def test_there_is_a_variant_for_everything_that_is_cast() -> None:
    expected = {" ".join(("cast_transpose", *casts.variant(*variant))) for variant in VARIANTS}
    others = {variant.name for variant in EVERY} - expected
    assert len(EVERY) == len(expected) + len(others)
    assert {name for name in others if not name.startswith("gemm")} == {
        "cast_weights", "update_scales", *(f"sum_splits OUTPUT=Out{name}" for name in ("Fp32", "Bf16", "Fp16"))
    }  # fmt: skip


def test_every_gemm_that_training_may_use_is_tested() -> None:
    gemms = {variant.name for variant in EVERY if variant.family == "gemm_sm90"}
    for promote, (a, outputs) in {False: ("e4m3", ("Bf16",)), True: ("e5m2", ("Bf16", "Fp32", "Fp16"))}.items():
        for one in configurations((9, 0), promote):
            for output in outputs:
                name = f"OUTPUT=Out{output} PROMOTE={int(promote)}"
                cut = f"BLOCK_M={one.block_m} BLOCK_N={one.block_n} STAGES={one.stages} CLUSTER={one.cluster}"
                gemms.remove(f"gemm_sm90 {cut} A_FORMAT={a} B_FORMAT=e4m3 {name}")
    assert gemms == set()
    assert {variant.family for variant in kernels_of((8, 9))} - {"cast_transpose"} == {
        "cast_weights", "update_scales", "gemm_sm89", "sum_splits"
    }  # fmt: skip
    assert [variant.family for variant in kernels_of((10, 0))[-2:]] == ["cast_weights", "update_scales"]


@pytest.mark.parametrize("capability", [(9, 0), (8, 9), (10, 0)])
def test_gemms_are_those_of_the_table(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capability: tuple[int, int]
) -> None:
    with_gpus(monkeypatch, capability)
    seen = [fp8(examine(compile=False), "cuda:0")["GEMMs"]]
    name = configurations(capability, True)[0].name if capability != (10, 0) else "256x128 s4 c2"
    shape = {"m": 256, "n": 256, "promote": True, "output": "bfloat16", "configuration": name, "splits": 1}
    measured = [{**shape, "k": k, "p50_us": 10.0, "cublaslt_p50_us": theirs} for k, theirs in ((64, 11.0), (128, 9.0))]
    path = gemm_table.own_path("NVIDIA H200")
    path.parent.mkdir(parents=True, exist_ok=True)
    gemm_table.write(path, {"gpu": "NVIDIA H200"}, measured)
    gemm_table.rows.cache_clear()
    seen.append(fp8(examine(compile=False), "cuda:0")["GEMMs"])
    monkeypatch.setenv("LIGHTNING_FP8_BACKEND", "reference")
    kernels.backend.cache_clear()
    seen.append(fp8(examine(compile=False), "cuda:0")["GEMMs"])
    plain = "torch._scaled_mm"
    measured_texts = [
        f"{plain} (nothing measured: lightning_fp8 tune)",
        f"own kernels for 1 of 2 measured, else {plain}",
    ]
    assert seen == [*([plain, plain] if capability == (10, 0) else measured_texts), plain]


@pytest.mark.parametrize(
    ("capability", "cuda", "backend", "runs", "casts", "gemms"),
    [
        ((9, 0), "12.6", "auto", "yes", "own kernels (tested at first use)", "own kernels (tested at first use)"),
        ((8, 9), "13.0", "auto", "yes", "own kernels (tested at first use)", "own kernels (tested at first use)"),
        ((9, 0), "12.9", "reference", "yes", "torch's operators", "torch's scaled_mm (cuBLASLt)"),
        ((9, 0), "12.8", "reference", "no: fp8-block has no kernel here", "-", "-"),
        ((12, 0), "13.0", "reference", "no: fp8-block has no kernel here", "-", "-"),
        ((10, 0), "13.0", "auto", "no: fp8-block has no kernel here", "-", "-"),
        ((8, 6), "13.0", "auto", "no: compute capability 8.6", "-", "-"),
    ],
)
def test_blocks_run_on_kernels_on_cublaslt_or_not(
    monkeypatch: pytest.MonkeyPatch,
    capability: tuple[int, int],
    cuda: str,
    backend: str,
    runs: str,
    casts: str,
    gemms: str,
) -> None:
    with_gpus(monkeypatch, capability)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setenv("LIGHTNING_FP8_BACKEND", backend)
    found = examine(compile=False)
    row, delayed = (fp8(found, "cuda:0", f"fp8-{name}") for name in ("block", "delayed"))
    assert (row["runs"].split(": light")[0], row["casts"], row["GEMMs"]) == (runs, casts, gemms)
    if runs.startswith("no: fp8"):
        asked = "compute capability 8.9, 9.0 or 12.x, cuBLASLt's a GPU of compute capability 9.0 (H100, H200)"
        assert asked in row["runs"]
        assert f"got {capability[0]}.{capability[1]} and CUDA {cuda}. Use precision='fp8-current'" in row["runs"]
    # including the kernels of delayed scaling
    assert fp8(found, "cuda:0", "fp8-current") == {**delayed, "precision": "fp8-current"}


@pytest.mark.parametrize("arguments", [["--quick"], ["--compile", "sm_89", "sm_120a"], ["--compile"]])
def test_architectures(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    without_gpu(monkeypatch)
    with pytest.raises(SystemExit) as ended:
        command.main([*arguments, "--json"])
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    assert ended.value.code == found["status"] == 0
    expected = {
        "--quick": [],
        "sm_89": ["sm_89", "sm_120a"],
        "--compile": [*kernel_checks.ARCHITECTURES],
    }[arguments[min(1, len(arguments) - 1)]]
    assert list(dict.fromkeys(check["place"] for check in found["kernels"])) == expected
    # each kernel when it was tried
    assert [line.split(": ")[:2] for line in printed.err.splitlines()] == [
        [check["place"], check["kernel"]] for check in found["kernels"]
    ]
    assert all("compiled" in line or "from the cache" in line for line in printed.err.splitlines())
    assert cache_folder().exists() == bool(expected)


def test_json_has_what_the_page_has(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with_gpus(monkeypatch, (8, 6), name="NVIDIA A10")
    for arguments in (["--json", "--quick"], ["--quick"]):
        with pytest.raises(SystemExit):
            command.main(arguments)
    found, _, text = capsys.readouterr().out.partition("\n}\n")
    data = json.loads(found + "}")
    assert set(data) == {"status", "verdict", "problems", "sections", "kernels"}
    squeezed = "".join(text.split())
    for entries in data["sections"].values():
        for row in entries:
            assert all("".join(cell.split())[:8] in squeezed for cell in row.values())
    for problem in data["problems"]:
        assert problem["do"] in text
        assert "".join(problem["what"].split()) in squeezed
    assert "".join(data["verdict"].split()) in squeezed


def test_cupy_is_not_missed_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    without_gpu(monkeypatch)
    without_cupy(monkeypatch)
    found = examine()
    assert (found.status, found.problems, found.kernels) == (0, [], [])
    assert value(found, "GPU and toolchain", "CuPy") == "not installed"
    assert "only a GPU needs" in value(found, "GPU and toolchain", "NVRTC")
    # unless kernels are to be compiled
    found = examine(architectures=["sm_90a"])
    assert (found.status, found.kernels) == (1, [])
    assert [problem.do for problem in found.problems] == [f"pip install {hardware._cupy(0)}"]


def test_nvrtc_is_missed_where_cupy_is(monkeypatch: pytest.MonkeyPatch) -> None:
    without_gpu(monkeypatch)

    def missing() -> tuple[int, int]:
        raise KernelsUnavailable("No NVRTC library. Run `pip install nvidia-cuda-nvrtc`. (OSError: libnvrtc.so.13)")

    monkeypatch.setattr(hardware, "nvrtc_version", missing)
    found = examine()
    assert (found.status, found.kernels) == (1, [])
    assert [problem.do for problem in found.problems] == ["Run `pip install nvidia-cuda-nvrtc`."]
    assert found.problems[0].what == "No NVRTC library. (OSError: libnvrtc.so.13)"


def test_a_source_that_does_not_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    without_gpu(monkeypatch)
    real = kernel_checks.compiled

    def refusing(family: str, *rest: Any) -> Path:
        if family == "cast_weights":
            raise CompileError("expected a ;")
        return real(family, *rest)

    monkeypatch.setattr(kernel_checks, "compiled", refusing)
    found = examine()
    assert found.status == 1
    assert [problem.what for problem in found.problems] == [
        "cast_weights cannot be compiled or loaded for sm_90a: CompileError: expected a ;"
    ]
    assert {check.kernel: check.compiled for check in found.kernels}["cast_weights"] == "failed"


@pytest.mark.parametrize(("cuda", "words"), [(None, "torch was built without CUDA"), ("13.0", "cannot use it")])
def test_a_gpu_that_torch_does_not_see(monkeypatch: pytest.MonkeyPatch, cuda: str | None, words: str) -> None:
    without_gpu(monkeypatch)
    monkeypatch.setattr(hardware, "driver_version", lambda: "570.1")
    monkeypatch.setattr(hardware, "driver_cuda", lambda: 12080)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    found = examine(compile=False)
    assert found.status == 1
    assert words in found.problems[0].what
    assert ("whl/cu126" in found.problems[0].do) == (cuda is None)
    assert value(found, "GPU and toolchain", "driver") == "570.1, CUDA 12.8"


# --- GPUs ---


def test_all_is_fine(host_gpu: list[str]) -> None:
    found = examine()
    assert (found.status, found.problems) == (0, [])
    assert found.verdict == "fp8-delayed runs with its own kernels on every GPU (cpu)."
    assert [check.self_test for check in found.kernels] == ["passed"] * len(FEW)
    assert all(check.self_test_s and check.compile_s > 0 for check in found.kernels)
    taken = {"registers": 64, "local_bytes": 0, "shared_bytes": 8448}
    assert [check["resources"] for check in found.as_dict()["kernels"]] == [taken] * len(FEW)
    assert {row["at most"] for row in rows(found, "Kernels")} == {"64 registers, local 0 B, shared 8448 B"}
    row = fp8(found, "cpu")
    assert (row["runs"], row["casts"], row["scales"], row["GEMMs"]) == (
        "yes",
        "own kernels",
        "own kernels",
        "torch._scaled_mm (nothing measured: lightning_fp8 tune)",
    )
    assert value(found, "GPU and toolchain", "driver") == "580.65.06, CUDA 13.0"
    assert host_gpu == []


def test_quick_compiles_nothing(host_gpu: list[str], host_kernels: list[str]) -> None:
    found = examine(compile=False)
    assert (found.status, found.kernels, host_kernels, host_gpu) == (0, [], [], [])
    assert found.verdict.endswith("as far as is known without compiling them (--quick).")
    assert fp8(found, "cpu")["casts"] == "own kernels (not tested: --quick)"


@pytest.mark.parametrize("family", ["cast_transpose", "cast_weights", "update_scales"])
def test_a_kernel_that_fails_its_self_test(monkeypatch: pytest.MonkeyPatch, host_gpu: list[str], family: str) -> None:
    def load(name: str, defines: tuple[str, ...], *rest: Any) -> HostKernel:
        return (Broken if name == family else HostKernel)((name, tuple(defines)), *rest)

    # an argument of each kernel that is compared: a payload, the recorded amaxes, the history
    position, byte = {"cast_transpose": (2, 3), "cast_weights": (3, 2), "update_scales": (1, 3)}[family]
    monkeypatch.setattr(Broken, "damage", staticmethod(poke(position, byte=byte)), raising=False)
    monkeypatch.setattr(kernels.load, "load", load)
    found = examine()
    assert (found.status, len(found.problems)) == (1, 1)
    assert found.problems[0].what.startswith(family)
    assert "did not pass on cpu: its self-test" in found.problems[0].what
    assert "doctor --json" in found.problems[0].do
    failed = [check.kernel for check in found.kernels if check.self_test == "failed"]
    assert failed == [variant.name for variant in FEW if variant.family == family]
    assert {check.resources is None for check in found.kernels if check.self_test == "failed"} == {True}
    # the pass of an earlier self-test is forgotten
    assert host_gpu == [family] * len(failed)
    row = fp8(found, "cpu")
    assert row["runs"] == "yes"
    assert ("torch's operators" in row["casts"]) == (family != "update_scales")
    assert (row["scales"] == "torch's operators") == (family == "update_scales")


def test_a_kernel_that_cannot_be_loaded(monkeypatch: pytest.MonkeyPatch, host_gpu: list[str]) -> None:
    real = kernels.load.load

    def load(family: str, *rest: Any) -> Any:
        if family == "update_scales":
            raise RuntimeError("CUDA_ERROR_NO_BINARY_FOR_GPU")
        return real(family, *rest)

    monkeypatch.setattr(kernels.load, "load", load)
    found = examine()
    assert found.status == 1
    assert "update_scales cannot be compiled or loaded for cpu: RuntimeError: CUDA_ERROR" in found.problems[0].what
    assert found.kernels[-1].self_test == "not run: not loaded"
    assert host_gpu == []


def test_a_toolchain_that_gives_out_is_said_once(monkeypatch: pytest.MonkeyPatch, host_gpu: list[str]) -> None:
    def load(*_: Any) -> None:
        raise KernelsUnavailable("Gone. Run `pip install it`.")

    monkeypatch.setattr(kernels.load, "load", load)
    found = examine()
    assert (found.status, len(found.problems), len(found.kernels)) == (1, 1, 1)
    assert fp8(found, "cpu")["casts"] == fp8(found, "cpu")["scales"] == "torch's operators"


# a child with simulated kernels: `update_scales` hangs, `cast_weights` ends its process
def serve_fakes() -> None:
    def attempt(variant: kernels.Variant, device: torch.device, test_again: bool) -> kernels.Attempt:
        print("what libraries print")
        if variant.family == "update_scales":
            time.sleep(600)
        if variant.family == "cast_weights":
            os.abort()
        return kernels.Attempt(None, None, False, 0.25, 0.5)

    torch.cuda.get_device_capability = lambda _: (9, 0)  # type: ignore[assignment]
    kernels.try_kernel = attempt  # type: ignore[assignment]
    serve(child.test)


@pytest.mark.slow
def test_a_kernel_that_hangs_costs_its_limit_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    fork_workers(monkeypatch)
    with_gpus(monkeypatch, (9, 0))
    chosen = [next(one for one in EVERY if one.family == family) for family in ("cast_weights", "update_scales")]
    cast = FEW[0]
    monkeypatch.setattr(kernels, "variants", lambda *_: [cast, *chosen, chosen[1], chosen[1], cast])
    monkeypatch.setattr(child, "command", lambda: [serve_fakes])
    shown: list[str] = []
    checks = kernel_checks.on_device(torch.device("cuda:0"), 3.0, shown.append)
    assert [(check.kernel, check.self_test, check.failure) for check in checks] == [
        (cast.name, "passed", None),
        ("cast_weights", "not run: not loaded", "ended by signal 6"),
        ("update_scales", "not run: not loaded", "did not end within 3 s"),
        ("update_scales", "not run: not loaded", "did not end within 3 s"),
        (
            "update_scales",
            "not run: not loaded",
            "not tried, after 2 of update_scales in a row gave no result",
        ),
        (cast.name, "passed", None),
    ]
    # printed before it is tried, so that the last line of a killed run names the kernel that hung
    assert shown[0] == f"cuda:0: {cast.name}: "
    assert shown[1] == "compiled 0.25 s, self-test passed 0.50 s\n"
    assert shown[4] == "cuda:0: update_scales: "
    assert shown[5].endswith("did not end within 3 s\n")


def test_gemm_is_compared(monkeypatch: pytest.MonkeyPatch, host_gpu: list[str]) -> None:
    assert kernel_checks.gemm(CPU) is None
    real = kernel_checks.plain.scaled_mm
    monkeypatch.setattr(kernel_checks.plain, "scaled_mm", lambda *args: real(*args) * 1.01)
    assert "another result" in str(kernel_checks.gemm(CPU))
    monkeypatch.setattr("lightning_fp8.tools.doctor.precisions.gemm", kernel_checks.gemm)
    found = examine(compile=False)
    assert (found.status, fp8(found, "cpu")["runs"], fp8(found, "cpu")["GEMMs"]) == (2, "no", "FAILED")
    assert "torch._scaled_mm" in found.problems[0].what


def test_a_gpu_before_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpus(monkeypatch, (8, 6), name="NVIDIA A10")
    found = examine()
    assert (found.status, found.kernels) == (2, [])
    assert found.verdict.startswith("fp8-delayed cannot run here")
    assert "needs a GPU of compute capability 8.9" in found.problems[0].what
    assert "NVIDIA A10, 8.6" in found.problems[0].what
    assert 'precision="bf16-mixed"' in found.problems[0].do
    assert [row["runs"] for row in rows(found, "Precisions")][:5] == ["yes", "yes", *["no: compute capability 8.6"] * 3]


def test_the_gravest_counts_and_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTNING_FP8_BACKEND", "reference")
    with_gpus(monkeypatch, (8, 6))
    found = examine(compile=False)
    assert (found.status, [problem.status for problem in found.problems]) == (2, [2, 1])


def test_a_gpu_before_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpus(monkeypatch, (7, 5), name="Tesla T4")
    found = examine()
    assert found.status == 2
    assert {row["runs"] for row in rows(found, "Precisions")[:5]} == {"no: compute capability 7.5"}


@pytest.mark.parametrize(("visible", "chosen"), [(None, "1,2"), ("4,6,7", "6,7")])
def test_some_gpus_before_fp8(monkeypatch: pytest.MonkeyPatch, visible: str | None, chosen: str) -> None:
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with_gpus(monkeypatch, (8, 6), (9, 0), (8, 9))
    found = examine(compile=False)
    assert found.status == 1
    assert [problem.do for problem in found.problems] == [f"export CUDA_VISIBLE_DEVICES={chosen}"]
    assert [fp8(found, f"cuda:{index}")["runs"][:3] for index in range(3)] == ["no:", "yes", "yes"]
    # only one of them, on request
    assert examine("cuda:1", compile=False).status == 0
    assert examine("cpu", compile=False).verdict.startswith("no GPU")


@pytest.mark.parametrize(("driver", "extra"), [(13000, "cuda13"), (12080, "cuda12")])
def test_without_cupy(monkeypatch: pytest.MonkeyPatch, driver: int, extra: str) -> None:
    with_gpus(monkeypatch, (9, 0), driver=driver)
    without_cupy(monkeypatch)
    found = examine()
    assert (found.status, found.kernels) == (1, [])
    assert [problem.do for problem in found.problems] == [f"pip install cupy-{extra}x"]
    assert "CuPy, which is not installed" in found.problems[0].what
    assert "pip install" not in found.problems[0].what
    row = fp8(found, "cuda:0")
    assert (row["runs"], row["casts"], row["scales"]) == ("yes", "torch's operators", "torch's operators")


def test_nvrtc_newer_than_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpus(monkeypatch, (9, 0), driver=12080)
    monkeypatch.setattr(hardware, "nvrtc_version", lambda: (13, 5))
    found = examine()
    assert (found.status, found.kernels, len(found.problems)) == (1, [], 1)
    assert found.problems[0].what == "The driver is for CUDA 12.8 and does not load what NVRTC 13.5 compiles."
    assert found.problems[0].do == (
        "Update the driver, or run `pip uninstall -y cupy-cuda13x nvidia-cuda-nvrtc`, then"
        " `pip install cupy-cuda12x nvidia-cuda-nvrtc-cu12`."
    )


def test_two_cupys(monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpus(monkeypatch, (9, 0))
    monkeypatch.setattr(
        hardware, "package_version", lambda name: {"cupy-cuda12x": "13.0", "cupy-cuda13x": "14.2"}.get(name)
    )
    found = examine(compile=False)
    assert found.status == 1
    assert found.problems[0].do == ("pip uninstall -y cupy-cuda13x cupy-cuda12x, then pip install cupy-cuda13x")


# --- versions and settings ---


@pytest.mark.parametrize(("package", "status"), [("torch", 2), ("lightning", 1), ("torchmetrics", 1)])
def test_what_is_too_old(monkeypatch: pytest.MonkeyPatch, package: str, status: int) -> None:
    without_gpu(monkeypatch)
    monkeypatch.setattr(software, "requires", lambda _: [f"{package}>=99", "rich>=99; extra == 'cli'"])
    found = examine(compile=False)
    assert found.status == status
    assert [problem.do for problem in found.problems] == [f"pip install --upgrade '{package}>=99'"]


def test_a_lightning_without_the_seam(monkeypatch: pytest.MonkeyPatch) -> None:
    without_gpu(monkeypatch)

    def register() -> None:
        raise RuntimeError("lightning 9.0 has no `_AcceleratorConnector`")

    monkeypatch.setattr(software, "registered", frozenset)
    monkeypatch.setattr(software, "register", register)
    found = examine(compile=False)
    assert found.status == 2
    assert value(found, "Versions", "precision strings") == "not registered with Lightning"
    assert "lightning 9.0 has no" in found.problems[0].what
    assert "Fp8Precision()" in found.problems[0].do


@pytest.mark.parametrize("way", ["argument", "environment"])
def test_bf16_plugins_that_are_left_to_lightning(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    without_gpu(monkeypatch)
    with monkeypatch.context() as patch:
        if way == "environment":
            patch.setenv("LIGHTNING_FP8_REPLACE_BF16", "0")
        try:
            lightning_fp8.plugins.register(bf16=False if way == "argument" else None)
            said = value(examine(compile=False), "Versions", "precision strings")
            # the examination changes nothing
            plugin = Fabric(accelerator="cpu", precision="bf16-mixed").strategy.precision
        finally:
            lightning_fp8.plugins.register(bf16=True)
    assert (
        said
        == "registered with Lightning: fp8-block, fp8-current, fp8-delayed; bf16-mixed and bf16-true: Lightning's own"
    )
    assert type(plugin).__module__.startswith("lightning.fabric.")


def test_optional_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    without_gpu(monkeypatch)
    version = software.package_version
    monkeypatch.setattr(software, "package_version", lambda name: None if name == "plotly" else version(name))
    found = examine(compile=False)
    assert found.status == 0
    assert value(found, "Versions", "plotly") == "not installed (optional: pip install plotly)"


@pytest.mark.parametrize(
    ("backend", "with_gpu", "status"),
    [("reference", True, 1), ("reference", False, 0), ("cuda", True, 2), ("cuda", False, 1)],
)
def test_backend(monkeypatch: pytest.MonkeyPatch, backend: str, with_gpu: bool, status: int) -> None:
    (with_gpus(monkeypatch, (9, 0)) if with_gpu else without_gpu(monkeypatch))  # type: ignore[func-returns-value]
    monkeypatch.setenv("LIGHTNING_FP8_BACKEND", backend)
    found = examine(compile=False)
    assert found.status == status
    assert [problem.do for problem in found.problems] == ["unset LIGHTNING_FP8_BACKEND"] * bool(status)
    assert value(found, "Settings", "LIGHTNING_FP8_BACKEND").strip("'").startswith(backend)
    if with_gpu and backend == "reference":
        assert fp8(found, "cuda:0")["casts"] == "torch's operators"


@pytest.mark.parametrize("compile", [False, True])
def test_a_cache_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, compile: bool) -> None:
    without_gpu(monkeypatch)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("LIGHTNING_FP8_CACHE_DIR", str(tmp_path / "file" / "below"))
    found = examine(compile=compile)
    assert (found.status, len(found.problems)) == (1, 1)
    assert "Not a directory" in found.problems[0].what
    assert found.problems[0].do.startswith("export LIGHTNING_FP8_CACHE_DIR=")
    assert [check.failure for check in found.kernels] == [None] * (len(FEW) if compile else 0)
    import_module("kernels_cuda.compile")._remove_private_folder()


def test_a_read_only_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    without_gpu(monkeypatch)
    cache_folder().mkdir(mode=0o500)
    asked: list[object] = []

    def refused(dir: Path) -> None:
        asked.append(dir)
        raise PermissionError(13, "Permission denied")

    # root may write everywhere
    monkeypatch.setattr(software.tempfile, "TemporaryFile", refused)
    found = examine(compile=False)
    assert asked == [cache_folder()]
    assert found.status == 1
    assert "Permission denied" in found.problems[0].what
    assert "not writable" in value(found, "Settings", "LIGHTNING_FP8_CACHE_DIR")


def test_looking_at_the_cache_leaves_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    without_gpu(monkeypatch)
    examine(compile=False)
    assert list(tmp_path.iterdir()) == []


# --- a page is always printed ---


BROKEN_PARTS: dict[str, tuple[Any, str]] = {
    "Versions": (software, "versions"),
    "GPU and toolchain": (hardware, "describe"),
    "GPUs": (hardware, "gpus"),
    "Settings": (software, "settings"),
    "Kernels": (kernels, "variants"),
    "Precisions": (torch.cuda, "get_device_capability"),
}


@pytest.mark.parametrize("part", BROKEN_PARTS)
def test_what_fails_is_a_line_of_the_page(monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise OSError("the wires\nare cut")

    (with_gpus(monkeypatch, (9, 0)) if part == "Precisions" else without_gpu(monkeypatch))  # type: ignore[func-returns-value]
    monkeypatch.setattr(*BROKEN_PARTS[part], broken)
    found = examine()
    assert found.status >= 1
    assert "OSError: the wires are cut" in json.dumps(found.as_dict())
    assert page.page(found, 80)
    if part != "Precisions":
        assert {"this part failed": "OSError: the wires are cut"} in rows(found, part)


def test_warnings_are_on_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    import warnings

    without_gpu(monkeypatch)
    monkeypatch.setattr(hardware, "gpus", lambda: warnings.warn("The NVIDIA driver is too old", stacklevel=1) or [])
    found = examine(compile=False)
    assert rows(found, "Warnings") == [{"said meanwhile": "The NVIDIA driver is too old"}]


def a_page() -> Diagnosis:
    section = diagnosis.Section("A title", ("what", "found"), (("a[b]", "word " * 40), ("/" + "x" * 200, "")))
    problem = diagnosis.Problem(1, "Something " * 20, "pip install cupy-cuda13x and a line of quite some length")
    return Diagnosis(1, "It runs.", (problem,), (section,), ())


@pytest.mark.parametrize("width", [40, 80, 200])
def test_width(width: int) -> None:
    lines = page.page(a_page(), width).splitlines()
    assert all(len(line) <= width for line in lines if "->" not in line)
    # complete, to be copied
    assert "   -> pip install cupy-cuda13x and a line of quite some length" in lines
    assert any("a[b]" in line for line in lines)
    assert any("Status 1: It runs." in line for line in lines)


# --- the command ---


def run(tmp_path: Path, *arguments: str, code: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    variables = {"CUDA_VISIBLE_DEVICES": "", "LIGHTNING_FP8_CACHE_DIR": str(tmp_path / "cache"), **environment}
    program = (
        f"import sys, lightning_fp8.__main__ as entry\n{code}\nsys.argv[1:] = {['doctor', *arguments]!r}\nentry.run()"
    )
    command = ("-c", program) if code else ("-m", "lightning_fp8", "doctor", *arguments)
    return run_warm(*command, env={**os.environ, **variables})


@needs_no_gpu
def test_the_command(tmp_path: Path) -> None:
    ran = run(tmp_path, "--quick")
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout.rstrip().endswith("Status 0: no GPU: fp8-delayed runs as a reference on the CPU.")
    assert "\033" not in ran.stdout


@needs_no_gpu
def test_the_command_as_json(tmp_path: Path) -> None:
    """With two small kernels; the test of `first_contact.sh` has all of them compiled."""
    names = [variant.name for variant in EVERY if variant.family in ("cast_weights", "update_scales")]
    two = f"""
from lightning_fp8.tools.doctor import kernel_checks
every = kernel_checks.kernels.variants
kernel_checks.kernels.variants = lambda *which: [one for one in every(*which) if one.name in {names!r}]"""
    ran = run(tmp_path, "--json", code=two)
    assert ran.returncode == 0
    found = json.loads(ran.stdout)
    assert len(ran.stderr.splitlines()) == len(names) == 2
    assert [check["kernel"] for check in found["kernels"]] == names
    assert {check["compiled"] for check in found["kernels"]} == {"compiled"}


@needs_no_gpu
def test_the_command_on_a_machine_in_a_bad_state(tmp_path: Path) -> None:
    bare = "\n".join(
        f"sys.modules[{name!r}] = None" for name in ("rich", "rich.console", "jsonargparse", "cupy_backends")
    )
    ran = run(
        tmp_path, code=bare, LIGHTNING_FP8_BACKEND="nonsense", LIGHTNING_FP8_CACHE_DIR="/dev/null/cache", COLUMNS="70"
    )
    assert ran.returncode == 1
    assert "Traceback" not in ran.stdout + ran.stderr
    for words in ("-> unset LIGHTNING_FP8_BACKEND", "-> export LIGHTNING_FP8_CACHE_DIR=", "Status 1: no GPU"):
        assert words in ran.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--nonsense"], "unrecognized arguments: --nonsense"),
        (["--compile", "sm_70"], "argument --compile: invalid choice: 'sm_70'"),
        (["--quick", "--compile", "sm_90a"], "argument --compile: not allowed with argument --quick"),
        (["--compile", "--quick"], "argument --quick: not allowed with argument --compile"),
    ],
)
def test_wrong_arguments_are_not_a_diagnosis(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        command.main(arguments)
    printed = capsys.readouterr()
    assert (ended.value.code, printed.out) == (2, "")
    assert f"error: {said}" in printed.err


def test_help_explains_the_statuses(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(["--help"])
    text = capsys.readouterr().out
    assert all(f"\n  {status}  " in text for status in (0, 1, 2))


def test_the_entry_point_knows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[list[str]] = []
    remember: Callable[[list[str]], None] = given.append
    monkeypatch.setattr(command, "main", remember)
    monkeypatch.setattr(sys, "argv", ["lightning-fp8", "doctor", "--quick"])
    entry.run()
    assert given == [["--quick"]]
