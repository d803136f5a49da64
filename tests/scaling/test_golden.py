"""Checkpoints of every released version load, evaluate and train on as they did in the version that wrote them.

``golden/write.py`` made the files in ``golden/``, each with the results of its version. Scales and histories of inputs
and gradients must load exactly. They are looked up by name, because the order of rows and the fields kept for weights
differ between versions.

Results may differ between versions by FP8 rounding, since a weight may be scaled by another amax. The SQNR of a cast to
E4M3 is about 31 dB, that of a product of two casts 28 dB; that of this model's recorded outputs is 29.3 to 30.5 dB
relative to bf16, because each branch is small compared with its residual. If each weight is scaled by its current
values instead of its history, outputs are within 27.1 to 28.3 dB of the recorded ones, losses of the next steps within
0.3%, and amaxes of gradients, which depend on single elements, within 13%.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from golden.write import RECIPE, STEPS, Golden, batches, of_inputs_and_gradients, trainer
from repository import ROOT
from sqnr import sqnr

import lightning_fp8
from lightning_fp8 import convert, load_scales, scaling_state

FOLDER = ROOT / "tests" / "golden"
VERSIONS = sorted(path.stem for path in FOLDER.glob("*.ckpt"))
# 0.1.0 converted only linear layers; layers without scales in the checkpoint are left out when it is loaded
IGNORED = {"0.1.0": ("encoder.layers.0.self_attn", "attention", "conv1d")}
# these versions converted layers with fewer than 16 features by default, like this model's `attention`
WITH_SMALL = ("0.1.0", "0.2.0", "0.3.0", "0.4.0", "0.5.0")
LEAST_SQNR = 25.0
LOSS_TOLERANCE = 0.01
AMAX_TOLERANCE = 0.25

every_version = pytest.mark.parametrize("version", VERSIONS)


def file_of(version: str) -> Path:
    return FOLDER / f"{version}.ckpt"


def read(version: str) -> dict[str, Any]:
    return torch.load(file_of(version), weights_only=True)


def settings_of(version: str) -> dict[str, Any]:
    """Those with which the layers in the checkpoint, and no others, are converted."""
    small = {"min_features": 0} if version in WITH_SMALL else {}
    return {"ignore_modules": IGNORED.get(version, ()), **small}


def trainer_of(version: str, folder: Path, **kwargs: Any) -> pl.Trainer:
    return trainer(folder, settings=settings_of(version), **kwargs)


def check_loaded(model: Golden, golden: dict[str, Any]) -> None:
    found = of_inputs_and_gradients(model)
    assert found["scales"] == golden["scales"]
    assert found["histories"] == golden["histories"]
    assert list(scaling_state(model).fallbacks) == golden["fallbacks"]


def check_next_steps(model: Golden, golden: dict[str, Any]) -> None:
    assert torch.stack(model.losses).tolist() == pytest.approx(golden["next_losses"], rel=LOSS_TOLERANCE)
    found = of_inputs_and_gradients(model)["histories"]
    assert found.keys() == golden["next_histories"].keys()
    for name, expected in golden["next_histories"].items():
        assert found[name] == pytest.approx(expected, rel=AMAX_TOLERANCE), name
        # three steps later, the window of four still ends with the loaded value
        assert found[name][-1] == expected[-1], name


class CheckLoaded(pl.Callback):
    """Compares the loaded state before the first step changes it."""

    def __init__(self, golden: dict[str, Any]) -> None:
        self.golden = golden

    def on_train_start(self, trainer: pl.Trainer, module: Any) -> None:
        check_loaded(module, self.golden)


def test_every_released_version_has_one() -> None:
    released = re.findall(r"^## \[(\d.*?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    # the version in development is not released yet
    assert set(released) - {lightning_fp8.__version__} <= set(VERSIONS)


@every_version
def test_a_run_goes_on(tmp_path: Path, version: str) -> None:
    golden, model = read(version)["golden"], Golden()
    run = trainer_of(version, tmp_path, epochs=2, callbacks=[CheckLoaded(golden)])
    run.fit(model, batches(golden["next_batches"]), ckpt_path=file_of(version))
    assert run.global_step == STEPS + len(golden["next_batches"])
    check_next_steps(model, golden)


@every_version
def test_by_hand(version: str) -> None:
    checkpoint = read(version)
    golden = checkpoint["golden"]
    model = convert(Golden(), RECIPE, **settings_of(version))
    model.load_state_dict(checkpoint["state_dict"])
    scaling_state(model).load_state_dict(checkpoint["Fp8Precision"])
    check_loaded(model, golden)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        logits = model.eval()(golden["next_batches"][0][:, :-1])
    assert sqnr(logits, golden["logits"]) > LEAST_SQNR
    optimizer = model.train().configure_optimizers()
    optimizer.load_state_dict(checkpoint["optimizer_states"][0])
    for batch in golden["next_batches"]:
        with torch.autocast("cpu", torch.bfloat16):
            loss = model.loss(batch)
        loss.backward()
        scaling_state(model).update()
        optimizer.step()
        optimizer.zero_grad()
    check_next_steps(model, golden)


@pytest.mark.parametrize("weights_only", [True, False])
@every_version
def test_hyperparameters(version: str, weights_only: bool) -> None:
    # the file names the recipe's class by its module at that time
    checkpoint = torch.load(file_of(version), weights_only=weights_only)
    assert checkpoint["hyper_parameters"]["recipe"] == RECIPE
    model = Golden.load_from_checkpoint(file_of(version), weights_only=weights_only)
    assert model.hparams["recipe"] == RECIPE


def test_layers_without_scales_are_named(tmp_path: Path) -> None:
    (version,) = IGNORED
    names = r"'encoder\.layers\.0\.self_attn\.in_proj\.input.*`ignore_modules`"
    with pytest.raises(ValueError, match=rf"In the model but not in the checkpoint: {names}"):
        trainer(tmp_path).validate(
            Golden(), batches(torch.zeros(1, 4, 8, dtype=torch.int64)), ckpt_path=file_of(version)
        )


@pytest.mark.parametrize("version", WITH_SMALL[1:])
def test_scales_of_small_layers_are_refused_with_what_restores_them(tmp_path: Path, version: str) -> None:
    golden = read(version)["golden"]
    said = (
        "In the checkpoint but not in the model: 'attention.q_proj.input', .*versions up to 0.5 converted layers with"
        " fewer than 16 features too, as `min_features=0` does"
    )
    with pytest.raises(ValueError, match=said):
        trainer(tmp_path, epochs=2).fit(Golden(), batches(golden["next_batches"]), ckpt_path=file_of(version))


@every_version
def test_scales_are_loaded_into_a_plain_model(version: str) -> None:
    checkpoint, model = read(version), Golden()
    model.load_state_dict(checkpoint["state_dict"])
    load_scales(model, checkpoint, RECIPE)
    check_loaded(model, checkpoint["golden"])
