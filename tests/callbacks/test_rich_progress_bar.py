from __future__ import annotations

import io
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lightning.pytorch import Callback
from lit import loader, make_trainer, seeded
from repository import ROOT
from warm import run_warm

from lightning_fp8 import DelayedScaling, Fp8RichProgressBar, ScalingState, scaling_state


def smallest_by_hand(state: ScalingState) -> float:
    largest = {"grad_output": 57344.0, "input": 448.0}
    bits = [
        math.log2(largest[name.split(".")[-1]] / (state.amax[row].item() * state.scale[row].item()))
        for row, name in enumerate(state.names[: state.delayed])
        if state.amax_history[0, row] > 0
    ]
    return min(bits, default=math.nan)


class Shrink(Callback):
    """Sets arbitrary scales for one step; the next update computes them anew."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        state = scaling_state(pl_module)
        state.scale.mul_(torch.linspace(0.9, 0.1, len(state.names)) / (1 + trainer.global_step))


class Keep(Callback):
    """Runs after the bar's own hook: keeps what the bar read, and what could be read before the scales were updated."""

    def __init__(self) -> None:
        self.read: list[float | None] = []
        self.there: list[float] = []

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        self.there.append(smallest_by_hand(scaling_state(pl_module)))

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.read.append(trainer.progress_bar_callback.headroom_bits)


def terminal() -> tuple[io.StringIO, dict[str, Any]]:
    file = io.StringIO()
    return file, {"file": file, "force_terminal": True, "width": 200, "color_system": None}


PLAIN = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


def test_the_column_shows_the_smallest_headroom(tmp_path: Path) -> None:
    file, console = terminal()
    bar, keep = Fp8RichProgressBar(every_n_steps=1, leave=True, console_kwargs=console), Keep()
    make_trainer(tmp_path, callbacks=[Shrink(), bar, keep], enable_progress_bar=True).fit(seeded(), loader())
    assert len({round(bits, 2) for bits in keep.there[1:]}) == 3
    lines = [line for line in re.split(r"[\r\n]", PLAIN.sub("", file.getvalue())) if "4/4" in line]
    assert f"headroom {keep.there[-1]:.2f} bits" in lines[-1]


def test_read_at_the_second_step_and_then_when_due(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    readings: list[float] = []
    item = torch.Tensor.item
    monkeypatch.setattr(torch.Tensor, "item", lambda self: readings.append(item(self)) or item(self))
    _, console = terminal()
    bar, keep = Fp8RichProgressBar(every_n_steps=3, console_kwargs=console), Keep()
    monkeypatch.setattr(Keep, "on_after_backward", unread(Keep.on_after_backward, readings))
    trainer = make_trainer(tmp_path, callbacks=[Shrink(), bar, keep], enable_progress_bar=True, max_epochs=2)
    trainer.fit(seeded(), loader())
    first, second, third = (keep.there[step - 1] for step in (2, 5, 8))
    expected = [first] * 3 + [second] * 3 + [third]
    # a step without a history shows nothing
    assert keep.read[0] is None
    assert keep.read[1:] == pytest.approx(expected, abs=1e-5)
    assert len(set(expected)) == 3
    # nothing else is copied from the device for it
    assert [value for value in readings if value in keep.read] == [keep.read[1], keep.read[4], keep.read[7]]


def unread(function: Any, readings: list[float]) -> Any:
    """The state without the values that the function itself reads."""

    def call(*args: Any) -> None:
        before = len(readings)
        function(*args)
        del readings[before:]

    return call


def test_accumulated_batches_are_not_steps(tmp_path: Path) -> None:
    _, console = terminal()
    bar, seen = Fp8RichProgressBar(every_n_steps=1, console_kwargs=console), []

    class See(Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            seen.append(bar.headroom_bits is None)

    trainer = make_trainer(tmp_path, callbacks=[bar, See()], enable_progress_bar=True, accumulate_grad_batches=2)
    trainer.fit(seeded(), loader())
    # in the first step no tensor had a history
    assert seen == [True, True, True, False]


def rendered(bar: Fp8RichProgressBar, task_id: int | None) -> str:
    column = bar.configure_columns(None)[-1]
    return column.render(type("Task", (), {"id": task_id})()).plain


def test_the_training_bar_alone_has_it() -> None:
    bar = Fp8RichProgressBar()
    bar.train_progress_bar_id = 3
    assert rendered(bar, 3) == ""
    bar.headroom_bits = 0.3149
    assert rendered(bar, 3) == "headroom 0.31 bits"
    assert rendered(bar, 4) == ""
    bar.headroom_bits = -1e-7
    assert rendered(bar, 3) == "headroom 0.00 bits"
    bar.headroom_bits = -1.5
    assert rendered(bar, 3) == "headroom -1.50 bits"


def test_tensors_without_a_history_and_those_that_did_not_run_have_no_part() -> None:
    from lightning_fp8.callbacks.rich_progress_bar import _smallest_headroom

    state = ScalingState(["a", "b", "c"], DelayedScaling(margin=1))

    def smallest(*amaxes: float) -> float:
        return _smallest_headroom(state, torch.tensor(amaxes)).item()

    assert smallest(4.0, 8.0, 16.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0) == math.inf
    state.amax[:6] = torch.tensor([4.0, 8.0, 16.0, 1.0, 1.0, 1.0])
    state.update()
    # c has no history, b did not run; a margin of 1 leaves one bit
    assert smallest(4.0, 4.0, 2.0, 0.0, 0.0, 0.0, 9.0, 9.0, 9.0) == pytest.approx(1.0, abs=1e-6)
    assert smallest(1.0, 64.0, math.inf, 0.5, math.nan, 1.0, 9.0, 9.0, 9.0) == pytest.approx(-2.0, abs=1e-6)
    assert smallest(*[0.0] * 9) == math.inf


def test_other_precisions_and_validation_show_nothing(tmp_path: Path) -> None:
    file, console = terminal()
    bar = Fp8RichProgressBar(every_n_steps=1, console_kwargs=console, leave=True)
    trainer = make_trainer(tmp_path, callbacks=[bar], enable_progress_bar=True, precision="bf16-mixed")
    trainer.fit(seeded(), loader())
    assert "4/4" in file.getvalue()
    assert "headroom" not in file.getvalue()
    file, console = terminal()
    bar = Fp8RichProgressBar(every_n_steps=1, console_kwargs=console, leave=True)
    trainer = make_trainer(tmp_path, callbacks=[bar], enable_progress_bar=True)
    model = seeded()
    trainer.validate(model, loader(), verbose=False)
    trainer.test(model, loader(), verbose=False)
    assert "4/4" in file.getvalue()
    assert "headroom" not in file.getvalue()
    trainer.fit(model, loader(), loader())
    lines = re.split(r"[\r\n]", PLAIN.sub("", file.getvalue()))
    assert any("headroom" in line for line in lines if "Epoch" in line)
    assert not any("headroom" in line for line in lines if "Validation" in line and "Epoch" not in line)


def test_training_is_not_touched_and_bad_input(tmp_path: Path) -> None:
    _, console = terminal()
    runs = []
    for callbacks in ([], [Fp8RichProgressBar(every_n_steps=1, console_kwargs=console)]):
        model = seeded()
        make_trainer(tmp_path, callbacks=callbacks, enable_progress_bar=bool(callbacks)).fit(model, loader())
        runs.append([*model.losses, *model.parameters(), scaling_state(model).scale])
    assert all(map(torch.equal, *runs))
    with pytest.raises(
        ValueError, match=r"Fp8RichProgressBar: `every_n_steps` must be an integer of at least 1, got 0\."
    ):
        Fp8RichProgressBar(every_n_steps=0)


def test_from_yaml(tmp_path: Path) -> None:
    parsed = yaml.safe_load((ROOT / "configs" / "tiny_gpt_fp8.yaml").read_text())
    arguments = {
        "every_n_steps": 2,
        "leave": True,
        "theme": {"metrics": "bold", "metrics_format": ".1f"},
        # into a pipe, rich would print nothing
        "console_kwargs": {"force_terminal": True, "width": 200},
    }
    bar = {"class_path": "lightning_fp8.Fp8RichProgressBar", "init_args": arguments}
    parsed["trainer"].update(max_steps=4, val_check_interval=2, limit_val_batches=1, accelerator="cpu", callbacks=[bar])
    parsed["model"]["init_args"].update(width=64, context=32)
    parsed["data"]["init_args"].update(batch_size=4, context=32, max_bytes=100_000)
    path = tmp_path / "bar.yaml"
    path.write_text(yaml.safe_dump(parsed))
    run = run_warm("-m", "lightning_fp8", "fit", "--config", str(path), cwd=tmp_path)
    assert run.returncode == 0, run.stderr[-3000:]
    assert re.search(r"headroom -?\d+\.\d\d bits", PLAIN.sub("", run.stdout + run.stderr))
    saved = yaml.safe_load(next(tmp_path.rglob("config.yaml")).read_text())
    (shown,) = [c for c in saved["trainer"]["callbacks"] if c["class_path"] == "lightning_fp8.Fp8RichProgressBar"]
    assert set(shown["init_args"]) == {"every_n_steps", "refresh_rate", "leave", "theme", "console_kwargs"}
    assert shown["init_args"]["theme"]["metrics"] == "bold"
