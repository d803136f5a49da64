"""``python -m lightning_fp8 tune``: which products it measures, what it prints and keeps, and where it ends."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_tables import FAST, GPU, HOPPER, NAME, h200
from warm import run_warm

from kernels_cuda.compile import KernelsUnavailable
from lightning_fp8.ops.cuda import gemm_table, gemm_timing, kernels
from lightning_fp8.ops.cuda.gemm import run_choice
from lightning_fp8.ops.cuda.gemm_table import Choice, Product, Row
from lightning_fp8.tools.tune import command as tune
from lightning_fp8.tools.tune.command import LAYERS, Layer, parse_layers, products_of

OURS = Choice(FAST["128x256 s4 c2"])


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[Product]]:
    """An H200, as far as torch can tell, with kernels; the products that are timed. With M = 32 memory runs out."""
    products: list[Product] = []

    def times(product: Product, choices: list[Choice], device: torch.device, run: Any) -> dict[Choice, float]:
        assert (device, run) == (GPU, run_choice)
        products.append(product)
        if product.m == 32:
            raise torch.OutOfMemoryError("full")
        return {Choice(None): 1.0 + product.promote, choices[0]: 1.5 + len(products) / 100}

    monkeypatch.setattr(gemm_timing, "times", times)
    monkeypatch.setattr(kernels, "gemm_kernel", lambda *_: "kernel")
    monkeypatch.setattr(tune, "_device", lambda: GPU)
    with h200(tmp_path, monkeypatch):
        yield products


def test_products_of_a_layer() -> None:
    assert Layer(8192, 1024, 4096).products() == [
        (8192, 4096, 1024, False, torch.bfloat16),
        (8192, 1024, 4096, True, torch.bfloat16),
        (4096, 1024, 8192, True, torch.float32),
    ]
    # of each size class one
    assert products_of([Layer(64, 64, 64), Layer(65, 66, 63)]) == Layer(64, 64, 64).products()


def test_layers_of_training() -> None:
    assert len(LAYERS) == len(set(LAYERS)) == 36
    for tokens in (2048, 8192, 32768):
        for hidden in (1024, 4096, 8192):
            projections = {(i, o) for t, i, o in LAYERS if t == tokens and hidden in (i, o)}
            assert projections >= {(hidden, hidden), (hidden, 3 * hidden), (hidden, 4 * hidden), (4 * hidden, hidden)}
    # what an interrupted run must have: the feed-forward of the middle size
    assert LAYERS[:2] == (Layer(8192, 4096, 16384), Layer(8192, 16384, 4096))
    # no layer stands for another
    assert set(products_of(LAYERS)) == {product for layer in LAYERS for product in layer.products()}


def test_layers_from_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert parse_layers("8192x4096x16384, 1x2x3") == (Layer(8192, 4096, 16384), Layer(1, 2, 3))
    for text in ("", "64", "64x64", "64x64x64x64", "64x0x64", "64x-1x64", "64xax64", "64x64x64,"):
        with pytest.raises(SystemExit):
            tune.main(["--shapes", text])
        assert "TOKENSxINxOUT" in capsys.readouterr().err


def test_products_are_measured_again_each_kept_at_once(gpu: list[Product], capsys: pytest.CaptureFixture[str]) -> None:
    for calls in (1, 2):
        tune.main(["--shapes", "48x64x128"])
        assert gpu == calls * Layer(48, 64, 128).products()
        # in the order of their sizes
        times = [row.p50_us for row in gemm_table.rows.__wrapped__(NAME, HOPPER)]
        assert times == pytest.approx([1.5 + (3 * calls - at) / 100 for at in (1, 2, 0)])
        head, *lines = capsys.readouterr().out.splitlines()
        assert head == f"{NAME}: 3 GEMMs, into {gemm_table.own_path(NAME)}"
        assert [line.split(";")[0].split(": ") for line in lines] == [
            ["48x128x64 fast bfloat16", "cuBLASLt"],
            ["48x64x128 promoted bfloat16", "128x128 s6 c2"],
            ["128x64x48 promoted float32", "128x128 s6 c2"],
        ]


def test_what_cannot_be_measured_is_named_and_the_others_kept(
    gpu: list[Product], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.warns(UserWarning, match="no memory"), pytest.raises(SystemExit, match="32x64x48 promoted float32"):
        tune.main(["--shapes", "48x64x32"])
    assert "32x64x48 promoted float32: not measured, chosen by the rule" in capsys.readouterr().out
    assert [row.is_measured for row in gemm_table.rows(NAME, HOPPER)] == [False, True, True]


def test_a_line() -> None:
    product = Product(8192, 4096, 16384, True, torch.float32)
    assert tune.line(product, Row(product, OURS._replace(splits=2), 1000.0, 1500.0)) == (
        "8192x4096x16384 promoted float32: 128x256 s4 c2, K in 2; ours 1000.0 us (1100 TFLOP/s), cuBLASLt 1500.0 us"
        " (733 TFLOP/s)"
    )
    refused = tune.line(product, Row(product, Choice(None), None, 1000.0))
    assert refused.endswith(": cuBLASLt; ours not available, cuBLASLt 1000.0 us (1100 TFLOP/s)")


def test_a_table_that_cannot_be_written(gpu: list[Product], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("LIGHTNING_FP8_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(SystemExit, match=r"the table cannot be written.*LIGHTNING_FP8_CACHE_DIR"):
        tune.main(["--shapes", "48x64x48"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what is said where there is no GPU")
def test_without_a_gpu_it_says_so_and_fails() -> None:
    ran = run_warm("-m", "lightning_fp8", "tune")
    assert ran.returncode == 1
    assert "on a CUDA GPU of compute capability 8.9 or newer, and none was found" in ran.stderr
    assert "Traceback" not in ran.stderr


@pytest.mark.parametrize(
    ("capability", "backend", "said"),
    [
        ((8, 0), "auto", "NVIDIA B200 has compute capability 8.0, which has no GEMM"),
        ((10, 0), "auto", "NVIDIA B200 has compute capability 10.0, which has no GEMM"),
        (HOPPER, "reference", "LIGHTNING_FP8_BACKEND=reference"),
        (HOPPER, "auto", "Run `pip install cupy-cuda13x`"),
    ],
)
def test_where_there_is_nothing_to_measure(
    capability: tuple[int, int], backend: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing() -> None:
        raise KernelsUnavailable("Run `pip install cupy-cuda13x`.")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA B200")
    monkeypatch.setattr(kernels, "backend", lambda: backend)
    monkeypatch.setattr(tune, "nvrtc_version", missing)
    with pytest.raises(SystemExit, match=said):
        tune.main([])
