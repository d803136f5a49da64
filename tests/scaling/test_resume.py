"""A run stopped and resumed equals the uninterrupted one, weights and scales, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from lightning.pytorch.callbacks import ModelCheckpoint
from lit import Regression, dataset, loader, long_window, make_trainer, same, seeded, warned
from torch import Tensor, nn
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_fp8 import Fp8Precision, scaling_state


def checkpointing(path: Path, **kwargs: Any) -> ModelCheckpoint:
    return ModelCheckpoint(path, save_top_k=-1, filename="{step}", **kwargs)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_inside_an_epoch_with_a_stateful_loader(tmp_path: Path, accumulate: int) -> None:
    def stateful() -> StatefulDataLoader:
        generator = torch.Generator().manual_seed(5)
        return StatefulDataLoader(dataset(96), batch_size=8, shuffle=True, generator=generator)

    whole, resumed = seeded(), seeded()
    callback = checkpointing(tmp_path, every_n_train_steps=2)
    options = {"max_epochs": 1, "enable_checkpointing": True, "accumulate_grad_batches": accumulate}
    make_trainer(tmp_path, callbacks=[callback], **options).fit(whole, stateful())
    middle = tmp_path / "step=4.ckpt"
    assert torch.load(middle, weights_only=False)["epoch"] == 0
    make_trainer(tmp_path / "again", **options).fit(resumed, stateful(), ckpt_path=middle)
    assert len(resumed.losses) == len(whole.losses) - 4 * accumulate
    assert torch.equal(torch.stack(whole.losses[4 * accumulate :]), torch.stack(resumed.losses))
    assert same(whole, resumed)


def fitted(path: Path, weights_only: bool = False, **kwargs: Any) -> tuple[Regression, Path]:
    model, trainer = seeded(), make_trainer(path, **kwargs)
    trainer.fit(model, loader())
    trainer.save_checkpoint(path / "model.ckpt", weights_only)
    return model, path / "model.ckpt"


def test_checkpoint_has_the_plain_state_dict_and_the_scales_by_name(tmp_path: Path) -> None:
    model, path = fitted(tmp_path)
    checkpoint = torch.load(path, weights_only=True)
    plain = seeded()
    assert set(checkpoint["state_dict"]) == set(plain.state_dict())
    plain.load_state_dict(checkpoint["state_dict"])
    assert torch.equal(plain.net[0].weight, model.net[0].weight)
    assert set(checkpoint["Fp8Precision"]) == {"net.0.input", "net.2.input", "net.0.grad_output", "net.2.grad_output"}


def test_a_bf16_checkpoint_resumes_in_fp8_and_back(tmp_path: Path) -> None:
    _, path = fitted(tmp_path, precision="bf16-mixed")
    resumed = seeded()
    make_trainer(tmp_path, max_epochs=2, plugins=long_window()).fit(resumed, loader(), ckpt_path=path)
    assert len(resumed.losses) == 4
    assert (scaling_state(resumed).amax_history > 0).sum(0).tolist() == [4] * 4
    _, fp8 = fitted(tmp_path)
    back = seeded()
    make_trainer(tmp_path, max_epochs=2, precision="bf16-mixed").fit(back, loader(), ckpt_path=fp8)
    assert len(back.losses) == 4


def test_a_checkpoint_resumes_under_a_subclass_of_the_plugin(tmp_path: Path) -> None:
    class OwnPrecision(Fp8Precision):
        pass

    model, path = fitted(tmp_path)
    resumed = seeded()
    make_trainer(tmp_path, max_epochs=1, plugins=OwnPrecision()).fit(resumed, loader(), ckpt_path=path)
    assert torch.equal(scaling_state(resumed).scale[:4], scaling_state(model).scale[:4])
    # no step is left to run, so no weight has been cast
    assert (scaling_state(resumed).scale[4:] == 1).all()


def predictions(path: Path, model: Regression, **kwargs: Any) -> Tensor:
    kwargs["dataloaders"] = loader(batch_size=4)
    return torch.cat(make_trainer(path).predict(model, **kwargs))  # type: ignore[arg-type]


def with_fabric(model: Regression) -> Tensor:
    ready = Fabric(accelerator="cpu", devices=1, precision="fp8-delayed").setup(model.eval())
    return torch.cat([ready(x) for x, _ in loader(batch_size=4)])


@torch.no_grad()
def test_load_from_checkpoint_predicts_the_same(tmp_path: Path) -> None:
    found: list[Tensor] = []
    model, path = fitted(tmp_path, weights_only=True)
    # histories serve training alone
    assert not {"optimizer_states", "Fp8Precision"} & set(torch.load(path, weights_only=True))
    loaded = Regression.load_from_checkpoint(path)
    assert type(loaded.net[2]) is nn.Linear
    assert vars(loaded).keys() == vars(Regression()).keys()
    assert warned("lightning_fp8", lambda: found.append(with_fabric(loaded))) == []
    assert torch.equal(found[0], with_fabric(model))


def test_the_scales_of_ckpt_path_win(tmp_path: Path) -> None:
    _, first = fitted(tmp_path)
    (tmp_path / "second").mkdir()
    model, second = fitted(tmp_path / "second", max_epochs=3)
    expected = predictions(tmp_path, model)
    loaded = Regression.load_from_checkpoint(first)
    assert torch.equal(predictions(tmp_path, loaded, ckpt_path=second), expected)
    assert torch.equal(scaling_state(loaded).amax_history, scaling_state(model).amax_history)


class Longer(Regression):
    """One layer more than the run that saved the checkpoint, and one less of those in FP8."""

    def __init__(self) -> None:
        super().__init__()
        self.strict_loading = False
        self.extra = nn.Linear(16, 16)


LEFT_OUT = (
    " Only in the file: 'net.2.input', 'net.2.grad_output'. Only in the model: 'extra.input', 'extra.grad_output'."
)


@pytest.mark.parametrize("way", ["fit", "validate"])
def test_without_strict_loading_other_layers_are_named(way: str, tmp_path: Path) -> None:
    model, path = fitted(tmp_path)
    trainer = make_trainer(tmp_path, plugins=Fp8Precision(ignore_modules=["net.2"]), max_epochs=1)

    def run() -> Regression:
        fresh = Longer()
        getattr(trainer, way)(fresh, loader(), ckpt_path=path)
        return fresh

    if way == "fit":
        # the optimizer's states are those of other parameters
        checkpoint = torch.load(path, weights_only=True)
        checkpoint["optimizer_states"] = [torch.optim.AdamW(Longer().parameters(), lr=1e-2).state_dict()]
        torch.save(checkpoint, path)
    found: list[Regression] = []
    (said,) = warned("lightning_fp8: a scaling state", lambda: found.append(run()))
    assert said.endswith(LEFT_OUT)
    mine, theirs = (scaling_state(one).state_dict()["net.0.input"] for one in (found[0], model))
    assert torch.equal(mine["amax_history"], theirs["amax_history"])


def test_without_strict_loading_a_model_without_fp8_skips_all_scales(tmp_path: Path) -> None:
    _, path = fitted(tmp_path)
    plain = Longer()
    trainer = make_trainer(tmp_path, plugins=Fp8Precision(ignore_modules=["net", "extra"]))
    said = "The checkpoint has FP8 scales ('net.0.input', "
    assert len(warned(said, lambda: trainer.validate(plain, loader(), ckpt_path=path))) == 1
