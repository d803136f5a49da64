"""Code shared by the scripts of ``benchmarks/``: variants take turns, each in a separate process."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from benchmarks import attention_dtypes, cpu_step, generation, harness, precisions
from benchmarks.harness import take_turns
from lightning_fp8.examples import ByteGPT

CHILD = """
import json, sys
if "--fail" in sys.argv:
    sys.exit("it broke")
print("something else")
print(json.dumps({"told": sys.argv[1:]}))
"""


def test_each_variant_runs_the_same_command_again_in_each_round(monkeypatch: pytest.MonkeyPatch) -> None:
    # the interpreter's original command: with `python -m`, the arguments alone do not show how it was called
    monkeypatch.setattr(sys, "orig_argv", ["python", "-c", CHILD, "--steps", "2"])
    told = {name: {"told": ["--steps", "2", "--variant", name]} for name in ("a", "b c")}
    assert take_turns(told, rounds=2) == {name: [one, one] for name, one in told.items()}


def test_a_variant_that_fails_ends_the_benchmark_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "orig_argv", ["python", "-c", CHILD, "--fail"])
    with pytest.raises(SystemExit, match="a failed:\nit broke"):
        take_turns(["a"], rounds=1)


SAID = "This CPU emulates bf16 products: bf16 precisions are left out, and 32-true takes their place"


@pytest.fixture(params=[True, False], ids=["emulated", "multiplied"])
def first(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The baseline on a CPU that emulates bf16 products, and on one that does not."""
    monkeypatch.setattr(harness, "emulates_bf16", lambda: request.param)
    return "32-true" if request.param else "bf16-mixed"


def turns(variants: Iterable[str], rounds: int) -> dict[str, list[dict[str, Any]]]:
    milliseconds = {"32-true": 4.0, "bf16-mixed": 8.0}
    measured = {key: 1.0 for key in precisions.COLUMNS if not key.endswith("_ms") and key != "times_baseline"}
    measured |= {"page_faults": 0, "losses": [2.0]}
    return {name: [{"times": [milliseconds.get(name, 16.0)], **measured}] for name in variants}


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_fp32_is_the_baseline_where_bf16_is_emulated(first: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert harness.baseline("cuda") == "bf16-mixed"
    assert not capsys.readouterr().err
    assert harness.baseline("cpu") == first
    assert capsys.readouterr().err.count(SAID) == (first == "32-true")


def test_a_step_on_the_cpu_beside_the_baseline(first: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_step, "take_turns", turns)
    monkeypatch.setattr(sys, "argv", ["cpu_step", "--out", str(tmp_path / "rows")])
    cpu_step.main()
    rows = rows_of(tmp_path / "rows")
    assert [row["variant"] for row in rows] == [first, "fp8-delayed", "torchao emulated"]
    assert {row["baseline"] for row in rows} == {first}
    assert rows[0]["times_fp8_delayed"] == (0.25 if first == "32-true" else 0.5)


def test_the_precisions_beside_the_baseline(
    first: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    checked: list[str] = []
    monkeypatch.setattr(precisions, "take_turns", turns)
    monkeypatch.setattr(precisions, "check", lambda _, variants: checked.extend(variants))
    monkeypatch.setattr(sys, "argv", ["precisions", "--device", "cpu", "--out", str(tmp_path / "rows")])
    precisions.main()
    rows = rows_of(tmp_path / "rows")
    bf16 = ["bf16-true", "bf16-mixed", "bf16-mixed, weight_copy"]
    expected = ["32-true", *(bf16 if first == "bf16-mixed" else []), "fp8-delayed"]
    assert checked == [row["variant"] for row in rows] == expected
    assert {row["baseline"] for row in rows} == {first}
    assert rows[-1]["times_baseline"] == (4.0 if first == "32-true" else 2.0)
    assert f"x {first}" in capsys.readouterr().out


def test_generation_beside_the_baseline(
    first: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(generation, "compare", lambda *given: {given[-1]: [2.0], "fp8, once": [3.0]})
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    monkeypatch.setattr(sys, "argv", ["generation"])
    generation.main()
    assert capsys.readouterr().out.endswith(f"3.00 ms a token, 1.50 x {first}\n")


def test_the_cost_of_watching_in_what_runs(first: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = ("p50_ms", "p50_without_ms", "call_us", "entry_us", "added_us_per_step", "added_share")
    numbers = dict.fromkeys(keys, 1.0)
    monkeypatch.setattr(attention_dtypes, "compare", lambda precision, *_: {"variant": precision, **numbers})
    monkeypatch.setattr(sys, "argv", ["attention_dtypes", "--out", str(tmp_path / "rows")])
    attention_dtypes.main()
    in_bf16 = ["bf16-mixed"] if first == "bf16-mixed" else []
    assert [row["variant"] for row in rows_of(tmp_path / "rows")] == ["fp8-delayed", *in_bf16]


def test_fp32_on_the_cpu_is_fp32() -> None:
    sizes = {"layers": 1, "width": 32, "heads": 2, "context": 16}
    config = {"model": {"init_args": sizes}, "data": {"init_args": {"batch_size": 2, "context": 16}}}
    found = cpu_step.train("32-true", config, steps=1)
    torch.manual_seed(0)
    model = ByteGPT(**sizes)
    batch = torch.randint(0, 256, (2, 17), dtype=torch.uint8)
    expected = F.cross_entropy(model(batch[:, :-1].long()).flatten(0, 1), batch[:, 1:].long().flatten())
    assert found["losses"][0] == pytest.approx(expected.item(), rel=1e-6)
    assert found["losses"][0] != pytest.approx(cpu_step.train("bf16-mixed", config, 1)["losses"][0], rel=1e-6)
