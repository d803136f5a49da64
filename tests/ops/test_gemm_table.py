"""The tables of measured GEMMs: read, written by several processes at once, and left out where damaged."""

from __future__ import annotations

import json
import multiprocessing
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_tables import FAST, HOPPER, NAME, PROMOTED, forget, given, h200, promoted, row

from lightning_fp8.ops.cuda import gemm_table
from lightning_fp8.ops.cuda.gemm_table import Choice, Product


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with h200(tmp_path, monkeypatch):
        yield


def test_rows_come_back_as_they_were_written_one_a_line() -> None:
    rows = [row(64, 64, 64, None, 2.0, configuration=None, p20_us=0.5), promoted(1024, 512, 8192, 3.5, None, splits=4)]
    path = given(*reversed(rows))
    assert gemm_table.rows(NAME, HOPPER) == (
        (Product(64, 64, 64, False, torch.bfloat16), Choice(None), None, 2.0, False),
        (Product(1024, 512, 8192, True, torch.bfloat16), Choice(PROMOTED["256x128 s4 c1"], 4), 3.5, None, False),
    )
    text = path.read_text()
    assert json.loads(text) == {"gpu": NAME, "rows": rows}
    assert [json.loads(line.strip().rstrip(",")) for line in text.splitlines() if '"m"' in line] == rows


def test_names_of_choices_and_products() -> None:
    assert [Choice(None).name, Choice(PROMOTED["256x128 s4 c2"]).name] == ["cuBLASLt", "256x128 s4 c2"]
    assert Choice(PROMOTED["256x128 s4 c2"], 4).name == "256x128 s4 c2, K in 4"
    assert Product(32, 64, 48, True, torch.float32).name == "32x64x48 promoted float32"
    assert Product(48, 32, 64, False, torch.bfloat16).name == "48x32x64 fast bfloat16"


def test_writing_replaces_the_same_size_class_only() -> None:
    given(row(64, 64, 64, 1.0, 2.0), row(64, 64, 64, 1.0, 2.0, output="float32"), promoted(64, 64, 64, 1.0, 2.0))
    given(row(65, 64, 64, 5.0, 2.0), row(640, 64, 64, 6.0, 2.0))
    found = {(*one.product[:1], *one.product[3:]): one.p50_us for one in gemm_table.rows(NAME, HOPPER)}
    bf16, fp32 = torch.bfloat16, torch.float32
    expected = {(65, False, bf16): 5.0, (640, False, bf16): 6.0, (64, False, fp32): 1.0, (64, True, bf16): 1.0}
    assert found == expected


@pytest.mark.parametrize(("replace", "time"), [(True, 2.0), (False, 1.0)])
def test_what_is_kept_is_the_row_to_go_by(replace: bool, time: float) -> None:
    gemm_table.keep(NAME, HOPPER, row(64, 64, 64, 1.0, 3.0), replace)
    kept = gemm_table.keep(NAME, HOPPER, row(65, 64, 64, 2.0, 3.0), replace)
    assert kept is not None
    assert (kept.p50_us, kept.at_first_use) == (time, not replace)
    assert gemm_table.rows(NAME, HOPPER) == (kept,)


RIGHT = row(64, 64, 64, 1.0, 2.0)
WRONG = {
    "it is not JSON": ["{", "", "[" * 100_000],
    "it has no list `rows`": ["[]", "{}", '{"rows": {}}'],
    "row 0 of it is wrong: not an object": ['{"rows": [3]}'],
    "row 1 of it is wrong: 'n' is 0": [json.dumps({"rows": [RIGHT, {**RIGHT, "n": 0}]})],
    "row 0 of it is wrong: no 'splits'": [
        json.dumps({"rows": [{key: field for key, field in RIGHT.items() if key != "splits"}]})
    ],
    **{
        f"row 0 of it is wrong: {field!r} is {value!r}": [json.dumps({"rows": [{**RIGHT, field: value}]})]
        for field, value in (
            *(("m", value) for value in (-1, 64.0, "64", True, None)),
            *(("promote", 1), ("output", "int8"), ("output", None), ("configuration", 3)),
            *(("p50_us", value) for value in (0, -1.0, float("nan"), True)),
            *(("cublaslt_p50_us", "fast"), ("cublaslt_p50_us", float("inf"))),
        )
    },
}


@pytest.mark.parametrize("why", WRONG)
def test_a_damaged_table_counts_as_absent_and_is_named_once(why: str) -> None:
    for text in WRONG[why]:
        given(RIGHT, own=False)
        path = gemm_table.own_path(NAME)
        path.write_text(text)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            for _ in range(2):
                assert [one.p50_us for one in gemm_table.rows(NAME, HOPPER)] == [1.0]
                gemm_table.rows.cache_clear()
        (message,) = (str(one.message) for one in said)
        assert f"{path} is left out of account: {why}" in message
    # and is written anew
    forget()
    with pytest.warns(UserWarning, match="left out of account"):
        given(row(64, 64, 64, 4.0, 2.0))
    assert [one.p50_us for one in gemm_table.rows(NAME, HOPPER)] == [4.0]


@pytest.mark.parametrize("content", [b"\xff\xfe", None])
def test_a_table_that_cannot_be_read_counts_as_absent(content: bytes | None) -> None:
    path = gemm_table.own_path(NAME)
    path.mkdir() if content is None else path.write_bytes(content)
    with pytest.warns(UserWarning, match="left out of account"):
        assert gemm_table.rows(NAME, HOPPER) == ()


@pytest.mark.parametrize(("promote", "name"), [(False, "512x512 s4 c8"), (True, "128x256 s4 c2")])
def test_a_row_of_an_unknown_configuration_is_ignored_alone(promote: bool, name: str) -> None:
    given(row(64, 64, 64, 1.0, 2.0, promote=promote, configuration="128x128 s6 c1"), own=False)
    # the second has another field, as in tables of version 0.5
    path = given(
        row(64, 64, 64, 1.0, 2.0, promote=promote, configuration=name),
        row(4096, 64, 64, 1.0, 2.0, promote=promote, configuration="128x128 s6 c2", chained={"gelu": True}),
    )
    with pytest.warns(UserWarning, match="has rows of the configuration") as said:
        found = [one.ours.configuration for one in gemm_table.rows(NAME, HOPPER)]
    assert found == [FAST["128x128 s6 c1"], FAST["128x128 s6 c2"]]
    assert len(said) == 1
    assert str(path) in str(said[0].message)
    assert repr(name) in str(said[0].message)


def write_rows(path: Path, exponents: range) -> None:
    for exponent in exponents:
        gemm_table.write(path, {"gpu": NAME}, [row(1 << exponent, 64, 64, 1.0, 2.0)])


def test_two_writers_at_once_lose_nothing() -> None:
    path, context = gemm_table.own_path(NAME), multiprocessing.get_context("fork")
    writers = [context.Process(target=write_rows, args=(path, range(start, 60, 2))) for start in (0, 1)]
    for writer in writers:
        writer.start()
    seen = 0
    while any(writer.is_alive() for writer in writers):
        if path.exists():
            now = len(json.loads(path.read_text())["rows"])
            assert now >= seen
            seen = now
    assert [writer.exitcode for writer in writers] == [0, 0]
    assert [one.product.m for one in gemm_table.rows(NAME, HOPPER)] == [1 << exponent for exponent in range(60)]
    assert not list(path.parent.glob("*.tmp"))


def test_a_write_that_fails_leaves_the_old_table(monkeypatch: pytest.MonkeyPatch) -> None:
    path = given(row(64, 64, 64, 1.0, 2.0))
    before = path.read_bytes()

    def full(*_: Any) -> None:
        raise OSError("no space left")

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", full)
        with pytest.raises(OSError, match="no space"):
            gemm_table.keep(NAME, HOPPER, row(128, 64, 64, 1.0, 2.0), False)
    assert path.read_bytes() == before
    assert not list(path.parent.glob(".*.tmp"))


def test_measurements_of_gpus_drivers_and_versions_lie_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    gemm_table.keep(NAME, HOPPER, row(64, 64, 64, 1.0, 2.0), False)
    path = gemm_table.own_path(NAME)
    about = json.loads(path.read_text())
    assert (about["gpu"], about["torch"]) == (NAME, torch.__version__)
    assert {"driver", "lightning-fp8"} < {*about}
    others = [gemm_table.own_path("NVIDIA H100 PCIe")]
    for name, other in (("driver_cuda", lambda: 12080), ("torch", "2.0"), ("__version__", "0.0")):
        with monkeypatch.context() as patch:
            patch.setattr(torch if name == "torch" else gemm_table, "__version__" if name == "torch" else name, other)
            forget()
            others.append(gemm_table.own_path(NAME))
            assert gemm_table.rows(NAME, HOPPER) == ()
    forget()
    assert len({path, *others}) == 5
    assert path.name.startswith("gemm-nvidia-h200-")
    assert gemm_table.own_path(NAME) == path
