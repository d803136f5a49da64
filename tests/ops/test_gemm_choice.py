"""Which GEMM is chosen: by measured rows, by the nearest of them, or by the estimate; and the tables of the rows."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import random
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kernels_cuda.gemm_variants import Configuration, configurations
from lightning_fp8.ops.cuda import gemm_choice, gemm_table, kernels
from lightning_fp8.ops.cuda.gemm_choice import Choice, check_gemm, choose, estimated, most_splits
from lightning_fp8.runtime.warn_once import warn_once

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")
NAME, HOPPER = "NVIDIA H200", (9, 0)
BF16, FP32 = torch.bfloat16, torch.float32
FAST = {one.name: one for one in configurations(HOPPER, promote=False)}
PROMOTED = {one.name: one for one in configurations(HOPPER, promote=True)}
ABOUT = {"gpu": NAME, "driver": "580", "versions": {"torch": "2.13"}, "commit": "abc", "command": "tune"}


def forget() -> None:
    for function in (choose, warn_once, gemm_table.rows, kernels.backend):
        function.cache_clear()


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Separate tables, and an H200 as far as torch can tell."""
    monkeypatch.setenv("LIGHTNING_FP8_CACHE_DIR", str(tmp_path / "own"))
    monkeypatch.setattr(gemm_table, "_SHIPPED", tmp_path / "shipped")
    monkeypatch.delenv("LIGHTNING_FP8_BACKEND", raising=False)
    for name in ("own", "shipped"):
        (tmp_path / name).mkdir()
    be(monkeypatch)
    forget()
    yield
    forget()


@contextmanager
def recorded() -> Iterator[list[warnings.WarningMessage]]:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        yield said


def be(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int] = HOPPER, name: str = NAME) -> None:
    properties = SimpleNamespace(name=name, major=capability[0], minor=capability[1], multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)


def row(m: int, n: int, k: int, ours: float | None, theirs: float | None, **others: Any) -> dict[str, Any]:
    fields = {"promote": False, "output": "bfloat16", "configuration": "128x256 s4 c2", "splits": 1}
    return {"m": m, "n": n, "k": k, **fields, "p50_us": ours, "cublaslt_p50_us": theirs, **others}


def promoted(m: int, n: int, k: int, ours: float | None, theirs: float | None, **others: Any) -> dict[str, Any]:
    return row(m, n, k, ours, theirs, **{"promote": True, "configuration": "256x128 s4 c1", **others})


def given(*rows: dict[str, Any], own: bool = True) -> Path:
    path = gemm_table.own_path(NAME) if own else gemm_table.shipped_path(NAME)
    gemm_table.write(path, ABOUT, rows)
    forget()
    return path


def chosen(m: int, n: int, k: int, gemm: str = "auto", promote: bool = False, output: torch.dtype = BF16) -> Choice:
    return choose(GPU, gemm, m, n, k, promote, output)


# the three words


@pytest.mark.parametrize("gemm", ["auto", "rawkernel", "cublaslt"])
def test_words_that_are_allowed(gemm: str) -> None:
    check_gemm(gemm)


@pytest.mark.parametrize("call", [check_gemm, lambda gemm: chosen(64, 64, 64, gemm)])
def test_another_word_is_named_with_those_allowed(call: Any) -> None:
    with pytest.raises(ValueError, match="'auto', 'rawkernel', 'cublaslt', got 'cublas'"):
        call("cublas")


def test_cublaslt_is_always_cublaslt() -> None:
    given(row(4096, 4096, 4096, 1.0, 2.0))
    assert chosen(4096, 4096, 4096, "cublaslt") == Choice(None)
    assert chosen(4096, 4096, 4096, "auto") == Choice(FAST["128x256 s4 c2"])


@pytest.mark.parametrize("gemm", gemm_choice.GEMMS)
def test_nothing_is_chosen_or_said_on_the_cpu(gemm: str) -> None:
    given(row(64, 64, 64, 1.0, 2.0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert choose(CPU, gemm, 64, 64, 64, False, BF16) == Choice(None)


@pytest.mark.parametrize("gemm", gemm_choice.GEMMS)
def test_reference_backend_has_no_kernel(gemm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given(row(64, 64, 64, 1.0, 2.0))
    monkeypatch.setenv("LIGHTNING_FP8_BACKEND", "reference")
    assert chosen(64, 64, 64, gemm) == Choice(None)


@pytest.mark.parametrize("sizes", [(0, 64, 64), (64, 0, 64), (64, 64, 0)])
def test_empty_products_take_no_kernel(sizes: tuple[int, int, int]) -> None:
    given(row(64, 64, 64, 1.0, 2.0))
    for gemm in gemm_choice.GEMMS:
        assert chosen(*sizes, gemm) == Choice(None)


@pytest.mark.parametrize("gemm", ["auto", "rawkernel"])
@pytest.mark.parametrize("promote", [False, True])
def test_architecture_without_kernels_is_named_once(gemm: str, promote: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    be(monkeypatch, (10, 0), "NVIDIA B200")
    with recorded() as said:
        for m in (64, 128):
            assert chosen(m, 64, 64, gemm, promote) == Choice(None)
    assert [str(one.message) for one in said] == [
        "FP8 GEMMs run by torch._scaled_mm on NVIDIA B200: lightning_fp8 has no GEMM kernel for compute"
        " capability 10.0."
    ]


@pytest.mark.parametrize("gemm", ["auto", "rawkernel"])
def test_a_choice_is_made_once_for_a_shape(gemm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given(row(64, 64, 64, 1.0, 2.0))
    chosen(64, 64, 64, gemm)
    monkeypatch.setattr(torch.cuda, "get_device_properties", None)
    assert chosen(64, 64, 64, gemm).configuration is not None


def test_names_of_choices() -> None:
    assert Choice(None).name == "cuBLASLt"
    assert Choice(PROMOTED["256x128 s4 c2"], 4).name == "256x128 s4 c2, K in 4"
    assert Choice(PROMOTED["256x128 s4 c2"]).name == "256x128 s4 c2"


# by the table


def test_auto_without_a_table_is_cublaslt_and_says_so_once() -> None:
    with recorded() as said:
        for m, promote in itertools.product((64, 128), (False, True)):
            assert chosen(m, 64, 64, promote=promote) == Choice(None)
    assert len(said) == 1
    for part in (NAME, "nothing has been measured", "`python -m lightning_fp8 tune`", "torch._scaled_mm"):
        assert part in str(said[0].message)


def test_auto_with_rows_of_the_other_accumulation_only_says_which() -> None:
    given(row(64, 64, 64, 1.0, 2.0))
    with pytest.warns(UserWarning, match="FP8 GEMMs with promoted sums run by torch._scaled_mm on NVIDIA H200"):
        assert chosen(64, 64, 64, promote=True) == Choice(None)


@pytest.mark.parametrize(
    ("ours", "theirs", "is_ours"),
    [(9.9, 10.0, True), (10.1, 10.0, False), (10.0, 10.0, False), (10.0, None, True), (None, 10.0, False)],
)
def test_auto_takes_the_faster_one_of_a_measured_gemm(ours: float | None, theirs: float | None, is_ours: bool) -> None:
    name = None if ours is None else "128x128 s6 c1"
    given(row(4096, 4096, 4096, ours, theirs, configuration=name))
    assert chosen(4096, 4096, 4096) == Choice(FAST["128x128 s6 c1"] if is_ours else None)
    # one of our kernels nevertheless
    expected = FAST["128x256 s4 c2" if name is None else name]
    assert chosen(4096, 4096, 4096, "rawkernel") == Choice(expected)


def test_auto_is_never_slower_than_the_better_one_where_measured() -> None:
    numbers = random.Random(0)
    rows = []
    for m, n, k in itertools.product((1024, 2048, 8192), repeat=3):
        times = (numbers.uniform(10, 20), numbers.uniform(10, 20))
        rows += [row(m, n, k, *times), promoted(m, n, k, *reversed(times), output="float32")]
    given(*rows)
    sides = set()
    for one in rows:
        output = getattr(torch, one["output"])
        choice = chosen(one["m"], one["n"], one["k"], promote=one["promote"], output=output)
        taken = one["cublaslt_p50_us"] if choice.configuration is None else one["p50_us"]
        assert taken == min(one["p50_us"], one["cublaslt_p50_us"])
        sides.add(choice.configuration is None)
    assert sides == {False, True}


def test_measured_splits_are_taken() -> None:
    given(promoted(1024, 1024, 8192, 1.0, 2.0, splits=4))
    assert chosen(1024, 1024, 8192, promote=True) == Choice(PROMOTED["256x128 s4 c1"], 4)


@pytest.mark.parametrize(("k", "splits"), [(8192, 8), (6144, 6), (4096 + 1, 4), (4096, 4)])
def test_splits_of_a_near_gemm_are_no_more_than_k_allows(k: int, splits: int) -> None:
    given(promoted(1024, 1024, 8192, 1.0, 2.0, splits=8))
    assert chosen(1024, 1024, k, promote=True) == Choice(PROMOTED["256x128 s4 c1"], splits)


def test_nearest_is_nearest_in_ratios() -> None:
    given(
        row(4096, 1024, 1024, 1.0, 2.0, configuration="128x128 s6 c1"),
        row(8192, 1024, 1024, 1.0, 2.0, configuration="128x256 s4 c1"),
    )
    # by absolute differences, the first row would be nearer
    assert chosen(5900, 1024, 1024) == Choice(FAST["128x256 s4 c1"])
    assert chosen(5700, 1024, 1024) == Choice(FAST["128x128 s6 c1"])


@pytest.mark.parametrize("sizes", [(8192, 4096, 4096), (4096, 2048, 4096), (4096, 4096, 8192), (5700, 5700, 5700)])
def test_configuration_of_a_near_gemm_in_every_direction(sizes: tuple[int, int, int]) -> None:
    given(row(4096, 4096, 4096, 1.0, 2.0, configuration="128x128 s6 c1"))
    assert chosen(*sizes) == Choice(FAST["128x128 s6 c1"])


@pytest.mark.parametrize("sizes", [(8193, 4096, 4096), (4096, 2047, 4096), (4096, 4096, 8200), (8192, 4200, 4096)])
def test_farther_than_a_factor_of_two_the_configuration_is_estimated(sizes: tuple[int, int, int]) -> None:
    given(row(4096, 4096, 4096, 1.0, 2.0, configuration="128x128 s6 c1"))
    expected = estimated(tuple(FAST.values()), *sizes, False, 132)
    assert expected.configuration != FAST["128x128 s6 c1"]
    assert chosen(*sizes) == chosen(*sizes, "rawkernel") == expected


def test_near_and_slower_is_cublaslt_whatever_others_say() -> None:
    faster = [row(m, 4096, 4096, 1.0, 2.0) for m in (8192, 2048, 1024)]
    given(row(4096, 4096, 4096, 2.0, 1.0), *faster)
    assert chosen(4500, 4096, 4096) == Choice(None)
    assert chosen(7000, 4096, 4096) == Choice(FAST["128x256 s4 c2"])


@pytest.mark.parametrize(
    ("slower", "is_ours"), [(None, True), (1024, True), (2048, False), (4096, False), (8192, False)]
)
def test_far_from_all_the_three_nearest_decide(slower: int | None, is_ours: bool) -> None:
    given(*(row(m, 4096, 4096, *((2.0, 1.0) if m == slower else (1.0, 2.0))) for m in (1024, 2048, 4096, 8192)))
    assert (chosen(65536, 4096, 4096).configuration is not None) == is_ours


def test_the_other_accumulation_is_another_matter() -> None:
    given(row(4096, 4096, 4096, 1.0, 2.0), promoted(8192, 4096, 4096, 2.0, 1.0))
    assert chosen(4096, 4096, 4096, promote=True) == Choice(None)
    assert chosen(8192, 4096, 4096) == Choice(FAST["128x256 s4 c2"])


def test_another_output_is_farther_by_half_an_octave() -> None:
    at = {"configuration": "128x128 s6 c1", "output": "float32"}
    given(promoted(4096, 4096, 4096, 1.0, 2.0, **at), promoted(6000, 4096, 4096, 1.0, 2.0))
    # 6000 / 4096 is 0.55 octaves
    assert chosen(4096, 4096, 4096, promote=True, output=BF16) == Choice(PROMOTED["128x128 s6 c1"])
    assert chosen(4300, 4096, 4096, promote=True, output=BF16) == Choice(PROMOTED["256x128 s4 c1"])
    assert chosen(4300, 4096, 4096, promote=True, output=FP32) == Choice(PROMOTED["128x128 s6 c1"])
    # 0.6 and 0.5 octaves at once are not near any more
    gemm_table.own_path(NAME).unlink()
    given(promoted(4096, 4096, 4096, 1.0, 2.0, **at))
    assert chosen(6208, 4096, 4096, promote=True, output=BF16) == Choice(PROMOTED["128x128 s6 c2"])


def test_of_two_equally_near_it_is_the_smaller() -> None:
    for order in (1, -1):
        rows = [row(2048, 64, 64, 1.0, 2.0), row(8192, 64, 64, 1.0, 2.0, configuration="128x256 s4 c1")][::order]
        rows += [row(2048, 8192, 64, 2.0, 1.0), row(8192, 8192, 64, 1.0, 2.0)]
        given(*rows)
        assert chosen(4096, 64, 64) == Choice(FAST["128x256 s4 c2"])
        assert chosen(4096, 8192, 64) == Choice(None)


def test_rawkernel_needs_no_table_and_says_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert chosen(8192, 8192, 8192, "rawkernel") == Choice(FAST["128x256 s4 c2"])
        assert chosen(8192, 8192, 8192, "rawkernel", promote=True) == Choice(PROMOTED["256x128 s4 c2"])


# by the estimate


def by_hand(one: Configuration, splits: int, m: int, n: int, k: int, multiprocessors: int) -> float:
    """The docstring's formula with numpy's rounding, counting the tiles of clusters one by one."""
    rows = np.arange(0, m, one.block_m * one.cluster).size
    columns = np.arange(0, n, one.block_n).size
    waves = np.ceil(rows * columns * splits / np.floor(multiprocessors / one.cluster))
    steps = np.ceil(np.arange(0, k, 128).size / splits)
    demand = 4096 * (one.block_m + one.block_n / one.cluster) / (one.block_m * one.block_n)
    return float(waves * one.block_m * one.block_n * (128 * steps + 256) / np.minimum(1, 47 / demand))


def splits_by_hand(one: Configuration, m: int, n: int, k: int, promote: bool, multiprocessors: int) -> list[int]:
    tiles = np.arange(0, m, one.block_m * one.cluster).size * np.arange(0, n, one.block_n).size * one.cluster
    steps = np.arange(0, k, 128).size
    return [s for s in range(1, 17) if s == 1 or (promote and tiles < multiprocessors / 2 and steps >= 8 * s)]


@pytest.mark.parametrize("promote", [False, True])
@pytest.mark.parametrize("multiprocessors", [132, 78])
def test_estimate_is_the_best_by_its_formula(promote: bool, multiprocessors: int) -> None:
    numbers, ours, taken = random.Random(1), configurations(HOPPER, promote), set()
    for _ in range(400):
        m, n, k = (round(2 ** numbers.uniform(4, 15)) for _ in range(3))
        choice = estimated(ours, m, n, k, promote, multiprocessors)
        everything = [
            (by_hand(one, splits, m, n, k, multiprocessors), at, splits)
            for at, one in enumerate(ours)
            for splits in splits_by_hand(one, m, n, k, promote, multiprocessors)
        ]
        _, at, splits = min(everything)
        assert choice == Choice(ours[at], splits), (m, n, k)
        taken.add((at, splits > 1))
    assert len({at for at, _ in taken}) >= 2
    assert ({split for _, split in taken} == {False, True}) == promote


@pytest.mark.parametrize(
    ("sizes", "promote", "name", "splits"),
    [
        ((8192, 8192, 8192), False, "128x256 s4 c2", 1),
        # 64 tiles of 128x256 leave half of the GPU idle, 128 of 128x128 do not
        ((2048, 1024, 1024), False, "128x128 s6 c2", 1),
        ((8192, 8192, 8192), True, "256x128 s4 c2", 1),
        # 64 tiles on 132 multiprocessors
        ((1024, 1024, 8192), True, "128x128 s6 c2", 2),
        # one row of tiles: half of each cluster would be empty, which takes two waves
        ((100, 16384, 4096), False, "128x128 s6 c1", 1),
        ((1024, 1024, 1920), True, "128x128 s6 c2", 1),
    ],
)
def test_estimates_of_known_shapes(sizes: tuple[int, int, int], promote: bool, name: str, splits: int) -> None:
    known = PROMOTED if promote else FAST
    assert estimated(tuple(known.values()), *sizes, promote, 132) == Choice(known[name], splits)


@pytest.mark.parametrize(
    ("k", "promote", "most"),
    [(1, True, 1), (15 * 128, True, 1), (15 * 128 + 1, True, 2), (16 * 128, True, 2), (24 * 128, True, 3),
     (128 * 128, True, 16), (1 << 20, True, 16), (1 << 20, False, 1)],
)  # fmt: skip
def test_parts_of_k_are_long_and_few(k: int, promote: bool, most: int) -> None:
    assert most_splits(k, promote) == most


# tables


def test_rows_come_back_as_they_were_written() -> None:
    given(
        promoted(1024, 512, 8192, 3.5, None, output="float32", splits=4), row(64, 64, 64, None, 2.0, configuration=None)
    )
    assert gemm_table.rows(NAME, HOPPER) == (
        (64, 64, 64, False, BF16, None, 1, None, 2.0),
        (1024, 512, 8192, True, FP32, PROMOTED["256x128 s4 c1"], 4, 3.5, None),
    )


def test_a_table_says_how_it_came_about_and_has_a_row_a_line() -> None:
    path = given(row(128, 64, 64, 1.0, 2.0, p20_us=0.5), row(64, 64, 64, 1.0, 2.0))
    text = path.read_text()
    found = json.loads(text)
    assert {key: value for key, value in found.items() if key != "rows"} == ABOUT
    assert found["rows"] == [row(64, 64, 64, 1.0, 2.0), row(128, 64, 64, 1.0, 2.0, p20_us=0.5)]
    assert [json.loads(line.strip().rstrip(",")) for line in text.splitlines() if '"m"' in line] == found["rows"]


def test_own_rows_go_before_shipped_ones_row_by_row() -> None:
    given(row(64, 64, 64, 1.0, 2.0), row(4096, 64, 64, 1.0, 2.0), own=False)
    given(row(64, 64, 64, 3.0, 2.0), row(64, 64, 4096, 1.0, 2.0))
    assert [(one.m, one.k, one.p50_us) for one in gemm_table.rows(NAME, HOPPER)] == [
        (64, 64, 3.0),
        (64, 4096, 1.0),
        (4096, 64, 1.0),
    ]
    assert chosen(64, 64, 64) == Choice(None)
    assert chosen(4096, 64, 64).configuration is not None


def test_writing_replaces_the_same_gemm_and_keeps_others() -> None:
    given(row(64, 64, 64, 1.0, 2.0), row(64, 64, 64, 1.0, 2.0, output="float32"), promoted(64, 64, 64, 1.0, 2.0))
    given(row(64, 64, 64, 5.0, 2.0))
    found = {(one.promote, one.output): one.p50_us for one in gemm_table.rows(NAME, HOPPER)}
    assert found == {(False, BF16): 5.0, (False, FP32): 1.0, (True, BF16): 1.0}


WRONG = {
    "not JSON": "{",
    "empty": "",
    "no object": "[]",
    "no rows": "{}",
    "rows are no list": '{"rows": {}}',
    "a row is no object": '{"rows": [3]}',
    **{
        f"{field} is {value!r}": json.dumps({"rows": [{**row(64, 64, 64, 1.0, 2.0), field: value}]})
        for field, value in (
            *(("m", value) for value in (0, -1, 64.0, "64", True, None)),
            *(("n", 0), ("k", 0), ("splits", 0), ("splits", None), ("promote", 1), ("output", "int8")),
            *(("output", None), ("configuration", 3), ("p50_us", 0), ("p50_us", -1.0), ("p50_us", float("nan"))),
            *(("cublaslt_p50_us", "fast"), ("cublaslt_p50_us", float("inf")), ("p50_us", True)),
        )
    },
    **{
        f"no {field}": json.dumps({"rows": [{key: v for key, v in row(64, 64, 64, 1.0, 2.0).items() if key != field}]})
        for field in row(64, 64, 64, 1.0, 2.0)
    },
}


@pytest.mark.parametrize("what", WRONG)
def test_a_malformed_table_counts_as_absent_and_is_named_once(what: str) -> None:
    given(row(64, 64, 64, 1.0, 2.0), own=False)
    path = gemm_table.own_path(NAME)
    path.write_text(WRONG[what])
    with recorded() as said:
        assert chosen(64, 64, 64) == chosen(65, 64, 64) == Choice(FAST["128x256 s4 c2"])
        gemm_table.rows.cache_clear()
        gemm_table.rows(NAME, HOPPER)
    assert len(said) == 1
    assert str(path) in str(said[0].message)
    assert "left out of account" in str(said[0].message)


def test_the_warning_says_what_is_wrong_with_a_row() -> None:
    gemm_table.own_path(NAME).write_text(json.dumps({"rows": [row(1, 1, 1, 1.0, 1.0), row(1, 0, 1, 1.0, 1.0)]}))
    with pytest.warns(UserWarning, match="row 1 of it is wrong: 'n' is 0"):
        gemm_table.rows(NAME, HOPPER)


def test_a_table_that_cannot_be_read_counts_as_absent() -> None:
    path = gemm_table.own_path(NAME)
    path.mkdir()
    with pytest.warns(UserWarning, match="left out of account"):
        assert gemm_table.rows(NAME, HOPPER) == ()
    path.rmdir()
    for content in (b"\xff\xfe", b"[" * 100_000):
        path.write_bytes(content)
        forget()
        with pytest.warns(UserWarning, match="left out of account"):
            assert gemm_table.rows(NAME, HOPPER) == ()


def test_a_malformed_table_is_written_anew() -> None:
    gemm_table.own_path(NAME).write_text("{")
    with pytest.warns(UserWarning, match="it is not JSON"):
        given(row(64, 64, 64, 1.0, 2.0))
    assert len(gemm_table.rows(NAME, HOPPER)) == 1


# the last is one of version 0.5, as are the additional fields of rows
@pytest.mark.parametrize(
    ("promote", "name"), [(False, "512x512 s4 c8"), (True, "128x256 s4 c2"), (False, "128x128 s6 c2 ping-pong")]
)
def test_a_row_of_an_unknown_configuration_is_ignored_alone(promote: bool, name: str) -> None:
    given(row(64, 64, 64, 1.0, 2.0, promote=promote, configuration="128x128 s6 c1"), own=False)
    path = given(
        row(64, 64, 64, 1.0, 2.0, promote=promote, configuration=name),
        row(4096, 64, 64, 1.0, 2.0, promote=promote, configuration="128x128 s6 c2", chained={"gelu": True}),
    )
    with recorded() as said:
        assert chosen(64, 64, 64, promote=promote).configuration == FAST["128x128 s6 c1"]
        assert chosen(4096, 64, 64, promote=promote).configuration == FAST["128x128 s6 c2"]
    assert len(said) == 1
    assert str(path) in str(said[0].message)
    assert repr(name) in str(said[0].message)
    # another version may support it
    given(row(1, 1, 1, 1.0, 2.0))
    assert name in path.read_text()


def write_rows(path: Path, sizes: range) -> None:
    for m in sizes:
        gemm_table.write(path, ABOUT, [row(m, 64, 64, 1.0, 2.0)])


def test_two_writers_at_once_lose_nothing() -> None:
    path, context = gemm_table.own_path(NAME), multiprocessing.get_context("fork")
    writers = [context.Process(target=write_rows, args=(path, range(start, start + 40))) for start in (1, 101)]
    for writer in writers:
        writer.start()
    seen = 0
    while any(writer.is_alive() for writer in writers):
        if path.exists():
            now = len(json.loads(path.read_text())["rows"])
            assert now >= seen
            seen = now
    assert [writer.exitcode for writer in writers] == [0, 0]
    assert [one.m for one in gemm_table.rows(NAME, HOPPER)] == [*range(1, 41), *range(101, 141)]
    assert not list(path.parent.glob("*.tmp"))
    assert not list(path.parent.glob(".*.tmp"))


def test_a_write_that_fails_leaves_the_old_table(monkeypatch: pytest.MonkeyPatch) -> None:
    path = given(row(64, 64, 64, 1.0, 2.0))
    before = path.read_bytes()

    def full(*_: Any) -> None:
        raise OSError("no space left")

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", full)
        with pytest.raises(OSError, match="no space"):
            gemm_table.write(path, ABOUT, [row(128, 64, 64, 1.0, 2.0)])
    assert path.read_bytes() == before
    assert not list(path.parent.glob(".*.tmp"))


def test_tables_of_gpus_lie_apart() -> None:
    names = ("NVIDIA H100 80GB HBM3", "NVIDIA H100 PCIe", "NVIDIA GeForce RTX 4090")
    assert [gemm_table.own_path(name).name for name in names] == [
        "gemm-nvidia-h100-80gb-hbm3.json",
        "gemm-nvidia-h100-pcie.json",
        "gemm-nvidia-geforce-rtx-4090.json",
    ]
    given(row(64, 64, 64, 1.0, 2.0))
    assert gemm_table.rows("NVIDIA H100 PCIe", HOPPER) == ()


def test_shipped_tables_are_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path(gemm_table.kernels_cuda.__file__).parent / "tables"
    monkeypatch.undo()
    assert folder == gemm_table._SHIPPED
    assert (folder / "README.md").exists()
    for path in folder.glob("*.json"):
        found = json.loads(path.read_text())
        assert path.name == f"{gemm_table.slug(found['gpu'])}.json"
        assert len(gemm_table._checked(path.read_text())) == len(found["rows"]) > 0
