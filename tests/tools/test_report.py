"""The report: what is read from a run's logs, and what its tables, charts and pictures show of it."""

from __future__ import annotations

import contextlib
import html
import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from lightning.pytorch import Callback
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lit import loader, make_trainer, seeded
from logged_runs import tensor_metrics, tensor_names, write_metrics
from matplotlib.figure import Figure

from lightning_fp8 import (
    DelayedScaling,
    DtypeAudit,
    Fp8Monitor,
    Fp8Precision,
    PrecisionSchedule,
    RunRecord,
    ScaleFactorLogger,
    scaling_state,
)
from lightning_fp8.tools.report import tables
from lightning_fp8.tools.report.charts import curves, thinned
from lightning_fp8.tools.report.command import main
from lightning_fp8.tools.report.page import write_page
from lightning_fp8.tools.report.runs import ReadError, Run, Series, read_csv, read_runs
from lightning_fp8.tools.report.tensors import tensors_of
from lightning_fp8.tools.report.verdict import findings, headline

QUANTITIES = ("scale", "headroom_bits", "saturated_fraction", "underflowed_fraction")


def run_of(scalars: Mapping[str, tuple[list[int], list[float]]], name: str = "run", **kwargs: Any) -> Run:
    series = {key: Series(np.array(steps), np.array(values, float)) for key, (steps, values) in scalars.items()}
    return Run(name, Path(name), "", series, **kwargs)


def texts(table: tables.Table) -> list[list[str]]:
    return [[cell.text for cell in row] for row in table.rows]


# reading


def test_reads_what_the_loggers_wrote(tmp_path: Path) -> None:
    scales = []

    class Remember(Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            scales.append(scaling_state(pl_module).scale[0].item())

    loggers = [CSVLogger(tmp_path / "csv"), TensorBoardLogger(tmp_path / "events")]
    callbacks = [ScaleFactorLogger(1, histograms=False), Remember()]
    make_trainer(tmp_path, logger=loggers, max_epochs=3, callbacks=callbacks).fit(seeded(), loader())
    one, other = read_runs([Path(logger.log_dir) for logger in loggers])
    assert (one.note, other.note) == ("read from metrics.csv", "read from TensorBoard's event files")
    assert one.precision == other.precision == "fp8-delayed"
    assert one.scalars["fp8/net.0.input/scale"].steps.tolist() == list(range(12))
    assert one.scalars["fp8/net.0.input/scale"].values.tolist() == pytest.approx(scales, rel=1e-6)
    # other loggers add their own counters
    ours = {key for key in one.scalars if key.startswith("fp8/")}
    assert ours == {key for key in other.scalars if key.startswith("fp8/")}
    for key in ours:
        assert one.scalars[key].steps.tolist() == other.scalars[key].steps.tolist() != []
        np.testing.assert_allclose(one.scalars[key].values, other.scalars[key].values, rtol=1e-6)


def test_event_files_without_tensorboard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "events.out.tfevents.1.host").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "tensorboard.backend.event_processing.event_accumulator", None)
    with pytest.raises(ReadError, match="pip install tensorboard"):
        read_runs([tmp_path])


def test_a_line_that_is_not_finished_is_left_out(tmp_path: Path) -> None:
    path = write_metrics(tmp_path, [{"step": step, "a": step / 8, "b": 1} for step in range(4)]) / "metrics.csv"
    whole = path.read_bytes()
    # every way to truncate the last line
    for end in range(len(whole) - len(b"0.375,1,3\r\n"), len(whole) - 1):
        path.write_bytes(whole[:end])
        assert read_csv(path)["a"].values.tolist() == [0, 0.125, 0.25]
    path.write_bytes(whole)
    assert read_csv(path)["a"].values.tolist() == [0, 0.125, 0.25, 0.375]


def test_cells_and_the_order_of_steps(tmp_path: Path) -> None:
    rows = [
        {"step": 3, "a": "", "b": "nan"},
        {"step": 1, "a": "-inf", "b": "2"},
        {"step": 2, "a": "word", "b": "5"},
        {"step": 2, "a": "", "b": "6"},
    ]
    scalars = read_csv(write_metrics(tmp_path, rows) / "metrics.csv")
    assert (scalars["a"].steps.tolist(), scalars["a"].values.tolist()) == ([1], [-math.inf])
    assert scalars["b"].steps.tolist() == [1, 2, 3]
    np.testing.assert_array_equal(scalars["b"].values, [2, 6, math.nan])


def test_the_newest_version_is_read_and_runs_have_different_names(tmp_path: Path) -> None:
    for version in (2, 9, 10):
        write_metrics(tmp_path / "experiment" / f"version_{version}", [{"step": 0, "loss": version}])
    (tmp_path / "experiment" / "version_11").mkdir()
    run = read_runs([tmp_path / "experiment"])[0]
    assert (run.name, run.scalars["loss"].values.tolist()) == ("experiment/version_10", [10])
    assert run.note.startswith(f"version_10, the newest of {tmp_path / 'experiment'}")
    folders = [tmp_path / start / "model" / "version_0" for start in ("one", "other")]
    for folder in folders:
        write_metrics(folder, [{"step": 0, "loss": 1}])
    assert [run.name for run in read_runs(folders)] == ["one/model/version_0", "other/model/version_0"]
    assert [run.name for run in read_runs([folders[0]] * 2)] == ["model/version_0 (1)", "model/version_0 (2)"]


@pytest.mark.parametrize(
    ("path", "content", "message"),
    [
        ("metrics.csv", "a,b\r\n1,2\r\n", "metrics.csv has no column `step`"),
        ("metrics.csv", "a,step\r\n1,0\r\n1,2,3\r\n1,1\r\n", "line 3: 3 cells, and its header has 2"),
        ("metrics.csv", "a,step\r\n1,x\r\n", "line 2: the step is 'x', not a number"),
        ("metrics.csv", "a,step\r\n", "metrics.csv has no step with a number in it yet"),
        ("metrics.csv", "", "metrics.csv has no step with a number in it yet"),
        ("nothing", "", "has no logs: .* what CSVLogger or TensorBoardLogger wrote"),
        ("a/b/version_3/metrics.csv", "a,step\r\n1,0\r\n", "has no logs: .* Inside it, .*version_3 has"),
    ],
)
def test_folders_and_files_that_cannot_be_read(tmp_path: Path, path: str, content: str, message: str) -> None:
    with pytest.raises(ReadError, match=r"There is no folder .*logs"):
        read_runs([tmp_path / "logs"])
    file = tmp_path / "logs" / path
    file.parent.mkdir(parents=True)
    file.write_text(content)
    with pytest.raises(ReadError, match=message):
        read_runs([tmp_path / "logs"])


SECRETS = ("api_key", "apiKey", "HF_TOKEN", "db_password", "passwd", "a_secret", "credentials", "authorization", "auth")
PLAIN = {"max_tokens": 4096, "key_dim": 64, "keywords": "a b", "author": "Ada", "tokenizer": "gpt2", "token": None}


def test_secrets_among_hyperparameters_are_left_out_by_name(tmp_path: Path) -> None:
    folder = write_metrics(tmp_path / "run", [{"step": step, "train_loss": 1.0} for step in range(3)])
    nested = {"logger": {"init_args": [{"api_key": "hidden-1", "lr": 0.5}]}, "password": 123457}
    given = {**dict.fromkeys(SECRETS, "hidden-2"), "token_file": ["hidden-3"], **nested, **PLAIN}
    tag = "model: !!python/object/apply:os.system ['exit 1']\n"
    (folder / "hparams.yaml").write_text(yaml.safe_dump(given) + tag)
    main([str(folder), "--out", str(tmp_path / "report.html")])
    page = (tmp_path / "report.html").read_text()
    assert "hidden-" not in page
    assert "123457" not in page
    environment = tables.environment(read_runs([folder]))
    assert "RunRecord" in environment.note
    rows = {row[0].text: row[1].text for row in environment.rows}
    note = "(left out: may be a secret)"
    assert [rows[f"hparams: {name}"] for name in (*SECRETS, "token_file", "password")] == [note] * (len(SECRETS) + 2)
    assert rows["hparams: logger"] == str({"init_args": [{"api_key": note, "lr": 0.5}]})
    assert rows["hparams: model"] == "(object/apply:os.system)"
    assert {name: rows[f"hparams: {name}"] for name in PLAIN} == {
        name: "-" if value is None else str(value) for name, value in PLAIN.items()
    }


# what callbacks write


@pytest.mark.parametrize("precision", ["fp8-delayed", "bf16-mixed"])
def test_run_record(tmp_path: Path, precision: str) -> None:
    model, logger, is_fp8 = seeded(), CSVLogger(tmp_path), precision == "fp8-delayed"
    settings = {"plugins": Fp8Precision(recipe=DelayedScaling(margin=1), ignore_modules=["net.2"])}
    trainer = make_trainer(
        tmp_path, **settings if is_fp8 else {"precision": precision}, logger=logger, callbacks=[RunRecord()]
    )
    trainer.fit(model, loader())
    record = json.loads((Path(logger.log_dir) / "fp8_run.json").read_text())
    facts = {name: record[name] for name in ("precision", "strategy", "accelerator", "world_size", "parameters")}
    assert list(facts.values()) == [precision, "SingleDeviceStrategy", "CPUAccelerator", 1, 49 * 64 + 16]
    assert record["environment"]["torch"] == torch.__version__
    assert [path.name for path in Path(logger.log_dir).iterdir() if path.name.startswith(".")] == []
    if is_fp8:
        assert record["recipe"]["margin"] == 1
        assert record["modules"] == ["net.0"]
        assert [(row["path"], row["converted"]) for row in record["layers"]] == [("net.0", True), ("net.2", False)]
    else:
        assert record["recipe"] is record["modules"] is record["layers"] is None


def test_without_a_folder_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.warns(UserWarning, match="RunRecord: no logger of the Trainer has a local folder"):
        make_trainer(tmp_path, callbacks=[RunRecord(), DtypeAudit()]).fit(seeded(), loader())
    assert not list(tmp_path.glob("fp8_*.json"))


def test_dtype_audit_writes_its_report(tmp_path: Path) -> None:
    logger, audit = CSVLogger(tmp_path), DtypeAudit(on_violation="raise")
    model = seeded()

    class Break(Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            model.net[2].weight.data = model.net[2].weight.data.double()

    trainer = make_trainer(tmp_path, precision="bf16-mixed", logger=logger, callbacks=[Break(), audit])
    with pytest.raises(RuntimeError, match="differ from those expected, after the first optimizer step"):
        trainer.fit(model, loader())
    written = json.loads((Path(logger.log_dir) / "fp8_dtypes.json").read_text())
    assert audit.report is not None
    assert len(written["rows"]) == len(audit.report.rows) >= 4
    weight = {"kind": "parameter", "name": "net.2.weight", "actual": "float64", "expected": "float32", "elements": 1024}
    assert weight in written["violations"]
    assert {row["name"] for row in written["violations"]} == {row.name for row in audit.report.violations}


# tables and curves


def test_long_runs_keep_the_last_scale_and_the_worst_of_the_others() -> None:
    numbers = {quantity: np.random.default_rng(1).random(1000) for quantity in QUANTITIES}
    numbers["headroom_bits"][500] = np.nan
    run = run_of({f"fp8/a.weight/{name}": ([*range(1000)], [*values]) for name, values in numbers.items()})
    tensors = tensors_of(run)
    assert tensors is not None
    starts, ends = tensors.bounds
    assert len(starts) == 150
    assert [*starts[1:], 1000] == [end + 1 for end in ends]
    combined = {"scale": lambda part: part[-1], "headroom_bits": np.nanmin}
    for quantity, values in numbers.items():
        expected = [combined.get(quantity, np.nanmax)(values[a : b + 1]) for a, b in zip(starts, ends)]
        np.testing.assert_array_equal(tensors.columns[quantity][0], expected)
    worst, step = tensors.worst["headroom_bits"]
    assert (worst[0], step[0]) == (np.nanmin(numbers["headroom_bits"]), np.nanargmin(numbers["headroom_bits"]))
    assert tensors.worst["saturated_fraction"][0][0] == numbers["saturated_fraction"].max()


def test_thinned_curves_keep_peaks_and_ends() -> None:
    values = np.sin(np.arange(50_000) / 100)
    values[31_234] = 100
    # in the same stretch as the peak
    values[31_235] = np.nan
    some = thinned(Series(np.arange(50_000), values))
    assert 1000 < len(some.steps) <= 2000
    assert (some.steps[0], some.steps[-1]) == (0, 49_999)
    assert some.steps[np.nanargmax(some.values)] == 31_234
    np.testing.assert_array_equal(some.values, values[some.steps])
    assert thinned(Series(np.arange(2000), values[:2000])).steps.tolist() == list(range(2000))


def test_switches_are_drawn_with_what_they_changed_to(tmp_path: Path) -> None:
    # as the callbacks write it
    logger = CSVLogger(tmp_path)
    callbacks = [RunRecord(), PrecisionSchedule({2: {"net.0": "bf16"}})]
    make_trainer(tmp_path, logger=logger, callbacks=callbacks).fit(seeded(), loader())
    (run,) = read_runs([Path(logger.log_dir)])
    assert [(one.step, one.label) for one in curves([run], []).switches] == [(2, "{'net.0': 'bf16'} from 2")]


def test_final_values_and_their_difference() -> None:
    one = {"train_loss": ([0, 9], [5.0, 4.0]), "lr": ([0, 1], [1.0, 0.0]), "reward": ([0, 9], [-9.0, -4.0])}
    other = {"train_loss": ([0, 8], [math.nan, 4.5]), "reward": ([0, 8], [-9.0, -5.0])}
    table = tables.final_values([run_of(one, "one"), run_of(other, "other")])
    assert texts(table) == [
        ["train_loss", "4", "4.5", "+12.500%"],
        ["lr", "0", "-", "-"],
        # lower, though the quotient of the two is above 1
        ["reward", "-4", "-5", "-25.000%"],
    ]
    assert "train_loss of other: 1 of 2 values" in table.note
    assert texts(tables.final_values([run_of(one, "one")] * 2))[2] == ["reward", "-4", "-4", "0.000%"]


def test_worst_values_of_layers() -> None:
    scalars = {
        "fp8/b.in_proj.input/underflowed_fraction": ([4], [0.125]),
        "fp8/a.input/headroom_bits": ([4, 8], [1.0, -0.5]),
        "fp8/a.weight/headroom_bits": ([4, 8], [0.25, 3.0]),
        "fp8/a.weight/saturated_fraction": ([4, 8], [0.25, 0.5]),
        "fp8/a.weight/nonfinite_steps": ([4, 8], [0, 2]),
    }
    attention = {"layers": [{"path": path} for path in "ab"]}
    table = tables.worst_layers(tensors_of(run_of(scalars, record=attention)))
    assert texts(table) == [
        ["a", "-0.50 bits (input, step 8)", "50.000% (weight, step 8)", "-", "2 (weight)"],
        ["b", "-", "-", "12.500% (input, step 4)", "-"],
    ]
    assert [cell.style for cell in table.rows[0]] == [""] * 4 + ["wrong"]
    assert "lightning_fp8.ScaleFactorLogger" in tables.worst_layers(tensors_of(run_of({}))).note


def test_a_layer_that_stays_in_bf16_is_not_marked() -> None:
    layer = {"path": "head", "kind": "Linear", "converted": False, "reason": "ignored"}
    (row,) = tables.layers(run_of({}, record={"layers": [layer]})).rows
    assert [(cell.text, cell.style) for cell in row][2] == ("not FP8", "")


def test_many_tensors_share_lines_of_the_heat_map_by_role() -> None:
    numbers = np.random.default_rng(0).random((200, 3, 2))
    scalars = {
        f"fp8/{layer}.{role}/{quantity}": ([0, 1], [*numbers[layer, number]])
        for layer in range(200)
        for number, role in enumerate(("input", "weight", "grad_output"))
        for quantity in ("headroom_bits", "saturated_fraction")
    }
    tensors = tensors_of(run_of(scalars))
    assert tensors is not None
    names, planes = tensors.lines
    # 600 tensors, three in a line
    assert len(names) == 201
    assert [names[0], names[66], names[67]] == ["0.input and 2 more", "198.input and 1 more", "0.weight and 2 more"]
    np.testing.assert_array_equal(planes["headroom_bits"][67], numbers[:3, 1].min(axis=0))
    np.testing.assert_array_equal(planes["saturated_fraction"][-1], numbers[198:, 2].max(axis=0))


# the verdict


def found(condition: str, *where: str, **kwargs: Any) -> dict[str, Any]:
    """One finding as ``Fp8Monitor`` writes it."""
    return {
        **{"condition": condition, "where": [*where], "since": 8, "last": 16, "value": 0.5, "holds": True},
        **{
            "what": f"{condition}!",
            "meaning": "because",
            "remedy": "`mend(it)`, or look",
            "status": "unhealthy",
            **kwargs,
        },
    }


def verdict_of(*all_found: dict[str, Any], status: str = "unhealthy", text: str = "FP8: sick") -> dict[str, Any]:
    text = f"{text}\n more"
    return {"status": status, "text": text, "run": "ended", "layers": 2, "steps": 16, "findings": [*all_found]}


class FailsAt(Callback):
    def __init__(self, step: int | None) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == self.step:
            raise RuntimeError("stopped")


@pytest.mark.parametrize("last", [None, 10], ids=["ended", "failed"])
def test_the_verdict_of_a_real_run(tmp_path: Path, last: int | None) -> None:
    monitor, logger = Fp8Monitor(every_n_steps=4), CSVLogger(tmp_path)
    trainer = make_trainer(tmp_path, logger=logger, max_epochs=4, callbacks=[monitor, FailsAt(last)])
    with contextlib.nullcontext() if last is None else pytest.raises(RuntimeError, match="stopped"):
        trainer.fit(seeded(), loader())
    (run,) = read_runs([Path(logger.log_dir)])
    assert headline(run) == str(monitor.verdict()).splitlines()[0]
    assert headline(run).startswith("FP8: ")
    assert f"2 layers, {last or 16} steps" in headline(run)
    assert run.health["run"] == ("failed" if last else "ended")
    assert [shown.what for shown in findings(run)] == [worst.what for worst, _ in monitor.verdict().groups]
    # while the run goes on, its logger may not have written yet
    (Path(logger.log_dir) / "metrics.csv").unlink()
    (early,) = read_runs([Path(logger.log_dir)])
    assert headline(early) == headline(run)
    write_page([early], tmp_path / "report.html")
    assert headline(run) in html.unescape((tmp_path / "report.html").read_text())


def test_without_a_verdict_none_is_invented() -> None:
    assert "add lightning_fp8.Fp8Monitor" in headline(run_of({}))
    assert findings(run_of({})) == []
    in_bf16 = headline(run_of({}, record={"precision": "bf16-mixed", "layers": None}))
    assert "no layer runs in FP8 under precision bf16-mixed" in in_bf16


def test_findings_are_shown_as_the_monitor_has_them() -> None:
    ended = {"holds": False, "status": "look at"}
    health = verdict_of(
        found("saturated", *(f"{name}.input" for name in "abcde"), since=1200),
        found("bursts", "a.input", **ended),
        found("spikes", "", since=16, remedy="look", status="not FP8", holds=False),
    )
    run = run_of({}, health=health)
    assert headline(run) == "FP8: sick"
    shown = findings(run)
    assert [one.what for one in shown] == ["saturated!", "bursts!", "spikes!"]
    assert [one.where for one in shown] == ["a.input, b.input, c.input and 2 more", "a.input", ""]
    assert [one.when for one in shown] == ["since step 1,200", "from step 8 to 16", "at step 16"]
    assert [one.remedy for one in shown] == [["", "mend(it)", ", or look"]] * 2 + [["look"]]


@pytest.mark.parametrize(
    ("finding", "is_wrong"),
    [
        (found("saturated"), True),
        (found("saturated", holds=False), False),
        (found("unused", status="look at"), False),
        (found("diverges", status="not FP8"), False),
        (found("nonfinite", status="not FP8"), True),
    ],
)
def test_only_what_is_wrong_now_is_red(finding: dict[str, Any], is_wrong: bool) -> None:
    (shown,) = findings(run_of({}, health=verdict_of(finding)))
    assert shown.is_wrong == is_wrong


SERIES = (
    "fp8/a.input/saturated_fraction", "fp8/a.input/headroom_bits", "fp8/a.input/nonfinite_steps", "fp8/a.input/scale",
    "fp8/a.grad_output/amax", "fp8/health/input/underflowed_fraction/max", "fp8/health/weight/sqnr_db/min",
    "fp8/health/product/sqnr_db/min", "fp8/health/grad_output/headroom_bits/min", "train_loss", "lr",
)  # fmt: skip


@pytest.mark.parametrize(
    ("condition", "where", "key"),
    [
        ("saturated", "a.input", "fp8/a.input/saturated_fraction"),
        ("margin", "a.input", "fp8/a.input/headroom_bits"),
        ("nonfinite", "a.input", "fp8/a.input/nonfinite_steps"),
        ("stale", "a.input", "fp8/a.input/scale"),
        ("growing", "a.grad_output", "fp8/a.grad_output/amax"),
        # the tensor itself was not logged, or the condition is of its role
        ("underflowed", "a.input", "fp8/health/input/underflowed_fraction/max"),
        ("imprecise", "a.weight", "fp8/health/weight/sqnr_db/min"),
        ("bursts", "b.grad_output", "fp8/health/grad_output/headroom_bits/min"),
        ("product", "a", "fp8/health/product/sqnr_db/min"),
        ("diverges", "", "train_loss"),
        ("unused", "a", None),
        ("stale", "b.input", None),
        ("a new condition", "a.input", None),
    ],
)
def test_the_curve_of_a_finding(condition: str, where: str, key: str | None) -> None:
    scalars = {key: ([4, 8], [1.0 + number, 2.0]) for number, key in enumerate(SERIES)}
    (shown,) = findings(run_of(scalars, health=verdict_of(found(condition, where))))
    if key is None:
        assert shown.chart is None
    else:
        assert shown.chart is not None
        assert [line.values for line in shown.chart.lines] == [scalars[key][1]]
        assert [mark.step for mark in shown.chart.switches] == [8]


def test_dtypes_from_a_file(tmp_path: Path) -> None:
    def row(name: str, actual: str, expected: str | None) -> dict[str, Any]:
        return {"kind": "parameter", "name": name, "actual": actual, "expected": expected, "elements": 2**20}

    right, wrong = row("a", "bfloat16", "bfloat16"), row("b", "float32", "bfloat16")
    written = {"rows": [right, wrong, row("c", "int64", None), right], "violations": [wrong]}
    folder = write_metrics(tmp_path, [{"step": 0, "train_loss": 1}])
    assert "lightning_fp8.DtypeAudit" in tables.dtypes(read_runs([folder])[0])[0].note
    (folder / "fp8_dtypes.json").write_text(json.dumps(written))
    table, violations = tables.dtypes(read_runs([folder])[0])
    assert texts(table) == [
        ["parameter", "bfloat16", "bfloat16", "2", "2,097,152", "4.00", "ok"],
        ["parameter", "float32", "bfloat16", "1", "1,048,576", "4.00", "MISMATCH"],
        ["parameter", "int64", "-", "1", "1,048,576", "8.00", "-"],
    ]
    assert [cells[-1].style for cells in table.rows] == ["", "mark", ""]
    assert texts(violations) == [["b", "parameter", "float32", "bfloat16"]]


# pictures and the command


def test_the_command_and_the_numbers_in_its_pictures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    names = tensor_names(24)
    lost = {"fp8/input/saturated_fraction/median": 0.0, "fp8/input/headroom_bits/min": 1.0}
    write_metrics(tmp_path / "fp8" / "version_0", [{"step": 0, "train_loss": 1}])
    lost["fp8/schedule"] = 1.0
    write_metrics(tmp_path / "fp8" / "version_1", [{**row, **lost} for row in tensor_metrics(names, 6)])
    write_metrics(tmp_path / "bf16", [{"step": 10 * step + 9, "train_loss": 5 - step / 8} for step in range(6)])
    saved: dict[str, Figure] = {}
    savefig = Figure.savefig
    monkeypatch.setattr(
        Figure, "savefig", lambda self, path, **_: saved.update({path.name: self}) or savefig(self, path)
    )
    main([str(tmp_path / "fp8"), str(tmp_path / "bf16")])
    pictures = ["curves.png", "log2_scale.png", "saturation_underflow.png", "headroom.png"]
    paths = [tmp_path / "fp8" / "report.html", *(tmp_path / "fp8" / "report_png" / name for name in pictures)]
    printed = capsys.readouterr().out.splitlines()
    assert "version_1, the newest of" in printed[0]
    assert printed[-5:] == list(map(str, paths))
    assert all(path.stat().st_size > 10_000 for path in paths)
    runs = read_runs([tmp_path / "fp8", tmp_path / "bf16"])
    *lines, switch = saved["curves.png"].axes[0].lines
    assert [*switch.get_xdata()] == [9, 9]
    assert [text.get_text() for text in saved["curves.png"].axes[0].texts] == ["schedule 1"]
    assert [line.get_label() for line in lines] == ["fp8/version_1 train_loss", "bf16 train_loss"]
    for line, run in zip(lines, runs):
        np.testing.assert_allclose(line.get_ydata(), run.scalars["train_loss"].values, rtol=1e-6)
    exponents = saved["log2_scale.png"].axes[0].images[0].get_array()
    labels = [label.get_text() for label in saved["log2_scale.png"].axes[0].get_yticklabels()]
    for label, row in zip(labels, exponents, strict=True):
        np.testing.assert_allclose(row, np.log2(runs[0].scalars[f"fp8/{label}/scale"].values))
    assert sorted(labels) == sorted(names)
    (shares,) = saved["saturation_underflow.png"].axes
    assert (shares.get_title(), shares.get_ylim()[0]) == ("Saturated share: fp8/version_1", 0)


def test_a_report_that_cannot_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit, match=r"^There is no folder nowhere\.$"):
        main(["nowhere"])
    folder = str(write_metrics(tmp_path / "run", [{"step": 0, "loss": 1}]))
    with pytest.raises(SystemExit, match=r"^The report cannot be written: .*/dev/null"):
        main([folder, "--out", "/dev/null/report.html"])
    for module in ("plotly", "plotly.offline"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(SystemExit, match=r"^A report needs plotly: pip install plotly$"):
        main([folder])
