"""The suites ``linear``, ``layer`` and ``train``: steps as a Trainer takes them, and how they are checked."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from bench_rows import written
from lightning.pytorch.plugins.precision import HalfPrecision, MixedPrecision, Precision
from repository import ROOT
from torch import Tensor, nn

from benchmarks import baselines, harness, memory, settings, train, training
from benchmarks.settings import Setting
from benchmarks.suites import SUITES
from benchmarks.training import Start, Task, Training
from lightning_fp8 import Fp8Precision, convert, scaling_state
from lightning_fp8.examples import ByteGPT
from lightning_fp8.examples.transformer_block import Block, initialize

CPU = torch.device("cpu")
FP32, FP8 = Setting(Precision), Setting(Fp8Precision)
LINEAR = Task(lambda: nn.Linear(32, 48), 64, (64, 32), 48)
GPT = Task(lambda: ByteGPT(1, 64, 2, 32), 256, text=lambda: train.text_of(train.TINY), learning_rate=1e-4)


@pytest.fixture
def first(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the CPU emulates bf16 products; torchao is not installed."""
    monkeypatch.setattr(settings, "emulates_bf16", lambda: request.param)
    monkeypatch.setattr(settings, "find_spec", lambda name: None)
    return bool(request.param)


@pytest.mark.parametrize(
    ("suite", "part", "tokens", "count"),
    [("linear", "", 64, 2), ("layer", "", 64, 2), ("experts", "", 48, 1), ("train", "tiny", 256, 2)],
)
@pytest.mark.parametrize("first", [True], indirect=True)
@pytest.mark.slow
def test_the_whole_suite_on_the_cpu(
    suite: str, part: str, tokens: int, count: int, first: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[bool] = []
    real = baselines.compiled

    def counting(function: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
        compiled.append(True)
        # the layers of the other suite are also converted
        return real(function, device) if suite == "layer" else function

    monkeypatch.setattr(baselines, "compiled", counting)
    before = torch.random.get_rng_state()
    options = ["--suite", suite, "--case", part, "--device", "cpu", "--rounds", "1"]
    harness.main([*options, "--out", str(tmp_path / "rows.jsonl")], SUITES)
    assert torch.equal(torch.random.get_rng_state(), before)
    rows = {(row["case"], row["variant"]): row for row in written(tmp_path)}
    cases = [case for case in SUITES[suite].cases(CPU) if part in case.name]
    assert {case for case, _ in rows} == {case.name for case in cases}
    assert len(cases) == count
    for row in rows.values():
        assert row["tokens_per_s"] == pytest.approx(tokens / row["p50_us"] * 1e6)
        assert (row["checked"], row["baseline"], row["peak_memory_bytes"]) == (True, "32-true", None)
    for case in cases:
        assert 0 < rows[case.name, "lightning_fp8"]["saved_bytes"] < rows[case.name, "32-true"]["saved_bytes"]
    # the compiled case creates each variant for the check and for the timing (of a layer two copies), but no reference
    assert len(compiled) == {"linear": 0, "layer": 2 * 3, "experts": 0, "train": 2 * 2}[suite]


def test_each_precision_computes_in_its_own() -> None:
    mixed = Setting(lambda: MixedPrecision("bf16-mixed", "cpu"))
    true = Setting(lambda: HalfPrecision("bf16-true"))
    seen = []
    for setting in (FP32, FP8, mixed, true):
        made = Training(GPT, setting, False, CPU)
        up = made.model.blocks[0].up
        up.register_forward_hook(lambda module, x, y: seen.append((module.weight.dtype, y.dtype)))
        made.forward()
    fp32, bf16 = torch.float32, torch.bfloat16
    assert seen == [(fp32, fp32), (fp32, bf16), (fp32, bf16), (bf16, bf16)]


def test_a_layers_numbers_are_those_in_fp64() -> None:
    def make() -> Block:
        block = Block(64, 4)
        initialize(block)
        return block

    made = Training(Task(make, 64, (2, 32, 64), 64), FP32, False, CPU)
    start = training.start_of(made)
    torch.manual_seed(0)
    block, x = make().double(), made.leaves["x"].detach().double().requires_grad_()
    y = block(x)
    generator = torch.Generator().manual_seed(1)
    torch.randn(2, 32, 64, generator=generator)
    y.backward(torch.randn(2, 32, 64, generator=generator).mul(1e-3).bfloat16().double())
    expected = {"x": x.grad, **{name: parameter.grad for name, parameter in block.named_parameters()}}
    assert set(start.gradients) == set(expected)
    for name, gradient in start.gradients.items():
        # a bias of the keys has no gradient except noise
        assert (gradient - expected[name]).norm() < 1e-5 * expected[name].norm()
    assert start.losses == pytest.approx(3 * [y.square().mean().item()], rel=1e-5)
    assert x.std() > 0.9


def test_steps_of_the_gpt_are_those_of_a_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "_CLIPPED_TO", 0.05)
    made = Training(GPT, FP32, False, CPU)
    torch.manual_seed(0)
    model = ByteGPT(1, 64, 2, 32).double()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, betas=(0.9, 0.95))
    losses = []
    for batches in train.text_of(train.TINY)[:2]:
        optimizer.zero_grad()
        # all micro-batches have the same length, so the mean of their losses is that of all windows
        loss = model.loss(batches.flatten(0, 1))
        loss.backward()
        norm = math.sqrt(sum(float(parameter.grad.square().sum()) for parameter in model.parameters()))
        assert norm > 0.05
        for parameter in model.parameters():
            parameter.grad.mul_(0.05 / norm)
        losses.append(loss.item())
        optimizer.step()
    assert [training._loss(made.step()) for _ in range(2)] == pytest.approx(losses, rel=1e-5)
    assert losses[0] != pytest.approx(losses[1], rel=1e-3)
    for got, expected, start in zip(made.model.parameters(), model.parameters(), before):
        assert (got - expected).norm() < 0.01 * (expected - start).norm() + 1e-7


def test_the_start_is_whole_steps_and_the_gradients_of_the_first() -> None:
    start = training.start_of(Training(GPT, FP32, False, CPU))
    other = Training(GPT, FP32, False, CPU)
    assert start.losses == [training._loss(other.step()) for _ in range(3)]
    torch.manual_seed(0)
    model = ByteGPT(1, 64, 2, 32).double()
    model.loss(train.text_of(train.TINY)[0].flatten(0, 1)).backward()
    for name, parameter in model.named_parameters():
        # before they are clipped
        assert (start.gradients[name] - parameter.grad).norm() <= 1e-5 * parameter.grad.norm() + 1e-8


def test_figures_of_a_model() -> None:
    made = Training(GPT, FP8, False, CPU)
    for _ in range(2):
        made.step()
    updates = made.scaling.updates
    found = made.figures()
    assert made.scaling.updates == updates + 1
    elements = sum(parameter.numel() for parameter in made.model.parameters())
    assert found["parameter_bytes"] == found["gradient_bytes"] == 4 * elements
    # two moments, and the number of steps for each parameter
    assert found["optimizer_bytes"] == 2 * 4 * elements + 4 * len([*made.model.parameters()])
    # one byte an element of the block's matrices and the head, scales and biases in 16 bits apart
    matrices = 12 * 64**2 + 64 * 256
    assert matrices < found["weight_copy_bytes"] < 1.05 * matrices
    assert found["loss"] == pytest.approx(made.forward().item(), rel=1e-6)
    assert 0 <= found["unchanged_fraction"] < 0.01
    with torch.no_grad():
        made._optimizer.param_groups[0].update(lr=0.0, weight_decay=0.0)
    assert made.figures()["unchanged_fraction"] == 1


def test_the_models_are_those_of_the_configurations() -> None:
    names = {"1.3B": "gpt_1b3", "124M": "gpt_124m", "350M": "gpt_350m", "demo": "tiny_gpt"}
    for name, of in {**train.MODELS, "demo": train.DEMO}.items():
        config = yaml.safe_load((ROOT / "configs" / f"{names[name]}_fp8.yaml").read_text())
        sizes, data = config["model"]["init_args"], config["data"]["init_args"]
        assert all(getattr(of, key) == sizes[key] for key in ("layers", "width", "heads", "context"))
        assert of.batch * of.accumulate == data["batch_size"] * config["trainer"].get("accumulate_grad_batches", 1)


def gradients(*values: float) -> dict[str, Tensor]:
    return {"a": torch.tensor(values[:2]), "b": torch.tensor(values[2:])}


# norms of 5, 1, and 5.1 together
REFERENCE = Start([2.0, 1.0], gradients(3.0, 4.0, 1.0))
SAME, LIMIT_B = gradients(3, 4, 1), 0.2 * 1 + 0.01 * math.sqrt(26)
WRONG = {
    "a loss": (Start([2.041, 1.0], SAME), "a loss of 2.0410 in step 1, where 32-true has 2.0"),
    "a lower loss": (Start([1.959, 1.0], SAME), "a loss of 1.9590 in step 1, where 32-true has 2.0"),
    "a later loss": (Start([2.0, 1.021], SAME), "a loss of 1.0210 in step 2, where 32-true has 1.0"),
    "NaN": (Start([math.nan, 1.0], SAME), "a loss of nan"),
    "no gradient": (Start([2.0, 1.0], {"a": SAME["a"]}), "no gradient of b of shape (1,)"),
    "another shape": (Start([2.0, 1.0], {**SAME, "b": torch.ones(2)}), "no gradient of b of shape (1,)"),
    "a small one": (Start([2.0, 1.0], gradients(3, 4, 1 + 1.01 * LIMIT_B)), "a gradient of b that is 0.254 away"),
    "a large one": (Start([2.0, 1.0], gradients(3, 5.1, 1)), "a gradient of a that is 1.1 away from that of 32-true"),
    "no direction": (Start([2.0, 1.0], gradients(0, 0, 1)), "a gradient of a that is 5 away"),
    "no number": (Start([2.0, 1.0], gradients(3, math.nan, 1)), "a gradient of a that is nan away"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_starts_that_are_too_far_apart(wrong: str) -> None:
    start, words = WRONG[wrong]
    assert words in str(training.difference(start, REFERENCE))


def test_starts_that_are_close_enough() -> None:
    for start in (REFERENCE, Start([2.039, 0.981], gradients(3, 5.04, 1 + 0.99 * LIMIT_B))):
        assert training.difference(start, REFERENCE) is None


def weakened(model: nn.Module) -> nn.Module:
    model.weight.data.mul_(0.5)
    return model


def backwards(model: nn.Module) -> nn.Module:
    model.register_full_backward_hook(lambda module, into, out: (-into[0],))
    return model


@pytest.mark.parametrize(
    ("change", "words"), [(weakened, "a loss of"), (backwards, "a gradient of x"), (lambda model: model, None)]
)
def test_a_wrong_result_is_named(change: Callable[[nn.Module], nn.Module], words: str | None) -> None:
    (variant,) = training.variants(LINEAR, {"theirs": FP32._replace(prepare=change)}, CPU)
    assert words in str(variant.check()) if words else variant.check() is None


def test_saved_bytes_by_hand() -> None:
    first, second = nn.Linear(16, 16), nn.Linear(16, 16)
    x = torch.randn(8, 16, requires_grad=True)
    # both keep x, 8 * 16 * 4 bytes, once
    assert memory.saved_bytes(nn.ModuleList([first, second]), lambda: first(x) + second(x)) == 512
    # and a GELU its input
    assert memory.saved_bytes(first, lambda: nn.functional.gelu(first(x))) == 1024
    weight = first.weight.detach()
    assert memory.bytes_of([weight, weight[2:], weight.t()]) == 1024


def test_what_is_kept_anyway_is_not_saved() -> None:
    torch.manual_seed(0)
    x = torch.randn(8, 16).bfloat16()
    model = convert(nn.Sequential(nn.Linear(16, 16)))
    for _ in range(2):
        model(x).float().sum().backward()
        scaling_state(model).update()
    # the FP8 input with its inverse scale in fp32
    assert memory.saved_bytes(model, lambda: model(x)) == 8 * 16 + 4
    # the weight with its inverse scale, in the only layout used on a CPU, and the bias in 16 bits
    assert memory.bytes_of(memory.weight_copies(model)) == 256 + 4 + 32
