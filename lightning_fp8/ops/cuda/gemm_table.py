"""Measured GEMMs: for each GPU a file shipped with the kernels, and one in the cache folder, which has priority."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

import kernels_cuda
from kernels_cuda import cache
from kernels_cuda.gemm_variants import OUTPUTS, Configuration, configurations
from lightning_fp8.ops.formats import dtype_name
from lightning_fp8.runtime.environment import driver_cuda
from lightning_fp8.runtime.version import __version__
from lightning_fp8.runtime.warn_once import warn_once

_SHIPPED = Path(kernels_cuda.__file__).parent / "tables"
_DTYPES = {dtype_name(dtype): dtype for dtype in OUTPUTS}


class Product(NamedTuple):
    """One GEMM, ``[m, k] x [n, k] -> [m, n]``.

    Attributes:
        m: rows of the output.
        n: columns of the output.
        k: the dimension that is summed over.
        promote: whether partial sums are added up in fp32 registers every 128 along K.
        output: dtype of the output.
    """

    m: int
    n: int
    k: int
    promote: bool
    output: torch.dtype

    @property
    def name(self) -> str:
        """``"8192x4096x1024 promoted float32"``."""
        return f"{self.m}x{self.n}x{self.k} {'promoted' if self.promote else 'fast'} {dtype_name(self.output)}"

    @property
    def size_class(self) -> tuple[int | bool | str, ...]:
        """What products have in common for which one measurement counts: each size, rounded to half a power of two.

        >>> Product(8192, 4096, 14336, True, torch.float32).size_class
        (26, 24, 28, True, 'float32')
        """
        halves = (round(2 * math.log2(size)) for size in self[:3])
        return *halves, self.promote, dtype_name(self.output)

    def as_json(self) -> dict[str, Any]:
        """The fields by name, with the dtype by its name."""
        return {**self._asdict(), "output": dtype_name(self.output)}


class Choice(NamedTuple):
    """How a GEMM is computed.

    Attributes:
        configuration: of our kernel; None for cuBLASLt, which is ``torch._scaled_mm``.
        splits: the number of parts of K that are computed in parallel and then added.
    """

    configuration: Configuration | None
    splits: int = 1

    @property
    def name(self) -> str:
        """``"256x128 s4 c2, K in 4"``, as in tables and messages."""
        if self.configuration is None:
            return "cuBLASLt"
        return self.configuration.name + (f", K in {self.splits}" if self.splits > 1 else "")


class Row(NamedTuple):
    """The measurements of one GEMM.

    Attributes:
        product: what was measured.
        ours: the fastest of our kernels; ``Choice(None)`` if none ran.
        p50_us: its median time in microseconds; None if none ran.
        cublaslt_p50_us: the same for ``torch._scaled_mm``; None if it does not support this GEMM.
        at_first_use: whether a run measured it by itself, and not ``tune``.
    """

    product: Product
    ours: Choice
    p50_us: float | None
    cublaslt_p50_us: float | None
    at_first_use: bool = False

    @property
    def is_measured(self) -> bool:
        """Whether anything ran; without, as where memory ran out, the choice is by the rule."""
        return self.p50_us is not None or self.cublaslt_p50_us is not None

    @property
    def is_faster(self) -> bool:
        """Whether our kernel was faster."""
        if self.ours.configuration is None or self.p50_us is None:
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
    """The path of the table measured on this machine with this driver and these versions, which may not exist."""
    key = hashlib.sha256(json.dumps(_versions()).encode()).hexdigest()[:8]
    return cache.cache_folder() / f"gemm-{slug(gpu)}-{key}.json"


@functools.cache
def _versions() -> dict[str, Any]:
    return {"driver": driver_cuda(), "torch": torch.__version__, "lightning-fp8": __version__}


@functools.cache
def rows(gpu: str, capability: tuple[int, int]) -> tuple[Row, ...]:
    """All measurements of such a GPU, one of each size class; the user's own where it is in both tables. Read once.

    A file that cannot be read or is not a table counts as absent, with a warning; so does a row of an unknown
    configuration.
    """
    table: dict[tuple[Any, ...], Row] = {}
    for path in (shipped_path(gpu), own_path(gpu)):
        for fields in _readable_rows(path):
            row = _row(fields, capability, path)
            if row is not None:
                table[row.product.size_class] = row
    return tuple(table[key] for key in sorted(table))


def keep(gpu: str, capability: tuple[int, int], measured: Mapping[str, Any], replace: bool) -> Row | None:
    """Put a measurement into the user's own table; gives the row that is in the table afterwards.

    Without ``replace``, a row of its size class that another process has written meanwhile stays, and is the one to go
    by: a run that is resumed chooses as before. None if that row is of an unknown configuration.

    Raises:
        OSError: if the table cannot be written.
    """
    path = own_path(gpu)
    cache.make_folder(path.parent)
    row = {**measured, "at_first_use": not replace}
    table = write(path, {"gpu": gpu, **_versions()}, [row], replace)
    return _row(table[_product(measured).size_class], capability, path)


def write(
    path: Path, about: Mapping[str, Any], measured: Iterable[Mapping[str, Any]], replace: bool = True
) -> dict[tuple[Any, ...], dict[str, Any]]:
    """Put rows into a table; gives all its rows, by size class. Safe to call from several processes at once.

    Args:
        path: of the table, which need not exist; its folder must.
        about: ``gpu``, ``driver`` and versions, which replace those in the table.
        measured: the fields of :class:`Product`, and ``configuration`` by name, ``splits``, ``p50_us``,
            ``cublaslt_p50_us``, and any others.
        replace: whether they replace the table's rows of the same size classes, which otherwise stay.

    Raises:
        OSError: if the file or its lock cannot be written.
    """
    with _locked(path):
        before = _readable_rows(path)
        latest_last = (*before, *measured) if replace else (*measured, *before)
        table = {_product(row).size_class: dict(row) for row in latest_last}
        lines = ",\n".join(f"  {json.dumps(table[key])}" for key in sorted(table))
        above = "".join(f" {json.dumps(name)}: {json.dumps(value)},\n" for name, value in about.items())
        cache.write(path, f'{{\n{above} "rows": [\n{lines}\n ]\n}}\n'.encode())
    return table


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


def _readable_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a file; none if it does not exist or cannot be used."""
    try:
        return _checked(_text(path))
    except FileNotFoundError:
        return []
    except (OSError, UnicodeDecodeError, MalformedTable) as error:
        warn_once(
            f"The table of measured GEMMs {path} is left out of account: {error}. Delete it, or measure again"
            " with `python -m lightning_fp8 tune`."
        )
        return []


def _text(path: Path) -> str:
    """A table in the cache folder is read only if no other user could have written it; other paths are explicit."""
    if path.parent != cache.cache_folder():
        return path.read_text(encoding="utf-8")
    cache.check_folder(path.parent)
    return cache.read(path).decode()


def _checked(text: str) -> list[dict[str, Any]]:
    try:
        table = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise MalformedTable(f"it is not JSON ({error})") from error
    if not isinstance(table, dict) or not isinstance(table.get("rows"), list):
        raise MalformedTable("it has no list `rows`")
    rows: list[dict[str, Any]] = table["rows"]
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


def _product(row: Mapping[str, Any]) -> Product:
    return Product(row["m"], row["n"], row["k"], row["promote"], _DTYPES[row["output"]])


def _row(row: Mapping[str, Any], capability: tuple[int, int], path: Path) -> Row | None:
    """The row; None if its configuration is unknown, as in the table of another version."""
    name = row["configuration"]
    by_name = {configuration.name: configuration for configuration in configurations(capability, row["promote"])}
    if name is not None and name not in by_name:
        warn_once(
            f"The table of measured GEMMs {path} has rows of the configuration {name!r}, which this version does not"
            " have: they are left out of account. Measure again with `python -m lightning_fp8 tune`."
        )
        return None
    ours = Choice(None if name is None else by_name[name], row["splits"])
    return Row(_product(row), ours, row["p50_us"], row["cublaslt_p50_us"], row.get("at_first_use") is True)
