"""Kurtosis and outliers behind a SwiGLU: their numbers, and what the watchdog does about them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from feed_forward_blocks import BLOCKS, llama
from lightning.pytorch.loggers import CSVLogger
from lightning_fp8.callbacks.input_statistics import InputStatistics
from lit import Regression, loader, make_trainer, seeded, warned
from logged_runs import rows_of
from torch import Tensor, nn
from watched_models import NEVER

from lightning_fp8 import QuantizationProbe, ScaleWatchdog, convert, scaling_state
from lightning_fp8.conversion.plan import converted
from lightning_fp8.modules.fused_blocks import behind_swiglu


def statistics(x: Tensor) -> tuple[float, float]:
    """Kurtosis and share of outliers in NumPy, by their definitions."""
    numbers = x.detach().double().numpy()
    deviations = numbers - numbers.mean()
    kurtosis = (deviations**4).mean() / (deviations**2).mean() ** 2
    return float(kurtosis), float((np.abs(numbers) > 10 * np.sqrt((numbers**2).mean())).mean())


class Gated(Regression):
    """A SwiGLU block in which a channel of the last layer's input is far larger than the others."""

    def __init__(self) -> None:
        super().__init__()
        self.block = llama()
        width = self.block.gate_proj.in_features
        self.net = nn.Sequential(nn.Linear(32, width), nn.ReLU(), nn.Linear(width, 16))
        with torch.no_grad():
            self.block.up_proj.weight[0] *= 100

    def forward(self, x: Tensor) -> Tensor:
        return self.net[2](self.block(self.net[1](self.net[0](x))))


@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_probe_logs_what_the_formulas_say(accumulate: int, tmp_path: Path) -> None:
    seen: dict[str, list[Tensor]] = {}
    hooks: list[int] = []

    class Seen(Gated):
        def training_step(self, *batch: Any) -> Tensor:
            hooks.append(len(self.net[0]._forward_pre_hooks))
            return super().training_step(*batch)

        def on_train_start(self) -> None:
            for path, layer in converted(self):
                inputs = seen.setdefault(path, [])
                layer.register_forward_pre_hook(lambda layer, args, inputs=inputs: inputs.append(args[0].clone()))

    logger, probe, model = CSVLogger(tmp_path), QuantizationProbe(2), seeded(Seen)
    trainer = make_trainer(
        tmp_path, logger=logger, callbacks=[probe], max_steps=2, accumulate_grad_batches=accumulate, max_epochs=-1
    )
    trainer.fit(model, loader())
    # besides the one of this test: in one micro-batch alone
    assert hooks == [1] * accumulate + [2] + [1] * (accumulate - 1)
    assert all(len(layer._forward_pre_hooks) == 1 for _, layer in converted(model))
    (row,) = [row for row in rows_of(logger) if row.get("fp8/net.0/kurtosis")]
    # the first micro-batch of the second step, which is due
    expected = {path: statistics(inputs[accumulate]) for path, inputs in seen.items()}
    assert {path: float(row[f"fp8/{path}/kurtosis"]) for path in expected} == pytest.approx(
        {path: kurtosis for path, (kurtosis, _) in expected.items()}, rel=1e-6
    )
    # normally distributed, and a few numbers of many
    assert 2.5 < expected["net.0"][0] < 3.5
    assert expected["block.down_proj"][0] > 50
    # the layer behind the SwiGLU alone
    shares = {key: float(value) for key, value in row.items() if key.endswith("outlier_share") and value}
    assert shares == {"fp8/block.down_proj/outlier_share": pytest.approx(expected["block.down_proj"][1])}
    assert shares["fp8/block.down_proj/outlier_share"] > 0.001
    assert probe.outliers["outlier_share"] == {"block.down_proj": pytest.approx(expected["block.down_proj"][1])}


def test_which_layers_are_behind_a_swiglu() -> None:
    found = {}
    for name, make in BLOCKS.items():
        model = convert(make())
        behind = behind_swiglu(model.modules())
        found[name] = [path for path, layer in converted(model) if layer in behind]
    assert {name: paths for name, paths in found.items() if paths} == {
        "Llama": ["down_proj"],
        "Llama with biases": ["down_proj"],
        "Phi-3": ["down_proj"],
    }


def test_sums_over_processes_and_calls_are_those_of_all_numbers_together() -> None:
    model = convert(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)))
    parts = [torch.randn(40, 16) + 1, 3 * torch.randn(8, 16), torch.full((1, 16), 50.0)]
    halves = []
    for some in (parts[:2], parts[2:]):
        inputs = InputStatistics(dict(converted(model)), model)
        inputs.start()
        for part in some:
            model[0](part)
        inputs.stop()
        model[0](parts[0])
        halves.append(inputs)
    sums: list[Tensor] = []
    halves[0].values(lambda mine: sums.append(mine) or mine, torch.device("cpu"))
    values = halves[1].values(lambda mine: sums[0] + mine, torch.device("cpu"))
    assert values["kurtosis"][0].item() == pytest.approx(statistics(torch.cat(parts))[0], rel=1e-9)
    # the second layer was not called, and none is behind a SwiGLU
    assert values["kurtosis"][1].isnan()
    assert values["outlier_share"].isnan().all()


# a limit that is exceeded, what is said, and the layer that moves
WATCHED: list[tuple[dict[str, float], str, str]] = [
    (
        {"kurtosis_above": 20.0},
        r"kurtosis above 20\.0, at 2 checks in a row: block\.down_proj\.input \(\d+",
        "fallback",
    ),
    ({"outliers_above": 0.001}, r"more than 0\.1% outliers behind a SwiGLU, at 2 checks.*input \(0\.\d+%\)", "current"),
]


@pytest.mark.parametrize(("limits", "message", "action"), WATCHED)
def test_outliers_move_a_layer_to_bf16(limits: dict[str, float], message: str, action: Any, tmp_path: Path) -> None:
    model, logger, hooked = seeded(Gated), CSVLogger(tmp_path), []
    model.training_step = lambda *batch: (
        hooked.append(bool(model.net[0]._forward_pre_hooks)) or Gated.training_step(model, *batch)
    )
    watchdog = ScaleWatchdog(action, 2, **{**NEVER, "checks_in_a_row": 2}, **limits)  # type: ignore[arg-type]
    trainer = make_trainer(tmp_path, callbacks=[watchdog], max_epochs=2, logger=logger)
    (said,) = warned("ScaleWatchdog", lambda: trainer.fit(model, loader()))
    assert said.startswith("ScaleWatchdog, step 4: ")
    assert re.search(message, said)
    assert said.endswith("In bf16 from now on: block.down_proj.")
    assert scaling_state(model).fallbacks == ("block.down_proj",)
    name = "kurtosis" if "kurtosis_above" in limits else "outliers"
    logged = [row[f"fp8/watchdog/{name}"] for row in rows_of(logger) if row.get(f"fp8/watchdog/{name}")]
    # a layer in bf16 is not watched any more
    assert [float(value) for value in logged] == [0, 1, 0, 0]
    assert hooked == [False, True] * 4
    assert not any(layer._forward_pre_hooks for _, layer in converted(model))


def test_limits_below_which_nothing_is_said(tmp_path: Path) -> None:
    model = seeded(Gated)
    watchdog = ScaleWatchdog("raise", 2, **{**NEVER, "checks_in_a_row": 1}, kurtosis_above=1e6, outliers_above=0.5)
    make_trainer(tmp_path, callbacks=[watchdog], max_epochs=2).fit(model, loader())


def test_compiled_layers_are_not_seen(tmp_path: Path) -> None:
    class Compiled(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return nn.functional.linear(batch[0], self.net[0].weight).square().mean()

    watchdog = ScaleWatchdog("warn", 2, **NEVER, kurtosis_above=10.0)
    run = make_trainer(tmp_path, callbacks=[watchdog])
    with pytest.warns(UserWarning, match=r"ScaleWatchdog: no converted layer was called.*`torch\.compile`"):
        run.fit(seeded(Compiled), loader())


def test_arguments() -> None:
    with pytest.raises(ValueError, match=r"`kurtosis_above` must be at least 1, got 0\.5"):
        ScaleWatchdog(kurtosis_above=0.5)
    with pytest.raises(ValueError, match=r"`outliers_above` must be a share from 0 to below 1, got 2"):
        ScaleWatchdog(outliers_above=2)
    with pytest.raises(ValueError, match="`cooldown` must be an integer of at least 1, got 0"):
        ScaleWatchdog("fallback", cooldown=0)
    with pytest.raises(ValueError, match="`cooldown` is for layers that were moved, and 'warn' moves none"):
        ScaleWatchdog(cooldown=10)
