"""``CurrentScaling``: every tensor is scaled by its own values, in every step, mode and half."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from feed_forward_blocks import converted, llama, part_by_part
from fp8_numpy import code_values, saturating_cast
from lightning.pytorch.loggers import CSVLogger
from lit import loader, make_trainer, seeded
from processes import run_processes
from scales_in_numpy import largest, scale_of
from small_models import small_mlp
from torch import Tensor, nn

from lightning_fp8 import CurrentScaling, DelayedScaling, ScaleFactorLogger, convert, load_scales, ops, scaling_state
from lightning_fp8.ops.operand import Slot
from lightning_fp8.scaling.recipe import Recipe

SIZES = (16, 32, 48)
# the amaxes of the steps, which grow and shrink by far more than FP8's range
MAGNITUDES = (1.0, 100.0, 1e5, 1e-4, 1.0)


def in_fp8(x: Tensor, fmt: str, margin: int = 0) -> np.ndarray:
    """A tensor quantized to FP8 with the scale of its own values, in fp64, from the formats' definitions."""
    values = x.detach().numpy()
    scale = scale_of(largest(values), fmt, margin)
    return code_values(fmt)[saturating_cast(values, scale, fmt)] / np.float64(scale)


def layer(recipe: Recipe, inputs: int, outputs: int) -> nn.Linear:
    torch.manual_seed(1)
    return convert(nn.Linear(inputs, outputs, bias=False), recipe)  # type: ignore[return-value]


def check_products(recipe: CurrentScaling) -> None:
    """Five steps of one layer: outputs and gradients are the products of the quantized operands."""
    rows, inputs, outputs = SIZES
    model = layer(recipe, inputs, outputs)
    gradient = "e5m2" if recipe.fp8_format == "HYBRID" else "e4m3"
    generator = torch.Generator().manual_seed(0)
    for magnitude in MAGNITUDES:
        x = (torch.randn(rows, inputs, generator=generator) * magnitude).requires_grad_()
        dy = torch.randn(rows, outputs, generator=generator) * magnitude
        y = model(x)
        y.backward(dy)
        x_, w, g = in_fp8(x, "e4m3", recipe.margin), in_fp8(model.weight, "e4m3"), in_fp8(dy, gradient, recipe.margin)
        assert x.grad is not None
        assert model.weight.grad is not None
        for got, expected in ((y, x_ @ w.T), (x.grad, g @ w), (model.weight.grad, g.T @ x_)):
            error = np.abs(got.detach().numpy() - expected).max()
            assert error < 2e-6 * np.abs(expected).max(), magnitude
        scaling_state(model).update()
        with torch.no_grad():
            model.weight.add_(model.weight.grad, alpha=1e-3 / magnitude**2)
            model.weight.grad = None


@pytest.mark.parametrize("recipe", [CurrentScaling(), CurrentScaling(3, "E4M3")], ids=str)
def test_products_of_own_scales(recipe: CurrentScaling) -> None:
    check_products(recipe)


@pytest.mark.parametrize("recipe", [CurrentScaling(), CurrentScaling(3, "E4M3")], ids=str)
def test_products_of_own_scales_with_the_kernels(recipe: CurrentScaling, cuda_half: Any) -> None:
    check_products(recipe)
    # one launch that measures and one that casts, for input and gradient of each step
    assert sum(count for name, count in cuda_half.items() if "cast_transpose" in name) >= 4 * len(MAGNITUDES)


@pytest.mark.parametrize("half", ["reference", "kernels"])
@pytest.mark.parametrize("margin", [0, 2])
def test_a_gated_block(half: str, margin: int, request: pytest.FixtureRequest) -> None:
    """Fused, as in Llama: the tensor cast between the products has its own scale too, as in separate layers."""
    if half == "kernels":
        request.getfixturevalue("cuda_half")
    fused = converted(llama, recipe=CurrentScaling(margin))
    found = []
    for block in (part_by_part(fused), fused):
        x = torch.randn(12, 32, generator=torch.Generator().manual_seed(2)).mul_(50).requires_grad_()
        y = block(x)
        y.square().sum().backward()
        found.append([y, x.grad, *(parameter.grad for parameter in block.parameters())])
    for one, other in zip(*found, strict=True):
        # the products may be summed in a different order
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5 * one.detach().abs().max().item())


def test_a_margin_is_kept_free() -> None:
    """Power-of-two operands are exact, so the scale shows in which numbers underflow."""
    x = torch.tensor([[1.0, 2.0**-16, 2.0**-17, 2.0**-18] + [0.0] * 12])
    alive = []
    for margin in (0, 1, 4):
        model = layer(CurrentScaling(margin), 16, 16)
        nn.init.eye_(model.weight)
        with torch.no_grad():
            alive.append(int((model(x)[0, :4] != 0).sum()))
    # 448 * 2**-18 = 2**-9.2 is above 2**-10, half of the smallest number, so it survives; a margin halves it per unit
    assert alive == [4, 3, 1]


def test_a_margin_above_the_largest_fp32_number() -> None:
    """The amax times the margin's factor is limited to fp32's range, so the scale stays below 1 and keeps the order of
    numbers that scale 1 would clip."""
    x = torch.tensor([[3e38, 1.5e38, -7.5e37, 1e37] + [0.0] * 12])
    # float(2**128 - 2**104) is the largest fp32 number
    scale = np.float32(np.float32(448) / np.float32(2.0**128 - 2.0**104))
    expected = code_values("e4m3")[saturating_cast(x.numpy(), scale, "e4m3")] / np.float64(scale)
    state = scaling_state(layer(CurrentScaling(2), 16, 16))
    history, own = state.model.how_cast(state.precisions[0], "")
    slot = Slot(state.scale, history, state.indices[0], "e4m3", state, True, own=own)
    rows, _, scale_inv = ops.cast(x, slot, "none", "rows")
    np.testing.assert_allclose(code_values("e4m3")[rows.numpy()] * np.float64(scale_inv), expected, rtol=1e-6)


def saturated(recipe: Recipe) -> list[list[float]]:
    """The share of clipped numbers of input and gradient in each step; at step 3 they grow a hundredfold."""
    model = layer(recipe, 16, 16)
    state, shares = scaling_state(model), []
    for step in range(6):
        state.cast_counts.start("test")
        size = 100.0 if step >= 3 else 1.0
        generator = torch.Generator().manual_seed(step)
        model(torch.randn(64, 16, generator=generator) * size).backward(torch.randn(64, 16, generator=generator) * size)
        counts = state.cast_counts.values
        assert counts is not None
        shares.append((counts[:2, 1] / counts[:2, 0]).tolist())
        state.cast_counts.stop("test")
        state.update()
    return shares


def test_growth_within_a_step_is_clipped_by_delayed_scaling_only() -> None:
    for algorithm in ("max", "most_recent"):
        delayed = saturated(DelayedScaling(amax_compute_algo=algorithm))  # type: ignore[arg-type]
        # in the step of the growth; in the others no more than the noise of an amax
        assert min(delayed[3]) > 0.9
        assert max(max(step) for at, step in enumerate(delayed) if at != 3) < 0.01
    assert saturated(CurrentScaling()) == [[0.0, 0.0]] * 6


# states and checkpoints


def trained_state(recipe: Recipe) -> Any:
    model = convert(small_mlp(), recipe)
    model(torch.randn(8, 32)).sum().backward()
    scaling_state(model).update()
    return scaling_state(model)


def test_a_state_has_no_scales_in_its_checkpoint() -> None:
    entries = trained_state(CurrentScaling()).state_dict()
    assert {tuple(entry) for entry in entries.values()} == {("nonfinite_steps", "in_fp8")}


@pytest.mark.parametrize(
    ("saved", "loading"),
    [
        (CurrentScaling(), CurrentScaling(1)),
        (DelayedScaling(), CurrentScaling()),
        (CurrentScaling(), DelayedScaling(amax_history_len=3)),
    ],
)
def test_a_run_goes_on_with_another_recipe(saved: Recipe, loading: Recipe) -> None:
    state = trained_state(saved)
    state.nonfinite_steps[1] = 3
    other = trained_state(loading)
    other.load_state_dict(state.state_dict())
    assert other.nonfinite_steps[: other.delayed].tolist() == state.nonfinite_steps[: state.delayed].tolist()
    # histories that are not in the checkpoint start anew
    assert not other.has_scales if loading.from_history else True
    half = {name: {"scale": torch.ones(())} for name in state.state_dict()}
    with pytest.raises(ValueError, match="lacks the tensors amax, amax_history, nonfinite_steps"):
        other.load_state_dict(half)


def test_load_scales_takes_such_a_checkpoint() -> None:
    entries = {"scaling": trained_state(CurrentScaling()).state_dict()}
    model = load_scales(small_mlp(), entries, CurrentScaling())
    assert scaling_state(model).recipe == CurrentScaling()


# in a Trainer


def test_a_model_of_another_recipe_is_refused_by_the_string(tmp_path: Path) -> None:
    model = seeded()
    convert(model, CurrentScaling(1))
    with pytest.raises(ValueError, match=r"converted with CurrentScaling\(margin=1.*precision='fp8-current'"):
        make_trainer(tmp_path).fit(model, loader())
    make_trainer(tmp_path, precision="fp8-current").fit(model, loader())
    assert scaling_state(model).recipe == CurrentScaling(1)


def test_the_logged_scale_is_the_one_that_was_used(tmp_path: Path) -> None:
    model, inputs = seeded(), []
    model.net[0].register_forward_pre_hook(lambda module, args: inputs.append(args[0].detach().float().numpy()))
    logger, watching = CSVLogger(tmp_path), ScaleFactorLogger(every_n_steps=1)
    make_trainer(
        tmp_path, precision="fp8-current", max_steps=3, callbacks=[watching], logger=logger, log_every_n_steps=1
    ).fit(model, loader())
    with open(Path(logger.log_dir) / "metrics.csv") as file:
        logged = [float(row["fp8/net.0.input/scale"]) for row in csv.DictReader(file)]
    assert logged == [float(scale_of(largest(x), "e4m3")) for x in inputs]


# across processes

SPLIT = """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from lightning_fp8 import CurrentScaling

mesh = init_device_mesh("cpu", (world,))
columns, rows = nn.Linear(16, 32, bias=False), nn.Linear(32, 16, bias=False)
with torch.no_grad():
    # the two parts of what goes from one to the other differ a thousandfold, and those of its gradient the other way
    columns.weight[:16] *= 1000
    rows.weight[:, 16:] *= 1000
model = convert(nn.Sequential(columns, rows), CurrentScaling())
rows_before = rows.weight.detach().clone()
parallelize_module(model, mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})
hidden = {}
columns.register_forward_hook(lambda module, args, y: hidden.update(y=y))
x = torch.randn(8, 16, requires_grad=True)
if COMPILED:
    for layer in model:
        layer.compile(backend="aot_eager")
y = model(x)
y.backward(torch.ones_like(y))
local = lambda t: (t.to_local() if hasattr(t, "to_local") else t).detach().clone()
result |= {"x": x.detach(), "y": y.detach() + 0, "h": local(hidden["y"]), "rows": rows_before}
result |= {"dw": local(columns.weight.grad)}
"""


@pytest.mark.parametrize("compiled", [False, True])
def test_a_split_tensor_has_the_scale_of_the_whole(compiled: bool, tmp_path: Path) -> None:
    ranks = run_processes(SPLIT.replace("COMPILED", str(compiled)), tmp_path)
    h = torch.cat([rank["h"] for rank in ranks], dim=1)
    assert h[:, :16].abs().max() > 100 * h[:, 16:].abs().max()
    # each process scales its own part of a weight
    w = np.concatenate([in_fp8(part, "e4m3") for part in ranks[0]["rows"].chunk(2, 1)], axis=1)
    expected = in_fp8(h, "e4m3") @ w.T
    apart = np.concatenate([in_fp8(part, "e4m3") for part in h.chunk(2, 1)], axis=1) @ w.T
    assert np.abs(expected - apart).max() > 1e-3 * np.abs(expected).max()
    ones = in_fp8(torch.ones(8, 16), "e5m2")
    dh = torch.from_numpy((ones @ w).astype(np.float32))
    dw = in_fp8(dh, "e5m2").T @ in_fp8(ranks[0]["x"], "e4m3")
    dw_apart = in_fp8(dh[:, :16], "e5m2").T @ in_fp8(ranks[0]["x"], "e4m3")
    assert np.abs(dw[:16] - dw_apart).max() > 1e-3 * np.abs(dw[:16]).max()
    for number, rank in enumerate(ranks):
        assert np.abs(rank["y"].numpy() - expected).max() < 1e-5 * np.abs(expected).max()
        part = dw[16 * number : 16 * (number + 1)]
        assert np.abs(rank["dw"].numpy() - part).max() < 1e-5 * np.abs(part).max()
