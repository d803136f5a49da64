"""The report's page in a real Chromium."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from logged_runs import tensor_metrics, tensor_names, write_metrics
from playwright.sync_api import Browser, Page, sync_playwright

from lightning_fp8 import DtypeAudit, Fp8Monitor, RunRecord, ScaleFactorLogger
from lightning_fp8.examples import ByteGPT, StdlibText
from lightning_fp8.tools.report.page import write_page
from lightning_fp8.tools.report.runs import Run, read_runs

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
        self.page.set_default_timeout(60_000)
        self.page.on("console", lambda m: self.complaints.append(m.text) if m.type in ("error", "warning") else None)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("dialog", lambda dialog: (self.complaints.append(dialog.message), dialog.dismiss()))
        self.page.goto(path.as_uri())

    def check(self) -> None:
        assert self.complaints == []
        # data that the page creates itself needs no network
        assert [url for url in self.requests if not url.startswith(("data:", "blob:"))] == [self.path.as_uri()]

    def unfold(self) -> None:
        for title in self.page.locator("summary").all():
            title.click()

    def data(self, chart: str) -> list[dict[str, Any]]:
        """The traces of a chart that are shown, as Plotly draws them."""
        fields = "({name, x, y, z, line}) => ({name, x, y, z, line})"
        return self.page.evaluate(
            f"document.getElementById('{chart}').data.filter((one) => one.visible ?? true).map({fields})"
        )

    def choose(self, chart: str, menu: int, label: str) -> None:
        """Choose from a menu of a chart."""
        self.page.locator(f"#{chart} .updatemenu-header").nth(menu).click()
        self.page.locator(f"#{chart} .updatemenu-dropdown-button", has_text=label).click()

    def table(self, section: str) -> list[list[str]]:
        """The first table of a section."""
        lines = self.page.locator(f"#{section} tbody").first.locator("tr").all()
        return [line.locator("td").all_text_contents() for line in lines]

    def colour(self, selector: str) -> list[int]:
        """The red, green and blue of an element's text."""
        text = self.page.locator(selector).first.evaluate("element => getComputedStyle(element).color")
        return [int(part) for part in re.findall(r"\d+", text)[:3]]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Run]]:
    """A real run in FP8 and one in bf16."""
    folder = tmp_path_factory.mktemp("trained")
    for precision in ("fp8-delayed", "bf16-mixed"):
        pl.seed_everything(0)
        watching = [RunRecord(), DtypeAudit()]
        if precision == "fp8-delayed":
            watching += [ScaleFactorLogger(every_n_steps=1), Fp8Monitor(every_n_steps=4)]
        trainer = pl.Trainer(
            precision=precision, max_steps=8, val_check_interval=4, limit_val_batches=1, log_every_n_steps=1,
            logger=CSVLogger(folder, name=precision), callbacks=watching, accelerator="cpu", devices=1,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        data = StdlibText(context=32, batch_size=4, val_windows=4, max_bytes=100_000)
        trainer.fit(ByteGPT(layers=1, width=64, heads=2, context=32), data)
    runs = read_runs([folder / "fp8-delayed", folder / "bf16-mixed"])
    write_page(runs, folder / "report.html")
    return folder / "report.html", runs


@pytest.fixture(scope="module")
def opened_runs(browser: Browser, trained: tuple[Path, list[Run]]) -> Iterator[Opened]:
    """The page of the trained runs, unfolded."""
    opened = Opened(browser, trained[0], color_scheme="light")
    opened.unfold()
    yield opened
    opened.check()


def found(condition: str, where: Sequence[str], status: str, holds: bool = True) -> dict[str, Any]:
    """One finding as ``Fp8Monitor`` writes it."""
    remedy = "`DelayedScaling(margin=1)`, or another `margin`"
    texts = {"what": f"{condition} by half", "meaning": "too large", "remedy": remedy, "status": status}
    return {"condition": condition, "where": [*where], "since": 9, "last": 29, "value": 0.5, "holds": holds, **texts}


SICK = [
    found("saturated", [f"blocks.{block}.mlp.up.input" for block in range(5)], "unhealthy"),
    found("underflowed", ["blocks.0.mlp.up.weight"], "unhealthy", holds=False),
    *(found(condition, ["blocks.0.mlp.up.input"], "look at") for condition in ("bursts", "margin", "tiny", "dead")),
]
OTHER = [found("diverges", [""], "not FP8")]
VERDICTS = {
    "healthy": ("FP8: healthy (24 layers, 2,000 steps)", []),
    "unhealthy": ("FP8: unhealthy, 6 findings (24 layers, 2,000 steps)", SICK),
    "not FP8": ("FP8: not the cause of 1 finding (24 layers, 2,000 steps)", OTHER),
}


def folder_of(tmp_path: Path, status: str) -> Path:
    """Logs of a run, and the verdict on it."""
    folder = write_metrics(tmp_path / status.replace(" ", "_"), tensor_metrics(tensor_names(60), 5))
    text, all_found = VERDICTS[status]
    verdict = {"status": status, "text": f"{text}\n  more", "layers": 24, "steps": 2000, "findings": all_found}
    verdict["run"] = "ended"
    (folder / "fp8_health.json").write_text(json.dumps(verdict))
    return folder


def open_runs(browser: Browser, tmp_path: Path, *folders: Path, **kwargs: Any) -> Opened:
    write_page(read_runs(folders), tmp_path / "report.html")
    return Opened(browser, tmp_path / "report.html", **kwargs)


# the verdict


@pytest.mark.parametrize("status", VERDICTS)
def test_the_verdict_comes_first(browser: Browser, tmp_path: Path, status: str) -> None:
    opened = open_runs(browser, tmp_path, folder_of(tmp_path, status))
    page = opened.page
    assert page.inner_text("body").startswith(VERDICTS[status][0])
    # in the largest letters
    sizes = page.evaluate(
        "[...document.querySelectorAll('body *')].map((one) => parseFloat(getComputedStyle(one).fontSize))"
    )
    assert page.locator("h1").evaluate("one => parseFloat(getComputedStyle(one).fontSize)") == max(sizes) >= 24
    red, green, blue = opened.colour("h1")
    assert (red > 2 * max(green, blue)) == (status == "unhealthy")
    opened.check()


def test_findings_and_what_mends_them(browser: Browser, tmp_path: Path) -> None:
    opened = open_runs(browser, tmp_path, folder_of(tmp_path, "unhealthy"))
    findings = opened.page.locator(".finding")
    # of six conditions
    assert findings.count() == 5
    assert "and 1 more" in opened.page.inner_text("article")
    first, second = (findings.nth(number).inner_text() for number in (0, 1))
    for text in ("aturated by half", "blocks.0.mlp.up.input, blocks.1", "and 2 more", "since step 9", "too large"):
        assert text in first
    assert "from step 9 to 29" in second
    # red is for what is wrong now
    assert findings.locator(".wrong").all_text_contents() == ["saturated by half"]
    lines = opened.data("finding-0-0")
    assert [line["name"] for line in lines] == [f"blocks.{block}.mlp.up.input" for block in range(3)]
    button = findings.nth(0).locator(".remedy button")
    assert button.count() == 1
    button.click()
    assert opened.page.evaluate("getSelection().toString()") == "DelayedScaling(margin=1)"
    assert button.text_content() == "Copied"
    opened.check()


def test_the_rest_is_folded(browser: Browser, tmp_path: Path) -> None:
    opened = open_runs(browser, tmp_path, folder_of(tmp_path, "healthy"))
    page = opened.page
    assert page.locator("details").count() == 7
    assert page.locator("details[open]").count() == 0
    assert [chart.is_visible() for chart in page.locator("details .main-svg").all()] == [False] * page.locator(
        "details .main-svg"
    ).count()
    opened.unfold()
    # charts take the width of the page when they are unfolded
    page.wait_for_function("document.querySelector('#curves .main-svg').clientWidth > 900")
    opened.check()


def test_a_run_without_a_verdict(browser: Browser, tmp_path: Path) -> None:
    opened = open_runs(browser, tmp_path, write_metrics(tmp_path / "run", [{"step": 0, "loss": 1.0}]))
    (line,) = opened.page.locator("h1").all_text_contents()
    assert "add lightning_fp8.Fp8Monitor" in line
    assert "healthy" not in opened.page.inner_text("article")
    opened.check()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_in_both_colour_schemes(browser: Browser, tmp_path: Path, scheme: Any) -> None:
    folders = [folder_of(tmp_path, status) for status in ("unhealthy", "not FP8")]
    phone = {"viewport": {"width": 390, "height": 844}, "is_mobile": True, "has_touch": True}
    opened = open_runs(browser, tmp_path, *folders, color_scheme=scheme, **phone)
    page = opened.page
    opened.unfold()
    page.wait_for_timeout(200)
    # the page does not scroll sideways; tables and heat maps do so in their boxes
    assert page.evaluate("[document.documentElement.scrollWidth, innerWidth]") == [390, 390]
    assert page.evaluate("[...document.querySelectorAll('.scrolled')].some((box) => box.scrollWidth > box.clientWidth)")
    is_dark = scheme == "dark"
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (max(map(int, re.findall(r"\d+", background))) < 64) == is_dark
    for text in ("body", "h1", ".finding h2", ".finding p", "td", "th"):
        assert (sum(opened.colour(text)) > 384) == is_dark
    fill = page.locator(".xtick text").first.evaluate("text => getComputedStyle(text).fill")
    assert (min(map(int, re.findall(r"\d+", fill))) > 140) == is_dark
    opened.check()


# what is folded


def test_two_runs_render_without_a_complaint(opened_runs: Opened, trained: tuple[Path, list[Run]]) -> None:
    opened, (fp8, bf16) = opened_runs, trained[1]
    page = opened.page
    assert page.title() == ("FP8 report: fp8-delayed/version_0, FP8: healthy (5 layers, 8 steps), bf16-mixed/version_0")
    first, other = page.locator("h1").all_text_contents()
    assert first == fp8.health["text"].splitlines()[0]
    assert "no layer runs in FP8 under precision bf16-mixed" in other
    assert len(opened.data("curves-chart")) == 4
    assert page.locator("#scales .heatmaplayer image").count() == 1
    finals = {row[0]: row for row in opened.table("curves")}
    last, last_other = (run.scalars["train_loss"].values[-1] for run in (fp8, bf16))
    assert finals["train_loss"][1:3] == [f"{last:.5g}", f"{last_other:.5g}"]
    assert float(finals["train_loss"][3].rstrip("%")) == pytest.approx(100 * (last_other - last) / last, abs=6e-4)
    environment = {row[0]: row[1:] for row in opened.table("environment")}
    assert environment["precision"] == ["fp8-delayed", "bf16-mixed"]
    assert environment["torch"] == [torch.__version__] * 2
    marked = page.locator("#environment td.mark:first-child").all_text_contents()
    assert "precision" in marked
    assert "torch" not in marked
    assert page.locator("#dtypes table").count() == 2
    assert "5 of 5 layers ran in FP8" in page.inner_text("#layers")


def test_lines_of_roles_are_those_of_the_logs(opened_runs: Opened, trained: tuple[Path, list[Run]]) -> None:
    lines = opened_runs.data("lost-0-headroom_bits")
    assert [(line["name"], line["line"]["dash"]) for line in lines] == [
        ("input, median", "solid"), ("input, min", "dot"), ("grad_output, median", "solid"), ("grad_output, min", "dot")
    ]  # fmt: skip
    for line, key in zip(lines, ("input/headroom_bits/median", "input/headroom_bits/min")):
        logged = trained[1][0].scalars[f"fp8/{key}"]
        assert line["x"] == logged.steps.tolist()
        np.testing.assert_allclose(line["y"], logged.values, rtol=1e-6)


def test_a_click_on_a_title_sorts(browser: Browser, tmp_path: Path) -> None:
    runs = [[{"step": step, **dict.fromkeys(keys, 1.0), "c": 2.0} for step in range(2)] for keys in ("ab", "a")]
    folders = [write_metrics(tmp_path / f"run{number}", rows) for number, rows in enumerate(runs)]
    opened = open_runs(browser, tmp_path, *folders)
    opened.unfold()
    # cells without a number come last in both directions
    for title, orders in {2: ("acb", "cab"), 0: ("abc", "cba")}.items():
        for order in orders:
            opened.page.locator("#curves thead button").nth(title).click()
            assert "".join(row[0] for row in opened.table("curves")) == order
    opened.check()


def test_metrics_gaps_the_log_switch_shares_and_a_change_of_precision(browser: Browser, tmp_path: Path) -> None:
    lost = dict.fromkeys((f"fp8/input/{of}_fraction/median" for of in ("saturated", "underflowed")), 0.0)
    rows = [{"step": step, "a": "nan" if step == 2 else 2.0**step, "b": 1.0, **lost} for step in range(5)]
    folder = write_metrics(tmp_path / "run", [{**row, "fp8/schedule": float(row["step"] >= 3)} for row in rows])
    (folder / "fp8_run.json").write_text(json.dumps({"precision": "fp8-delayed", "schedule": [EVIL]}))
    opened = open_runs(browser, tmp_path, folder)
    opened.unfold()
    axis = "document.getElementById('{}')._fullLayout.yaxis.{}"
    # a line with its label
    shapes = "document.getElementById('curves-chart').layout.shapes.map((shape) => [shape.x0, shape.x1])"
    assert opened.page.evaluate(shapes) == [[3, 3]]
    assert opened.page.locator("#curves-chart .annotation-text").text_content() == EVIL
    assert opened.data("curves-chart")[0]["y"] == [1, 2, None, 8, 16]
    assert opened.page.evaluate(axis.format("curves-chart", "type")) == "linear"
    opened.choose("curves-chart", 0, "log")
    assert opened.page.evaluate(axis.format("curves-chart", "type")) == "log"
    opened.choose("curves-chart", 1, "b")
    assert [line["y"] for line in opened.data("curves-chart")] == [[1, 1, 1, 1, 1]]
    assert "1 of 5 values" in opened.page.inner_text("#curves")
    for quantity in ("saturated", "underflowed"):
        assert opened.page.evaluate(axis.format(f"lost-0-{quantity}_fraction", "range")) == [0, 1]
    opened.check()


def test_the_heat_map_of_a_large_model(browser: Browser, tmp_path: Path) -> None:
    names, steps = tensor_names(1400), 16
    folder = write_metrics(tmp_path / "large", tensor_metrics(names, steps))
    modules = [name.rpartition(".")[0] for name in names[::3]]
    (folder / "fp8_run.json").write_text(json.dumps({"precision": "fp8-delayed", "modules": modules}))
    opened = open_runs(browser, tmp_path, folder)
    assert opened.path.stat().st_size < 12e6
    scalars = read_runs([folder])[0].scalars
    opened.unfold()
    # a line for six tensors of a role
    inputs = [name for name in names if name.endswith("input")]
    for label, quantity, worst in (
        ("log2", "scale", np.min),
        ("headroom", "headroom_bits", np.min),
        ("saturated", "saturated_fraction", np.max),
    ):
        opened.choose("map-0", 0, label)
        (chart,) = opened.data("map-0")
        assert chart["y"][:2] == [f"{inputs[0]} and 5 more", f"{inputs[6]} and 5 more"]
        z = np.array(chart["z"])
        assert z.shape == (len(chart["y"]), steps)
        expected = worst([scalars[f"fp8/{name}/{quantity}"].values for name in inputs[6:12]], axis=0)
        np.testing.assert_allclose(z[1], np.log2(expected) if quantity == "scale" else expected, rtol=0.001)
    opened.check()


def test_names_are_text_whatever_they_hold(browser: Browser, tmp_path: Path) -> None:
    names = [f"{EVIL}.{role}" for role in ("input", "weight", "grad_output")]
    # markup that Plotly would interpret
    link = '<a href="http://127.0.0.1:9/">loss</a>'
    rows = [{**row, f"{EVIL}_loss": 1.0, link: 2.0} for row in tensor_metrics(names, 3)]
    folder = write_metrics(tmp_path / "<b>run", rows)
    layer = {"path": EVIL, "kind": EVIL, "converted": False, "reason": EVIL}
    record = {"precision": EVIL, "modules": [EVIL], "layers": [layer], "environment": {EVIL: EVIL}}
    (folder / "fp8_run.json").write_text(json.dumps(record))
    texts = dict.fromkeys(("what", "meaning", "status"), EVIL)
    finding = {**found("saturated", names[:1], ""), **texts, "remedy": f"`{EVIL}`"}
    verdict = {"status": "unhealthy", "text": EVIL, "run": "ended", "layers": 1, "steps": 1, "findings": [finding]}
    (folder / "fp8_health.json").write_text(json.dumps(verdict))
    opened = open_runs(browser, tmp_path, folder)
    assert EVIL not in opened.path.read_text()
    opened.unfold()
    assert opened.page.locator("img, b").count() == 0
    assert opened.page.inner_text("article strong") == "<b>run"
    assert opened.page.inner_text("h1") == opened.page.inner_text(".finding code") == EVIL
    assert opened.table("layers")[0][0] == EVIL
    assert set(opened.page.locator("#map-0 .ytick text").all_text_contents()) == set(names)
    for key in (f"{EVIL}_loss", link):
        opened.choose("curves-chart", 1, key)
        assert key in (opened.page.locator("#curves-chart .legendtext").first.text_content() or "")
    assert opened.page.locator("#curves-chart a[href], #curves-chart a[*|href]").count() == 0
    opened.check()
