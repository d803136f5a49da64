"""Converted models as programs of ``torch.export`` and ``torch.jit``, and what ``torch.onnx.export`` says."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import feed_forward_blocks
import pytest
import torch
from torch import Tensor, nn

from lightning_fp8 import convert, scaling_state

pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec.*", "ignore:.*legacy TorchScript.*", "ignore:.*deprecated.*")
MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: nn.Sequential(nn.Linear(32, 64), nn.GELU("tanh"), nn.Linear(64, 16)),
    "gated": lambda: feed_forward_blocks.llama(bias=True),
    "plain": lambda: nn.Sequential(nn.Linear(32, 64, bias=False), nn.Tanh(), nn.Linear(64, 16)),
}


def trained(build: Callable[[], nn.Module]) -> tuple[nn.Module, Tensor]:
    """A converted model with scales, in evaluation, and an input that partly exceeds the scales' range."""
    torch.manual_seed(0)
    model = convert(build())
    x = torch.randn(2, 5, 32)
    model(x).square().mean().backward()
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


def test_a_traced_model_is_the_model(tmp_path: Path) -> None:
    model, x = trained(MODELS["mlp"])
    with torch.no_grad():
        y = model(x)
        torch.jit.save(torch.jit.trace(model, (x,)), tmp_path / "model.pt")
        assert torch.equal(torch.jit.load(tmp_path / "model.pt")(x), y)


@pytest.mark.parametrize("strict", [False, True])
def test_a_model_that_was_never_trained_is_exported_as_it_evaluates(strict: bool) -> None:
    model = convert(MODELS["plain"]()).eval()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="lightning_fp8")
        program = torch.export.export(model, (torch.randn(4, 32),), strict=strict)
    x = 100 * torch.randn(4, 32)
    with torch.no_grad():
        assert torch.equal(program.module()(x), model(x))


def test_what_would_record_is_refused() -> None:
    model, x = trained(MODELS["plain"])
    model.train()
    for export in (lambda: torch.export.export(model, (x,)), lambda: torch.jit.trace(model, (x,))):
        with pytest.raises(RuntimeError, match="cannot record amaxes"):
            export()
    with pytest.raises(RuntimeError, match=r"torch\.jit\.script cannot compile the FP8 layer '0'"):
        torch.jit.script(model)
