"""A custom loop with the real Accelerate: the three lines that FP8 needs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import accelerate
import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import AORecipeKwargs
from accelerate_runs import Run
from lit import LONG_WINDOW, dataset, same, seeded, warned
from torch import nn
from torch.utils.data import DataLoader

from lightning_fp8 import convert, scaling_state
from lightning_fp8.runtime.warn_once import warn_once


@pytest.fixture(autouse=True)
def _own_state() -> Iterator[None]:
    """Accelerate keeps one precision per process."""
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    yield
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


def by_hand(bf16: bool, accumulate: int) -> nn.Module:
    model = convert(seeded().net, LONG_WINDOW)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for index, (x, y) in enumerate(DataLoader(dataset(), batch_size=8)):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16):
            found = model(x)
        (nn.functional.mse_loss(found.float(), y) / accumulate).backward()
        if (index + 1) % accumulate == 0:
            scaling_state(model).update()
            optimizer.step()
            optimizer.zero_grad()
    return model


@pytest.mark.parametrize(("precision", "accumulate"), [("bf16", 1), ("no", 4)])
def test_the_loop_equals_one_by_hand(precision: str, accumulate: int) -> None:
    run = Run(precision, accumulate)
    run.train()
    assert same(run.plain, by_hand(precision == "bf16", accumulate))
    state = scaling_state(run.plain)
    assert (state.amax_history > 0).sum(0).tolist() == [8 // accumulate] * 4
    # `prepare` has wrapped the forward of the same object
    assert run.model is run.plain
    unwrapped = run.runner.unwrap_model(run.model, keep_fp32_wrapper=False)
    assert unwrapped is run.plain
    assert scaling_state(unwrapped) is state
    assert unwrapped.forward.__func__ is type(unwrapped).forward


def test_a_resumed_run_is_exact(tmp_path: Path) -> None:
    whole = Run(accumulate=2)
    whole.train()
    whole.runner.save_state(str(tmp_path / "half"))
    whole.train()
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    resumed = Run(accumulate=2, scale=3.0)
    assert not torch.equal(resumed.plain[0].weight, whole.plain[0].weight)
    resumed.runner.load_state(str(tmp_path / "half"))
    resumed.train()
    assert same(resumed.plain, whole.plain)
    assert scaling_state(resumed.plain).updates == 4
    # the scales are plain values
    saved = torch.load(tmp_path / "half" / "custom_checkpoint_0.pkl", weights_only=True)
    assert set(saved) == {"0.input", "0.grad_output", "2.input", "2.grad_output"}


def test_the_fp8_of_accelerate_is_said_once() -> None:
    """Its `prepare` replaces layers, including converted ones, with those of torchao."""
    runner = accelerate.Accelerator(cpu=True, mixed_precision="fp8", kwargs_handlers=[AORecipeKwargs()])
    torch.manual_seed(0)
    layers = [nn.Linear(32, 32) for _ in range(4)]
    model, _ = runner.prepare(convert(nn.Sequential(*layers)), torch.optim.SGD(layers[0].parameters()))
    warn_once.cache_clear()
    (message,) = warned(
        "2 layers (1, 2) run in the FP8 of another library", lambda: [scaling_state(model) for _ in range(2)]
    )
    assert 'choose "bf16"' in message
