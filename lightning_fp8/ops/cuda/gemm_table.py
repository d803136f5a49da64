"""Measured GEMMs: one JSON file per GPU shipped with the kernels, and one written by the user, which has priority."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

import kernels_cuda
from kernels_cuda import cache
from kernels_cuda.gemm_variants import OUTPUTS, Configuration, configurations
from lightning_fp8.ops.formats import dtype_name
from lightning_fp8.runtime.warn_once import warn_once

Read = TypeVar("Read")
_SHIPPED = Path(kernels_cuda.__file__).parent / "tables"
_DTYPES = {dtype_name(dtype): dtype for dtype in OUTPUTS}
# the fields that identify a row
_KEY = ("m", "n", "k", "promote", "output")


class Row(NamedTuple):
    """The measurements of one GEMM, ``[m, k] x [n, k] -> [m, n]``.

    Attributes:
        m: rows of the output.
        n: columns of the output.
        k: the dimension that is summed over.
        promote: whether partial sums are added up in fp32 registers every 128 along K.
        output: dtype of the output.
        configuration: our fastest configuration; None if none ran.
        splits: the number of parts of K with which it was fastest.
        p50_us: its median time in microseconds; None if none ran.
        cublaslt_p50_us: the same for ``torch._scaled_mm``; None if it does not support this GEMM.
    """

    m: int
    n: int
    k: int
    promote: bool
    output: torch.dtype
    configuration: Configuration | None
    splits: int
    p50_us: float | None
    cublaslt_p50_us: float | None

    @property
    def is_faster(self) -> bool:
        """Whether our kernel was faster."""
        if self.configuration is None or self.p50_us is None:
            return False
        return self.cublaslt_p50_us is None or self.p50_us < self.cublaslt_p50_us


class MalformedTable(ValueError):  # noqa: N818 - a state of a file, not a mistake in the program
    """A file that is not a table; the message says why."""


def slug(gpu: str) -> str:
    """A GPU's name as used in file names.

    >>> slug("NVIDIA H100 80GB HBM3")
    'nvidia-h100-80gb-hbm3'
    """
    return re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-")


def shipped_path(gpu: str) -> Path:
    """The path of the table shipped with the package, which may not exist."""
    return _SHIPPED / f"{slug(gpu)}.json"


def own_path(gpu: str) -> Path:
    """The path of the table that ``python -m lightning_fp8 tune`` writes on this machine, which may not exist."""
    return cache.cache_folder() / f"gemm-{slug(gpu)}.json"


@functools.cache
def rows(gpu: str, capability: tuple[int, int]) -> tuple[Row, ...]:
    """All measurements of such a GPU, sorted; for a GEMM that is in both tables, the user's own row. Read once.

    A file that cannot be read or is not a table counts as absent, with a warning; so does a row of an unknown
    configuration.
    """
    found: dict[tuple[Any, ...], Row] = {}
    for path in (shipped_path(gpu), own_path(gpu)):
        for fields in _readable_rows(path):
            row = _row(fields, capability, path)
            if row is not None:
                found[_key(fields)] = row
    return tuple(found[key] for key in sorted(found))


def min_features(gpu: str) -> int | None:
    """The size from which linear layers are faster in FP8; None if that was not measured on such a GPU.

    The user's own table has priority. An invalid size counts as absent, with a warning.
    """
    for path in (own_path(gpu), shipped_path(gpu)):
        found = _readable(path, _checked_min_features, " for `min_features`")
        if found:
            return found["features"]
    return None


def write(path: Path, about: Mapping[str, Any], measured: Iterable[Mapping[str, Any]]) -> None:
    """Put rows into a table, replacing those of the same GEMMs. Safe to call from several processes at once.

    Args:
        path: of the table, which need not exist; its folder must.
        about: ``gpu``, ``driver``, ``versions``, ``commit`` and ``command``, which replace those in the table.
        measured: rows with the fields of :class:`Row`, ``output`` and ``configuration`` by name, and any others.

    Raises:
        OSError: if the file or its lock cannot be written.
    """
    with _locked(path):
        kept = _readable(path, _checked_min_features, " for `min_features`")
        head = {**about, "min_features": kept} if kept else about
        _replace(path, head, (*_readable_rows(path), *measured))


def write_min_features(path: Path, about: Mapping[str, Any], found: Mapping[str, Any]) -> None:
    """Put a size into a table, replacing the former one. Safe to call from several processes at once.

    Args:
        path: of the table, which need not exist; its folder must.
        about: as for :func:`write`; kept with the size, because rows in the table may come from other runs.
        found: ``features``, the size, and how it was found.

    Raises:
        OSError: if the file or its lock cannot be written.
    """
    with _locked(path):
        table = _readable(path, _parsed) or dict(about)
        head = {name: value for name, value in table.items() if name != "rows"}
        own = {name: value for name, value in about.items() if name != "gpu"}
        _replace(path, {**head, "min_features": {**found, **own}}, _readable_rows(path))


def _replace(path: Path, head: Mapping[str, Any], rows: Iterable[Mapping[str, Any]]) -> None:
    """Write a table; of two rows of one GEMM, the later one is kept."""
    merged = {_key(row): dict(row) for row in rows}
    lines = ",\n".join(f"  {json.dumps(merged[key])}" for key in sorted(merged))
    above = "".join(f" {json.dumps(name)}: {json.dumps(value)},\n" for name, value in head.items())
    cache.write(path, f'{{\n{above} "rows": [\n{lines}\n ]\n}}\n'.encode())


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Lock the table: two concurrent writers would otherwise lose the rows of one of them."""
    # only where tables are written, which is where CUDA is
    import fcntl

    lock = os.open(path.with_name(f".{path.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _key(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(row[part] for part in _KEY)


def _readable_rows(path: Path) -> list[dict[str, Any]]:
    return _readable(path, _checked) or []


def _readable(path: Path, read: Callable[[str], Read], for_what: str = "") -> Read | None:
    """The contents of a file; None if it does not exist or cannot be used."""
    try:
        return read(_text(path))
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError, MalformedTable) as error:
        warn_once(
            f"The table of measured GEMMs {path} is left out of account{for_what}: {error}. Delete it, or measure again"
            " with `python -m lightning_fp8 tune`."
        )
        return None


def _text(path: Path) -> str:
    """A table in the cache folder is read only if no other user could have written it; other paths are explicit."""
    if path.parent != cache.cache_folder():
        return path.read_text(encoding="utf-8")
    cache.check_folder(path.parent)
    return cache.read(path).decode()


def _parsed(text: str) -> dict[str, Any]:
    try:
        table = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise MalformedTable(f"it is not JSON ({error})") from error
    if not isinstance(table, dict) or not isinstance(table.get("rows"), list):
        raise MalformedTable("it has no list `rows`")
    return table


def _checked_min_features(text: str) -> dict[str, Any] | None:
    found = _parsed(text).get("min_features")
    if found is None or (isinstance(found, dict) and _is_count(found.get("features"))):
        return found
    raise MalformedTable(f"`min_features` is {found!r}, without a positive integer `features`")


def _checked(text: str) -> list[dict[str, Any]]:
    rows = _parsed(text)["rows"]
    for number, row in enumerate(rows):
        wrong = _wrong_field(row) if isinstance(row, dict) else "not an object"
        if wrong is not None:
            raise MalformedTable(f"row {number} of it is wrong: {wrong}")
    return rows


def _wrong_field(row: dict[str, Any]) -> str | None:
    """The first field that does not match :class:`Row`, with the value found."""
    rules = {
        **dict.fromkeys(("m", "n", "k", "splits"), _is_count),
        "promote": lambda value: isinstance(value, bool),
        "output": lambda value: isinstance(value, str) and value in _DTYPES,
        "configuration": lambda value: value is None or isinstance(value, str),
        **dict.fromkeys(("p50_us", "cublaslt_p50_us"), _is_time),
    }
    for field, is_right in rules.items():
        if field not in row:
            return f"no {field!r}"
        if not is_right(row[field]):
            return f"{field!r} is {row[field]!r}"
    return None


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _is_time(value: Any) -> bool:
    if value is None:
        return True
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def _row(row: dict[str, Any], capability: tuple[int, int], path: Path) -> Row | None:
    """The row; None if its configuration is unknown, as in the table of another version."""
    name = row["configuration"]
    known = {one.name: one for one in configurations(capability, row["promote"])}
    if name is not None and name not in known:
        warn_once(
            f"The table of measured GEMMs {path} has rows of the configuration {name!r}, which this version does not"
            " have: they are left out of account. Measure again with `python -m lightning_fp8 tune`."
        )
        return None
    return Row(
        row["m"],
        row["n"],
        row["k"],
        row["promote"],
        _DTYPES[row["output"]],
        None if name is None else known[name],
        row["splits"],
        row["p50_us"],
        row["cublaslt_p50_us"],
    )
