"""Converted models as programs of ``torch.export`` and ``torch.jit``, and what ``torch.onnx.export`` says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import feed_forward_blocks
import pytest
import torch
from pairwise import pairwise
from torch import Tensor, nn

from lightning_fp8 import (
    BlockScaling,
    DelayedScaling,
    MXScaling,
    convert,
    scaling_state,
    weights_unchanged,
)

pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec.*", "ignore:.*legacy TorchScript.*", "ignore:.*deprecated.*")
MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: nn.Sequential(nn.Linear(32, 64), nn.GELU("tanh"), nn.Linear(64, 16)),
    "gated": lambda: feed_forward_blocks.llama(bias=True),
    "plain": lambda: nn.Sequential(nn.Linear(32, 64, bias=False), nn.Tanh(), nn.Linear(64, 16)),
}


def trained(build: Callable[[], nn.Module], **settings: Any) -> tuple[nn.Module, Tensor]:
    """A converted model with scales, in evaluation, and an input that partly exceeds the scales' range."""
    torch.manual_seed(0)
    model = convert(build(), **settings)
    x = torch.randn(2, 5, 32)
    model(x.clone().requires_grad_()).square().mean().backward()
    scaling_state(model).update()
    x[0, 0] *= 3
    return model.eval(), x


def test_an_export_to_onnx_is_refused(tmp_path: Path) -> None:
    model, x = trained(MODELS["plain"])
    with pytest.raises(Exception, match=r"torch\.onnx\.export does not know .*`lightning_fp8\.unconvert\(model\)` fi"):
        torch.onnx.export(model, (x,), tmp_path / "model.onnx", dynamo=False, verbose=False)
    # the old exporter leaves it disabled after an error
    torch.set_autocast_cache_enabled(True)
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(("name", "strict"), [("gated", False), ("mlp", True)])
def test_a_program_is_the_model_and_knows_no_other(name: str, strict: bool, tmp_path: Path) -> None:
    model, x = trained(MODELS[name])
    with torch.no_grad():
        y = model(x)
        program = torch.export.export(model, (x,), strict=strict)
        assert torch.equal(program.module()(x), y)
        torch.export.save(program, tmp_path / "model.pt2")
        for weight in model.parameters():
            weight.mul_(4)
        model(x)
        state = scaling_state(model)
        scale, amax = state.scale.clone(), state.amax.clone()
        assert torch.equal(torch.export.load(tmp_path / "model.pt2").module()(x), y)
    # in the process that loads the program, the handle of a state may be that of any other model
    assert torch.equal(state.scale, scale)
    assert torch.equal(state.amax, amax)


IN_PART = {"overrides": {"*": {"dgrad": "bf16"}, "2": {"wgrad": "bf16"}}}


@pytest.mark.parametrize(
    ("name", "settings", "traced_in"),
    [
        *(
            (name, {"recipe": recipe}, traced_in)
            for name, recipe, traced_in in pairwise(
                [*MODELS], [DelayedScaling(), BlockScaling(), MXScaling()], [torch.enable_grad, torch.no_grad]
            )
        ),
        ("mlp", IN_PART, torch.no_grad),
        ("gated", {"recipe": BlockScaling(), "frozen_weights": "fp8"}, torch.enable_grad),
    ],
)
def test_a_traced_model_is_the_model(name: str, settings: Any, traced_in: Any, tmp_path: Path) -> None:
    """Torch traces again without gradients, and raises if the second program is another one."""
    build = MODELS[name]
    if "frozen_weights" in settings:
        build = lambda: MODELS[name]().requires_grad_(False)  # noqa: E731
    model, x = trained(build, **settings)
    with traced_in():
        torch.jit.save(torch.jit.trace(model, (x,)), tmp_path / "model.pt")
    x.requires_grad_()
    y, again = model(x), torch.jit.load(tmp_path / "model.pt")(x)
    assert torch.equal(again, y)
    gradients = [torch.autograd.grad(output.square().sum(), x)[0] for output in (y, again)]
    assert torch.equal(*gradients)
    assert gradients[0].norm() > 0


def test_a_program_is_not_traced_with_a_cast_that_is_kept() -> None:
    model, x = trained(MODELS["mlp"])
    with torch.no_grad():
        with weights_unchanged(model):
            first = torch.jit.trace(model, (x,))
            model(x)
            second = torch.jit.trace(model, (x,))
        for weight in model.parameters():
            weight.mul_(2)
        for program in (first, second):
            assert torch.equal(program(x), model(x))


def test_what_would_record_is_refused() -> None:
    model, x = trained(MODELS["plain"])
    model.train()
    for export in (lambda: torch.export.export(model, (x,)), lambda: torch.jit.trace(model, (x,))):
        with pytest.raises(RuntimeError, match="cannot record amaxes"):
            export()
    with pytest.raises(RuntimeError, match=r"torch\.jit\.script cannot compile the FP8 layer '0'"):
        torch.jit.script(model)
