"""Reads runs from the folders that loggers and callbacks wrote: series by key, and records."""

from __future__ import annotations

import contextlib
import csv
import io
import os
import re
import reprlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lightning_fp8.runtime.run_files import DTYPES_FILE, HEALTH_FILE, RUN_FILE
from lightning_fp8.tools.report.records import HPARAMS_FILE, ReadError, read_record

CSV_FILE = "metrics.csv"
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
        note: how the logs were found.
        scalars: series by key.
        record: what ``RunRecord`` wrote; empty without it, as are the next three.
        dtypes: what ``DtypeAudit`` wrote.
        health: what ``Fp8Monitor`` wrote.
        hparams: the model's hyperparameters, saved by Lightning.
    """

    name: str
    folder: Path
    note: str
    scalars: dict[str, Series]
    record: dict[str, Any] = field(default_factory=dict)
    dtypes: dict[str, Any] = field(default_factory=dict)
    health: dict[str, Any] = field(default_factory=dict)
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
    places = [_place(folder) for folder in folders]
    runs = []
    for name, folder, place in zip(_names(places), folders, places):
        path = place / CSV_FILE
        scalars = read_csv(path) if path.is_file() else _read_events(place)
        # a run is known by its verdict before its loggers have written, and where they write elsewhere
        if not scalars and not (place / HEALTH_FILE).is_file():
            raise ReadError(f"{path if path.is_file() else place} has no step with a number in it yet.")
        source = CSV_FILE if path.is_file() else "TensorBoard's event files"
        note = f"read from {source}" if scalars else f"read from {HEALTH_FILE}: no logs yet"
        if place != folder:
            note = f"{place.name}, the newest of {folder} · {note}"
        records = [read_record(place / name) for name in (RUN_FILE, DTYPES_FILE, HEALTH_FILE, HPARAMS_FILE)]
        runs.append(Run(name, place, note, scalars, *records))
    return runs


def _place(folder: Path) -> Path:
    """The folder itself if it has logs or a verdict, or the newest version in it."""
    if not folder.is_dir():
        raise ReadError(f"There is no folder {folder}.")
    folders = sorted({path.parent for name in (CSV_FILE, _EVENTS, HEALTH_FILE) for path in folder.rglob(name)})
    if folder in folders:
        return folder
    versions = {
        int(version[1]): path
        for path in folders
        if path.parent == folder and (version := re.fullmatch(r"version_(\d+)", path.name))
    }
    if versions:
        return versions[max(versions)]
    hint = f"Inside it, {folders[-1]} has." if folders else "A report reads what CSVLogger or TensorBoardLogger wrote."
    raise ReadError(f"{folder} has no logs: neither {CSV_FILE}, nor event files, nor a version_N with them. {hint}")


def read_csv(path: Path) -> dict[str, Series]:
    """Series by key from a file of Lightning's ``CSVLogger``; cells that are empty or hold words are skipped.

    Raises:
        ReadError: if it is not such a file.
    """
    columns: dict[str, dict[int, float]] = defaultdict(dict)
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
        # the run may be writing the last line, or have been stopped while writing it
        text = text[: text.rfind("\n") + 1]
        lines = csv.reader(io.StringIO(text))
        header = next(lines, [])
        if text and "step" not in header:
            raise ReadError(f"{path} has no column `step`; it is not a file of Lightning's CSVLogger.")
        for cells in lines:
            place = f"{path}, line {lines.line_num}"
            if len(cells) != len(header):
                raise ReadError(f"{place}: {len(cells)} cells, and its header has {len(header)}.")
            row = dict(zip(header, cells))
            step = _step(row.pop("step"), place)
            for key, cell in row.items():
                if cell:
                    with contextlib.suppress(ValueError):
                        columns[key][step] = float(cell)
    except (OSError, csv.Error) as error:
        raise ReadError(f"{path} cannot be read: {error}.") from error
    return {key: _series(values) for key, values in columns.items() if values}


def _read_events(folder: Path) -> dict[str, Series]:
    if not any(folder.glob(_EVENTS)):
        return {}
    try:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    except ModuleNotFoundError as error:
        raise ReadError(f"{folder} has event files, and reading them needs `pip install tensorboard`.") from error
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    place = f"The event files in {folder}"
    try:
        events.Reload()
        scalars = {key: events.Scalars(key) for key in events.Tags()["scalars"]}
    # the reader's exceptions for a damaged file are not documented
    except Exception as error:
        raise ReadError(f"{place} cannot be read: {error}.") from error
    return {key: _series({_step(e.step, place): e.value for e in some}) for key, some in scalars.items() if some}


def _step(value: str | int, place: str) -> int:
    with contextlib.suppress(ValueError, OverflowError):
        number = value if isinstance(value, int) else float(value)
        # false for NaN
        if abs(number) <= _LARGEST_STEP:
            return int(number)
    raise ReadError(f"{place}: the step is {reprlib.repr(value)}, not a number of at most 2**53.")


def _series(values: Mapping[int, float]) -> Series:
    steps = sorted(values)
    return Series(np.array(steps, np.int64), np.array([values[step] for step in steps], np.float64))


def _names(places: Sequence[Path]) -> list[str]:
    """The paths from the folder that all are in; a ``version_N`` always includes its experiment."""
    paths = [place.resolve() for place in places]
    tops = [path.parent if path.name.startswith("version_") else path for path in paths]
    shared = os.path.commonpath([top.parent for top in tops])
    names = [str(path.relative_to(shared)) for path in paths]
    # the same folder more than once
    repeated = len(set(names)) < len(names)
    return [f"{name} ({position})" if repeated else name for position, name in enumerate(names, start=1)]
