"""One instance of a callback or plugin in several fits: each begins anew, and what the user did by hand stays."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lit import Regression, loader, make_trainer, seeded, warned
from torch import Tensor, nn
from watched_models import Vanishing, only

from lightning_fp8 import Fp8Monitor, Fp8Precision, convert, scaling_state, unconvert
from lightning_fp8.conversion import fall_back
from lightning_fp8.plugins import Bf16MixedPrecision, Bf16TruePrecision

COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
}


def fit(path: Path, model: Any, *callbacks: Any, epochs: int = 4, **options: Any) -> Any:
    # a step in each epoch
    make_trainer(path, callbacks=list(callbacks), max_epochs=epochs, **options).fit(model, loader(16))
    return model


def monitor(action: Any = "fallback") -> Fp8Monitor:
    return Fp8Monitor(2, action, cooldown=4, thresholds=only(underflowed=0.5), checks_in_a_row=1)


class VanishingAtFirst(Vanishing):
    """In trouble in its first two steps."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if self.trainer.global_step < 2 else Regression.forward(self, x)


@pytest.mark.parametrize("second", ["another model", "the same model"])
def test_a_cooldown_is_that_of_its_fit(second: str, tmp_path: Path) -> None:
    callback, model = monitor(), seeded(VanishingAtFirst)
    with pytest.warns(UserWarning, match="In bf16 from now on: net.0"):
        fit(tmp_path, model, callback)
    assert scaling_state(model).fallbacks == ("net.0",)
    if second == "another model":
        model = convert(seeded())
    fall_back(model, "net.0")
    fit(tmp_path, model, callback, epochs=10)
    assert scaling_state(model).fallbacks == ("net.0",)


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(32, 16), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.q(x) + self.k(x)


class VanishingPair(VanishingAtFirst):
    def __init__(self) -> None:
        super().__init__()
        self.net = Pair()  # type: ignore[assignment]


def test_a_layer_that_shares_its_input_and_fell_back_by_hand_stays(tmp_path: Path) -> None:
    model = convert(seeded(VanishingPair))
    fall_back(model, "net.k")
    with pytest.warns(UserWarning, match="With current scaling from now on: net.q.$"):
        fit(tmp_path, model, monitor("current"))
    state = scaling_state(model)
    assert state.precisions[state.module_names.index("net.q")].is_current
    fresh = convert(seeded(VanishingPair))
    fall_back(fresh, "net.k")
    with pytest.warns(UserWarning, match="With current scaling from now on: net.q.$"):
        fit(tmp_path, fresh, monitor("current"), epochs=8)
    state = scaling_state(fresh)
    assert state.fallbacks == ("net.k",)
    assert not state.precisions[state.module_names.index("net.q")].is_current


KEEPING = {
    "fp8-delayed": lambda: Fp8Precision(keep_fp32=("net.0",)),
    "bf16-mixed": lambda: Bf16MixedPrecision(keep_fp32=("net.0",)),
    "bf16-true": lambda: Bf16TruePrecision(keep_fp32=("net.0",)),
}


@pytest.mark.parametrize("precision", KEEPING)
@pytest.mark.parametrize("is_same", [True, False])
def test_a_forward_that_was_patched_between_two_fits_stays(precision: str, is_same: bool, tmp_path: Path) -> None:
    plugin, model = KEEPING[precision](), seeded()
    fit(tmp_path, model, plugins=plugin, epochs=1)
    layer, calls, before = model.net[0], [], model.net[0].forward

    def patched(x: Tensor) -> Tensor:
        calls.append(x.dtype)
        return 2 * before(x)

    layer.forward = patched
    fit(tmp_path, model, plugins=plugin if is_same else type(plugin)(), epochs=3)
    assert len(calls) == 3
    x = torch.randn(4, 32)
    in_fp32, weights = F.linear(x, layer.weight.float(), layer.bias.float()), (layer.weight, layer.bias)
    with torch.autocast("cpu", torch.bfloat16, enabled=precision != "bf16-true"):
        x = x if precision != "bf16-true" or is_same else x.bfloat16()
        y, in_bf16 = layer(x), F.linear(x.to(layer.weight.dtype), *weights)
    # the run without `keep_fp32` has ended it also inside of what the user made of it
    assert torch.equal(y, 2 * (in_fp32 if is_same else in_bf16))


@pytest.mark.parametrize("precision", KEEPING)
def test_a_forward_that_was_taken_away_between_two_fits(precision: str, tmp_path: Path) -> None:
    plugin, model = KEEPING[precision](), seeded()
    fit(tmp_path, model, plugins=plugin, epochs=1)
    del model.net[0].forward
    fit(tmp_path, model, plugins=plugin, epochs=1)
    fit(tmp_path, model, plugins=type(plugin)(), epochs=1)
    assert "forward" not in vars(model.net[0])


@pytest.mark.parametrize("how", COPIES)
def test_copies_are_released_too(how: str) -> None:
    model = Bf16MixedPrecision(keep_fp32=("net.0",)).convert_module(seeded())
    copied = COPIES[how](model)
    assert "forward" in vars(copied.net[0])
    Bf16MixedPrecision().convert_module(copied)
    assert "forward" not in vars(copied.net[0])
    assert "forward" in vars(model.net[0])


def test_a_patched_forward_outlives_the_class_that_it_was_made_for(tmp_path: Path) -> None:
    class Attending(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(32, 2, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            x = x[:, None].expand(-1, 3, -1)
            return super().forward(self.attention(x, x, x, need_weights=False)[0].mean(1))

    model, calls = seeded(Attending), []
    fit(tmp_path, model, plugins=Fp8Precision(), epochs=1)

    def patch(layer: nn.Module) -> None:
        before = layer.forward

        def patched(*args: Any, **kwargs: Any) -> Any:
            calls.append(type(layer))
            return before(*args, **kwargs)

        layer.forward = patched

    patch(model.net[0]), patch(model.attention)
    fit(tmp_path, model, plugins=Bf16MixedPrecision(), epochs=2)
    assert calls == 2 * [nn.MultiheadAttention, nn.Linear]


def test_trained_and_frozen_weights_and_fallbacks_stay_as_they_were_set(tmp_path: Path) -> None:
    plugin, model = Fp8Precision(overrides={"net.2": {"wgrad": "bf16"}}), seeded()
    fit(tmp_path, model, plugins=plugin, epochs=1)
    fall_back(model, "net.0")
    model.net[0].weight.requires_grad_(False)
    fit(tmp_path, model, plugins=plugin, epochs=1)
    assert scaling_state(model).fallbacks == ("net.0",)
    assert [parameter.requires_grad for parameter in model.parameters()] == [False, True, True, True]
    # by hand it can be undone
    fit(tmp_path, convert(unconvert(model)), plugins=plugin, epochs=1)
    assert scaling_state(model).fallbacks == ()


class Disagreeing(Regression):
    def forward(self, x: Tensor) -> Tensor:
        q = x[:, None, None].float()
        return super().forward(F.scaled_dot_product_attention(q, q.bfloat16(), q)[:, 0, 0])


def test_each_model_is_told_of_its_dtypes(tmp_path: Path) -> None:
    plugin = Bf16TruePrecision(dtype_mismatch="warn")
    models = [seeded(Disagreeing), seeded(Disagreeing)]
    runs = [partial(fit, tmp_path, model, plugins=plugin) for model in (*models, models[1])]
    assert [len(warned("scaled_dot", run)) for run in runs] == [1, 1, 0]
