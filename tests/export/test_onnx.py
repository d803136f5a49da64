"""Converted models in ONNX, run by ONNX's evaluator and by onnxruntime, and as programs of ``torch.export``."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import feed_forward_blocks
import onnx
import onnxruntime
import pytest
import torch
from onnx.reference import ReferenceEvaluator
from torch import Tensor, nn
from torch.onnx._internal.exporter._registration import onnxscript_apis
from transformers.pytorch_utils import Conv1D

from lightning_fp8 import convert, export_onnx, fall_back, scaling_state

FP8 = 17
pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec.*", "ignore:.*legacy TorchScript.*", "ignore:.*deprecated.*")


@pytest.fixture(autouse=True, scope="module")
def _operators_are_read_once() -> Iterator[None]:
    # torch reads the source of each of its operators for every export, which takes half a second
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(onnxscript_apis, "get_torchlib_ops", functools.cache(onnxscript_apis.get_torchlib_ops))
        yield


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(32, 64, bias=False), nn.Linear(32, 64), nn.Linear(64, 32)
        self.act = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.gate(x)) * self.up(x))


class Cross(nn.Module):
    # its weight is too large for the optimizer's own constant folding
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(64, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x[:, :3], x[:, :3], need_weights=False)[0]


def packed() -> nn.Module:
    return feed_forward_blocks.phi3()


def conv1d() -> nn.Module:
    return nn.Sequential(Conv1D(64, 32), nn.Tanh(), nn.Linear(64, 16))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: nn.Sequential(nn.Linear(32, 64), nn.GELU("tanh"), nn.Linear(64, 16)),
    "gated": Gated,
    "packed": packed,
    "plain": lambda: nn.Sequential(nn.Linear(32, 64, bias=False), nn.Tanh(), nn.Linear(64, 16)),
    "conv1d": conv1d,
    "cross": Cross,
    # onnxruntime removes a ReLU followed by QuantizeLinear
    "relu": lambda: nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 16)),
}


def trained(build: Callable[[], nn.Module], shape: tuple[int, ...] = (2, 5, 32)) -> tuple[nn.Module, Tensor]:
    """A converted model with scales, in evaluation, and an input that partly exceeds the scales' range."""
    torch.manual_seed(0)
    model = convert(build())
    x = torch.randn(shape)
    model(x).square().mean().backward()
    scaling_state(model).update()
    x[0, 0] *= 3
    return model.eval(), x


def run(path: Path, x: Tensor, by: str) -> Tensor:
    if by == "onnx":
        (y,) = ReferenceEvaluator(str(path)).run(None, {"x": x.numpy()})
    else:
        options = onnxruntime.SessionOptions()
        # onnxruntime's own passes take every quantized operand for an integer
        options.add_session_config_entry("session.disable_quant_qdq", "1")
        session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        (y,) = session.run(None, {"x": x.numpy()})
    return torch.from_numpy(y.astype("float32"))


@pytest.mark.parametrize("name", MODELS)
def test_the_file_computes_what_the_model_does(name: str, tmp_path: Path) -> None:
    model, x = trained(MODELS[name], (2, 5, 64 if name == "cross" else 32))
    path = tmp_path / "model.onnx"
    sizes = ({0: torch.export.Dim("batch"), 1: torch.export.Dim("length", min=4)},)
    export_onnx(model, (x,), path, input_names=["x"], dynamic_shapes=sizes if name == "plain" else None)
    onnx.checker.check_model(onnx.load(path), full_check=True)
    if name == "plain":
        x = torch.randn(3, 7, 32)
    with torch.no_grad():
        y = model(x)
    for by in ("onnx", "onnxruntime"):
        torch.testing.assert_close(run(path, x, by), y, rtol=0, atol=1e-6 * y.abs().max().item(), msg=f"{name}, {by}")


def test_weights_are_codes_and_scales_are_those_of_the_state(tmp_path: Path) -> None:
    model, x = trained(MODELS["plain"])
    path = tmp_path / "model.onnx"
    export_onnx(model, (x,), path)
    tensors = onnx.load(path).graph.initializer
    assert {tuple(one.dims): one.data_type for one in tensors if len(one.dims) == 2} == {(64, 32): FP8, (16, 64): FP8}
    for index, shape in ((0, (64, 32)), (2, (16, 64))):
        weight = model[index].weight  # type: ignore[index]
        (stored,) = [onnx.numpy_helper.to_array(one) for one in tensors if tuple(one.dims) == shape]
        expected = (weight * (448 / weight.abs().max())).to(torch.float8_e4m3fn)
        assert torch.equal(torch.from_numpy(stored.view("uint8").copy()), expected.view(torch.uint8))
    numbers = {float(onnx.numpy_helper.to_array(one)) for one in tensors if one.data_type == 1 and not one.dims}
    state = scaling_state(model)
    rows = [state.names.index(f"{index}.{role}") for index in (0, 2) for role in ("input", "weight")]
    assert set((1 / state.scale[rows]).tolist()) <= numbers
    assert all(rows.prepared is None for layer in (model[0], model[2]) for rows in layer.fp8.values())  # type: ignore[index]


def test_under_autocast_results_are_rounded_as_in_torch(tmp_path: Path) -> None:
    model, x = trained(MODELS["gated"])
    path = tmp_path / "model.onnx"
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        y = model(x)
        export_onnx(model, (x,), path, input_names=["x"])
    # a sum in another order may round to the neighbouring number, and its cast to the next code
    assert (run(path, x, "onnx") - y.float()).norm() < 2e-3 * y.float().norm()


def test_a_layer_that_fell_back_is_a_plain_one(tmp_path: Path) -> None:
    model, x = trained(MODELS["plain"])
    fall_back(model, "2")
    path = tmp_path / "model.onnx"
    export_onnx(model, (x,), path, input_names=["x"])
    kinds = {tuple(one.dims): one.data_type for one in onnx.load(path).graph.initializer if len(one.dims) == 2}
    assert sorted(kinds.values()) == [1, FP8]
    with torch.no_grad():
        torch.testing.assert_close(run(path, x, "onnx"), model(x), rtol=1e-5, atol=1e-6)


def untrained() -> nn.Module:
    return convert(MODELS["plain"]()).eval()


def computed_weight() -> nn.Module:
    model = nn.Sequential(nn.Linear(32, 32))
    model[0].weight = nn.Parameter(torch.randn(64, 64)[::2, ::2])
    model = trained(lambda: model)[0]
    return model


def frozen() -> nn.Module:
    model = trained(MODELS["plain"])[0].requires_grad_(False)
    return convert(model, frozen_weights="fp8")


@pytest.mark.parametrize(
    ("build", "options", "message"),
    [
        (untrained, {}, "export: 2 tensors have no history.*0.input, 2.input"),
        (lambda: trained(MODELS["plain"])[0].train(), {}, "export_onnx: the model is in training"),
        (lambda: trained(MODELS["plain"])[0], {"opset_version": 18}, "`opset_version` must be at least 20, got 18"),
        (lambda: MODELS["plain"]().eval(), {}, "has no layers that run in FP8"),
        (computed_weight, {}, "the weights of 0 are not stored as separate parameters"),
        (frozen, {}, r'convert\(model, frozen_weights="master"\)'),
    ],
)
def test_what_cannot_be_right_is_refused(
    build: Callable[[], nn.Module], options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        export_onnx(build(), (torch.randn(2, 32),), tmp_path / "model.onnx", **options)
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("dynamo", [True, False])
def test_torchs_own_export_names_ours(dynamo: bool, tmp_path: Path) -> None:
    model, x = trained(MODELS["plain"])
    with pytest.raises(Exception, match=r"`lightning_fp8.export_onnx\(model, args, path\)`"):
        torch.onnx.export(model, (x,), tmp_path / "model.onnx", dynamo=dynamo, verbose=False)
    # the old exporter leaves it disabled after an error
    torch.set_autocast_cache_enabled(True)
    assert not [*tmp_path.iterdir()]


# --- torch.export and torch.jit ---


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
def test_a_program_without_scales_is_said_once(strict: bool) -> None:
    model = untrained()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        program = torch.export.export(model, (torch.randn(4, 32),), strict=strict)
    said = [str(one.message) for one in caught if "lightning_fp8" in str(one.message)]
    assert len(said) == 1
    assert "('0', '2') is exported without scales from training" in said[0]
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
