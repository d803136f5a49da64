from __future__ import annotations

import io
import json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.figure import Figure

from benchmarks import command, plot, progress
from benchmarks.case import Case
from benchmarks.clock import clock
from benchmarks.run import Run
from benchmarks.suites import SUITES, Suite
from lightning_fp8.tools.report.pictures import COLOURS
from lightning_fp8.tools.timing import Variant

CPU = torch.device("cpu")


class Nothing:
    """A case that does no work."""

    bytes = None

    def __init__(self, name: str, flops: int | None = None, variants: tuple[str, ...] = ("ours", "theirs")) -> None:
        self.name, self.flops, self.names = name, flops, variants
        self.gradients: set[bool] = set()

    def is_served(self, device: torch.device) -> bool:
        return True

    def variants(self, device: torch.device) -> list[Variant]:
        def call(at: int) -> None:
            self.gradients.add(torch.is_grad_enabled())

        return [Variant(name, call, lambda: call(0)) for name in self.names]


@pytest.fixture
def suites(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Any]]:
    """Two suites that replace the real ones; returns their cases by name."""
    cases: dict[str, list[Any]] = {"small": [Nothing("a"), Nothing("b", 10**6)], "other": [Nothing("c")]}

    def summary(rows: list[dict[str, Any]]) -> str:
        return "in all: " + " ".join(f"{row['case']}:{row['variant']}" for row in rows)

    made = {
        "small": Suite(lambda device: cases["small"], "device", "theirs", summary=summary),
        "other": Suite(lambda device: cases["other"], "iterations", "nobody's", summary=lambda rows: None),
    }
    monkeypatch.setattr(command, "SUITES", made)
    return cases


def run(*arguments: str) -> None:
    command.main(["--device", "cpu", "--rounds", "1", *arguments])


def test_all_suites_in_one_file(
    suites: dict[str, list[Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "rows.jsonl"
    run("--suite", "all", "--out", str(out))
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(row["suite"], row["case"], row["variant"]) for row in rows] == [
        (suite, case, variant)
        for suite, cases in (("small", "ab"), ("other", "c"))
        for case in cases
        for variant in ("ours", "theirs")
    ]
    assert len({frozenset(row) for row in rows}) == 1
    printed = capsys.readouterr().out
    assert printed.index("in all: a:ours a:theirs b:ours b:theirs\n") < printed.index("\nc\n")
    # no cases, lines or ceiling are printed for a suite without matching cases
    run("--suite", "all", "--case", "c")
    assert "in all" not in capsys.readouterr().out
    with pytest.raises(SystemExit, match=r"--case: no name has 'z' in it. There are:\n  a\n  b\n  c$"):
        run("--suite", "all", "--case", "z")
    run("--suite", "small", "--case", "a")
    assert "in all: a:ours a:theirs\n" in capsys.readouterr().out


@pytest.mark.parametrize("emulated", [True, False])
def test_a_cpu_that_emulates_bf16_is_named(
    emulated: bool, suites: dict[str, list[Any]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "emulates_bf16", lambda: emulated)
    run("--suite", "small", "--case", "a")
    assert capsys.readouterr().out.count("This CPU emulates bf16 products: nothing follows from times") == emulated


def test_all_is_every_suite(monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(SUITES) == ["cast", "gemm", "blocks", "launch", "linear", "layer", "train"]
    measured: list[str] = []
    monkeypatch.setattr(command, "_measure", lambda run, cases, out, begin: measured.append(run.name) or [])
    run("--suite", "all")
    assert measured == list(SUITES)


def test_iterations_have_gradients_and_nothing_else_has(suites: dict[str, list[Any]]) -> None:
    run("--suite", "all")
    assert [case.gradients for case in suites["small"]] == [{False}, {False}]
    assert suites["other"][0].gradients == {True}


def test_only_casts_are_beside_a_copy() -> None:
    found = {name: [case.name for case in Run(name, suite, CPU, 1, {}).ceiling()] for name, suite in SUITES.items()}
    assert found.pop("cast") == ["copy of 16 MiB, the ceiling"]
    assert all(ceiling == [] for ceiling in found.values())


def test_what_has_no_flops_has_no_peak(suites: dict[str, list[Any]]) -> None:
    run = Run("small", command.SUITES["small"], CPU, 1, {"gpu": "NVIDIA H200"})
    ceilings = [{row["ceiling_tflops"] for row in run.measure(case)} for case in suites["small"]]
    assert ceilings == [{None}, {1979.0}]


def test_failures_of_all_suites_are_told_at_the_end(
    suites: dict[str, list[Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse() -> str | None:
        raise RuntimeError("not here")

    class Failing(Nothing):
        def variants(self, device: torch.device) -> list[Variant]:
            return [*super().variants(device), Variant("failing", lambda at: None, refuse)]

    suites["small"].insert(0, Failing("first"))
    suites["other"].append(Failing("last"))
    picture = tmp_path / "bars.png"
    with pytest.raises(SystemExit) as ended:
        run("--suite", "all", "--plot", str(picture))
    lines = [f"{case}: failing: RuntimeError: not here" for case in ("first", "last")]
    assert str(ended.value).splitlines()[-2:] == lines
    # the variants that ran are plotted
    assert picture.exists()
    assert "\nc\n" in capsys.readouterr().out


def test_a_case_too_large_for_the_memory_costs_its_own_rows(suites: dict[str, list[Any]], tmp_path: Path) -> None:
    class Large(Nothing):
        def variants(self, device: torch.device) -> list[Variant]:
            raise torch.OutOfMemoryError("not so much")

    suites["small"].insert(0, Large("large"))
    out = tmp_path / "rows.jsonl"
    with pytest.raises(SystemExit, match="large: not so much"):
        run("--suite", "small", "--out", str(out))
    assert {json.loads(line)["case"] for line in out.read_text().splitlines()} == {"a", "b"}


def test_a_picture(suites: dict[str, list[Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "bars.png"
    run("--suite", "small", "--plot", str(picture))
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert capsys.readouterr().out.splitlines()[-1] == str(picture)
    other = tmp_path / "other.png"
    run("--suite", "other", "--plot", str(other))
    assert not other.exists()
    assert "--plot: no case has the variant that its suite compares with" in capsys.readouterr().out


def test_what_a_picture_cannot_be_is_said_before_anything_is_measured(
    suites: dict[str, list[Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SystemExit, match=r"must end in \.png, got bars\.pdf"):
        run("--suite", "small", "--plot", str(tmp_path / "bars.pdf"))
    with pytest.raises(SystemExit, match=r"--plot: there is no folder nowhere to write bars\.png in"):
        run("--suite", "small", "--plot", "nowhere/bars.png")
    monkeypatch.setattr(command, "find_spec", lambda name: None if name == "matplotlib" else find_spec(name))
    with pytest.raises(SystemExit, match=r"--plot needs matplotlib: pip install matplotlib"):
        run("--suite", "small", "--plot", str(tmp_path / "bars.png"))
    assert suites["small"][0].gradients == set()
    run("--suite", "small")


def row(suite: str, case: str, variant: str, p50: float) -> dict[str, Any]:
    return {"suite": suite, "case": case, "variant": variant, "p20_us": 0.9 * p50, "p50_us": p50, "p80_us": 1.2 * p50}


ROWS = [
    row("gemm", "one", "ours", 30.0), row("gemm", "one", "cublaslt", 20.0), row("gemm", "one", "cublaslt fast", 10.0),
    row("gemm", "alone", "ours", 5.0), row("cast", "one", "ours", 7.0), row("cast", "one", "torch.compile(x)", 14.0),
    row("gemm", "two", "cublaslt", 8.0), row("gemm", "two", "new", 4.0),
]  # fmt: skip


def test_times_beside_the_baseline() -> None:
    found = plot.relative(ROWS, "gemm", "cublaslt")
    assert {case: list(variants) for case, variants in found.items()} == {
        "one": ["ours", "cublaslt", "cublaslt fast"],
        "two": ["cublaslt", "new"],
    }
    assert found["one"]["ours"] == pytest.approx((1.35, 1.5, 1.8))
    assert found["one"]["cublaslt fast"] == pytest.approx((0.45, 0.5, 0.6))
    assert found["two"]["new"] == pytest.approx((0.45, 0.5, 0.6))
    assert plot.relative(ROWS, "cast", "torch.compile") == {
        "one": {"ours": pytest.approx((0.45, 0.5, 0.6)), "torch.compile(x)": pytest.approx((0.9, 1.0, 1.2))}
    }
    assert plot.relative(ROWS, "launch", "driver") == {}


def test_bars_show_the_times() -> None:
    axes = Figure().subplots()
    plot._bars(axes, plot.relative(ROWS, "gemm", "cublaslt"))
    bars = [bar for bar in axes.patches if bar.get_width() > 0]
    assert [bar.get_width() for bar in bars] == pytest.approx([1.5, 1.0, 0.5, 1.0, 0.5])
    centres = [bar.get_y() + bar.get_height() / 2 for bar in bars]
    # a gap between cases
    assert centres == pytest.approx([0, 1, 2, 4, 5])
    assert [text.get_text() for text in axes.get_yticklabels()] == ["one", "two"]
    assert list(axes.get_yticks()) == [1, 4.5]
    bottom, top = axes.get_ylim()
    assert (bottom, top) == (6, -1)
    # a variant has one colour in all cases
    assert bars[1].get_facecolor() == bars[3].get_facecolor()
    assert len({bar.get_facecolor() for bar in bars}) == 4
    assert axes.get_legend_handles_labels()[1] == ["ours", "cublaslt", "cublaslt fast", "new"]
    spread = axes.containers[0].lines[2][0].get_segments()[0]
    assert [point[0] for point in spread] == pytest.approx([1.35, 1.8])


def test_a_second_chart_where_tokens_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        {**row("train", "one", "ours", 30.0), "tokens_per_s": 600.0},
        {**row("train", "one", "bf16", 20.0), "tokens_per_s": 900.0},
        {**row("cast", "one", "ours", 7.0), "tokens_per_s": None},
    ]
    # slow at p80, fast at p20
    expected = {"ours": (500, 600, 600 / 0.9), "bf16": (750, 900, 1000)}
    assert plot.tokens(rows, "train") == {"one": {name: pytest.approx(bar) for name, bar in expected.items()}}
    assert plot.tokens(rows, "cast") == {}
    drawn: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, **options: drawn.append(figure))
    assert plot.draw(rows, {"cast": "ours", "train": "bf16"}, tmp_path / "a.png")
    titles = [(axes.get_title(), axes.get_xlabel()) for axes in drawn[0].axes]
    assert titles == [
        ("cast", "p50 relative to ours: lower is faster"), ("train", "p50 relative to bf16: lower is faster"),
        ("train, tokens/s", "tokens per second: higher is faster"),
    ]  # fmt: skip
    # in the columns that compare with the baseline, and not among the tokens
    assert [[line.get_xdata()[0] for line in axes.lines if len(line.get_xdata()) == 2] for axes in drawn[0].axes] == [
        [1], [1], [],
    ]  # fmt: skip
    widths = [bar.get_width() for bar in drawn[0].axes[2].patches if bar.get_width() > 0]
    assert widths == [600, 900]


def test_more_variants_than_colours_stay_apart() -> None:
    names = [f"v{number}" for number in range(2 * len(COLOURS))]
    looks = [(look["color"], look["hatch"]) for look in (plot._look(names, name) for name in names)]
    assert len(set(looks)) == len(names)


def test_a_chart_for_each_suite_that_has_bars(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, **options: drawn.append(figure))
    assert plot.draw(ROWS, {"launch": "driver", "gemm": "cublaslt", "cast": "torch.compile"}, tmp_path / "a.png")
    (figure,) = drawn
    assert [axes.get_title() for axes in figure.axes] == ["gemm", "cast"]
    assert [axes.get_xlabel() for axes in figure.axes] == [
        "p50 relative to cublaslt: lower is faster", "p50 relative to torch.compile: lower is faster",
    ]  # fmt: skip
    assert all(axes.get_legend() is not None for axes in figure.axes)
    assert not plot.draw(ROWS, {"launch": "driver"}, tmp_path / "a.png")
    assert len(drawn) == 1


def test_baselines_are_variants_of_their_suites() -> None:
    for name in ("cast", "gemm", "blocks", "linear", "layer", "train"):
        suite = SUITES[name]
        for case in suite.cases(CPU):
            assert any(variant.name.startswith(suite.baseline) for variant in case.variants(CPU))


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_bar_on_a_terminal(suites: dict[str, list[Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", terminal)
    suites["small"][0].name = "[bold]a"
    run("--suite", "all")
    shown = terminal.getvalue()
    # the case being measured is not counted as done
    places = [shown.index(text) for text in ("0/3", "small: [bold]a", "1/3", "small: b", "2/3", "other: c")]
    assert places == sorted(places)
    assert "3/3" not in shown


def test_the_ceiling_is_a_part_of_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    totals: list[int] = []
    real = command.progress

    def counting(total: int) -> Any:
        totals.append(total)
        return real(total)

    monkeypatch.setattr(command, "progress", counting)
    run("--suite", "cast", "--case", "update_scales")
    assert totals == [2]


@pytest.mark.parametrize("without", ["a terminal", "rich"])
def test_no_bar_without(without: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Terminal() if without == "rich" else io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    if without == "rich":
        monkeypatch.setattr(progress, "find_spec", lambda name: None)
    with progress.progress(1) as begin:
        begin("a case")
    assert stream.getvalue() == ""


@pytest.mark.parametrize("on_terminal", [True, False])
def test_output_passes_the_bar_by_where_it_goes_to_a_file(on_terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    output, terminal = Terminal() if on_terminal else io.StringIO(), Terminal()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stdout", output)
    monkeypatch.setattr(sys, "stderr", terminal)
    with progress.progress(1) as begin:
        begin("a case")
        print("a table")
    assert ("a table" in output.getvalue()) is not on_terminal
    # otherwise the progress bar would be in the middle of it
    assert ("a table" in terminal.getvalue()) is on_terminal


def test_nothing_draws_while_something_is_measured() -> None:
    import threading

    before = threading.active_count()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stderr", Terminal())
        with progress.progress(1) as begin:
            begin("a case")
            assert threading.active_count() == before


def test_a_new_suite_needs_no_more_than_a_row(suites: dict[str, list[Any]], capsys: pytest.CaptureFixture[str]) -> None:
    def cases(device: torch.device) -> list[Case]:
        return [Nothing("anything", 10**12)]

    command.SUITES["layer"] = Suite(cases, "iterations", "theirs")
    run("--suite", "layer")
    assert "TFLOP/s" in capsys.readouterr().out
    assert Run("layer", command.SUITES["layer"], CPU, 1, {}).clock == clock("iterations", CPU)
