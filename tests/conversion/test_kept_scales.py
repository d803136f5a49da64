"""Scales of a checkpoint stay with a plain model until it is converted, for as long as its weights are the same."""

from __future__ import annotations

import gc
import pickle
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lit import Regression, loader, make_trainer, seeded
from torch import nn

from lightning_fp8 import convert, scaling_state


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("run") / "run.ckpt"
    trainer = make_trainer(path.parent)
    trainer.fit(seeded(), loader())
    trainer.save_checkpoint(path, weights_only=True)
    return path


def in_numbers(entries: dict[str, Any]) -> dict[str, list[float]]:
    return {name: [amax for amax in entry["amax_history"].tolist() if amax] for name, entry in entries.items()}


def histories(model: nn.Module) -> dict[str, list[float]]:
    return in_numbers(scaling_state(model).state_dict())


def saved(checkpoint: Path) -> dict[str, list[float]]:
    return in_numbers(torch.load(checkpoint, weights_only=True)["Fp8Precision"])


def step(model: Regression, optimizer: torch.optim.Optimizer) -> None:
    model(torch.randn(4, 32)).sum().backward()
    optimizer.step()


CHANGES: dict[str, Callable[[Regression], Any]] = {
    "load_state_dict": lambda model: model.load_state_dict(seeded().state_dict()),
    "assigned": lambda model: model.load_state_dict(seeded().state_dict(), assign=True),
    "of one layer": lambda model: model.net[2].load_state_dict(nn.Linear(64, 16).state_dict()),
    # leaves no new version
    "fused AdamW": lambda model: step(model, torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_other_weights_do_not_get_them(change: str, checkpoint: Path) -> None:
    model = Regression.load_from_checkpoint(checkpoint)
    CHANGES[change](model)
    assert not any(histories(convert(model)).values())


def test_a_weight_that_was_replaced_leaves_its_id_to_no_other_one(checkpoint: Path) -> None:
    model = Regression.load_from_checkpoint(checkpoint)
    former = weakref.ref(model.net[0].weight)
    model.net[0].weight = nn.Parameter(torch.randn(64, 32))
    gc.collect()
    assert former() is not None
    assert not any(histories(convert(model)).values())
    gc.collect()
    # not for longer than the scales are kept
    assert former() is None


def test_a_part_of_a_model_and_a_step_of_another_one(checkpoint: Path) -> None:
    loaded, other = Regression.load_from_checkpoint(checkpoint), seeded()
    # a plain model stays plain
    assert b"lightning_fp8" not in pickle.dumps(loaded)
    step(other, other.configure_optimizers())
    model = nn.Sequential(nn.Linear(32, 32), loaded)
    found = histories(convert(model))
    assert found.pop("0.input") == found.pop("0.grad_output") == []
    assert found == {f"1.{name}": history for name, history in saved(checkpoint).items()}
    # weights loaded after the conversion empty them
    loaded.load_state_dict(other.state_dict())
    model.train()(next(iter(loader()))[0])
    assert not any(histories(model).values())


def test_a_model_that_converts_itself_gets_them_at_once(checkpoint: Path) -> None:
    class Converts(Regression):
        def __init__(self) -> None:
            super().__init__()
            convert(self)

    assert histories(Converts.load_from_checkpoint(checkpoint)) == saved(checkpoint)


def test_layers_that_fell_back_stay_in_bf16_and_are_named(
    checkpoint: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    content = torch.load(checkpoint, weights_only=True)
    for role in ("input", "grad_output"):
        content["Fp8Precision"][f"net.2.{role}"]["in_fp8"] = torch.tensor(False)
    torch.save(content, tmp_path / "run.ckpt")
    model = Regression.load_from_checkpoint(tmp_path / "run.ckpt")
    with caplog.at_level("INFO"):
        make_trainer(tmp_path).validate(model, loader(), verbose=False)
    assert scaling_state(model).fallbacks == ("net.2",)
    assert "1 layers fell back to bf16 in the run that saved this checkpoint, and stay there: net.2." in caplog.text


def test_a_malformed_entry_is_named_and_the_model_stays_plain(checkpoint: Path, tmp_path: Path) -> None:
    content = torch.load(checkpoint, weights_only=True)
    content["Fp8Precision"]["net.2.input"]["scale"] = torch.tensor(-1.0)
    torch.save(content, tmp_path / "damaged.ckpt")
    model = Regression.load_from_checkpoint(tmp_path / "damaged.ckpt")
    with pytest.raises(ValueError, match=r"'net\.2\.input' must have a scale that is a positive normal fp32 number"):
        convert(model)
    assert [type(layer) for layer in model.net] == [nn.Linear, nn.GELU, nn.Linear]
