"""Which GEMM is chosen: by the tables, by a measurement at first use, or by the rule and the estimate."""

from __future__ import annotations

import random
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gpu_tables import FAST, GPU, HOPPER, NAME, PROMOTED, be, forget, given, h200, promoted, row

from kernels_cuda.gemm_variants import Configuration, configurations
from lightning_fp8.ops.cuda import gemm_choice, gemm_table, gemm_timing, kernels
from lightning_fp8.ops.cuda.gemm_choice import Choice, check_gemm, choose, estimated, most_splits
from lightning_fp8.ops.cuda.gemm_table import Product

CPU, BF16, FP32 = torch.device("cpu"), torch.bfloat16, torch.float32


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(gemm_choice, "is_capturing", lambda _: False)
    with h200(tmp_path, monkeypatch):
        yield


def unused(*_: Any) -> Any:
    raise AssertionError("nothing runs")


def chosen(
    m: int, n: int, k: int, gemm: str = "auto", promote: bool = False, output: torch.dtype = BF16, run: Any = unused
) -> Choice:
    return choose(GPU, gemm, m, n, k, promote, output, run)


def by_rule(m: int, n: int, k: int, promote: bool) -> Choice:
    return estimated(tuple(PROMOTED.values()), m, n, k, True, 132) if promote else Choice(None)


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> list[Product]:
    """Products that have been timed, in order: our estimated kernel takes 1.0, the others more, cuBLASLt 1.5."""
    products: list[Product] = []

    def times(product: Product, choices: list[Choice], device: torch.device, run: Any) -> dict[Choice, float]:
        assert (device, run) == (GPU, unused)
        products.append(product)
        # other threads come meanwhile
        time.sleep(0.05)
        return {Choice(None): 1.5, **{choice: 1.0 + at for at, choice in enumerate(choices)}}

    monkeypatch.setattr(gemm_timing, "times", times)
    monkeypatch.setattr(kernels, "gemm_kernel", lambda *_: "kernel")
    monkeypatch.setattr(kernels, "sum_splits_kernel", lambda *_: "kernel")
    return products


# the setting, and where there is nothing to choose


@pytest.mark.parametrize("call", [check_gemm, lambda gemm: chosen(64, 64, 64, gemm)])
def test_another_word_is_named_with_those_allowed(call: Callable[[str], object]) -> None:
    with pytest.raises(ValueError, match="'auto', 'rawkernel', 'cublaslt', got 'cublas'"):
        call("cublas")


def test_where_only_cublaslt_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    given(row(64, 64, 64, 1.0, 2.0))
    assert chosen(64, 64, 64) == Choice(FAST["128x256 s4 c2"])
    assert chosen(64, 64, 64, "cublaslt") == Choice(None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for gemm in ("auto", "rawkernel"):
            assert choose(CPU, gemm, 64, 64, 64, False, BF16) == Choice(None)
            for sizes in ((0, 64, 64), (64, 0, 64), (64, 64, 0)):
                assert chosen(*sizes, gemm) == Choice(None)
        monkeypatch.setenv("LIGHTNING_FP8_BACKEND", "reference")
        forget()
        assert chosen(64, 64, 64) == chosen(64, 64, 64, "rawkernel") == Choice(None)


def test_architecture_without_kernels_is_named_once(monkeypatch: pytest.MonkeyPatch) -> None:
    be(monkeypatch, (10, 0), "NVIDIA B200")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for gemm in ("auto", "rawkernel"):
            assert chosen(64, 64, 64, gemm) == chosen(64, 64, 64, gemm, True) == Choice(None)
    assert [str(one.message) for one in said] == [
        "FP8 GEMMs run by torch._scaled_mm on NVIDIA B200: lightning_fp8 has no GEMM kernel for compute"
        " capability 10.0."
    ]


# by the tables


@pytest.mark.parametrize(
    ("ours", "theirs", "is_ours"),
    [(9.9, 10.0, True), (10.1, 10.0, False), (10.0, 10.0, False), (10.0, None, True), (None, 10.0, False)],
)
def test_the_faster_one_of_a_measured_gemm(ours: float | None, theirs: float | None, is_ours: bool) -> None:
    name = None if ours is None else "128x128 s6 c1"
    given(row(4096, 4096, 4096, ours, theirs, configuration=name))
    assert chosen(4096, 4096, 4096) == Choice(FAST["128x128 s6 c1"] if is_ours else None)
    # one of our kernels nevertheless: the estimated one, if none was measured
    assert chosen(4096, 4096, 4096, "rawkernel") == Choice(FAST["128x256 s4 c2" if name is None else name])


def test_a_measurement_counts_for_its_size_class(timed: list[Product]) -> None:
    given(row(4096, 4096, 4096, 3.0, 2.0), promoted(4096, 4096, 4096, 1.0, 2.0, splits=3))
    # a quarter of an octave
    assert chosen(4870, 3450, 4096) == chosen(4096, 4096, 3450) == Choice(None)
    assert chosen(4096, 4870, 3450, promote=True) == Choice(PROMOTED["256x128 s4 c1"], 3)
    # each part of K has at least 8 steps of 128
    given(promoted(4096, 4096, 2048, 1.0, 2.0, splits=3))
    assert chosen(4096, 4096, 2048, promote=True) == Choice(PROMOTED["256x128 s4 c1"], 2)
    assert timed == []
    others = [(4880, 4096, 4096), (4096, 3440, 4096), (4096, 4096, 4880)]
    for sizes in others:
        chosen(*sizes)
    chosen(4096, 4096, 4096, promote=True, output=FP32)
    assert timed == [*(Product(*sizes, False, BF16) for sizes in others), Product(4096, 4096, 4096, True, FP32)]


def test_own_rows_go_before_shipped_ones() -> None:
    given(row(64, 64, 64, 1.0, 2.0), row(4096, 64, 64, 1.0, 2.0), own=False)
    given(row(64, 64, 64, 3.0, 2.0))
    assert chosen(64, 64, 64) == Choice(None)
    assert chosen(4096, 64, 64) == Choice(FAST["128x256 s4 c2"])


# by a measurement


def test_a_product_is_measured_once_and_for_later_processes(timed: list[Product]) -> None:
    ours = estimated(tuple(FAST.values()), 8192, 4096, 4096, False, 132)
    assert chosen(8192, 4096, 4096) == ours == chosen(8000, 4096, 4096)
    choose.cache_clear()
    assert chosen(8192, 4096, 4096) == ours
    assert timed == [Product(8192, 4096, 4096, False, BF16)]
    forget()
    assert chosen(8100, 4096, 4096) == ours
    assert len(timed) == 1
    assert [one[1:] for one in gemm_table.rows(NAME, HOPPER)] == [(ours, 1.0, 1.5, True)]


def test_the_three_best_by_estimate_are_measured(monkeypatch: pytest.MonkeyPatch, timed: list[Product]) -> None:
    sizes, given = (1024, 1024, 8192), []
    monkeypatch.setattr(gemm_timing, "times", lambda product, choices, *_: given.extend(choices) or {Choice(None): 1.0})
    assert chosen(*sizes, promote=True, output=FP32) == Choice(None)
    best = [estimated((one,), *sizes, True, 132) for one in PROMOTED.values()]
    time = {one: by_hand(one.configuration, one.splits, *sizes, 132) for one in best}
    assert given == sorted(best, key=time.__getitem__)[:3]
    assert {choice.splits > 1 for choice in given} == {True}


def test_what_another_process_has_kept_meanwhile_counts(timed: list[Product]) -> None:
    """Both are resumed with the same choice."""
    gemm_table.rows(NAME, HOPPER)
    gemm_table.write(gemm_table.own_path(NAME), {"gpu": NAME}, [row(8192, 4096, 4096, 2.0, 1.0)])
    assert chosen(8192, 4096, 4096) == Choice(None)
    assert len(timed) == 1
    # but not for those who measure again
    assert gemm_choice.measure(timed[0], GPU, unused, replace=True).is_faster
    forget()
    assert chosen(8192, 4096, 4096).configuration is not None


def test_threads_measure_a_product_once(timed: list[Product]) -> None:
    with ThreadPoolExecutor(4) as threads:
        found = [*threads.map(lambda _: choose.__wrapped__(GPU, "auto", 64, 64, 64, True, BF16, unused), range(8))]
    assert len(timed) == len(set(found)) == 1


PREVENTED = {
    "deterministic": ("torch.are_deterministic_algorithms_enabled", lambda: True),
    "cudnn": ("torch.backends.cudnn.deterministic", True),
    "compiling": ("torch.compiler.is_compiling", lambda: True),
    "capturing": ("lightning_fp8.ops.cuda.gemm_choice.is_capturing", lambda on_gpu: on_gpu),
    "ranks": ("torch.distributed.is_initialized", lambda: True),
}


@pytest.mark.parametrize("why", [*PREVENTED, "no runner"])
def test_where_nothing_is_measured_the_rule_chooses_and_stays(
    why: str, timed: list[Product], monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes, found = (1024, 1024, 8192), []
    # of the table, what `tune` measured counts; what a run measured by itself, only where it could be measured
    given(promoted(64, 64, 64, 2.0, 1.0), promoted(256, 64, 64, 1.0, 2.0, at_first_use=True))
    ours, ruled = Choice(PROMOTED["256x128 s4 c1"]), by_rule(256, 64, 64, True)
    assert ours != ruled
    at_first_use = ruled if why in ("deterministic", "cudnn", "ranks") else ours
    for _ in range(2):
        with monkeypatch.context() as patch:
            patch.setattr("torch.distributed.get_world_size", lambda: 2)
            if why in PREVENTED:
                patch.setattr(*PREVENTED[why])
            run = None if why == "no runner" else unused
            found += [chosen(*sizes, promote=promote, run=run) for promote in (False, True)]
            # the table counts nevertheless
            assert chosen(64, 64, 64, promote=True, run=run) == Choice(None)
            assert chosen(256, 64, 64, promote=True, run=run) == at_first_use
            assert chosen(256, 64, 64, "rawkernel", True) == ruled
        choose.cache_clear()
        # recomputed where it could be measured
        found += [chosen(*sizes, promote=promote) for promote in (False, True)]
    assert found == [by_rule(*sizes, promote) for promote in (False, True)] * 4
    assert timed == []


def test_one_process_of_a_group_measures(timed: list[Product], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 1)
    chosen(64, 64, 64)
    assert len(timed) == 1


def test_what_cannot_be_kept_is_by_the_rule(
    tmp_path: Path, timed: list[Product], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("LIGHTNING_FP8_CACHE_DIR", str(tmp_path / "file" / "below"))
    with pytest.warns(UserWarning, match="cannot be kept .*Not a directory.*Set LIGHTNING_FP8_CACHE_DIR"):
        assert chosen(64, 64, 64) == Choice(None)


def test_without_memory_it_is_by_the_rule_also_later(timed: list[Product], monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("full")

    with monkeypatch.context() as patch:
        patch.setattr(gemm_timing, "times", full)
        with pytest.warns(UserWarning, match="no memory to measure FP8 GEMMs like 64x64x64 promoted float32"):
            assert chosen(64, 64, 64, promote=True, output=FP32) == by_rule(64, 64, 64, True)
    forget()
    assert chosen(64, 64, 64, promote=True, output=FP32) == by_rule(64, 64, 64, True)
    assert timed == []


@pytest.mark.parametrize("missing", ["gemm_kernel", "sum_splits_kernel"])
def test_kernels_that_are_not_available_are_not_measured(
    missing: str, timed: list[Product], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, missing, lambda *_: None)
    assert chosen(1024, 1024, 8192, promote=True) == by_rule(1024, 1024, 8192, True)
    assert timed == []
    assert not gemm_table.own_path(NAME).exists()


# by the estimate


def by_hand(one: Configuration | None, splits: int, m: int, n: int, k: int, multiprocessors: int) -> float:
    """The docstring's formula with numpy's rounding, counting the tiles of clusters one by one."""
    assert one is not None
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
def test_estimate_is_the_best_by_its_formula(promote: bool) -> None:
    numbers, ours, taken = random.Random(1), configurations(HOPPER, promote), set()
    for multiprocessors in 200 * [132, 78]:
        m, n, k = (round(2 ** numbers.uniform(4, 15)) for _ in range(3))
        everything = [
            (by_hand(one, splits, m, n, k, multiprocessors), at, splits)
            for at, one in enumerate(ours)
            for splits in splits_by_hand(one, m, n, k, promote, multiprocessors)
        ]
        _, at, splits = min(everything)
        assert estimated(ours, m, n, k, promote, multiprocessors) == Choice(ours[at], splits), (m, n, k)
        taken.add((at, splits > 1))
    assert len({at for at, _ in taken}) >= 2
    assert ({split for _, split in taken} == {False, True}) == promote


@pytest.mark.parametrize(
    ("k", "promote", "most"),
    [(1, True, 1), (16 * 128 - 128, True, 1), (15 * 128 + 1, True, 2), (24 * 128, True, 3), (1 << 20, True, 16),
     (1 << 20, False, 1)],
)  # fmt: skip
def test_parts_of_k_are_long_and_few(k: int, promote: bool, most: int) -> None:
    assert most_splits(k, promote) == most
