"""Reads the safetensors files of a folder: all headers at once, with checks; then the tensors, file by file."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_fp8.serialization.tensors import WEIGHTS_FILE, import_safetensors, listed, printable

INDEX_FILE = f"{WEIGHTS_FILE}.index.json"
# the length of the longest header that safetensors reads
_LARGEST_JSON = 100_000_000
_AT_ONCE = 2**25
_LONGEST_NAME = 1000
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}


class Stored(NamedTuple):
    """What a header says of a tensor."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]


class Shards:
    """The tensors of a folder, in ``model.safetensors`` or in the files that its index names.

    Args:
        folder: the folder.

    Attributes:
        stored: what the headers say of each tensor, by name, file by file.
        metadata: the metadata in the header of each file.
        path: the only file, or the index; for messages.

    Raises:
        FileNotFoundError: if there are no weights.
        ValueError: for files that are damaged, outside of the folder, pickles, or contradict the index.
    """

    def __init__(self, folder: Path) -> None:
        self.stored: dict[str, Stored] = {}
        self.metadata: dict[Path, dict[str, str]] = {}
        index = read_json(folder, INDEX_FILE)
        has_both = index is not None and (folder / WEIGHTS_FILE).is_file()
        if has_both:
            raise ValueError(
                f"load_exported: {folder} holds both {WEIGHTS_FILE} and {INDEX_FILE}. Remove that which does not belong"
                " to the model."
            )
        self.path = folder / (WEIGHTS_FILE if index is None else INDEX_FILE)
        files = _indexed(self.path, index)
        for file in dict.fromkeys([WEIGHTS_FILE] if index is None else files.values()):
            self._add(checked_file(folder, file, self.path))
        if index is not None:
            self._check_index(files)

    def _add(self, file: Path) -> None:
        safetensors = import_safetensors()
        if not file.is_file():
            _refuse_pickles(file)
            missing = f"There is no {printable(file.name)} in {file.parent}."
            if file != self.path:
                raise ValueError(f"load_exported: {missing} {self.path} names it.")
            raise FileNotFoundError(f"{missing} Nor is there a {INDEX_FILE}.")
        try:
            with safetensors.safe_open(file, framework="pt") as opened:
                self.metadata[file] = opened.metadata() or {}
                slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
                entries = {name: (view.get_dtype(), tuple(view.get_shape())) for name, view in slices.items()}
        except (safetensors.SafetensorError, OSError) as error:
            raise _damaged(file, error) from error
        unknown = (f"{name} ({printable(kind)})" for name, (kind, _) in entries.items() if kind not in _DTYPES)
        self._refuse(file, "are of a dtype that is not read", unknown)
        # patterns are searched in names, and messages hold them
        long = (f"{name[:40]}..." for name in entries if len(name) > _LONGEST_NAME)
        self._refuse(file, f"have names of more than {_LONGEST_NAME} characters", long)
        twice = (f"{name} ({self.stored[name].file.name})" for name in entries if name in self.stored)
        self._refuse(file, "are in another file too", twice)
        self.stored |= {name: Stored(file, _DTYPES[kind], shape) for name, (kind, shape) in entries.items()}

    def _check_index(self, files: Mapping[str, str]) -> None:
        lacking = (
            f"{name} ({file})"
            for name, file in files.items()
            if name not in self.stored or self.stored[name].file.name != file
        )
        self._refuse(self.path, "are not in the file that the index names", lacking)
        self._refuse(self.path, "are in the files and not in the index", (n for n in self.stored if n not in files))

    def _refuse(self, file: Path, misfit: str, names: Iterable[str]) -> None:
        if wrong := list(names):
            raise ValueError(f"load_exported: {file}: tensors that {misfit}: {listed(wrong)}.")

    def tensors(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """These tensors, file by file. Each is a view of the file: read or copy it before you take the next one.

        A file is reopened after every 32 MiB, because the parts read so far count as memory of the process until then.
        """
        by_file: dict[Path, list[list[str]]] = {}
        left: dict[Path, int] = {}
        for name in names:
            file, dtype, shape = self.stored[name]
            left[file] = left.get(file, 0) - math.prod(shape) * dtype.itemsize
            if left[file] < 0 or file not in by_file:
                by_file.setdefault(file, []).append([])
                left[file] = _AT_ONCE
            by_file[file][-1].append(name)
        safetensors = import_safetensors()
        for file, parts in by_file.items():
            for part in parts:
                try:
                    with safetensors.safe_open(file, framework="pt", device="cpu") as opened:
                        for name in part:
                            yield name, opened.get_tensor(name)
                except (safetensors.SafetensorError, OSError) as error:
                    raise _damaged(file, error) from error


def read_json(folder: Path, name: str) -> Any:
    """The content of a JSON file of the folder; None if there is no such file.

    Raises:
        ValueError: if it is outside of the folder, too large, not valid JSON, or names a key twice.
    """
    file = folder / name
    if not file.is_file():
        return None
    file = checked_file(folder, name, file)
    if file.stat().st_size > _LARGEST_JSON:
        raise ValueError(f"{file} has {file.stat().st_size} bytes; at most {_LARGEST_JSON} are read.")
    try:
        return json.loads(file.read_text(encoding="utf-8"), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not valid JSON: {printable(str(error))}") from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) < len(pairs):
        seen: set[str] = set()
        twice = [name for name, _ in pairs if name in seen or seen.add(name)]  # type: ignore[func-returns-value]
        raise ValueError(f"it has two entries {listed(twice)}")
    return mapping


def _indexed(path: Path, index: Any) -> dict[str, str]:
    """Name of the file of each tensor, according to the index."""
    if index is None:
        return {}
    files = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(files, dict) or not files or not all(isinstance(file, str) for file in files.values()):
        raise ValueError(f"{path} must have a `weight_map` with the name of a file for each tensor.")
    return files


def checked_file(folder: Path, name: str, named_by: Path) -> Path:
    """The path of a file directly in the folder, from a name that is read from a file.

    Links out of the folder are refused, except those of the cache of Hugging Face, whose snapshots link to its blobs.

    Raises:
        ValueError: for any other path, or another kind of file.
    """
    if Path(name).name != name or "\\" in name or "\0" in name:
        raise ValueError(
            f"load_exported: {named_by} names {printable(name)!r}, which is not a file of {folder}. Files outside of"
            " the folder are not read."
        )
    if not name.endswith((".safetensors", ".json")):
        raise ValueError(
            f"load_exported: {named_by} names {printable(name)!r}. Only safetensors files are read: loading a pickle"
            " can run any code."
        )
    file, root = folder / name, folder.resolve()
    allowed = [root, root.parent.parent / "blobs"] if root.parent.name == "snapshots" else [root]
    if file.exists() and file.resolve().parent not in allowed:
        raise ValueError(f"load_exported: {printable(str(file))} is a link to {file.resolve()}, outside of the folder.")
    return file


def _refuse_pickles(file: Path) -> None:
    pickles = sorted(path.name for kind in _PICKLES for path in file.parent.glob(kind))
    if pickles:
        raise ValueError(
            f"load_exported: {file.parent} has no {printable(file.name)}, and holds {listed(pickles)}. Only safetensors"
            " files are read: loading a pickle can run any code. Convert them with the library that wrote them."
        )


def _damaged(file: Path, error: Exception) -> ValueError:
    return ValueError(f"{file} is damaged or not a safetensors file: {printable(str(error))}")
