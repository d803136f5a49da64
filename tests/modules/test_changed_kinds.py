"""Weights that change after the conversion to a dtype or class that FP8 layers do not take: an error names both."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import feed_forward_blocks
import pytest
import torch
from experts import WIDTH, experts, routing
from torch import Tensor, nn
from torch.func import functional_call

from lightning_fp8 import convert, unconvert, weights_unchanged
from lightning_fp8.conversion import fall_back


class Other(nn.Parameter):
    """A parameter with operators of its own, which do nothing else."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.core = nn.MultiheadAttention(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.core(x, x, x, need_weights=False)[0]  # type: ignore[no-any-return]


class Routed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = experts()

    def forward(self, x: Tensor) -> Tensor:
        return self.experts(x, *routing())  # type: ignore[no-any-return]


# the model, the path of a weight and the name of its layer
MODELS: dict[str, tuple[Callable[[], nn.Module], str, str]] = {
    "linear": (lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH)), "0.weight", "0"),
    "feed-forward": (lambda: feed_forward_blocks.sequential(nn.GELU()), "3.weight", "3"),
    "Conv1D": (feed_forward_blocks.gpt2, "0.c_proj.weight", "0.c_proj"),
    "attention": (Attention, "core.in_proj_weight", "core.in_proj"),
    "experts": (Routed, "experts.down_proj", "experts.down_proj.0"),
}


def change(model: nn.Module, path: str, to: Any) -> None:
    owner, _, name = path.rpartition(".")
    weight = model.get_parameter(path)
    if isinstance(to, torch.dtype):
        weight.data = weight.data.to(to)
    else:
        setattr(model.get_submodule(owner), name, to(weight.detach()))


@pytest.mark.parametrize(
    ("kind", "to"), [("linear", torch.float64), *zip(MODELS, itertools.cycle([Other, torch.float8_e4m3fn]))], ids=str
)
def test_an_error_names_the_layer_and_both_kinds(kind: str, to: Any) -> None:
    build, path, name = MODELS[kind]
    now = f"{to}".removeprefix("torch.") + r" \(Parameter\)" if isinstance(to, torch.dtype) else r"float32 \(Other\)"
    message = (
        rf"^'{name}': the weight was float32 \(Parameter\) when .* and is {now} now.*`ignore_modules`, which makes"
    )
    for training in (True, False):
        model, x = convert(build(), min_features=0).train(training), torch.randn(12, WIDTH)
        expected = model(x)
        kept = copy.deepcopy(model.state_dict())
        change(model, path, to)
        with pytest.raises(TypeError, match=message):
            model(x)
        with pytest.raises(TypeError, match=message), weights_unchanged(model), torch.no_grad():
            copy.deepcopy(model)(x)
        # the remedy
        change(model, path, torch.float32 if isinstance(to, torch.dtype) else nn.Parameter)
        model.load_state_dict(kept)
        torch.testing.assert_close(model(x), expected)


def test_the_bias_and_lent_weights() -> None:
    model, x = convert(nn.Sequential(nn.Linear(32, 32))), torch.randn(8, 32)
    expected = model(x)
    lent = {"0.weight": Other(model[0].weight.detach())}  # type: ignore[union-attr]
    with pytest.raises(TypeError, match=r"'0': the weight was float32 \(Parameter\) .* is float32 \(Other\) now"):
        functional_call(model, lent, (x,))
    torch.testing.assert_close(model(x), expected)
    change(model, "0.bias", Other)
    with pytest.raises(TypeError, match=r"'0': the bias was plain .* is float32 \(Other\) now"):
        model(x)
    # a layer that fell back multiplies as a plain one does
    fall_back(model, "0")
    torch.testing.assert_close(model(x), unconvert(model)(x))
