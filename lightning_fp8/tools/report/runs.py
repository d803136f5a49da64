"""Reads runs from the folders that loggers wrote: series by key."""

from __future__ import annotations

import contextlib
import csv
import io
import re
import reprlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lightning_fp8.runtime.run_files import DTYPES_FILE, RUN_FILE
from lightning_fp8.tools.report.records import ReadError, read_dtypes, read_hparams, read_record

CSV_FILE = "metrics.csv"
HPARAMS_FILE = "hparams.yaml"
_EVENTS = "events.out.tfevents.*"
# JavaScript's numbers are exact up to this
_LARGEST_STEP = 2**53
Floats = npt.NDArray[np.float64]


class Series(NamedTuple):
    """One key: ``steps [N]``, increasing, and ``values [N]``, which may be NaN or infinite."""

    steps: npt.NDArray[np.int64]
    values: Floats


@dataclass
class Run:
    """What one run left behind.

    Attributes:
        name: short, and unique in a report.
        folder: where the logs are.
        source: name of the file that the series are from.
        note: what a reader should know about how the logs were found; may be empty.
        scalars: series by key.
        record: what ``RunRecord`` wrote; empty without it.
        dtypes: what ``DtypeAudit`` wrote; empty without it.
        hparams: the model's hyperparameters; empty where none were saved.
    """

    name: str
    folder: Path
    source: str
    note: str
    scalars: dict[str, Series]
    record: dict[str, Any] = field(default_factory=dict)
    dtypes: dict[str, Any] = field(default_factory=dict)
    hparams: dict[str, Any] = field(default_factory=dict)

    @property
    def precision(self) -> str:
        """The precision in the record, or else the one that the logs imply."""
        told = self.record.get("precision")
        return str(told) if told else "fp8-delayed" if any(key.endswith("/scale") for key in self.scalars) else ""


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """Read a run from each folder, and give each a unique name.

    Raises:
        ReadError: for a folder that is missing or has no logs, or a file that cannot be read.
    """
    runs = [_read(folder) for folder in folders]
    for run, name in zip(runs, _names([run.folder for run in runs]), strict=True):
        run.name = name
    return runs


def _read(folder: Path) -> Run:
    if not folder.is_dir():
        raise ReadError(f"There is no folder {folder}.")
    place, note = folder, ""
    if not _has_logs(folder):
        place = _newest_version(folder)
        note = f"{place.name}, the newest of {folder}"
    path = place / CSV_FILE
    if path.is_file():
        scalars, source = read_csv(path), CSV_FILE
    else:
        scalars, source = _read_events(place), "TensorBoard's event files"
    if not any(len(series.steps) for series in scalars.values()):
        raise ReadError(f"{place / CSV_FILE if path.is_file() else place} has no step with a number in it yet.")
    return Run(
        place.name,
        place,
        source,
        note,
        scalars,
        read_record(place / RUN_FILE),
        read_dtypes(place / DTYPES_FILE),
        read_hparams(place / HPARAMS_FILE),
    )


def _has_logs(folder: Path) -> bool:
    return (folder / CSV_FILE).is_file() or any(folder.glob(_EVENTS))


def _newest_version(folder: Path) -> Path:
    versions = {
        int(found[1]): path
        for path in folder.iterdir()
        if (found := re.fullmatch(r"version_(\d+)", path.name)) and _has_logs(path)
    }
    if versions:
        return versions[max(versions)]
    inside = sorted({path.parent for name in (CSV_FILE, _EVENTS) for path in folder.glob(f"*/**/{name}")})
    hint = " A report reads what CSVLogger or TensorBoardLogger wrote."
    if inside:
        hint = f" Inside it, {inside[-1]} has."
    raise ReadError(f"{folder} has no logs: neither {CSV_FILE}, nor event files, nor a version_N with them.{hint}")


def read_csv(path: Path) -> dict[str, Series]:
    """Series by key from a file of Lightning's ``CSVLogger``; a line that is not finished yet is left out.

    Raises:
        ReadError: if it is not such a file.
    """
    try:
        text = path.read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ReadError(f"{path} cannot be read: {error}.") from error
    # the run may be writing the last line, or have been stopped while writing it
    text = text[: text.rfind("\n") + 1]
    lines = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        header = next(lines, [])
        if text and "step" not in header:
            raise ReadError(f"{path} has no column `step`; it is not a file of Lightning's CSVLogger.")
        found = _columns(header, lines, path)
    except csv.Error as error:
        raise ReadError(f"{path}, line {lines.line_num}, cannot be read: {error}.") from error
    return {key: _series(steps, values) for key, (steps, values) in found.items() if steps}


def _columns(header: list[str], lines: Any, path: Path) -> dict[str, tuple[list[int], list[float]]]:
    """Steps and numbers of each column; cells that are empty or hold words are skipped."""
    found: dict[str, tuple[list[int], list[float]]] = {key: ([], []) for key in header if key != "step"}
    columns = [(position, *found[key]) for position, key in enumerate(header) if key != "step"]
    at = header.index("step") if header else 0
    for cells in lines:
        if len(cells) != len(header):
            raise ReadError(f"{path}, line {lines.line_num}: {len(cells)} cells, and its header has {len(header)}.")
        step = _step(cells[at], f"{path}, line {lines.line_num}")
        for position, steps, values in columns:
            if cells[position]:
                try:
                    values.append(float(cells[position]))
                except ValueError:
                    continue
                steps.append(step)
    return found


def _step(value: str | int, place: str) -> int:
    with contextlib.suppress(ValueError, OverflowError):
        number = value if isinstance(value, int) else float(value)
        # false for NaN
        if abs(number) <= _LARGEST_STEP:
            return int(number)
    raise ReadError(f"{place}: the step is {reprlib.repr(value)}, not a number of at most 2**53.")


def _series(steps: Sequence[int], values: Sequence[float]) -> Series:
    """A series sorted by step; of several values for one step, the last."""
    order = np.argsort(np.asarray(steps, np.int64), kind="stable")
    sorted_steps, sorted_values = np.asarray(steps, np.int64)[order], np.asarray(values, np.float64)[order]
    last = np.append(sorted_steps[1:] != sorted_steps[:-1], True)
    return Series(sorted_steps[last], sorted_values[last])


def _read_events(folder: Path) -> dict[str, Series]:
    try:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    except ModuleNotFoundError as error:
        raise ReadError(f"{folder} has event files, and reading them needs `pip install tensorboard`.") from error
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    try:
        events.Reload()
        found = {key: events.Scalars(key) for key in events.Tags()["scalars"]}
    # the reader's exceptions for a damaged file are not documented
    except Exception as error:
        raise ReadError(f"The event files in {folder} cannot be read: {error}.") from error
    place = f"The event files in {folder}"
    return {key: _series([_step(e.step, place) for e in some], [e.value for e in some]) for key, some in found.items()}


def _names(folders: list[Path]) -> list[str]:
    """The shortest path endings that are unique; a ``version_N`` always includes its experiment."""
    parts = [folder.resolve().parts for folder in folders]
    least = 2 if any(part[-1].startswith("version_") for part in parts) else 1
    for length in range(least, max(map(len, parts)) + 1):
        names = ["/".join(part[-length:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    # the same folder more than once
    names = ["/".join(part[-least:]) for part in parts]
    return [f"{name} ({position})" for position, name in enumerate(names, start=1)]
