"""Damaged and hostile checkpoints in several files: refused by name before the model changes."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from exported import refused
from fp8_checkpoints import HF_FP8, quantized, write
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from lightning_fp8 import BlockScaling, convert, load_exported
from lightning_fp8.modules.fp8_parameter import Fp8Parameter

INDEX = "model.safetensors.index.json"
FIRST, SECOND = (f"model-0000{at}-of-00002.safetensors" for at in (1, 2))


def net() -> nn.Sequential:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(200, 144), nn.GELU(), nn.Linear(144, 16), nn.BatchNorm1d(16))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "plain": net,
    "meta": lambda: net().to("meta"),
    "converted": lambda: convert(net(), BlockScaling()),
    "frozen": lambda: convert(net().requires_grad_(False), BlockScaling(), frozen_weights="fp8"),
}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    written = write(tmp_path_factory.mktemp("written"), quantized(net().state_dict()).tensors, HF_FP8, shards=2)
    for how, make in MODELS.items():
        # this folder loads without errors; each fault below changes one thing in it
        load_exported(make(), written, frozen=how != "plain")
    return written


@pytest.fixture
def folder(tmp_path: Path, written: Path) -> Path:
    return Path(shutil.copytree(written, tmp_path / "in"))


def tensors_in(folder: Path, file: str, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / file)
    change(tensors)
    save_file(tensors, folder / file)


def index_in(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    index = json.loads((folder / INDEX).read_text())
    change(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))


def file_of(folder: Path, name: str) -> str:
    return json.loads((folder / INDEX).read_text())["weight_map"][name]


def in_index(name: str) -> Callable[[Path], object]:
    """Lets the index name another file for a tensor."""
    return lambda folder: index_in(folder, lambda files: files.update({"0.weight": name}))


def with_scale(value: float, at: tuple[int, int] = (1, 0)) -> Callable[[Path], object]:
    name = "0.weight_scale_inv"
    return lambda folder: tensors_in(folder, file_of(folder, name), lambda t: t[name].__setitem__(at, value))


def changed(name: str, make: Callable[[Tensor], Tensor | None]) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        def apply(tensors: dict[str, Tensor]) -> None:
            made = make(tensors.pop(name))
            if made is not None:
                tensors[name] = made.contiguous()

        tensors_in(folder, file_of(folder, name), apply)

    return change


def dropped(name: str) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        changed(name, lambda tensor: None)(folder)
        index_in(folder, lambda files: files.pop(name))

    return change


def moved_out(folder: Path) -> None:
    (folder / SECOND).rename(folder.parent / "elsewhere.safetensors")
    (folder / SECOND).symlink_to(folder.parent / "elsewhere.safetensors")


def other_than(file: str) -> str:
    return FIRST if file == SECOND else SECOND


def copied(folder: Path) -> None:
    """A tensor is in both files."""
    other = other_than(file_of(folder, "2.bias"))
    tensors_in(folder, other, lambda tensors: tensors.update({"2.bias": torch.zeros(16)}))


def pickled(folder: Path) -> None:
    torch.save({"0.weight": torch.zeros(2)}, folder / "pytorch_model.bin")
    for file in (FIRST, SECOND, INDEX):
        (folder / file).unlink()


def cut(size: int) -> Callable[[Path], object]:
    return lambda folder: os.truncate(folder / SECOND, (folder / SECOND).stat().st_size - size)


def long_header(folder: Path) -> None:
    (folder / SECOND).write_bytes(struct.pack("<Q", 2**60) + b"{}")


def turned(codes: Tensor) -> Tensor:
    return codes.view(torch.uint8).t().contiguous().view(codes.dtype)


def holds_codes(code: int) -> Callable[[Tensor], Tensor]:
    def change(tensor: Tensor) -> Tensor:
        tensor.view(torch.uint8)[140, 199] = code
        return tensor

    return change


RULE = r"are invalid scales; each must be a number from 2\*\*-118 to 2\*\*118: 0\.weight_scale_inv \("
OUTSIDE = r"which is not a file of .*Files outside of the folder are not read"
ONLY = r"Only safetensors files are read: loading a pickle can run any code"
LACKS = r"lack scales in the form of a matrix with a number for each block of 128 x 128: 0\.weight_scale_inv"
FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "a scale of NaN": (with_scale(float("nan")), RULE + "nan"),
    "a scale of 0": (with_scale(0.0), RULE + r"0\.0\)"),
    "a tiny scale": (with_scale(1e-40), RULE),
    "no scale": (dropped("0.weight_scale_inv"), LACKS + r"\.$"),
    "scales of too few blocks": (changed("0.weight_scale_inv", lambda t: t[:1]), LACKS + r" \(\(1, 2\) float32\)"),
    "scales of 8 bits": (
        changed("0.weight_scale_inv", lambda t: t.to(torch.float8_e8m0fnu)), LACKS + r" \(\(2, 2\) float8_e8m0fnu\)"
    ),
    "a code that is NaN": (changed("0.weight", holds_codes(0x7F)), r"hold codes that are NaN: 0\.weight\.$"),
    "transposed codes": (changed("2.weight", turned), LACKS.replace("0", "2")),
    "codes in one dimension": (changed("0.weight", lambda t: t.flatten()), LACKS),
    "a lost bias": (dropped("2.bias"), r"the model has and the file lacks: 2\.bias\.$"),
    "a lost buffer": (dropped("3.running_mean"), r"the model has and the file lacks: 3\.running_mean\.$"),
    "another tensor": (
        lambda folder: (tensors_in(folder, SECOND, lambda t: t.update({"x": torch.ones(1)})),
                        index_in(folder, lambda files: files.update({"x": SECOND}))),
        r"the file has and the model lacks: x\.$",
    ),
    "a name of a million letters": (
        lambda folder: tensors_in(folder, FIRST, lambda t: t.update({"a." * 500_000: torch.ones(1)})),
        r"have names of more than 1000 characters: (a\.){20}\.\.\.\.$",
    ),
    "a tensor that its file lacks": (
        changed("2.bias", lambda tensor: None), r"are not in the file that the index names: 2\.bias \(model-0000"
    ),
    "a tensor in another file": (
        lambda folder: index_in(folder, lambda files: files.update({"2.bias": other_than(files["2.bias"])})),
        r"are not in the file that the index names: 2\.bias \(model-0000",
    ),
    "a tensor that the index lacks": (
        lambda folder: index_in(folder, lambda files: files.pop("2.bias")), r"the files and not in the index: 2\.bias"
    ),
    "a tensor in two files": (copied, r"are in another file too: 2\.bias \(model-00001-of"),
    "a file above": (in_index("../in/" + FIRST), OUTSIDE),
    "an absolute path": (in_index("/etc/hostname"), OUTSIDE),
    "the folder above": (in_index(".."), ONLY),
    "a null byte": (in_index("x\0.safetensors"), OUTSIDE),
    "a file that does not exist": (in_index("x.safetensors"), r"There is no x\.safetensors in .*index\.json names it"),
    "a pickle": (in_index("x.bin"), r"names 'x\.bin'\. Only safetensors files are read: loading a pickle can run "),
    "pickles alone": (pickled, r"has no model\.safetensors, and holds pytorch_model\.bin\. Only safetensors files"),
    "a link out of the folder": (moved_out, r"is a link to .*elsewhere\.safetensors, outside of the folder"),
    "a number for a file": (lambda f: index_in(f, lambda files: files.update({"0.weight": 3})), r"a `weight_map` with"),
    "no map": (lambda folder: (folder / INDEX).write_text("{}"), r"must have a `weight_map` with the name of a file"),
    "an index of brackets": (lambda folder: (folder / INDEX).write_text("[" * 10**6), r"is not valid JSON"),
    "an index with a name twice": (
        lambda f: (f / INDEX).write_text('{"weight_map": {"x": "a.safetensors", "x": "b.safetensors"}}'),
        r"it has two entries x",
    ),
    "a huge index": (lambda folder: os.truncate(folder / INDEX, 2**32), r"has 4294967296 bytes; at most 100000000"),
    "both forms": (lambda folder: save_file({}, folder / "model.safetensors"), r"holds both model\.safetensors and "),
    "a file that is cut by a byte": (cut(1), r"is damaged or not a safetensors file"),
    "a header of 2**60 bytes": (long_header, r"is damaged or not a safetensors file"),
}  # fmt: skip


@pytest.mark.parametrize("what", FAULTS)
def test_a_fault_is_named_and_nothing_is_changed(what: str, folder: Path) -> None:
    change, message = FAULTS[what]
    change(folder)
    for how, make in MODELS.items():
        refused(make(), folder, message, frozen=how != "plain")


def test_values_that_overflow_float16_are_refused(folder: Path) -> None:
    with_scale(1e4)(folder)
    message = r"do not keep the values of the file in the model's dtype .*: 0\.weight \(float16\)"
    for frozen in (True, False):
        refused(net().half(), folder, message, frozen=frozen)


def test_links_of_the_hugging_face_cache_are_followed(folder: Path) -> None:
    cache = folder.parent / "models--a--b"
    snapshot = cache / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    (cache / "blobs").mkdir()
    for at, file in enumerate(sorted(folder.iterdir())):
        file.rename(cache / "blobs" / str(at))
        (snapshot / file.name).symlink_to(f"../../blobs/{at}")
    load_exported(net(), snapshot)
    (snapshot / INDEX).unlink()
    (folder.parent / "blob").write_text("{}")
    (snapshot / INDEX).symlink_to("../../../blob")
    refused(net(), snapshot, r"is a link to .*blob, outside of the folder")


def test_a_file_that_is_replaced_later_does_not_change_the_model(folder: Path) -> None:
    """No tensor is a view of a file."""
    model = load_exported(net().to("meta"), folder, frozen=True)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    held = [one.payload.clone() for one in model.parameters() if isinstance(one, Fp8Parameter)]
    for file in (FIRST, SECOND):
        content = (folder / file).read_bytes()
        (folder / file).write_bytes(content[:8] + bytes(len(content) - 8))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    now = [one.payload for one in model.parameters() if isinstance(one, Fp8Parameter)]
    assert all(map(torch.equal, now, held))
