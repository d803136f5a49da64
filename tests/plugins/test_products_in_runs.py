"""Products in bf16 in runs: kept by a plugin, watched, and exported."""

from __future__ import annotations

from pathlib import Path

from lightning.pytorch.loggers import CSVLogger
from lit import loader, make_trainer, seeded
from stacked_blocks import Blocks, products

from lightning_fp8 import (
    Fp8Monitor,
    Fp8Precision,
    ScaleFactorLogger,
)
from lightning_fp8.plugins.fabric import FabricPrecision


def test_a_plugin_keeps_them_for_another_front_end_and_a_converted_model() -> None:
    plugin = Fp8Precision(overrides={"*.down": {"wgrad": "bf16"}})
    other = FabricPrecision(plugin)
    model = other.convert_module(Blocks(3, 2))
    # without the arguments, a plugin leaves a converted model unchanged
    found = products(model)
    assert found["blocks.1.down"] == "w"
    Fp8Precision().convert_module(model)
    assert products(model) == found
    Fp8Precision(overrides={}).convert_module(model)
    assert products(model) == {}


def test_callbacks_see_only_what_is_cast(tmp_path: Path) -> None:
    monitor = Fp8Monitor(2, "raise", thresholds={"stale": 4})
    scales = ScaleFactorLogger(every_n_steps=2)
    plugin = Fp8Precision(
        recipe={"dgrad": "bf16", "wgrad": "bf16"}, overrides={"net.0": {"fprop": "bf16", "wgrad": "fp8"}}
    )
    logger = CSVLogger(tmp_path)
    model = seeded()
    make_trainer(
        tmp_path, plugins=plugin, callbacks=[monitor, scales], logger=logger, log_every_n_steps=1, max_epochs=3
    ).fit(model, loader())
    assert monitor.verdict().status == "healthy"
    logged = (Path(logger.log_dir) / "metrics.csv").read_text().splitlines()[0].split(",")
    tensors = {key.removeprefix("fp8/").removesuffix("/scale") for key in logged if key.endswith("/scale")}
    assert {name for name in tensors if name.startswith("net.")} == {
        *("net.0.input", "net.0.grad_output", "net.2.input", "net.2.weight")
    }
