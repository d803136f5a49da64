from __future__ import annotations

import base64
import json
import math
import sys
from collections.abc import Mapping
from itertools import pairwise
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
from warm import run_warm

from lightning_fp8 import DelayedScaling, DtypeAudit, Fp8Precision, RunRecord, ScaleFactorLogger, describe
from lightning_fp8.tools.report import tables
from lightning_fp8.tools.report.command import main
from lightning_fp8.tools.report.curves import curve_keys, loss_keys, thinned
from lightning_fp8.tools.report.page import half, page_data, single
from lightning_fp8.tools.report.runs import ReadError, Run, Series, read_csv, read_runs
from lightning_fp8.tools.report.tensors import role_curves, tensors_of

QUANTITIES = ("scale", "headroom_bits", "saturated_fraction", "underflowed_fraction")


def run_of(scalars: Mapping[str, tuple[list[int], list[float]]], name: str = "run", **kwargs: Any) -> Run:
    series = {key: Series(np.array(steps), np.array(values, float)) for key, (steps, values) in scalars.items()}
    return Run(name, Path(name), "metrics.csv", "", series, **kwargs)


def texts(table: tables.Table) -> list[list[str]]:
    return [[cell.text for cell in row] for row in table.rows]


# reading


def test_reads_what_the_csv_logger_wrote(tmp_path: Path) -> None:
    logger, callback = CSVLogger(tmp_path), Remember()
    make_trainer(tmp_path, logger=logger, log_every_n_steps=1, callbacks=[ScaleFactorLogger(1), callback]).fit(
        seeded(), loader()
    )
    run = read_runs([Path(logger.log_dir)])[0]
    assert run.scalars["fp8/net.0.input/scale"].steps.tolist() == [0, 1, 2, 3]
    assert run.scalars["fp8/net.0.input/scale"].values.tolist() == pytest.approx(callback.scales, rel=1e-6)
    assert run.source == "metrics.csv"
    assert run.precision == "fp8-delayed"


class Remember(Callback):
    """Records the first scale of a model after each step."""

    def __init__(self) -> None:
        self.scales: list[float] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        from lightning_fp8 import scaling_state

        self.scales.append(scaling_state(pl_module).scale[0].item())


def test_reads_event_files_where_there_is_no_csv(tmp_path: Path) -> None:
    loggers = [CSVLogger(tmp_path / "csv"), TensorBoardLogger(tmp_path / "events")]
    make_trainer(tmp_path, logger=loggers, max_epochs=3, callbacks=[ScaleFactorLogger(1, histograms=False)]).fit(
        seeded(), loader()
    )
    # other loggers add their own counters
    one, other = read_runs([Path(logger.log_dir) for logger in loggers])
    ours = {key for key in one.scalars if key.startswith("fp8/")}
    # the two weights, and their role, have neither a window nor headroom
    assert len(ours) == 6 * 7 - 2 * 2 + 3 * (3 * 7 - 2)
    assert ours == {key for key in other.scalars if key.startswith("fp8/")}
    for key in ours:
        assert one.scalars[key].steps.tolist() == other.scalars[key].steps.tolist() != []
        np.testing.assert_allclose(one.scalars[key].values, other.scalars[key].values, rtol=1e-6)
    assert other.source == "TensorBoard's event files"


def test_event_files_without_tensorboard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "events.out.tfevents.1.host").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "tensorboard.backend.event_processing.event_accumulator", None)
    with pytest.raises(ReadError, match="pip install tensorboard"):
        read_runs([tmp_path])


def test_a_line_that_is_not_finished_is_left_out(tmp_path: Path) -> None:
    path = write_metrics(tmp_path, [{"step": step, "a": step / 8, "b": 1} for step in range(4)]) / "metrics.csv"
    whole = path.read_bytes()
    # every way to truncate the last line, and the header alone
    for end in range(len(whole) - len(b"0.375,1,3\r\n"), len(whole)):
        path.write_bytes(whole[:end])
        assert read_csv(path)["a"].values.tolist() == [0, 0.125, 0.25]
    path.write_bytes(whole)
    assert read_csv(path)["a"].values.tolist() == [0, 0.125, 0.25, 0.375]
    path.write_bytes(whole[: len(b"a,b,step\r\n")])
    assert read_csv(path) == {}


def test_cells_that_are_empty_infinite_or_words(tmp_path: Path) -> None:
    rows = [{"step": 0, "a": "", "b": "nan"}, {"step": 1, "a": "-inf", "b": "2"}, {"step": 2, "a": "word", "b": ""}]
    scalars = read_csv(write_metrics(tmp_path, rows) / "metrics.csv")
    assert (scalars["a"].steps.tolist(), scalars["a"].values.tolist()) == ([1], [-math.inf])
    assert scalars["b"].steps.tolist() == [0, 1]
    assert math.isnan(scalars["b"].values[0])
    assert scalars["b"].values[1] == 2


def test_steps_are_in_order_and_the_later_of_two_counts(tmp_path: Path) -> None:
    rows = [{"step": step, "a": value} for step, value in ((3, 30), (1, 10), (3, 31))]
    series = read_csv(write_metrics(tmp_path, rows) / "metrics.csv")["a"]
    assert (series.steps.tolist(), series.values.tolist()) == ([1, 3], [10, 31])


def test_the_newest_version_is_read_and_named(tmp_path: Path) -> None:
    for version in (2, 9, 10):
        write_metrics(tmp_path / "experiment" / f"version_{version}", [{"step": 0, "loss": version}])
    (tmp_path / "experiment" / "version_11").mkdir()
    run = read_runs([tmp_path / "experiment"])[0]
    assert run.scalars["loss"].values.tolist() == [10]
    assert run.name == "experiment/version_10"
    assert run.note == f"version_10, the newest of {tmp_path / 'experiment'}"


def test_runs_have_different_names(tmp_path: Path) -> None:
    folders = [tmp_path / start / "model" / "version_0" for start in ("one", "other")]
    for folder in folders:
        write_metrics(folder, [{"step": 0, "loss": 1}])
    assert [run.name for run in read_runs(folders)] == ["one/model/version_0", "other/model/version_0"]
    assert [run.name for run in read_runs([folders[0]] * 2)] == ["model/version_0 (1)", "model/version_0 (2)"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"step,a\r\n0,\xff\r\n", "metrics.csv cannot be read: .* codec"),
        (b"a,b\r\n1,2\r\n", "has no column `step`"),
        (b"a,step\r\n1,0\r\n1,2,3\r\n1,1\r\n", "line 3: 3 cells, and its header has 2"),
        (b"a,step\r\n1,x\r\n", "line 2: the step is 'x', not a number"),
        (b"a,step\r\n", "metrics.csv has no step with a number in it yet"),
        (b"", "metrics.csv has no step with a number in it yet"),
    ],
)
def test_unreadable_files(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "metrics.csv").write_bytes(content)
    with pytest.raises(ReadError, match=message):
        read_runs([tmp_path])


def test_missing_folders_and_folders_without_logs(tmp_path: Path) -> None:
    with pytest.raises(ReadError, match=r"There is no folder .*nowhere"):
        read_runs([tmp_path / "nowhere"])
    with pytest.raises(ReadError, match=r"has no logs: .* what CSVLogger or TensorBoardLogger wrote"):
        read_runs([tmp_path])
    write_metrics(tmp_path / "a" / "b" / "version_3", [{"step": 0, "loss": 1}])
    with pytest.raises(ReadError, match=r"has no logs: .* Inside it, .*version_3 has"):
        read_runs([tmp_path])


def test_records_and_hyperparameters(tmp_path: Path) -> None:
    write_metrics(tmp_path, [{"step": 0, "loss": 1}])
    (tmp_path / "hparams.yaml").write_text("lr: 0.1\nmodel: !!python/object/apply:os.system ['exit 1']\n")
    (tmp_path / "fp8_run.json").write_text('{"precision": "32-true"}')
    run = read_runs([tmp_path])[0]
    assert run.precision == "32-true"
    assert run.hparams == {"lr": 0.1, "model": "(object/apply:os.system)"}
    (tmp_path / "fp8_run.json").write_text('{"precision": ')
    with pytest.raises(ReadError, match=r"fp8_run.json cannot be read: .* Remove it"):
        read_runs([tmp_path])


SECRETS = ("api_key", "apiKey", "HF_TOKEN", "db_password", "passwd", "a_secret", "credentials", "authorization", "auth")
PLAIN = {"max_tokens": 4096, "key_dim": 64, "keywords": "a b", "author": "Ada", "tokenizer": "gpt2", "token": None}


def test_secrets_among_hyperparameters_are_left_out_by_name(tmp_path: Path) -> None:
    folder = write_metrics(tmp_path / "run", [{"step": step, "train_loss": 1.0} for step in range(3)])
    nested = {"logger": {"init_args": [{"api_key": "hidden-1", "lr": 0.5}]}, "password": 123457}
    given = {**dict.fromkeys(SECRETS, "hidden-2"), "token_file": ["hidden-3"], **nested, **PLAIN}
    (folder / "hparams.yaml").write_text(yaml.safe_dump(given))
    main([str(folder), "--out", str(tmp_path / "report.html")])
    page = (tmp_path / "report.html").read_text()
    assert "hidden-" not in page
    assert "123457" not in page
    rows = {row[0].text: row[1].text for row in tables.environment(read_runs([folder])).rows}
    note = "(left out: may be a secret)"
    assert [rows[f"hparams: {name}"] for name in (*SECRETS, "token_file", "password")] == [note] * (len(SECRETS) + 2)
    assert rows["hparams: logger"] == str({"init_args": [{"api_key": note, "lr": 0.5}]})
    assert {name: rows[f"hparams: {name}"] for name in PLAIN} == {
        name: "-" if value is None else str(value) for name, value in PLAIN.items()
    }
    assert all(name in page for name in (*SECRETS, note))


# metrics that callbacks write


def test_run_record(tmp_path: Path) -> None:
    model, logger = seeded(), CSVLogger(tmp_path)
    plugin = Fp8Precision(recipe=DelayedScaling(margin=1), ignore_modules=["net.2"])
    make_trainer(tmp_path, plugins=plugin, logger=logger, callbacks=[RunRecord()]).fit(model, loader())
    record = json.loads((Path(logger.log_dir) / "fp8_run.json").read_text())
    assert record["precision"] == "fp8-delayed"
    assert record["strategy"] == "SingleDeviceStrategy"
    assert record["accelerator"] == "CPUAccelerator"
    assert record["world_size"] == 1
    assert record["parameters"] == 32 * 64 + 64 + 64 * 16 + 16
    assert record["recipe"]["margin"] == 1
    assert record["modules"] == ["net.0"]
    assert [row["converted"] for row in record["layers"]] == [True, False]
    assert [row["path"] for row in record["layers"]] == [row.path for row in describe(model)] == ["net.0", "net.2"]
    assert record["environment"]["torch"] == torch.__version__
    assert record["environment"]["gpu"] is None
    assert [path.name for path in Path(logger.log_dir).iterdir() if path.name.startswith(".")] == []


def test_run_record_of_a_bf16_run_and_without_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logger = CSVLogger(tmp_path)
    make_trainer(tmp_path, precision="bf16-mixed", logger=logger, callbacks=[RunRecord()]).fit(seeded(), loader())
    record = json.loads((Path(logger.log_dir) / "fp8_run.json").read_text())
    assert (record["precision"], record["recipe"], record["layers"]) == ("bf16-mixed", None, None)
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


def test_tensors_in_model_order_with_their_numbers() -> None:
    names = tensor_names(12 * 12)
    rows = tensor_metrics(names, steps=3)
    scalars = {
        key: ([row["step"] for row in rows if key in row], [row[key] for row in rows if key in row])
        for key in dict.fromkeys(key for row in rows for key in row if key != "step")
    }
    shuffled = dict(sorted(scalars.items()))
    tensors = tensors_of(run_of(shuffled))
    assert tensors is not None
    # by name, with numbers in names by size; alphabetically within a block, because no other order is known
    assert tensors.names[::12] == [f"blocks.{block}.attention.out.input" for block in range(12)]
    modules = [name.rpartition(".")[0] for name in names[::3]]
    tensors = tensors_of(run_of(shuffled, record={"modules": modules}))
    assert tensors is not None
    assert tensors.names == names
    assert tensors.steps.tolist() == [9, 19, 29]
    for quantity in QUANTITIES:
        expected = [[row[f"fp8/{name}/{quantity}"] for row in rows[::2]] for name in names]
        np.testing.assert_array_equal(tensors.values[quantity], expected)


def test_long_runs_keep_the_last_scale_and_the_worst_of_the_others() -> None:
    steps = list(range(1000))
    generator = np.random.default_rng(1)
    numbers = {quantity: generator.random(1000) for quantity in QUANTITIES}
    numbers["scale"][999] = np.nan
    tensors = tensors_of(run_of({f"fp8/a.weight/{q}": (steps, list(values)) for q, values in numbers.items()}))
    assert tensors is not None
    columns = tensors.columns
    bounds = [*tensors.bounds, 1000]
    assert len(tensors.bounds) == 150
    for column, (start, end) in enumerate(pairwise(bounds)):
        part = {quantity: values[start:end] for quantity, values in numbers.items()}
        assert columns["scale"][0, column] == part["scale"][-1 if end < 1000 else -2]
        assert columns["headroom_bits"][0, column] == part["headroom_bits"].min()
        assert columns["saturated_fraction"][0, column] == part["saturated_fraction"].max()
        assert columns["underflowed_fraction"][0, column] == part["underflowed_fraction"].max()
    worst, step = tensors.worst["headroom_bits"]
    assert (worst[0], step[0]) == (numbers["headroom_bits"].min(), numbers["headroom_bits"].argmin())
    assert tensors.worst["saturated_fraction"][0][0] == numbers["saturated_fraction"].max()


def test_thinned_curves_keep_peaks_and_ends() -> None:
    values = np.sin(np.arange(50_000) / 100)
    values[31_234] = 100
    values[5_000] = np.nan
    some = thinned(Series(np.arange(50_000), values))
    assert 1000 < len(some.steps) <= 2000
    assert (some.steps[0], some.steps[-1]) == (0, 49_999)
    assert np.nanmax(some.values) == 100
    assert some.steps[np.nanargmax(some.values)] == 31_234
    np.testing.assert_array_equal(some.values, values[some.steps])
    assert thinned(Series(np.arange(2000), values[:2000])).steps.tolist() == list(range(2000))


def test_which_metrics_are_curves() -> None:
    two = ([0, 1], [1.0, 2.0])
    run = run_of(dict.fromkeys(("lr", "val_loss", "aux_loss", "train_loss", "epoch", "fp8/a.input/scale"), two))
    run.scalars["once"] = Series(np.array([0]), np.array([1.0]))
    assert curve_keys([run]) == ["train_loss", "val_loss", "aux_loss", "lr"]
    assert loss_keys(curve_keys([run])) == ["train_loss", "val_loss"]
    assert loss_keys(["lr", "other"]) == ["lr"]


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


def test_worst_layers() -> None:
    scalars = {
        "fp8/a.input/headroom_bits": ([4, 8], [1.0, -0.5]),
        "fp8/a.weight/headroom_bits": ([4, 8], [0.25, 3.0]),
        "fp8/a.weight/saturated_fraction": ([4, 8], [0.25, 0.5]),
        "fp8/a.weight/nonfinite_steps": ([4, 8], [0, 2]),
        "fp8/b.in_proj.input/underflowed_fraction": ([4], [0.125]),
        "fp8/a/sqnr_db": ([4, 8], [20.0, 28.5]),
        "fp8/b/sqnr_db": ([4, 8], [31.0, 27.25]),
    }
    table = tables.worst_layers(*(lambda run: (run, tensors_of(run)))(run_of(scalars)))
    assert texts(table) == [
        ["b", "27.2 dB", "-", "-", "12.500% (input, step 4)", "-"],
        ["a", "28.5 dB", "-0.50 bits (input, step 8)", "50.000% (weight, step 8)", "-", "2 (weight)"],
    ]
    assert table.rows[1][5].mark
    # a run with the probe alone
    probed = run_of({"fp8/a/sqnr_db": ([4, 8], [20.0, 28.5])})
    table = tables.worst_layers(probed, tensors_of(probed))
    assert texts(table) == [["a", "28.5 dB", "-", "-", "-", "-"]]
    assert "add lightning_fp8.ScaleFactorLogger" in table.note
    nothing = tables.worst_layers(run_of({"loss": ([0], [1.0])}), None)
    assert "lightning_fp8.ScaleFactorLogger" in nothing.note


def test_watchdog_table() -> None:
    table = tables.watchdog(run_of({"fp8/watchdog/saturated": ([9, 19, 29], [0, 3, 1])}))
    assert texts(table) == [["saturated", "3", "19", "1"]]
    assert "lightning_fp8.ScaleWatchdog" in tables.watchdog(run_of({})).note


def test_dtype_table() -> None:
    row = {"kind": "parameter", "name": "a", "actual": "bfloat16", "expected": "bfloat16", "elements": 2**20}
    broken = {**row, "name": "b", "actual": "float32"}
    table, violations = tables.dtypes(run_of({}, dtypes={"rows": [row, broken, row], "violations": [broken]}))
    assert texts(table) == [
        ["parameter", "bfloat16", "bfloat16", "2", "2,097,152", "4.00", "ok"],
        ["parameter", "float32", "bfloat16", "1", "1,048,576", "4.00", "MISMATCH"],
    ]
    assert [row[-1].mark for row in table.rows] == [False, True]
    assert texts(violations) == [["b", "parameter", "float32", "bfloat16"]]
    assert "lightning_fp8.DtypeAudit" in tables.dtypes(run_of({}))[0].note


def test_dtypes_from_a_file(tmp_path: Path) -> None:
    def row(name: str, *dtypes: str | None) -> dict[str, Any]:
        return {"kind": "parameter", "name": name, **dict(zip(("actual", "expected"), dtypes)), "elements": 2**20}

    wrong = row("b", "float32", "bfloat16")
    written = {"rows": [row("a", "bfloat16", "bfloat16"), wrong, row("c", "int64", None)], "violations": [wrong]}
    (tmp_path / "metrics.csv").write_text("step,train_loss\n0,1\n")
    (tmp_path / "fp8_dtypes.json").write_text(json.dumps(written))
    table, violations = tables.dtypes(read_runs([tmp_path])[0])
    assert [title.rstrip(">") for title in table.columns[:3]] == ["what", "actual", "expected"]
    assert texts(table) == [
        ["parameter", "bfloat16", "bfloat16", "1", "1,048,576", "2.00", "ok"],
        ["parameter", "float32", "bfloat16", "1", "1,048,576", "4.00", "MISMATCH"],
        ["parameter", "int64", "-", "1", "1,048,576", "8.00", "-"],
    ]
    assert texts(violations) == [["b", "parameter", "float32", "bfloat16"]]


def test_environments_side_by_side() -> None:
    one = run_of({}, "one", record={"precision": "fp8-delayed", "environment": {"torch": "2.13", "gpu": None}})
    other = run_of({}, "other", record={"precision": "bf16-mixed", "environment": {"torch": "2.13"}}, hparams={"lr": 1})
    table = tables.environment([one, other])
    assert texts(table) == [
        ["precision", "fp8-delayed", "bf16-mixed"],
        ["torch", "2.13", "2.13"],
        ["gpu", "-", "-"],
        ["hparams: lr", "-", "1"],
    ]
    assert [row[0].mark for row in table.rows] == [True, False, False, True]
    assert "No record of x: add lightning_fp8.RunRecord" in tables.environment([run_of({}, "x")]).note


def test_curves_of_roles_from_summaries_else_from_tensors() -> None:
    values = {"a.input": [1.0, 2.0], "b.input": [3.0, math.nan], "c.input": [8.0, 4.0], "a.weight": [5.0, 5.0]}
    scalars = {f"fp8/{name}/headroom_bits": ([1, 2], numbers) for name, numbers in values.items()}
    run = run_of(scalars)
    curves = role_curves(run, tensors_of(run))["headroom_bits"]
    found = {statistic: series.values.tolist() for statistic, series in curves["input"].items()}
    assert found == {"min": [1, 2], "median": [3, 3], "max": [8, 4]}
    assert "grad_output" not in curves
    run.scalars["fp8/input/headroom_bits/min"] = Series(np.array([7]), np.array([0.5]))
    assert role_curves(run, tensors_of(run))["headroom_bits"]["input"]["min"].values.tolist() == [0.5]


def test_encodings_keep_what_is_not_finite() -> None:
    numbers = np.array([[1.0, -3.14159e-30, math.inf, math.nan, 448.0]])
    upper = np.frombuffer(base64.b64decode(half(numbers)), "<u2").astype(np.uint32) << 16
    np.testing.assert_allclose(upper.view(np.float32), numbers[0], rtol=2**-8)
    np.testing.assert_allclose(np.frombuffer(base64.b64decode(single(numbers)), "<f4"), numbers[0], rtol=1e-7)


# pictures and the command


@pytest.fixture(scope="module")
def two_runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("two")
    names = tensor_names(24)
    fp8 = write_metrics(folder / "fp8", tensor_metrics(names, 6))
    bf16 = write_metrics(folder / "bf16", [{"step": 10 * step + 9, "train_loss": 5 - step / 8} for step in range(6)])
    return [fp8, bf16]


def test_command_writes_page_and_pictures(two_runs: list[Path], tmp_path: Path) -> None:
    from matplotlib.image import imread

    ran = run_warm("-m", "lightning_fp8", "report", *map(str, two_runs), "--out", str(tmp_path / "a.html"))
    assert ran.returncode == 0, ran.stderr
    pictures = ["curves.png", "log2_scale.png", "saturation_underflow.png", "headroom.png"]
    paths = [tmp_path / "a.html", *(tmp_path / "a_png" / name for name in pictures)]
    assert ran.stdout.splitlines()[-5:] == list(map(str, paths))
    for path in paths[1:]:
        image = imread(path)
        assert min(image.shape[:2]) > 300
        assert len(np.unique(image.sum(axis=-1))) > 20, f"{path.name} is blank"


def test_pictures_show_the_numbers(two_runs: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.figure import Figure

    from lightning_fp8.tools.report.pictures import write_pictures

    saved: dict[str, Figure] = {}
    monkeypatch.setattr(Figure, "savefig", lambda self, path, **_: saved.update({path.name: self}))
    runs = read_runs(two_runs)
    write_pictures(runs, tmp_path)
    lines = saved["curves.png"].axes[0].lines
    assert [line.get_label() for line in lines] == ["fp8 train_loss (fp8-delayed)", "bf16 train_loss ()"]
    for line, run in zip(lines, runs):
        np.testing.assert_array_equal(line.get_ydata(), run.scalars["train_loss"].values)
    exponents = saved["log2_scale.png"].axes[0].images[0].get_array()
    labels = [label.get_text() for label in saved["log2_scale.png"].axes[0].get_yticklabels()]
    for label, row in zip(labels, exponents, strict=True):
        np.testing.assert_allclose(row, np.log2(runs[0].scalars[f"fp8/{label}/scale"].values))
    assert sorted(labels) == sorted(tensor_names(24))


def test_axes_of_shares_begin_at_zero(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.figure import Figure

    from lightning_fp8.tools.report.pictures import write_pictures

    saved: dict[str, Figure] = {}
    monkeypatch.setattr(Figure, "savefig", lambda self, path, **_: saved.update({path.name: self}))
    nothing = {"fp8/x.input/saturated_fraction": 0.0, "fp8/x.input/underflowed_fraction": 0.0}
    write_pictures(read_runs([write_metrics(tmp_path, [{"step": step, **nothing} for step in range(5)])]), tmp_path)
    assert [axes.get_ylim()[0] for axes in saved["saturation_underflow.png"].axes] == [0, 0]


def test_defaults_of_the_command(two_runs: list[Path], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for version in (0, 1):
        write_metrics(tmp_path / f"version_{version}", [{"step": step, "lr": 0.5} for step in range(3)])
    main([str(tmp_path)])
    out = capsys.readouterr().out
    assert "version_1, the newest of" in out
    assert (tmp_path / "report.html").is_file()
    assert [path.name for path in (tmp_path / "report_png").iterdir()] == ["curves.png"]


@pytest.mark.parametrize("arguments", [["nowhere"], ["."]])
def test_errors_are_one_line(arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert len(str(stopped.value).splitlines()) == 1
    assert arguments[0] in str(stopped.value)


def test_without_plotly_it_says_what_to_install(tmp_path: Path) -> None:
    # a Python that finds torch and the package, but not the plotting libraries
    program = (
        "import sys, importlib.util as u; find = u.find_spec\n"
        "u.find_spec = lambda name, *a: None if name == 'plotly' else find(name, *a)\n"
        "from lightning_fp8.tools.report.command import main; main(['.'])"
    )
    ran = run_warm("-c", program)
    assert ran.returncode == 1
    assert ran.stderr.strip().splitlines()[-1] == "A report needs plotly: pip install plotly"


def test_page_data_is_plain_json_with_numbers_that_are_not(tmp_path: Path) -> None:
    values = (1, "nan", "inf")
    rows = [{"step": step, "train_loss": value, "fp8/a.input/scale": value} for step, value in enumerate(values)]
    data = page_data(read_runs([write_metrics(tmp_path, rows)]))
    assert json.loads(json.dumps(data, allow_nan=False))["runs"][0]["tensors"]["names"] == ["a.input"]
