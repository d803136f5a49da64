"""The report's page in a real Chromium."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from logged_runs import tensor_metrics, tensor_names, write_metrics
from playwright.sync_api import Browser, Page, TimeoutError, sync_playwright

from lightning_fp8 import DtypeAudit, QuantizationProbe, RunRecord, ScaleFactorLogger
from lightning_fp8.examples import ByteGPT, StdlibText
from lightning_fp8.tools.report.page import write_page
from lightning_fp8.tools.report.runs import Run, read_runs
from lightning_fp8.tools.report.tensors import tensors_of

NAMES = tensor_names(1400)
STEPS = 16
EVIL = "</script><img src=http://127.0.0.1:9/x onerror=alert(1)>"
# Chromium's own services are off, so that every request comes from the page
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
             "--disable-component-update", "--disable-sync"]  # fmt: skip
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if found is None:
        without = pytest.fail if os.environ.get("CI") else pytest.skip
        without("The report's page is tested in a real Chromium, and there is none: `make browser` installs one.")
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=found, args=ARGUMENTS)
        yield opened
        opened.close()


class Opened:
    """A page, its console output, and its network requests."""

    def __init__(self, browser: Browser, path: Path, **kwargs: Any) -> None:
        self.path = path
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.page: Page = browser.new_page(**{"viewport": {"width": 1280, "height": 900}, **kwargs})
        # a busy machine opens the first page slowly
        self.page.set_default_timeout(120_000)
        self.page.on("console", lambda m: self.complaints.append(m.text) if m.type in ("error", "warning") else None)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("dialog", lambda dialog: (self.complaints.append(dialog.message), dialog.dismiss()))
        self.page.goto(path.as_uri())
        self.page.wait_for_selector("body[data-ready=yes]")

    def check(self) -> None:
        assert self.complaints == []
        # data that the page creates itself needs no network
        assert [url for url in self.requests if not url.startswith(("data:", "blob:"))] == [self.path.as_uri()]

    def labels(self) -> list[str]:
        return self.page.locator("#heatmap .ytick text").all_text_contents()

    def filter(self, text: str, rows: str) -> None:
        self.page.fill("#filter", text)
        self.page.wait_for_function("text => document.getElementById('rows').textContent === text", arg=rows)

    def data(self, chart: str) -> list[dict[str, Any]]:
        """The traces of a chart, as Plotly draws them."""
        fields = "({name, x, y, z, line, customdata}) => ({name, x, y, z, line, customdata})"
        return self.page.evaluate(f"document.getElementById('{chart}').data.map({fields})")

    def table(self, place: str) -> list[list[str]]:
        lines = self.page.locator(f"#{place} tbody tr").all()
        return [line.locator("th, td").all_text_contents() for line in lines]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Run]]:
    """A real run in FP8 and one in bf16."""
    folder = tmp_path_factory.mktemp("trained")
    for precision in ("fp8-delayed", "bf16-mixed"):
        pl.seed_everything(0)
        watching = [RunRecord(), DtypeAudit()]
        if precision == "fp8-delayed":
            watching += [ScaleFactorLogger(every_n_steps=1), QuantizationProbe(every_n_steps=2)]
        trainer = pl.Trainer(
            precision=precision, max_steps=6, val_check_interval=3, limit_val_batches=1, log_every_n_steps=1,
            logger=CSVLogger(folder, name=precision), callbacks=watching, accelerator="cpu", devices=1,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        data = StdlibText(context=32, batch_size=4, val_windows=4, max_bytes=100_000)
        trainer.fit(ByteGPT(layers=1, width=64, heads=2, context=32), data)
    runs = read_runs([folder / "fp8-delayed", folder / "bf16-mixed"])
    write_page(runs, folder / "report.html")
    return folder / "report.html", runs


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Run]:
    """1,400 tensors: a page of a large model."""
    folder = write_metrics(tmp_path_factory.mktemp("large") / "large", tensor_metrics(NAMES, STEPS))
    modules = [name.rpartition(".")[0] for name in NAMES[::3]]
    (folder / "fp8_run.json").write_text(json.dumps({"precision": "fp8-delayed", "modules": modules}))
    run = read_runs([folder])[0]
    write_page([run], folder / "report.html")
    return folder / "report.html", run


@pytest.fixture(scope="module")
def shown(browser: Browser, large: tuple[Path, Run]) -> Iterator[Opened]:
    opened = Opened(browser, large[0])
    yield opened
    opened.check()


@pytest.fixture
def opened(shown: Opened) -> Opened:
    """The large page as first opened."""
    for box in shown.page.locator("#role-boxes input").all():
        box.check()
    # each change redraws the page
    for select, value in {"#sort": "model", "#plane": "log2_scale"}.items():
        if shown.page.input_value(select) != value:
            shown.page.select_option(select, value)
    shown.filter("nothing", "none, filtered from 1,400")
    shown.filter("", "1 to 50 of 1,400")
    return shown


@pytest.fixture(scope="module")
def opened_runs(browser: Browser, trained: tuple[Path, list[Run]]) -> Iterator[Opened]:
    """The page of the trained runs."""
    opened = Opened(browser, trained[0], color_scheme="light")
    yield opened
    opened.check()


def open_runs(browser: Browser, tmp_path: Path, *folders: Path) -> Opened:
    write_page(read_runs(folders), tmp_path / "report.html")
    return Opened(browser, tmp_path / "report.html")


def test_two_runs_render_without_a_complaint(opened_runs: Opened, trained: tuple[Path, list[Run]]) -> None:
    opened, (fp8, bf16) = opened_runs, trained[1]
    page = opened.page
    assert page.title() == "FP8 report: fp8-delayed/version_0, bf16-mixed/version_0"
    assert page.locator("#runs .badge").all_text_contents() == ["fp8-delayed", "bf16-mixed"]
    sizes = [chart.bounding_box() for chart in page.locator(".chart .main-svg:first-child").all() if chart.is_visible()]
    # curves, heat map and three quantities by role
    assert len(sizes) == 5
    assert all(size and size["width"] > 250 and size["height"] > 150 for size in sizes)
    assert page.locator("#curves-chart .scatterlayer .trace").count() == 4
    assert page.locator("#heatmap .heatmaplayer image").count() == 1
    assert opened.labels() == tensors_of(fp8).names  # type: ignore[union-attr]
    finals = {row[0]: row for row in opened.table("finals-table")}
    first, other = (run.scalars["train_loss"].values[-1] for run in (fp8, bf16))
    assert finals["train_loss"][1:3] == [f"{first:.5g}", f"{other:.5g}"]
    assert float(finals["train_loss"][3].rstrip("%")) == pytest.approx(100 * (other - first) / first, abs=6e-4)
    environment = {row[0]: row[1:] for row in opened.table("environment-table")}
    assert environment["precision"] == ["fp8-delayed", "bf16-mixed"]
    assert environment["torch"] == [torch.__version__] * 2
    marked = page.locator("#environment-table tbody th.mark").all_text_contents()
    assert "precision" in marked
    assert "torch" not in marked
    assert page.locator("#dtypes-tables table").count() == 2
    assert "5 of 5 layers ran in FP8" in page.inner_text("#layers-tables")


def test_lines_of_roles_are_those_of_the_logs(opened_runs: Opened, trained: tuple[Path, list[Run]]) -> None:
    lines = opened_runs.data("roles-headroom_bits")
    assert [(line["name"], line["line"]["dash"]) for line in lines] == [
        ("input", "solid"), ("input, min", "dot"), ("grad_output", "solid"), ("grad_output, min", "dot")
    ]  # fmt: skip
    for line, key in zip(lines, ("input/headroom_bits/median", "input/headroom_bits/min")):
        logged = trained[1][0].scalars[f"fp8/{key}"]
        assert line["x"] == logged.steps.tolist()
        np.testing.assert_allclose(line["y"], logged.values, rtol=1e-6)


def test_worst_layers_and_a_run_without_tensors(opened_runs: Opened, trained: tuple[Path, list[Run]]) -> None:
    opened = opened_runs
    found = {key: series.values[-1] for key, series in trained[1][0].scalars.items() if key.endswith("/sqnr_db")}
    expected = sorted(found, key=lambda key: found[key])
    rows = opened.table("worst-table")
    assert [row[0] for row in rows] == [key.split("/")[1] for key in expected]
    assert [row[1] for row in rows] == [f"{found[key]:.1f} dB" for key in expected]
    # a click on a title sorts, and another reverses the order
    title = opened.page.locator("#worst-table thead button").nth(1)
    title.click()
    title.click()
    assert [row[0] for row in opened.table("worst-table")] == [key.split("/")[1] for key in reversed(expected)]
    assert opened.page.locator("#worst-table th[aria-sort=descending]").count() == 1
    # tensors are sorted by the SQNR of their layers
    opened.page.select_option("#sort", "sqnr")
    assert opened.labels()[0].rpartition(".")[0] == expected[0].split("/")[1]
    # a run without FP8 has no rows, and the page says what would log them
    opened.page.select_option("#run", "1")
    assert "add lightning_fp8.ScaleFactorLogger" in opened.page.inner_text("#scales-empty")
    assert not opened.page.is_visible("#heatmap")
    opened.page.select_option("#run", "0")


def test_metrics_gaps_the_log_switch_shares_and_a_change_of_precision(browser: Browser, tmp_path: Path) -> None:
    lost = dict.fromkeys((f"fp8/input/{of}_fraction/median" for of in ("saturated", "underflowed")), 0.0)
    rows = [{"step": step, "a": "nan" if step == 2 else 2.0**step, "b": 1.0, **lost} for step in range(5)]
    folder = write_metrics(tmp_path / "run", [{**row, "fp8/schedule": float(row["step"] >= 3)} for row in rows])
    (folder / "fp8_run.json").write_text(json.dumps({"precision": "fp8-delayed", "schedule": [EVIL]}))
    opened = open_runs(browser, tmp_path, folder)
    axis = "document.getElementById('{}')._fullLayout.yaxis.{}"
    # a line with its label
    shapes = "document.getElementById('curves-chart').layout.shapes.map((shape) => [shape.x0, shape.x1])"
    assert opened.page.evaluate(shapes) == [[3, 3]]
    assert opened.page.locator("#curves-chart .annotation-text").text_content() == EVIL
    assert opened.data("curves-chart")[0]["y"] == [1, 2, None, 8, 16]
    for kind in ("linear", "log"):
        assert opened.page.evaluate(axis.format("curves-chart", "type")) == kind
        opened.page.check("#curve-log")
    opened.page.select_option("#curve-key", "b")
    assert [line["y"] for line in opened.data("curves-chart")] == [[1, 1, 1, 1, 1]]
    assert "1 of 5 values" in opened.page.inner_text("#finals-table")
    for quantity in ("saturated", "underflowed"):
        assert opened.page.evaluate(axis.format(f"roles-{quantity}_fraction", "range")) == [0, 1]
    opened.check()


def test_pages_of_rows(opened: Opened, large: tuple[Path, Run]) -> None:
    assert large[0].stat().st_size < 12e6
    page = opened.page
    assert opened.labels() == NAMES[:50]
    assert page.is_disabled("#previous")
    page.click("#next")
    assert opened.labels() == NAMES[50:100]
    page.click("#previous")
    assert opened.labels() == NAMES[:50]
    opened.filter("blocks.11?.*", "1 to 50 of 80, filtered from 1,400")
    page.click("#next")
    assert opened.labels() == [name for name in NAMES if re.match(r"blocks\.11\d\.", name)][50:]
    assert page.is_disabled("#next")


def test_filters(opened: Opened) -> None:
    for text, pattern in {
        "ATTENTION.out": r".*attention\.out.*",
        "blocks.1?.mlp.*.weight": r"blocks\.1.\.mlp\..*\.weight",
    }.items():
        matching = [name for name in NAMES if re.fullmatch(pattern, name)]
        shown = min(len(matching), 50 if len(matching) > 60 else 60)
        opened.filter(text, f"1 to {shown} of {len(matching):,}, filtered from 1,400")
        assert opened.labels() == matching[:shown]
    # a pattern applies to the whole name
    for text in ("locks.17.*", "blocks.1?"):
        opened.filter(text, "none, filtered from 1,400")
        opened.filter("", "1 to 50 of 1,400")
    opened.filter("nothing", "none, filtered from 1,400")
    assert not opened.page.is_visible("#heatmap")
    assert "No layer matches" in opened.page.inner_text("#worst-table")
    opened.filter("blocks.17.mlp", "1 to 6 of 6, filtered from 1,400")
    assert {row[0] for row in opened.table("worst-table")} == {"blocks.17.mlp.up", "blocks.17.mlp.down"}
    for role in ("weight", "input"):
        opened.page.uncheck(f"#role-boxes input[value={role}]")
    assert opened.labels() == ["blocks.17.mlp.up.grad_output", "blocks.17.mlp.down.grad_output"]


@pytest.mark.parametrize(("quantity", "worst"), [("headroom_bits", min), ("saturated_fraction", max)])
def test_sorting(opened: Opened, large: tuple[Path, Run], quantity: str, worst: Any) -> None:
    found = {name: worst(large[1].scalars[f"fp8/{name}/{quantity}"].values) for name in NAMES}
    opened.page.select_option("#sort", quantity)
    assert opened.labels() == sorted(found, key=lambda name: found[name], reverse=worst is max)[:50]
    assert opened.page.inner_text("#sort option[disabled]") == "lowest SQNR: add lightning_fp8.QuantizationProbe"


@pytest.mark.parametrize("plane", ["log2_scale", "headroom_bits", "underflowed_fraction"])
def test_the_map_shows_the_numbers_of_the_logs(opened: Opened, large: tuple[Path, Run], plane: str) -> None:
    opened.page.select_option("#plane", plane)
    opened.filter("*.weight", "1 to 50 of 467, filtered from 1,400")
    (chart,) = opened.data("heatmap")
    quantity = plane.replace("log2_", "")
    expected = [large[1].scalars[f"fp8/{row[0][0]}/{quantity}"].values for row in chart["customdata"]]
    shown = np.array(chart["z"])
    assert shown.shape == (50, STEPS)
    np.testing.assert_allclose(2.0**shown if plane == "log2_scale" else shown, expected, rtol=0.01)


def test_the_overview_has_the_worst_and_leads_to_a_page(opened: Opened, large: tuple[Path, Run]) -> None:
    page = opened.page
    page.select_option("#plane", "saturated_fraction")
    z = np.array(opened.data("overview")[0]["z"])
    assert z.shape == (200, STEPS)
    all_values = np.array([large[1].scalars[f"fp8/{name}/saturated_fraction"].values for name in NAMES])
    np.testing.assert_allclose(z, all_values.reshape(200, 7, STEPS).max(axis=1), rtol=0.01)
    page.locator("#overview").scroll_into_view_if_needed()
    box = page.locator("#overview .nsewdrag").bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    page.wait_for_selector("#overview .hoverlayer .hovertext")
    name = page.locator("#overview .hoverlayer .hovertext").text_content() or ""
    assert re.search(r"blocks\.\d+\.(attention|mlp)\.\w+\.\w+step \d+: ", name)
    chosen = "() => /^[67]\\d\\d /.test(document.getElementById('rows').textContent)"
    for _ in range(3):
        page.mouse.click(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
        # Plotly takes no click while it redraws
        with suppress(TimeoutError):
            page.wait_for_function(chosen, timeout=20_000)
            break
    assert page.evaluate(chosen)
    assert opened.labels()[0] in NAMES[650:750:50]


def test_names_are_text_whatever_they_hold(browser: Browser, tmp_path: Path) -> None:
    names = [f"{EVIL}.{role}" for role in ("input", "weight", "grad_output")]
    # markup that Plotly would interpret
    link = '<a href="http://127.0.0.1:9/">loss</a>'
    rows = [{**row, f"{EVIL}_loss": 1.0, link: 2.0} for row in tensor_metrics(names, 3)]
    folder = write_metrics(tmp_path / "<b>run", rows)
    layer = {"path": EVIL, "kind": EVIL, "converted": False, "reason": EVIL}
    record = {"precision": EVIL, "modules": [EVIL], "layers": [layer], "environment": {EVIL: EVIL}}
    (folder / "fp8_run.json").write_text(json.dumps(record))
    write_page(read_runs([folder]), tmp_path / "report.html")
    assert EVIL not in (tmp_path / "report.html").read_text()
    opened = Opened(browser, tmp_path / "report.html")
    assert opened.page.locator("img, body b, main b").count() == 0
    assert opened.page.inner_text("#runs strong") == "<b>run"
    assert opened.table("layers-tables")[0][0] == EVIL
    opened.filter("onerror", "1 to 3 of 3")
    label = opened.labels()[0]
    start, _, end = label.partition("…")
    assert names[0].startswith(start)
    assert names[0].endswith(end)
    assert len(label) > 20
    for key in (f"{EVIL}_loss", link):
        opened.page.select_option("#curve-key", key)
        assert key in (opened.page.locator("#curves-chart .legendtext").first.text_content() or "")
    assert opened.page.locator("#curves-chart a[href], #curves-chart a[*|href]").count() == 0
    opened.check()
