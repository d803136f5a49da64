"""Damaged and hostile logs: either a report is made from them, or the error says which file is wrong."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lit import loader, make_trainer, seeded
from logged_runs import write_metrics
from mutations import as_json, damaged_bytes, texts, trees
from torch.utils.tensorboard import SummaryWriter

from lightning_fp8 import DtypeAudit, Fp8Monitor, RunRecord, ScaleFactorLogger
from lightning_fp8.tools.report.page import write_page
from lightning_fp8.tools.report.pictures import write_pictures
from lightning_fp8.tools.report.runs import ReadError, read_runs

HPARAMS = {"lr": 0.1, "layers": [1, 2], "model": {"width": 32, "name": "tiny", "none": None}}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of a real run."""
    loggers = [CSVLogger(tmp_path_factory.mktemp("csv")), TensorBoardLogger(tmp_path_factory.mktemp("events"))]
    callbacks = [RunRecord(), DtypeAudit(), ScaleFactorLogger(every_n_steps=1), Fp8Monitor(every_n_steps=2)]
    make_trainer(Path(), logger=loggers, log_every_n_steps=1, callbacks=callbacks).fit(seeded(), loader())
    folder = Path(loggers[0].log_dir)
    (folder / "hparams.yaml").write_text(json.dumps(HPARAMS))
    finding = dict.fromkeys(("condition", "what", "meaning", "remedy", "status"), "stale")
    verdict = json.loads((folder / "fp8_health.json").read_text())
    verdict["findings"] += [{**finding, "where": ["a.input"], "since": 1, "last": 2, "value": 0.5, "holds": True}]
    (folder / "fp8_health.json").write_text(json.dumps(verdict))
    shutil.copytree(loggers[1].log_dir, folder / "events")
    return folder


@pytest.fixture
def folder(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same files, to be damaged; and pages without the four megabytes of plotly."""
    shutil.copytree(whole, tmp_path / "run")
    monkeypatch.setattr("plotly.offline.get_plotlyjs", lambda: "")
    return tmp_path / "run"


def is_reported(folder: Path, name: str, pictures: bool = False) -> bool:
    """Whether a page was written; else the error must have the name. Any other exception fails the test."""
    try:
        runs = read_runs([folder])
    except ReadError as error:
        message = str(error)
    else:
        write_page(runs, folder.parent / "report.html")
        if pictures:
            write_pictures(runs, folder.parent / "pictures")
        return True
    assert name in message
    return False


def are_reported(file: Path, contents: Iterable[bytes], name: str = "") -> set[bool]:
    results = set()
    for content in contents:
        file.write_bytes(content)
        results.add(is_reported(file.parent, name or file.name))
    return results


@pytest.mark.parametrize("name", ["fp8_run.json", "fp8_dtypes.json", "fp8_health.json", "hparams.yaml"])
def test_any_record(folder: Path, name: str) -> None:
    assert is_reported(folder, "", pictures=True)
    text = (folder / name).read_text()
    # YAML's parser, written in Python, takes seconds for deep nesting
    short = [content for content in texts(text) if len(content) < 50_000 or name.endswith("json")]
    changed = [as_json(tree).encode() for tree in trees(json.loads(text), 60)]
    assert are_reported(folder / name, (*short, *changed, *damaged_bytes(text.encode(), 40))) == {True, False}


def rows(**wrong: Any) -> str:
    """Two rows of ``DtypeAudit``, of which the second is wrong."""
    right = {"kind": "parameter", "name": "a", "actual": "float32", "expected": None, "elements": 1}
    return json.dumps({"rows": [right, {**right, **wrong}], "violations": []})


def verdict(**wrong: Any) -> str:
    """A verdict of ``Fp8Monitor`` in which one field is wrong."""
    fields = {"run": "ended", "text": "FP8: healthy", "layers": 1, "steps": 4, "findings": []}
    return json.dumps({"status": "healthy", **fields, **wrong})


BOMB, MERGES = (
    f"a: &a {start}\n" + "".join(
        f"{one}: &{one} {form.format(', '.join([f'*{before}'] * 10))}\n"
        for before, one in zip("abcdefghij", "bcdefghijk")
    )
    for start, form in (("[x, x, x, x, x, x, x, x, x, x]", "[{}]"), ("{x: 1}", "{{<<: [{}]}}"))
)  # fmt: skip
WRONG = {
    "fp8_run.json": [
        ("[]", r"`content` must be an object, got \[\]"),
        ('{"parameters": "many"}', r"`content\.parameters` must be a whole number of at least 0, got 'many'"),
        ('{"modules": ["a", ["b"]]}', r"`content\.modules\[1\]` must be text, got \['b'\]"),
        ('{"layers": [{"path": "a"}]}', r"`content\.layers\[0\]\.kind` must be text, got None"),
        ('{"precision": "\\ud800"}', "surrogates not allowed"),
        ("[" * 100_000, "RecursionError"),
    ],
    "fp8_dtypes.json": [
        ("{}", r"`content\.rows` must be a list, got None"),
        (rows(actual="float99"), r"rows\[1\]\.actual` must be the name of a dtype of torch, got 'float99'"),
        (rows(elements=2**63), r"rows\[1\]\.elements` must be a whole number of at least 0, got 9223372036854775808"),
    ],
    "fp8_health.json": [
        ("{}", r"`content\.status` must be one of healthy, look at, unhealthy, not FP8, got None"),
        ('{"status": ["healthy"]}', r"`content\.status` must be one of .*, got \['healthy'\]"),
        (verdict(findings=[{"condition": "stale"}]), r"`content\.findings\[0\]\.what` must be text, got None"),
        (verdict(steps="many"), r"`content\.steps` must be a whole number of at least 0, got 'many'"),
        (verdict(findings=None), r"`content\.findings` must be a list, got None"),
    ],
    "hparams.yaml": [
        (BOMB, "it has more than 1,000,000 characters"),
        ("a: &a " + "x" * 1000 + "\nb: [" + "*a, " * 1000 + "*a]", "it has more than 1,000,000"),
        (MERGES, "ConstructorError: could not determine a constructor for the tag .*merge"),
        ("a: &a [*a]", "Circular reference"),
        ("- 1", r"`content` must be an object, got \[1\]"),
        ("a: !!bool x", "KeyError"),
        ("a: 0x" + "f" * 10_000, "ValueError: Exceeds the limit"),
    ],
}


@pytest.mark.parametrize(("name", "case"), [(name, case) for name, cases in WRONG.items() for case in cases])
def test_what_is_wrong_is_named(tmp_path: Path, name: str, case: tuple[str, str]) -> None:
    (write_metrics(tmp_path, [{"step": 0, "loss": 1}]) / name).write_text(case[0])
    with pytest.raises(ReadError, match=rf"(?s){name} cannot be read: .*{case[1]}.* Remove it to make the report"):
        read_runs([tmp_path])


def test_hyperparameters_that_share_a_value(folder: Path) -> None:
    """Written as by Lightning if an object occurs twice."""
    (folder / "hparams.yaml").write_text("a: &id001 [1, 2]\nb: *id001\nc: 2024-01-01\nd: !!set {x, y}\n")
    assert is_reported(folder, "")
    assert read_runs([folder])[0].hparams["b"] == [1, 2]


@pytest.mark.parametrize("step", ["1e400", "nan", "1e300", "9" * 400, "9007199254740993e2", "", "0x1"])
def test_steps_that_are_no_numbers(tmp_path: Path, step: str) -> None:
    (tmp_path / "metrics.csv").write_text(f"a,step\n1,0\n1,{step}\n")
    with pytest.raises(ReadError, match=r"metrics\.csv, line 3: the step is .*, not a number of at most 2\*\*53"):
        read_runs([tmp_path])


CELLS = (
    "", "nan", "inf", "-inf", "1e400", "-1e400", "1e308", "-1e308", "1e-320", "9" * 400, "word", "\x00", '"', "1,2",
    "\u0664", "-1", "0", "2.5", "9007199254740992", "-9007199254740992", "True", "x" * 200_000,
)  # fmt: skip
SPECIAL = (
    "fp8/input/scale/min", "fp8//scale", "fp8/.input/scale", "fp8/input/scale",
    "fp8/health/", "fp8/health/findings", "fp8/health/input/sqnr_db/min",
    "fp8/net.0.input/nonfinite_steps", "fp8/net.2.weight/headroom_bits",
    "fp8/input/headroom_bits/min", "fp8/input/saturated_fraction/max",
)  # fmt: skip
COLUMNS = (*SPECIAL, "step", "epoch", "", "$x^{", "</script>", f"fp8/net.{'9' * 5001}.input/scale")


def spoiled(text: str, rng: random.Random) -> bytes:
    """A CSV file in which some columns have other names, and some cells other contents."""
    rows = [line.split(",") for line in text.splitlines()]
    for _ in range(rng.choice((1, 3, 20))):
        rows[0][rng.randrange(len(rows[0]))] = rng.choice(COLUMNS)
    for _ in range(rng.choice((0, 1, 20, 200))):
        row = rng.choice(rows[1:])
        row[rng.randrange(len(row))] = rng.choice(CELLS)
    if rng.random() < 0.1:
        rng.choice(rows).append("1")
    # without this file there is nothing to read
    if rng.random() < 0.9 and "step" not in rows[0]:
        rows[0][-1] = "step"
    return "".join(",".join(row) + "\n" for row in rows).encode()


def test_any_csv(folder: Path) -> None:
    text, rng = (folder / "metrics.csv").read_text(), random.Random(0)
    changed = [spoiled(text, rng) for _ in range(80)]
    contents = (*texts(text), *changed, *damaged_bytes(text.encode(), 25))
    assert are_reported(folder / "metrics.csv", contents, str(folder)) == {True, False}


@pytest.mark.parametrize("values", [("-1e308", "1e308"), ("inf", "-inf"), ("nan", "nan"), ("1e-320", "0"), ("3", "3")])
def test_numbers_at_the_ends_of_the_range(folder: Path, values: tuple[str, str]) -> None:
    """In every table and picture: as scales, times, ratios, counts and losses."""
    quantities = ("scale", "headroom_bits", "saturated_fraction", "underflowed_fraction")
    tensors = [f"fp8/net.0.{role}/{quantity}" for role in ("input", "weight") for quantity in quantities]
    steps = ("-9007199254740992", "7", "9007199254740992")
    lines = [{**dict.fromkeys((*SPECIAL, *tensors, "loss"), x), "step": step} for x, step in zip(("1", *values), steps)]
    assert is_reported(write_metrics(folder, lines), "", pictures=True)


def test_any_event_file(folder: Path) -> None:
    (file,) = (folder / "events").glob("events.out.tfevents.*")
    # a checksum guards each record, so after most changes the file is read up to there
    are_reported(file, (b"", *damaged_bytes(file.read_bytes(), 25)), str(file.parent))
    file.unlink()
    with SummaryWriter(str(file.parent)) as writer:
        writer.add_scalar("loss", 1.0, 2**53 + 1)
    with pytest.raises(ReadError, match=rf"{file.parent}: the step is {2**53 + 1}, not a number of at most"):
        read_runs([file.parent])
