"""Models in which no layer can run in FP8, or whose settings leave none: they train without FP8, with a warning."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from lit import Averaging, Regression, loader, long_window, make_trainer, seeded
from torch import nn

import lightning_fp8
from lightning_fp8 import Fp8Precision, scaling_state
from lightning_fp8.conversion.convert import is_converted
from lightning_fp8.plugins import Bf16MixedPrecision
from lightning_fp8.runtime.warn_once import warn_once

NO_LAYER = "fp8-delayed: no layer runs in FP8, and the model computes in torch.bfloat16"
silent = pytest.mark.filterwarnings("ignore:.*no layer")


class Convolution(Regression):
    """A convolution on 32 numbers, as an image of one row; no linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Unflatten(1, (1, 1, 32)), nn.Conv2d(1, 16, (1, 32)), nn.Flatten())


def same_weights(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


@pytest.fixture(autouse=True)
def _say_it_again() -> Iterator[None]:
    warn_once.cache_clear()
    yield
    warn_once.cache_clear()


@pytest.mark.parametrize(
    ("model", "settings", "reason"),
    [
        (Convolution, {}, r"nothing to convert in Convolution: FP8 needs at least one plain `nn.Linear`\.$"),
        (Regression, {"ignore_modules": ["net"]}, r"net\.0,2 \(Linear\): matches `ignore_modules`"),
        (Regression, {"min_features": 65}, r"The largest here is net\.0, 32 -> 64: pass a smaller `min_features`"),
    ],
)
def test_trains_as_bf16_mixed_does(tmp_path: Path, model: Any, settings: dict[str, Any], reason: str) -> None:
    without, reference = seeded(model), seeded(model)
    trainer = make_trainer(tmp_path, plugins=Fp8Precision(**settings))
    with pytest.warns(UserWarning, match=f'(?s){NO_LAYER}.*`precision="bf16-mixed"`.*{reason}'):
        trainer.fit(without, loader(), loader())
    with warnings.catch_warnings():
        # the warning has been given
        warnings.filterwarnings("error", "fp8-delayed")
        trainer.validate(without, loader(), verbose=False)
    make_trainer(tmp_path, precision="bf16-mixed").fit(reference, loader(), loader())
    assert not is_converted(without)
    assert same_weights(without, reference)
    assert torch.equal(torch.stack(without.losses), torch.stack(reference.losses))
    assert trainer.precision_plugin.state_dict() == {}


def test_compute_dtype_is_that_of_the_settings(tmp_path: Path) -> None:
    without, reference = seeded(Convolution), seeded(Convolution)
    with pytest.warns(UserWarning, match='(?s)computes in torch.float32.*`precision="32-true"`'):
        make_trainer(tmp_path, plugins=Fp8Precision(compute_dtype="float32")).fit(without, loader())
    make_trainer(tmp_path, precision="32-true").fit(reference, loader())
    assert same_weights(without, reference)


def test_other_mistakes_still_raise(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="`ignore_modules` pattern 'nte'"):
        make_trainer(tmp_path, plugins=Fp8Precision(ignore_modules=["nte"])).fit(seeded(), loader())
    with pytest.raises(TypeError, match="is float64"):
        make_trainer(tmp_path).fit(Convolution().double(), loader())


def test_a_converted_model_becomes_plain(tmp_path: Path) -> None:
    model = seeded()
    make_trainer(tmp_path).fit(model, loader())
    with pytest.warns(UserWarning, match=NO_LAYER):
        make_trainer(tmp_path, plugins=Fp8Precision(ignore_modules=["net"])).fit(model, loader())
    assert [type(layer) for layer in model.net] == [nn.Linear, nn.GELU, nn.Linear]


@silent
def test_a_gather_in_fp8_has_nothing_to_gather() -> None:
    model, made = Convolution(), Fp8Precision(fp8_all_gather=True)
    made.convert_module(model)
    made.connect(model, [], [])
    with made.forward_context():
        assert model(torch.randn(2, 32)).dtype == torch.bfloat16


def test_only_one_process_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_zero_only, "rank", 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Fp8Precision().convert_module(Convolution())


def checkpoint_of(path: Path, model: Any, **kwargs: Any) -> Path:
    trainer = make_trainer(path, **kwargs)
    trainer.fit(model, loader())
    trainer.save_checkpoint(path / "model.ckpt")
    return path / "model.ckpt"


@silent
def test_resumes_a_checkpoint_without_scales(tmp_path: Path) -> None:
    resumed, whole = seeded(Convolution), seeded(Convolution)
    path = checkpoint_of(tmp_path, seeded(Convolution))
    assert "Fp8Precision" not in torch.load(path, weights_only=True)
    make_trainer(tmp_path, max_epochs=2).fit(resumed, loader(), ckpt_path=path)
    make_trainer(tmp_path, max_epochs=2).fit(whole, loader())
    assert same_weights(whole, resumed)
    # in a model with layers in FP8, scales begin anew
    path, model = checkpoint_of(tmp_path, seeded(), plugins=Fp8Precision(ignore_modules=["net"])), seeded()
    make_trainer(tmp_path, max_epochs=2, plugins=long_window()).fit(model, loader(), ckpt_path=path)
    assert (scaling_state(model).amax_history > 0).sum(0).max() == 4


@silent
def test_a_checkpoint_with_scales_is_refused_by_name(tmp_path: Path) -> None:
    path = checkpoint_of(tmp_path, seeded())
    without = make_trainer(tmp_path, max_epochs=2, plugins=Fp8Precision(ignore_modules=["net"]))
    with pytest.raises(ValueError, match=r"FP8 scales \('net\.0\.input', .*no layer runs in FP8.*`ignore_modules`"):
        without.fit(seeded(), loader(), ckpt_path=path)
    # bf16 does not use scales
    make_trainer(tmp_path, max_epochs=2, precision="bf16-mixed").fit(seeded(), loader(), ckpt_path=path)
    Bf16MixedPrecision().load_state_dict(torch.load(path, weights_only=True)["Fp8Precision"])


@silent
def test_with_every_callback(tmp_path: Path) -> None:
    arguments: dict[str, dict[str, Any]] = {
        "Fp8ThroughputMonitor": {"batch_size_fn": lambda batch: len(batch[0])},
        "PrecisionSchedule": {"schedule": {0.5: "bf16"}},
    }
    names = lightning_fp8.callbacks.__all__
    callbacks = [getattr(lightning_fp8, name)(**arguments.get(name, {})) for name in names]
    callbacks += [Averaging()] if Averaging else []
    model, alone = seeded(Convolution), seeded(Convolution)
    trainer = make_trainer(tmp_path, callbacks=callbacks, logger=CSVLogger(tmp_path), enable_progress_bar=True)
    trainer.fit(model, loader(), loader())
    make_trainer(tmp_path).fit(alone, loader(), loader())
    assert torch.equal(torch.stack(model.losses), torch.stack(alone.losses))
