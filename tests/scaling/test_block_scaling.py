"""``BlockScaling``: each block with the scale of its own values, in every step, mode and half."""

from __future__ import annotations

import copy
import warnings
from csv import DictReader
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from feed_forward_blocks import converted, llama, part_by_part
from fp8_numpy import cast_in_blocks, code_values
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lit import loader, make_trainer, same, seeded
from processes import run_processes
from small_models import small_mlp
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_fp8 import (
    BlockScaling,
    CurrentScaling,
    DelayedScaling,
    QuantizationProbe,
    RunRecord,
    ScaleFactorLogger,
    ScaleWatchdog,
    convert,
    describe,
    scaling_state,
    weights_unchanged,
)
from lightning_fp8.export.write import static_scales
from lightning_fp8.scaling.recipe import as_recipe

RECIPES = [BlockScaling(), BlockScaling(power_of_2_scales=True)]
# tokens, inputs, outputs: rows and columns that end within a block, and several blocks each way
SIZES = [(16, 32, 48), (200, 300, 136)]


def spread(*shape: int, seed: int) -> Tensor:
    """Numbers whose blocks differ by powers of ten: one scale for all of them would lose most."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator) * 10.0 ** torch.randint(-3, 4, shape, generator=generator)


def in_fp8(x: Tensor, rows: int, recipe: BlockScaling) -> np.ndarray:
    """What FP8 makes of a tensor whose blocks are ``rows`` x 128, in fp64."""
    codes, scale_inv = cast_in_blocks(x.detach().float().numpy(), "e4m3", rows, power_of_2=recipe.power_of_2_scales)
    scales = scale_inv.astype(np.float64).repeat(rows, 0).repeat(128, 1)[: x.shape[0], : x.shape[1]]
    return code_values("e4m3")[codes] * scales


def linear(recipe: Any, inputs: int, outputs: int, bias: bool = False) -> nn.Linear:
    torch.manual_seed(1)
    return convert(nn.Linear(inputs, outputs, bias), recipe)  # type: ignore[return-value]


def check_products(recipe: BlockScaling, sizes: tuple[int, int, int]) -> None:
    """Output and gradients of one layer are products of what FP8 makes of the operands, each in blocks along its K."""
    tokens, inputs, outputs = sizes
    model = linear(recipe, inputs, outputs, bias=True)
    with torch.no_grad():
        model.weight.copy_(spread(outputs, inputs, seed=2))
    x, dy = spread(tokens, inputs, seed=3).requires_grad_(), spread(tokens, outputs, seed=4)
    y = model(x)
    y.backward(dy)
    w = in_fp8(model.weight, 128, recipe)
    # along the tokens, inputs and gradients have other blocks than along their features
    expected = {
        "y": in_fp8(x, 1, recipe) @ w.T + model.bias.detach().numpy(),
        "dx": in_fp8(dy, 1, recipe) @ w,
        "dw": in_fp8(dy.T, 1, recipe) @ in_fp8(x.T, 1, recipe).T,
        "db": dy.numpy().astype(np.float64).sum(0),
    }
    assert x.grad is not None
    assert model.weight.grad is not None
    assert model.bias.grad is not None
    found = {"y": y.detach(), "dx": x.grad, "dw": model.weight.grad, "db": model.bias.grad}
    for name, value in expected.items():
        error = np.abs(found[name].numpy() - value).max()
        assert error < 2e-6 * np.abs(value).max(), name


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_products_of_blocks(recipe: BlockScaling, sizes: tuple[int, int, int]) -> None:
    check_products(recipe, sizes)


def test_products_of_blocks_where_operands_are_k_major(cuda_half: Any) -> None:
    check_products(BlockScaling(), SIZES[1])


def test_what_is_logged_is_the_largest_value_and_its_scale() -> None:
    for recipe in RECIPES:
        model = linear(recipe, 300, 136)
        x, dy = spread(40, 300, seed=5), spread(40, 136, seed=6)
        model(x.requires_grad_()).backward(dy)
        state = scaling_state(model)
        state.update()
        amax = [float(tensor.detach().abs().max()) for tensor in (x, dy, model.weight)]
        assert [*state.amax_history[0].tolist(), float(state.amax[2])] == amax
        scales = 448 / np.float32(amax)
        assert state.scale.tolist() == list(2.0 ** np.floor(np.log2(scales)) if recipe.power_of_2_scales else scales)


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_a_block_that_is_not_finite_harms_no_other(bad: float) -> None:
    model = linear(BlockScaling(), 256, 8)
    x = spread(4, 256, seed=7)
    exact = in_fp8(x, 1, BlockScaling())
    x[1, 5] = bad
    x.requires_grad_()
    y = model(x)
    y.backward(torch.ones_like(y))
    w = in_fp8(model.weight, 128, BlockScaling())
    # with a scale of 1, what is finite in the block survives
    assert np.allclose(in_fp8(x, 1, BlockScaling())[1, 128:], exact[1, 128:])
    expected = in_fp8(x, 1, BlockScaling()) @ w.T
    np.testing.assert_allclose(y.detach().numpy(), expected, rtol=0, atol=1e-5 * np.nanmax(np.abs(expected)))
    assert bool(y[[0, 2, 3]].isfinite().all())
    state = scaling_state(model)
    before = state.amax_history.clone()
    state.update()
    assert state.nonfinite_steps.tolist() == [1, 0, 0]
    assert torch.equal(state.amax_history[:, 0], before[:, 0])


# numbers


def db(found: Tensor, exact: Tensor) -> float:
    return float(10 * torch.log10(exact.square().sum() / (found.detach().double() - exact).square().sum()))


def layer_db(recipe: Any) -> tuple[float, float, float]:
    """SQNR of output, input gradient and weight gradient of one layer on N(0, 1)."""
    generator = torch.Generator().manual_seed(0)
    x, w, dy = (torch.randn(512, 512, generator=generator) for _ in range(3))
    model = linear(recipe, 512, 512)
    with torch.no_grad():
        model.weight.copy_(w)
    x.requires_grad_()
    y = model(x)
    y.backward(dy)
    assert x.grad is not None
    assert model.weight.grad is not None
    exact = x.detach().double(), w.double(), dy.double()
    return (
        db(y, exact[0] @ exact[1].T),
        db(x.grad, exact[2] @ exact[1]),
        db(model.weight.grad, exact[2].T @ exact[0]),
    )


def test_signal_to_noise_of_one_layer() -> None:
    delayed, current, block = map(layer_db, (DelayedScaling(), CurrentScaling(), BlockScaling()))
    print("SQNR in dB of y, dx and dw:", delayed, current, block)
    assert delayed == current
    # gradients in E4M3 have one bit more than in E5M2, which tensors need whose numbers differ widely
    for found, floor in ((delayed, (28.2, 24.2, 24.2)), (block, (28.4, 28.4, 28.4))):
        assert all(one > least for one, least in zip(found, floor, strict=True))
    assert all(one > other for one, other in zip(block, delayed, strict=True))


def contribution_db(recipe: Any, factor: float) -> float:
    """SQNR of what the other channels contribute where one of 4096 is a thousand times larger."""
    generator = torch.Generator().manual_seed(0)
    x, w = torch.randn(64, 4096, generator=generator), torch.randn(64, 4096, generator=generator)
    w[:, 7] = 0
    model = linear(recipe, 4096, 64)
    with torch.no_grad():
        model.weight.copy_(w)
    exact = x.double() @ w.double().T
    x[:, 7] *= factor
    return db(model(x), exact)


def test_an_outlier_channel_takes_precision_from_its_block_only() -> None:
    delayed, block = (
        [contribution_db(recipe, 10.0**n) for n in (3, 4, 5)] for recipe in (DelayedScaling(), BlockScaling())
    )
    print("SQNR in dB of the other channels, with one that is 1e3, 1e4 and 1e5 times larger:", delayed, block)
    # E4M3 keeps its precision down to 1/28,672 of its largest number, so a thousandfold channel costs neither
    assert min(delayed[0], block[0]) > 28
    assert block[2] > delayed[2] + 15
    assert block[2] > 26


def saturated_steps(recipe: Any) -> list[int]:
    """The steps that clip more than 1% of the gradient; at step 3 it grows a hundredfold and stays so."""
    model = linear(recipe, 16, 16)
    state, found = scaling_state(model), []
    for step in range(8):
        state.cast_counts.start("test")
        generator = torch.Generator().manual_seed(step)
        x, dy = torch.randn(64, 16, generator=generator), torch.randn(64, 16, generator=generator)
        model(x).backward(dy * (100 if step >= 3 else 1))
        counts = state.cast_counts.values
        assert counts is not None
        assert counts[:2, 0].tolist() == [1024, 1024]
        found += [step] if counts[1, 1] > 0.01 * counts[1, 0] else []
        state.cast_counts.stop("test")
        state.update()
    return found


def test_growth_within_a_step_is_clipped_by_delayed_scaling_only() -> None:
    assert saturated_steps(DelayedScaling()) == [3]
    assert saturated_steps(CurrentScaling()) == []
    assert saturated_steps(BlockScaling()) == []


def test_numbers_lost_in_a_block_are_counted() -> None:
    model = linear(BlockScaling(), 256, 8)
    state = scaling_state(model)
    x = torch.ones(2, 256)
    # half of E4M3's smallest number, 2**-10, is 1/458752 of its largest: zero beside a million, and not beside a one
    x[0, 0], x[0, 128] = 1e6, 1.0
    state.cast_counts.start("test")
    model(x)
    assert state.cast_counts.values is not None
    assert state.cast_counts.values[0].tolist() == [512, 0, 512, 127]


# in every mode


@pytest.mark.parametrize("half", ["reference", "kernels"])
def test_a_block_that_would_be_fused_runs_part_by_part(half: str, request: pytest.FixtureRequest) -> None:
    if half == "kernels":
        request.getfixturevalue("cuda_half")
    model = converted(llama, recipe=BlockScaling())
    found = []
    for block in (part_by_part(model), model):
        x = spread(12, 32, seed=8).requires_grad_()
        y = block(x)
        y.square().sum().backward()
        found.append([y, x.grad, *(parameter.grad for parameter in block.parameters())])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
    assert "not fused: its tensors are scaled in blocks" in str(describe(model))


def test_an_evaluation_is_that_of_training_and_needs_no_scales() -> None:
    model = convert(small_mlp(), BlockScaling())
    x = torch.randn(8, 32)
    trained = model(x).detach()
    model.eval()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with torch.no_grad():
            assert torch.equal(model(x), trained)
            # what a step leaves behind changes nothing
            model.train()
            with torch.enable_grad():
                model(1000 * x).sum().backward()
            scaling_state(model).update()
            model.eval()
            assert torch.equal(model(x), trained)
            with weights_unchanged(model):
                # the second one takes what the first has kept
                assert torch.equal(model(x), trained)
                assert torch.equal(model(x), trained)


def gradients_of_two_batches(recipe: Any, checkpointed: bool) -> list[Tensor]:
    torch.manual_seed(0)
    model = convert(small_mlp(), recipe)
    for scale in (1.0, 30.0):
        x = torch.randn(8, 32) * scale
        y = checkpoint(model, x, use_reentrant=False) if checkpointed else model(x)
        y.square().mean().backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def test_recomputation_and_micro_batches() -> None:
    for one, other in zip(*(gradients_of_two_batches(BlockScaling(), each) for each in (False, True)), strict=True):
        assert torch.equal(one, other)


def test_compiled() -> None:
    found = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = convert(small_mlp(), BlockScaling())
        run: Any = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
        outputs = []
        for scale in (1.0, 300.0, 0.01):
            y = run(torch.randn(8, 32) * scale)
            y.square().mean().backward()
            scaling_state(model).update()
            outputs.append(y.detach())
        state = scaling_state(model)
        found.append([*outputs, state.scale, state.amax_history, *(parameter.grad for parameter in model.parameters())])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def test_an_exported_program_scales_each_batch_by_itself() -> None:
    model = convert(small_mlp(), BlockScaling()).eval()
    x = torch.randn(8, 32)
    with torch.no_grad():
        program = torch.export.export(model, (x,)).module()
        for scale in (1.0, 1e4):
            assert torch.equal(program(x * scale), model(x * scale))


@pytest.mark.parametrize("width", [64, 128])
def test_attention_of_other_keys_has_the_blocks_of_each_projection(width: int) -> None:
    """The rows of a packed weight are those of three: of a width of 64, q's and k's are in one square."""
    torch.manual_seed(0)
    plain = nn.MultiheadAttention(width, 4, bias=False, batch_first=True)
    with torch.no_grad():
        plain.in_proj_weight[width : 2 * width] *= 1e6
    packed = convert(copy.deepcopy(plain), BlockScaling(), ignore_modules=["out_proj"])
    query, key = torch.randn(2, 3, width, requires_grad=True), torch.randn(2, 5, width) * 1e-6
    y = packed(query, key, key.clone(), need_weights=False)[0]
    y.sum().backward()
    projections = [in_fp8(part, 128, BlockScaling()) for part in plain.in_proj_weight.chunk(3)]
    q, k, v = (
        torch.from_numpy(in_fp8(of.flatten(0, 1), 1, BlockScaling()) @ w.T).view(2, -1, 4, width // 4).transpose(1, 2)
        for of, w in zip((query, key, key), projections, strict=True)
    )
    heads = torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
    torch.testing.assert_close(y.double(), heads @ plain.out_proj.weight.double().T, rtol=1e-4, atol=1e-12)
    assert query.grad is not None
    assert packed.in_proj_weight.grad is not None
    assert bool(packed.in_proj_weight.grad.isfinite().all())


def test_what_has_one_scale_for_each_weight_is_refused() -> None:
    with pytest.raises(ValueError, match=r"`frozen_weights='fp8'` keeps one scale .* BlockScaling\("):
        convert(small_mlp().requires_grad_(False), BlockScaling(), frozen_weights="fp8")
    model = convert(small_mlp(), BlockScaling())
    with pytest.raises(ValueError, match=r"BlockScaling\(.*no static scales to write"):
        static_scales(model, {})


# states and checkpoints


def test_a_state_has_no_scales_in_its_checkpoint() -> None:
    model = convert(small_mlp(), BlockScaling())
    model(torch.randn(8, 32)).sum().backward()
    scaling_state(model).update()
    entries = scaling_state(model).state_dict()
    assert {tuple(entry) for entry in entries.values()} == {("nonfinite_steps", "in_fp8")}
    other = convert(small_mlp(), DelayedScaling())
    scaling_state(other).load_state_dict(entries)


def test_the_fields() -> None:
    assert as_recipe({"precision": "fp8-block", "power_of_2_scales": True}) == BlockScaling(power_of_2_scales=True)
    with pytest.raises(TypeError, match=r"BlockScaling has no field 'margin'\. Its fields are power_of_2_scales\."):
        as_recipe({"precision": "fp8-block", "margin": 1})
    with pytest.raises(ValueError, match="BlockScaling: `power_of_2_scales` must be True or False, got 1"):
        BlockScaling(power_of_2_scales=1)  # type: ignore[arg-type]


def test_the_string_trains_and_resumes_exactly(tmp_path: Path) -> None:
    whole = seeded()
    make_trainer(tmp_path, precision="fp8-block", max_epochs=2).fit(whole, loader())
    assert scaling_state(whole).recipe == BlockScaling()
    first = seeded()
    saving = ModelCheckpoint(tmp_path, filename="half", save_on_train_epoch_end=True)
    make_trainer(tmp_path, precision="fp8-block", enable_checkpointing=True, callbacks=[saving]).fit(first, loader())
    again = seeded()
    make_trainer(tmp_path, precision="fp8-block", max_epochs=2).fit(
        again, loader(), ckpt_path=str(tmp_path / "half.ckpt")
    )
    assert same(again, whole)
    delayed = seeded()
    make_trainer(tmp_path, max_epochs=2).fit(delayed, loader())
    assert not torch.equal(torch.stack(delayed.losses), torch.stack(whole.losses))
    torch.testing.assert_close(torch.stack(delayed.losses), torch.stack(whole.losses), rtol=0.1, atol=0)


def test_callbacks_and_compiled_code_see_the_run(tmp_path: Path) -> None:
    """Compiled as a whole, whose weights are cast before each step; and eager, where each layer can be watched."""
    runs = []
    for compiled in (False, True):
        model = seeded()
        if compiled:
            model.net.compile(backend="aot_eager")
        probe, logger = QuantizationProbe(every_n_steps=1), ScaleFactorLogger(every_n_steps=1)
        watchdog = ScaleWatchdog()
        watching = [logger, watchdog, RunRecord()] if compiled else [logger, watchdog, probe]
        csv = CSVLogger(tmp_path, version=int(compiled))
        trainer = make_trainer(
            tmp_path, precision="fp8-block", max_epochs=2, callbacks=watching, logger=csv, log_every_n_steps=1
        )
        trainer.fit(model, loader())
        trainer.validate(model, loader(), verbose=False)
        runs.append([*model.losses, *model.parameters(), scaling_state(model).scale])
        if not compiled:
            # as of one layer on N(0, 1): no layer has lost its precision
            assert min(probe.sqnr_db.values()) > 25
        with open(Path(csv.log_dir) / "metrics.csv") as file:
            rows = [row for row in DictReader(file) if row.get("fp8/net.0.input/scale")]
        assert len(rows) == 8
        for row in rows:
            assert float(row["fp8/net.0.input/scale"]) == 448 / np.float32(row["fp8/net.0.input/amax"])
            assert float(row["fp8/net.0.grad_output/saturated_fraction"]) == 0
    for one, other in zip(*runs, strict=True):
        assert torch.equal(one, other)


def test_experts_have_blocks_of_their_own() -> None:
    from experts import Separate, experts, routing

    stacked = experts()
    separate = Separate(stacked)
    hidden = torch.randn(12, 32)
    index, weights = routing()
    convert(stacked, BlockScaling())
    convert(separate, BlockScaling())
    assert torch.equal(stacked(hidden, index, weights), separate(hidden, index, weights))


# over processes

SPLIT = """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from lightning_fp8 import BlockScaling

torch.manual_seed(0)
model = convert(nn.Sequential(nn.Linear(64, 256, bias=False), nn.Linear(256, 64, bias=False)), BlockScaling())
whole = copy.deepcopy(model)
parallelize_module(model, init_device_mesh("cpu", (world,)), {"0": ColwiseParallel(), "1": RowwiseParallel()})
x = torch.randn(8, 64) * torch.logspace(-4, 4, 64)
local = lambda t: (t.to_local() if hasattr(t, "to_local") else t).detach().clone()
for number, one in enumerate((model, whole)):
    y = one(x)
    y.backward(torch.ones_like(y))
    scaling_state(one).update()
    result[number] = {"y": local(y + 0), "dw": local(one[0].weight.grad), "amax": scaling_state(one).amax_history[0]}
"""


def test_parts_of_128_have_the_blocks_of_the_whole(tmp_path: Path) -> None:
    for number, rank in enumerate(run_processes(SPLIT, tmp_path)):
        part, whole = rank[0], rank[1]
        torch.testing.assert_close(part["y"], whole["y"], rtol=1e-5, atol=1e-6 * whole["y"].abs().max().item())
        expected = whole["dw"].chunk(2)[number]
        torch.testing.assert_close(part["dw"], expected, rtol=1e-5, atol=1e-6 * expected.abs().max().item())
        # what is logged is that of the whole
        torch.testing.assert_close(part["amax"], whole["amax"], rtol=1e-6, atol=0)
