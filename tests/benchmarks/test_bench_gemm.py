from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bench_rows import written
from fp8_numpy import code_values
from tensor_cores import HOPPER
from torch import Tensor

from benchmarks import command, gemm
from benchmarks.gemm import Gemm
from benchmarks.run import Run
from benchmarks.suites import SUITES
from kernels_cuda.gemm_variants import Configuration
from lightning_fp8 import ops
from lightning_fp8.ops.cuda import gemm_choice, kernels

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
FPROP, DGRAD, WGRAD = gemm.of_layer(64, 32, 48)
SCALE = 0.3717 * 1.6183


def run(path: Path, case: str = "") -> None:
    options = ["--device", "cpu", "--rounds", "2", "--case", case, "--out", str(path / "rows.jsonl")]
    command.main(["--suite", "gemm", *options])


def test_the_whole_suite_on_the_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(tmp_path)
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for row in written(tmp_path):
        found.setdefault(row["case"], {})[row["variant"]] = row
    assert list(found) == [case.name for case in gemm.cases(CPU)]
    for name, variants in found.items():
        other = "cublaslt precise" if name.startswith("fprop") else "cublaslt fast"
        assert list(variants) == ["lightning_fp8", "auto", "cublaslt", other, "bf16"]
        for row in variants.values():
            m, n, k = map(int, name.split()[1].split("x"))
            assert row["flops"] == 2 * m * n * k
            assert row["tflops"] == pytest.approx(2 * m * n * k / (row["p50_us"] * 1e-6) / 1e12)
            # no data sheet is used on the CPU
            assert (row["ceiling_tflops"], row["share_of_ceiling"], row["ceiling_gb_per_s"]) == (None, None, None)
            assert (row["suite"], row["checked"], row["bytes"], row["gb_per_s"]) == ("gemm", True, None, None)
    ratios = [times["cublaslt"]["p50_us"] / times["lightning_fp8"]["p50_us"] for times in found.values()]
    printed = capsys.readouterr().out
    mean = math.prod(ratios) ** (1 / len(ratios))
    assert printed.splitlines()[-1].startswith(
        f"lightning_fp8: {mean:.3f} (geometric mean of 6; lowest {min(ratios):.3f}"
    )
    assert "TFLOP/s" in printed
    assert "GB/s" not in printed


def test_the_three_gemms_of_a_layer() -> None:
    x, w, dy = torch.empty(64, 32), torch.empty(48, 32), torch.empty(64, 48)
    for case, a, b in ((FPROP, x, w), (DGRAD, dy, w.t()), (WGRAD, dy.t(), x.t())):
        assert ((case.m, case.k), (case.n, case.k)) == (a.shape, b.shape)
    assert len({case.name for case in gemm.cases(GPU)}) == 3 * len(gemm.LAYERS)


@pytest.mark.parametrize("case", [FPROP, DGRAD, WGRAD], ids=lambda case: case.kind)
def test_operands(case: Gemm) -> None:
    first, second = case._operands(CPU)
    for mine, theirs in zip(first, second):
        assert torch.equal(mine, theirs)
        assert mine.stride() == theirs.stride()
        assert mine.data_ptr() != theirs.data_ptr()
    for payload, values, fmt in ((first.a, first.a_values, case.a_format), (first.b, first.b_values, "e4m3")):
        decoded = code_values(fmt)[payload.numpy()]
        assert np.array_equal(values.double().numpy(), decoded)
        assert 80 < decoded.std() < 120
    # bf16 training stores the layer's x, w and dy, and no transpose of them
    assert [values.stride(1) == 1 for values in first[2:]] == {
        "fprop": [True, True], "dgrad": [True, False], "wgrad": [False, False],
    }[case.kind]  # fmt: skip


@pytest.mark.parametrize("case", [FPROP, DGRAD, WGRAD], ids=lambda case: case.kind)
def test_what_is_expected(case: Gemm) -> None:
    given = case._operands(CPU)[0]
    a, b = code_values(case.a_format)[given.a.numpy()], code_values("e4m3")[given.b.numpy()]
    exact, deviation, rows = case._expected(given)
    assert sorted(rows.tolist()) == list(range(case.m))
    assert np.allclose(exact.numpy(), (a @ b.T)[rows.numpy()], rtol=1e-13, atol=1e-9)
    assert np.allclose(deviation.numpy(), np.sqrt(a**2 @ (b**2).T)[rows.numpy()], rtol=1e-13)


def test_rows_are_drawn_where_there_are_many() -> None:
    case = Gemm("fprop", 1000, 16, 32)
    rows = case._expected(case._operands(CPU)[0])[2]
    assert len(set(rows.tolist())) == 64
    assert rows.max() > 900


def spoiled(number: float, at: tuple[int, int] = (5, 7)) -> Callable[[Tensor], Tensor]:
    def spoil(result: Tensor) -> Tensor:
        result[at] = result[at] * number
        return result

    return spoil


SPOILED = {
    "one number": (spoiled(1.02), "1 of {} numbers that are not the product's"),
    "the last one": (spoiled(1.02, (-1, -1)), "1 of {} numbers that are not the product's"),
    "a NaN": (spoiled(float("nan")), "1 of {} numbers that are not the product's"),
    "an infinity": (spoiled(float("inf")), "1 of {} numbers that are not the product's"),
    "a row": (lambda y: y.roll(1, dims=0), "numbers that are not the product's"),
    "no scales": (lambda y: y / SCALE, "numbers that are not the product's"),
    "its dtype": (lambda y: y.half(), "a result in torch.float16"),
    "its shape": (lambda y: y[1:], "a result of shape (63, 48)"),
}


# one function checks all results: every fault is tried in one result, and one fault of each kind in the others
@pytest.mark.parametrize(
    ("whose", "what"),
    [
        *(("lightning_fp8", what) for what in SPOILED),
        *((whose, what) for whose in ("auto", "cublaslt", "cublaslt precise") for what in ("one number", "its shape")),
    ],
)
def test_a_wrong_result_ends_the_run(whose: str, what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spoil, words = SPOILED[what]
    scaled_mm, cublaslt = ops.scaled_mm, torch._scaled_mm

    def ours(*arguments: Any) -> Tensor:
        result = scaled_mm(*arguments)
        mine = {"rawkernel": "lightning_fp8", "auto": "auto"}[arguments[-1]]
        return spoil(result) if mine == whose else result

    def theirs(*arguments: Any, use_fast_accum: bool, **options: Any) -> Tensor:
        result = cublaslt(*arguments, use_fast_accum=use_fast_accum, **options)
        return spoil(result) if whose == ("cublaslt" if use_fast_accum else "cublaslt precise") else result

    monkeypatch.setattr(ops, "scaled_mm", ours)
    monkeypatch.setattr(torch, "_scaled_mm", theirs)
    with pytest.raises(SystemExit) as ended:
        run(tmp_path, FPROP.name)
    message = str(ended.value).splitlines()[-1]
    assert message.startswith(f"{FPROP.name}: {whose} gave ")
    assert words.format(64 * 48) in message
    wrong = {row["variant"]: row["wrong"] for row in written(tmp_path) if not row["checked"]}
    # if ours is wrong, nothing is timed; if cuBLASLt is wrong, its row says so
    assert list(wrong) == ([] if whose in ("lightning_fp8", "auto") else [whose])
    assert len(written(tmp_path)) == (5 if wrong else 0)


def test_a_wrong_bf16_result_is_seen() -> None:
    given = FPROP._operands(CPU)[0]
    result = given.a_values @ given.b_values.t()
    expected = FPROP._expected(given)
    assert FPROP._difference(result, *expected, None) is None
    assert "not the product's" in str(FPROP._difference(result * SCALE, *expected, None))
    assert FPROP._difference(result.float(), *expected, None) == "a result in torch.float32"
    assert "not the product's" in str(FPROP._difference(spoiled(2.0)(result), *expected, None))


# each kind and precision; and the longest sums of the suite, where only more than a step is noticed
@pytest.mark.parametrize(
    ("kind", "fast", "k", "missing"),
    [
        *((kind, fast, 8192, 128) for kind in ("fprop", "dgrad", "wgrad") for fast in (True, False)),
        ("dgrad", True, 32768, 4096),
    ],
)
def test_the_bound_takes_tensor_cores_sums_and_no_missing_step(kind: str, fast: bool, k: int, missing: int) -> None:
    case = Gemm(kind, 40, 8, k)
    given = case._operands(CPU)[0]
    formats = case.a_format, "e4m3"
    a, b = (torch.from_numpy(code_values(fmt)[one.numpy()]) for fmt, one in zip(formats, given))
    expected = case._expected(given)

    def difference(k: int) -> str | None:
        sums = HOPPER.sums(a[:, :k], b[:, :k], formats, promote=not fast)
        return case._difference((SCALE * sums).to(case.output), *expected, fast)

    assert difference(k) is None
    assert difference(k - missing) is not None


def test_the_bound_in_numbers() -> None:
    # fast: 5 * 2^-13 for each 32; precise: the same for each 128, times the square root of the number of blocks
    assert Gemm("fprop", 1, 1, 8192)._accumulation(True) == pytest.approx(5 * 256 / 8192)
    assert Gemm("dgrad", 1, 1, 8192)._accumulation(False) == pytest.approx(5 * 4 * 8 / 8192)
    for fast in (True, False):
        assert Gemm("dgrad", 1, 1, 64)._accumulation(fast) == pytest.approx(5 * 2 / 8192)
    assert Gemm("dgrad", 1, 1, 64)._accumulation(None) == pytest.approx(5 * 2**-7)


@pytest.mark.parametrize(("gpu", "peak"), [("NVIDIA H100 80GB HBM3", 1979.0), ("NVIDIA L40S", 733.0), ("H20", None)])
def test_the_ceiling_is_the_gpus_fp8_peak(gpu: str, peak: float | None) -> None:
    rows = Run("gemm", SUITES["gemm"], CPU, 1, {"gpu": gpu}).measure(WGRAD)
    for row in rows:
        assert row["ceiling_tflops"] == peak
        assert row["share_of_ceiling"] == (None if peak is None else pytest.approx(row["tflops"] / peak))


CONFIGURATION = Configuration("gemm_sm90", 128, 128, 6)
SERVED = {
    "fprop": (FPROP, 1, [("choose", False, torch.bfloat16), ("gemm", "e4m3", torch.bfloat16, False)]),
    "dgrad": (DGRAD, 1, [("choose", True, torch.bfloat16), ("gemm", "e5m2", torch.bfloat16, True)]),
    "wgrad in parts": (
        WGRAD, 3, [("choose", True, torch.float32), ("gemm", "e5m2", torch.float32, True), ("sum", torch.float32)],
    ),
    "dgrad in parts": (
        DGRAD, 2, [("choose", True, torch.bfloat16), ("gemm", "e5m2", torch.float32, True), ("sum", torch.bfloat16)],
    ),
}  # fmt: skip


@pytest.mark.parametrize("missing", ["", "choose", "gemm", "sum"])
@pytest.mark.parametrize("served", SERVED)
def test_what_counts_as_served(served: str, missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case, splits, expected = SERVED[served]
    asked: list[tuple[Any, ...]] = []

    def choose(device: Any, word: str, m: int, n: int, k: int, *rest: Any) -> gemm_choice.Choice:
        assert (device, word, m, n, k) == (GPU, "rawkernel", case.m, case.n, case.k)
        asked.append(("choose", *rest))
        return gemm_choice.Choice(None if missing == "choose" else CONFIGURATION, splits)

    def gemm_kernel(device: Any, configuration: Configuration, a_format: str, b_format: str, *rest: Any) -> Any:
        assert (device, configuration, b_format) == (GPU, CONFIGURATION, "e4m3")
        asked.append(("gemm", a_format, *rest))
        return None if missing == "gemm" else "a kernel"

    def sum_splits_kernel(device: Any, output: torch.dtype) -> Any:
        asked.append(("sum", output))
        return None if missing == "sum" else "a kernel"

    monkeypatch.setattr(gemm_choice, "choose", choose)
    monkeypatch.setattr(kernels, "gemm_kernel", gemm_kernel, raising=False)
    monkeypatch.setattr(kernels, "sum_splits_kernel", sum_splits_kernel, raising=False)
    is_missing = missing in [what for what, *_ in expected]
    assert case.is_served(GPU) is not is_missing
    # no further kernel is requested after the missing one
    assert asked == expected[: {"choose": 1, "gemm": 2}.get(missing)]
    assert case.is_served(CPU)


def rows_of(times: dict[str, dict[str, float]]) -> list[dict[str, Any]]:
    return [
        {"case": case, "variant": variant, "p50_us": p50}
        for case, variants in times.items()
        for variant, p50 in variants.items()
    ]


def test_summary() -> None:
    times = {
        "one": {"lightning_fp8": 2.0, "auto": 2.0, "cublaslt": 4.0, "bf16": 1.0},
        "two": {"lightning_fp8": 8.0, "auto": 5.0, "cublaslt": 4.0},
        # ours did not run
        "three": {"auto": 1.0, "cublaslt": 9.0},
    }
    assert gemm.summary(rows_of(times)) == (
        "lightning_fp8: 1.000 (geometric mean of 2; lowest 0.500, two) times the speed of cublaslt; "
        "auto: 0.894 (geometric mean of 2; lowest 0.800, two) times the speed of the better of the two."
    )
    assert gemm.summary(rows_of({"three": times["three"]})) is None


def test_a_variant_that_does_not_run_costs_its_own_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: Any, **__: Any) -> Tensor:
        raise RuntimeError("no such GEMM here")

    monkeypatch.setattr(torch, "_scaled_mm", refuse)
    with pytest.raises(SystemExit, match=r"wgrad 48x32x64 \(MxNxK\): cublaslt fast: RuntimeError: no such GEMM here"):
        run(tmp_path, WGRAD.name)
    assert [row["variant"] for row in written(tmp_path)] == ["lightning_fp8", "auto", "bf16"]
    assert "geometric mean" not in capsys.readouterr().out
