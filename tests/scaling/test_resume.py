"""A run stopped and resumed equals the uninterrupted one, weights and scales, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lit import Regression, dataset, loader, long_window, make_trainer, same, seeded
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_fp8 import Fp8Precision, scaling_state


def checkpointing(path: Path, **kwargs: Any) -> ModelCheckpoint:
    return ModelCheckpoint(path, save_top_k=-1, filename="{step}", **kwargs)


@pytest.mark.parametrize("plugin", [Fp8Precision, long_window])
def test_at_an_epochs_end(plugin: Callable[[], Fp8Precision], tmp_path: Path) -> None:
    whole, resumed = seeded(), seeded()
    torch.manual_seed(3)
    make_trainer(tmp_path, max_epochs=4, plugins=plugin()).fit(whole, loader())
    stopped = seeded()
    trainer = make_trainer(tmp_path, max_epochs=2, plugins=plugin())
    trainer.fit(stopped, loader())
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    make_trainer(tmp_path, max_epochs=4, plugins=plugin()).fit(resumed, loader(), ckpt_path=tmp_path / "half.ckpt")
    assert same(whole, resumed)
    assert torch.equal(torch.stack(whole.losses[8:]), torch.stack(resumed.losses))


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


def fitted(path: Path, **kwargs: Any) -> tuple[Regression, Path]:
    model, trainer = seeded(), make_trainer(path, **kwargs)
    trainer.fit(model, loader())
    trainer.save_checkpoint(path / "model.ckpt")
    return model, path / "model.ckpt"


def test_checkpoint_has_the_plain_state_dict_and_the_scales_by_name(tmp_path: Path) -> None:
    model, path = fitted(tmp_path)
    checkpoint = torch.load(path, weights_only=True)
    plain = seeded()
    assert set(checkpoint["state_dict"]) == set(plain.state_dict())
    plain.load_state_dict(checkpoint["state_dict"])
    assert torch.equal(plain.net[0].weight, model.net[0].weight)
    assert set(checkpoint["Fp8Precision"]) == {"net.0.input", "net.2.input", "net.0.grad_output", "net.2.grad_output"}


def test_validation_of_a_checkpoint_uses_its_scales(tmp_path: Path) -> None:
    model, path = fitted(tmp_path)
    expected = make_trainer(tmp_path).validate(model, loader(), verbose=False)
    fresh = Regression()
    assert make_trainer(tmp_path).validate(fresh, loader(), ckpt_path=path, verbose=False) == expected
    assert torch.equal(scaling_state(fresh).scale, scaling_state(model).scale)


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


def test_a_checkpoint_of_other_layers_names_them(tmp_path: Path) -> None:
    _, path = fitted(tmp_path, plugins=Fp8Precision(ignore_modules=["net.2"]))
    with pytest.raises(ValueError, match=r"not in the checkpoint: net.2.input, net.2.grad_output"):
        make_trainer(tmp_path, max_epochs=2).fit(seeded(), loader(), ckpt_path=path)


def test_a_checkpoint_saved_under_fsdp_resumes_elsewhere(tmp_path: Path) -> None:
    model, path = fitted(tmp_path)
    checkpoint = torch.load(path, weights_only=False)
    checkpoint["Fp8FSDPPrecision"] = checkpoint.pop("Fp8Precision")
    torch.save(checkpoint, path)
    resumed = seeded()
    make_trainer(tmp_path, max_epochs=1).fit(resumed, loader(), ckpt_path=path)
    assert torch.equal(scaling_state(resumed).scale[:4], scaling_state(model).scale[:4])
    # no step is left to run, so no weight has been cast
    assert (scaling_state(resumed).scale[4:] == 1).all()


def test_load_from_checkpoint_gives_the_plain_model(tmp_path: Path) -> None:
    model, path = fitted(tmp_path)
    loaded = Regression.load_from_checkpoint(path)
    assert isinstance(loaded, pl.LightningModule)
    assert torch.equal(loaded.net[2].weight, model.net[2].weight)
