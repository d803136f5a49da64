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
from mutations import as_json, damaged_bytes, texts, trees

from lightning_fp8 import DtypeAudit, RunRecord, ScaleFactorLogger
from lightning_fp8.tools.report.page import write_page
from lightning_fp8.tools.report.pictures import write_pictures
from lightning_fp8.tools.report.runs import ReadError, read_runs

FILES = ("metrics.csv", "fp8_run.json", "fp8_dtypes.json", "hparams.yaml")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of a real run."""
    logger = CSVLogger(tmp_path_factory.mktemp("whole"))
    callbacks = [RunRecord(), DtypeAudit(), ScaleFactorLogger(every_n_steps=1)]
    trainer = make_trainer(Path(logger.save_dir), logger=logger, log_every_n_steps=1, callbacks=callbacks)
    trainer.fit(seeded(), loader())
    (Path(logger.log_dir) / "hparams.yaml").write_text("lr: 0.1\nlayers: [1, 2]\nmodel: {width: 32, name: tiny}\n")
    return Path(logger.log_dir)


@pytest.fixture
def folder(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same files, to be damaged; and pages without the four megabytes of plotly."""
    shutil.copytree(whole, tmp_path / "run")
    monkeypatch.setattr("plotly.offline.get_plotlyjs", lambda: "")
    return tmp_path / "run"


def reported(folder: Path, names: tuple[str, ...], pictures: bool = False) -> str | None:
    """None if a page was written, else the text of :class:`ReadError`. Any other exception fails the test."""
    try:
        runs = read_runs([folder])
    except ReadError as error:
        message = str(error)
    else:
        write_page(runs, folder.parent / "report.html")
        if pictures:
            write_pictures(runs, folder.parent / "pictures")
        return None
    assert any(name in message for name in names), message
    return message


def all_reported(file: Path, contents: Iterable[bytes]) -> set[bool]:
    results = set()
    for content in contents:
        file.write_bytes(content)
        results.add(reported(file.parent, (file.name,)) is None)
    return results


def test_what_is_whole_is_read(folder: Path) -> None:
    assert {path.name for path in folder.iterdir()} >= set(FILES)
    assert reported(folder, (), pictures=True) is None
    assert "tiny" in (folder.parent / "report.html").read_text()


@pytest.mark.parametrize("name", ["fp8_run.json", "fp8_dtypes.json"])
def test_any_json(folder: Path, name: str) -> None:
    text = (folder / name).read_text()
    changed = [as_json(tree).encode() for tree in trees(json.loads(text), 400)]
    assert all_reported(folder / name, (*texts(text), *changed)) == {True, False}


def rows(**wrong: Any) -> str:
    """Two rows of ``DtypeAudit``, of which the second is wrong."""
    right = {"kind": "parameter", "name": "a", "actual": "float32", "expected": None, "elements": 1}
    return json.dumps({"rows": [right, {**right, **wrong}], "violations": []})


JSON_MESSAGES = {
    "fp8_run.json": [
        ("[]", r"it holds \[\], not an object"),
        ('{"parameters": "many"}', r"'parameters' must be a whole number of at least 0, got 'many'"),
        ('{"parameters": 1.5}', r"'parameters' must be a whole number of at least 0, got 1\.5"),
        ('{"environment": [1]}', r"'environment' must be an object or null, got \[1\]"),
        ('{"recipe": "text"}', r"'recipe' must be an object or null, got 'text'"),
        ('{"modules": [["a"]]}', r"'modules' must be a list of module paths or null, got \['a'\]"),
        ('{"layers": {"path": "a"}}', r"'layers' must be a list of `path`, .* got \{'path': 'a'\}"),
        ('{"layers": [{"path": "a"}]}', r"'layers' must be a list of `path`, `kind`, `converted` and `reason`"),
        ('{"precision": {}}', r"'precision' must be text, got \{\}"),
        ('{"precision": "\\ud800"}', "is no text: it has half of a surrogate pair"),
        ('{"environment": ' + "[" * 100 + "]" * 100 + "}", "its values lie more than 50 deep"),
        ("[" * 100_000, "RecursionError"),
    ],
    "fp8_dtypes.json": [
        ("{}", "it has no list 'rows'"),
        ('{"rows": []}', "it has no list 'violations'"),
        ('{"rows": null, "violations": []}', "'rows' must be a list of `kind`, .* got None"),
        ('{"rows": [], "violations": [{"name": "a"}]}', "'violations' must be a list of `kind`"),
        (rows(actual="float99"), r"'rows' must be .*, got \{'actual': 'float99'"),
        (rows(elements=2**63), r"'rows' must be .*, got \{'actual': 'float32', 'elements': 922"),
    ],
}  # fmt: skip


@pytest.mark.parametrize(("name", "case"), [(name, case) for name, cases in JSON_MESSAGES.items() for case in cases])
def test_what_is_wrong_is_named(folder: Path, name: str, case: tuple[str, str]) -> None:
    (folder / name).write_text(case[0])
    with pytest.raises(ReadError, match=rf"{name} cannot be read: .*{case[1]}.* Remove it to make the report without"):
        read_runs([folder])


BOMB = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{one}: &{one} [{', '.join([f'*{before}'] * 10)}]\n" for before, one in zip("abcdefghij", "bcdefghijk")
)
MERGES = "a: &a {x: 1}\n" + "".join(
    f"{one}: &{one} {{<<: [{', '.join([f'*{before}'] * 10)}]}}\n" for before, one in zip("abcdefghij", "bcdefghijk")
)
YAML = {
    "a bomb": (BOMB, "it has more than 1,000,000 values and letters"),
    "a bomb of long texts": ("a: &a " + "x" * 1000 + "\nb: [" + "*a, " * 1000 + "*a]", "it has more than 1,000,000"),
    "a bomb of merges": (MERGES, "ConstructorError: could not determine a constructor for the tag .*merge"),
    "a list in itself": ("a: &a [*a]", "its values lie more than 50 deep"),
    "deep nesting": ("[" * 5_000, "RecursionError"),
    "a list": ("- 1", r"it holds \[1\], not an object"),
    "a text": ("text", "it holds 'text', not an object"),
    "an empty integer": ("a: !!int ''", "IndexError"),
    "no boolean": ("a: !!bool x", "KeyError"),
    "no time": ("a: !!timestamp x", "AttributeError"),
    "a huge number": ("a: 0x" + "f" * 10_000, "it has a number of 40000 bits"),
    "a list as a key": ("{[1]: {{}: 2}}", "ConstructorError"),
    "a tag": ("a: !nobody x", "ConstructorError"),
    "a surrogate": ('a: "\\ud800"', "half of a surrogate pair"),
}


@pytest.mark.parametrize("kind", YAML)
def test_hyperparameters(folder: Path, kind: str) -> None:
    text, message = YAML[kind]
    (folder / "hparams.yaml").write_text(text)
    with pytest.raises(ReadError, match=rf"hparams\.yaml cannot be read: .*{message}"):
        read_runs([folder])


def test_hyperparameters_that_share_a_value(folder: Path) -> None:
    """Written as by Lightning if an object occurs twice."""
    (folder / "hparams.yaml").write_text("a: &id001 [1, 2]\nb: *id001\nc: 2024-01-01\nd: !!set {x, y}\n")
    assert reported(folder, ()) is None
    assert read_runs([folder])[0].hparams["b"] == [1, 2]


def test_any_hyperparameters(folder: Path) -> None:
    whole = {"lr": 0.1, "layers": [1, 2], "model": {"width": 32, "name": "tiny", "none": None}}
    changed = [as_json(tree).encode() for tree in trees(whole, 200)]
    text = json.dumps(whole)
    # YAML's parser, written in Python, takes seconds for deep nesting: once is enough
    short = [content for content in texts(text) if len(content) < 50_000]
    noise = damaged_bytes((folder / "hparams.yaml").read_bytes(), 200)
    assert all_reported(folder / "hparams.yaml", (*short, *changed, *noise)) == {True, False}


@pytest.mark.parametrize("step", ["1e400", "-1e400", "nan", "inf", "1e300", "9" * 400, "9007199254740993e2", "", "0x1"])
def test_steps_that_are_no_numbers(folder: Path, step: str) -> None:
    (folder / "metrics.csv").write_text(f"a,step\n1,0\n1,{step}\n")
    message = reported(folder, ("metrics.csv",))
    assert message is not None
    assert "line 3: the step is " in message
    assert "not a number of at most 2**53" in message


CELLS = (
    "", "nan", "inf", "-inf", "1e400", "-1e400", "1e308", "-1e308", "1e-320", "9" * 400, "word", "\x00", '"', "1,2",
    "\u0664", "-1", "0", "2.5", "9007199254740992", "-9007199254740992", "True", "x" * 200_000,
)  # fmt: skip
SPECIAL = (
    "fp8/input/scale/min", "fp8//scale", "fp8/.input/scale", "fp8/input/scale", "fp8/sqnr_db", "fp8//sqnr_db",
    "fp8/watchdog/", "fp8/watchdog/a", "fp8/net.0.input/nonfinite_steps", "fp8/net.2.weight/headroom_bits",
)  # fmt: skip
COLUMNS = (
    *SPECIAL, "step", "epoch", "", "$x^{", "</script>",
    *(f"fp8/net.{'9' * digits}.input/scale" for digits in (5000, 5001)),
)  # fmt: skip


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
    changed = [spoiled(text, rng) for _ in range(300)]
    noise = damaged_bytes(text.encode(), 50)
    assert all_reported(folder / "metrics.csv", (*texts(text), *changed, *noise)) == {True, False}


@pytest.mark.parametrize("values", [("-1e308", "1e308"), ("inf", "-inf"), ("nan", "nan"), ("1e-320", "0"), ("3", "3")])
def test_numbers_at_the_ends_of_the_range(folder: Path, values: tuple[str, str]) -> None:
    """In every table and picture: as scales, times, ratios, counts and losses."""
    quantities = ("scale", "headroom_bits", "saturated_fraction", "underflowed_fraction")
    tensors = [f"fp8/net.0.{role}/{quantity}" for role in ("input", "weight") for quantity in quantities]
    keys = [*SPECIAL, *tensors, "loss"]
    steps = ("-9007199254740992", "7", "9007199254740992")
    lines = [[*keys, "step"], *([value] * len(keys) + [step] for value, step in zip(("1", *values), steps))]
    (folder / "metrics.csv").write_text("".join(",".join(line) + "\n" for line in lines))
    assert reported(folder, (), pictures=True) is None


def test_any_event_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("plotly.offline.get_plotlyjs", lambda: "")
    logger = TensorBoardLogger(tmp_path)
    make_trainer(tmp_path, logger=logger, log_every_n_steps=1).fit(seeded(), loader())
    file = next(Path(logger.log_dir).glob("events.out.tfevents.*"))
    # a checksum guards each record, so after most changes the file is read up to there
    for content in (b"", *damaged_bytes(file.read_bytes(), 60)):
        file.write_bytes(content)
        reported(file.parent, (str(file.parent),))


@pytest.mark.parametrize("step", [2**53 + 1, -(2**62)])
def test_steps_of_events_that_are_no_numbers(tmp_path: Path, step: int) -> None:
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path / "run")) as writer:
        writer.add_scalar("loss", 1.0, step)
    message = reported(tmp_path / "run", (str(tmp_path / "run"),))
    assert message is not None
    assert f"the step is {step}, not a number of at most 2**53" in message
