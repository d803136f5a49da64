from __future__ import annotations

import itertools
import re
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ThroughputMonitor
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import MixedPrecision, Precision
from lightning.pytorch.trainer.states import RunningStage
from lit import Regression, loader, make_trainer, seeded
from logged_runs import rows_of

from lightning_fp8 import Fp8Precision
from lightning_fp8.callbacks.throughput_monitor import Fp8ThroughputMonitor, dense_fp8_flops
from lightning_fp8.plugins import Bf16MixedPrecision, Bf16TruePrecision

H100 = "NVIDIA H100 80GB HBM3"
H100_SLICE = "NVIDIA H100 80GB HBM3 MIG 1g.10gb"
FLOPS = 1_234_567


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Pretends that this machine has a GPU with the given name."""

    def name_it(name: str, matmul: str = "highest") -> None:
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: name)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
        monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: matmul)

    return name_it


def set_up(monitor: ThroughputMonitor, plugin: Precision, device: str = "cuda:0", stage: str = "fit") -> float | None:
    """The peak after ``setup``, which is the same in the attribute and wherever it is used."""
    running = RunningStage.TRAINING if stage == "fit" else RunningStage.VALIDATING
    trainer: Any = SimpleNamespace(
        precision_plugin=plugin,
        strategy=SimpleNamespace(root_device=torch.device(device)),
        enable_validation=True,
        world_size=1,
        state=SimpleNamespace(stage=running),
    )
    monitor.setup(trainer, Regression(), stage)
    assert {running, RunningStage.VALIDATING} <= set(monitor._throughputs)
    peaks = [throughput.available_flops for throughput in monitor._throughputs.values()]
    assert peaks == [monitor.available_flops] * len(peaks)
    return monitor.available_flops


def peak_and_warnings(*args: Any, **kwargs: Any) -> tuple[float | None, list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        return set_up(*args, **kwargs), [str(warning.message) for warning in caught]


@pytest.mark.parametrize(
    ("plugin", "stock", "ours"),
    [
        (Fp8Precision(), 66.9, 1979),
        (Fp8Precision(compute_dtype="float32"), 66.9, 1979),
        (Bf16MixedPrecision(), 989.4, 989.4),
        (Bf16TruePrecision(), 989.4, 989.4),
        (Fp8Precision(reduce_dtype="bfloat16"), 989.4, 1979),
    ],
)
def test_the_peak_is_that_of_the_precision_where_the_stock_monitor_takes_fp32(
    plugin: Precision, stock: float, ours: float, gpu: Any
) -> None:
    gpu(H100)
    assert set_up(ThroughputMonitor(len), plugin) == pytest.approx(stock * 1e12)
    assert set_up(Fp8ThroughputMonitor(len), plugin) == pytest.approx(ours * 1e12)


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        (H100, 1979),
        ("NVIDIA H100 PCIe", 1513),
        ("NVIDIA H200", 1979),
        ("NVIDIA H200 NVL", 1671),
        ("NVIDIA GH200 480GB", 1979),
        ("NVIDIA GB200", 5000),
        ("NVIDIA L4", 242),
        ("NVIDIA L40", 362),
        ("NVIDIA L40S", 733),
        ("NVIDIA RTX 6000 Ada Generation", 728.5),
        ("NVIDIA GeForce RTX 4090", 330.3),
        ("NVIDIA GeForce RTX 4080", 194.9),
    ],
)
def test_fp8_peak_by_the_name_of_the_device(name: str, tflops: float, gpu: Any) -> None:
    gpu(name)
    # and without Lightning's warnings, although it does not know an H200
    assert peak_and_warnings(Fp8ThroughputMonitor(len), Fp8Precision()) == (pytest.approx(tflops * 1e12), [])


@pytest.mark.parametrize(
    "name", ["NVIDIA H20", "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA GeForce RTX 4080 SUPER", H100_SLICE, "L400"]
)
def test_a_similar_name_is_another_chip(name: str) -> None:
    assert dense_fp8_flops(name) is None


def test_twice_bf16_for_other_chips_and_it_says_so_once(gpu: Any) -> None:
    gpu(H100_SLICE)
    monitor = Fp8ThroughputMonitor(len)
    first, said = peak_and_warnings(monitor, Fp8Precision())
    second, said_again = peak_and_warnings(monitor, Fp8Precision(), stage="validate")
    assert first == second == pytest.approx(2 * 989.4e12)
    assert len(said) == 1
    assert re.search(f"FP8 peak of '{H100_SLICE}' is not known.*1978.8 TFLOP/s; pass `peak_flops`", said[0])
    assert said_again == []


@pytest.mark.parametrize("plugin", [Fp8Precision(), Bf16MixedPrecision()])
def test_no_peak_for_a_chip_that_nobody_knows(plugin: Precision, gpu: Any) -> None:
    gpu("NVIDIA Abacus")
    assert peak_and_warnings(Fp8ThroughputMonitor(len), plugin) == (None, ["FLOPs not found for 'NVIDIA Abacus'"])


@pytest.mark.parametrize(
    ("plugin", "device"),
    [(Fp8Precision(), "cpu"), (Precision(), "cuda:0"), (MixedPrecision("bf16-mixed", "cuda"), "cpu")],
)
def test_peak_flops_overrides_every_table(plugin: Precision, device: str, gpu: Any) -> None:
    gpu("NVIDIA Abacus")
    assert peak_and_warnings(Fp8ThroughputMonitor(len, peak_flops=1.5), plugin, device) == (1.5, [])


def test_arguments_outside_their_rules() -> None:
    for wrong in (0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=f"`peak_flops` must be a positive number of FLOP/s, got {wrong}"):
            Fp8ThroughputMonitor(len, peak_flops=wrong)
    with pytest.raises(ValueError, match="`window_size` must be at least 2, got 1"):
        Fp8ThroughputMonitor(len, window_size=1)


class Counted(Regression):
    flops_per_batch = FLOPS


def logged(path: Path, monitor: ThroughputMonitor, **kwargs: Any) -> list[dict[str, float]]:
    """The logged rows of a run on the CPU, without empty columns."""
    logger = CSVLogger(path)
    trainer = make_trainer(path, callbacks=[monitor], logger=logger, log_every_n_steps=1, **kwargs)
    trainer.fit(seeded(Counted), loader(), loader(32))
    trainer.test(trainer.model, loader(48), verbose=False)
    return [{key: float(value) for key, value in row.items() if value} for row in rows_of(logger)]


def samples(batch: Any) -> int:
    return len(batch[0])


def numbers(batch: Any) -> int:
    return batch[0].numel()


@pytest.mark.parametrize("precision", ["fp8-delayed", "bf16-mixed"])
def test_mfu_in_a_run_is_flops_per_second_over_the_peak(precision: str, tmp_path: Path) -> None:
    monitor = Fp8ThroughputMonitor(samples, numbers, window_size=2, peak_flops=3e9)
    rows = logged(tmp_path, monitor, precision=precision)
    for stage, batches in (("train", 4), ("validate", 2), ("test", 3)):
        of_stage = [row for row in rows if f"{stage}/time" in row]
        assert len(of_stage) == batches
        assert f"{stage}/device/mfu" not in of_stage[0]  # no time differences yet
        for before, row in itertools.pairwise(of_stage):
            seconds = row[f"{stage}/time"] - before[f"{stage}/time"]
            assert row[f"{stage}/device/flops_per_sec"] == FLOPS / seconds
            assert row[f"{stage}/device/mfu"] == row[f"{stage}/device/flops_per_sec"] / 3e9
            assert row[f"{stage}/device/samples_per_sec"] == 16 / seconds
            assert row[f"{stage}/device/items_per_sec"] == 16 * 32 / seconds
        assert of_stage[-1][f"{stage}/samples"] == 16 * batches
        assert of_stage[-1][f"{stage}/lengths"] == 16 * 32 * batches
