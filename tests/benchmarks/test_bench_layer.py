from __future__ import annotations

import contextlib
import gc
import io
import logging
import math
import sysconfig
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from bench_rows import written
from lightning.pytorch.plugins.precision import HalfPrecision, MixedPrecision, Precision
from repository import ROOT
from torch import Tensor, nn

from benchmarks import baselines, command, iteration, layer, memory, plot, steps, train, trainer_precisions, training
from benchmarks.trainer_precisions import Setting
from benchmarks.training import Start, Work
from lightning_fp8 import Fp8Precision, convert, scaling_state
from lightning_fp8.examples import ByteGPT
from lightning_fp8.examples.transformer_block import Block, initialize
from lightning_fp8.modules.weight_copy import keep_copies
from lightning_fp8.ops.cuda import kernels
from lightning_fp8.scaling.state import ScalingState
from lightning_fp8.tools import timing
from lightning_fp8.tools.timing import Variant

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
EAGER, COMPILED = layer.cases(CPU)
TRAIN = train.cases(CPU)[0]
PLAIN = Setting(Precision)
VARIANTS = ["lightning_fp8", "bf16-mixed", "bf16-true"]


def run(path: Path, suite: str, *arguments: str, rounds: int = 1) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        command.main(
            [
                "--suite",
                suite,
                "--device",
                "cpu",
                "--rounds",
                str(rounds),
                "--out",
                str(path / "rows.jsonl"),
                *arguments,
            ]
        )
    return out.getvalue()


@pytest.mark.parametrize(
    ("suite", "cases", "tokens"),
    [
        ("layer", ["layer 64 wide, 2 x 32 tokens, eager", "layer 64 wide, 2 x 32 tokens, compiled"], 64),
        ("train", ["GPT tiny, 2 x 4 x 32 tokens, eager", "GPT tiny, 2 x 4 x 32 tokens, compiled"], 256),
    ],
)
@pytest.mark.slow
def test_the_whole_suite_on_the_cpu(
    suite: str, cases: list[str], tokens: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[str] = []
    real = baselines.compiled

    def counting(function: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
        compiled.append("compiled")
        # the layers of the other suite are also converted
        return real(function, device) if suite == "layer" else function

    monkeypatch.setattr(baselines, "compiled", counting)
    if suite == "train":
        # torchao's layers are those of the other suite
        monkeypatch.setattr(baselines, "find_spec", lambda _: None)
    before = torch.random.get_rng_state()
    printed = run(tmp_path, suite, "--plot", str(tmp_path / "bars.png"), rounds=2 if suite == "layer" else 1)
    assert torch.equal(torch.random.get_rng_state(), before)
    rows = written(tmp_path)
    variants = [*VARIANTS, *baselines.torchao_precisions(CPU)]
    assert [(row["case"], row["variant"]) for row in rows] == [(case, name) for case in cases for name in variants]
    for row in rows:
        assert 0 < row["p20_us"] <= row["p50_us"] <= row["p80_us"]
        assert row["tokens_per_s"] == pytest.approx(tokens / row["p50_us"] * 1e6)
        assert (row["suite"], row["checked"], row["peak_memory_bytes"], row["gpu"]) == (suite, True, None, None)
        assert {row[key] for key in ("bytes", "flops", "host_us", "events_us", "share_of_ceiling")} == {None}
        assert {"driver", "torch", "cupy", "torchao", "commit", "command"} <= set(row)
    saved = {(row["case"], row["variant"]): row["saved_bytes"] for row in rows}
    for case in cases:
        assert 0 < saved[case, "bf16-true"] < saved[case, "bf16-mixed"]
        assert 0 < saved[case, "lightning_fp8"] < saved[case, "bf16-mixed"]
    # the compiled case creates each variant for the check and for the timing, but never the reference
    assert len(compiled) == 2 * len(variants)
    assert (tmp_path / "bars.png").read_bytes().startswith(b"\x89PNG")
    line = next(line for line in printed.splitlines() if line.startswith("lightning_fp8 compared with others"))
    assert all(f"{case}: " in line for case in cases)
    assert line.count("times the speed of bf16-mixed") == 2
    assert "tokens/s  saved MiB" in printed
    assert "linear layers run in FP8" not in printed


def test_the_precisions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(baselines, "find_spec", lambda name: None)
    found = trainer_precisions.settings(CPU)
    assert list(found) == VARIANTS
    ours, mixed, true = (setting.plugin() for setting in found.values())
    assert isinstance(ours, Fp8Precision)
    assert ours.precision == "fp8-delayed"
    # Lightning's own plugins, which ours subclass
    assert (type(mixed), type(true)) == (MixedPrecision, HalfPrecision)
    assert (mixed.precision, mixed.device, true.precision) == ("bf16-mixed", "cpu", "bf16-true")
    assert type(trainer_precisions.settings(GPU)["bf16-mixed"].plugin()) is MixedPrecision
    assert trainer_precisions.settings(GPU)["bf16-mixed"].plugin().device == "cuda"
    model = nn.Linear(16, 16)
    assert found["bf16-mixed"].prepare(model) is model
    theirs = iteration.Precision(lambda block: ("converted", block))
    monkeypatch.setattr(trainer_precisions, "torchao_precisions", lambda device: {"torchao": theirs})
    torchao = trainer_precisions.settings(CPU)["torchao"]
    assert torchao.prepare(model) == ("converted", model)
    assert type(torchao.plugin()) is MixedPrecision


def test_each_precision_computes_in_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = {}
    for name, setting in trainer_precisions.settings(CPU).items():
        made = train.GptTraining(TRAIN.model, setting, False, CPU)
        dtypes: list[torch.dtype] = []
        made.model.blocks[0].up.register_forward_hook(lambda module, x, y, dtypes=dtypes: dtypes.append(y.dtype))
        made.forward()
        seen[name] = (made.model.blocks[0].up.weight.dtype, dtypes, made.scaling is not None)
    fp32, bf16 = torch.float32, torch.bfloat16
    assert seen.pop("bf16-true") == (bf16, [bf16], False)
    assert seen.pop("lightning_fp8") == (fp32, [bf16], True)
    assert set(seen.values().__iter__().__next__()[1]) == {bf16}
    assert all(found == (fp32, [bf16], False) for found in seen.values())


def test_the_layers_numbers_are_those_of_the_block_in_fp64() -> None:
    made = layer.LayerTraining(EAGER, PLAIN, False, CPU)
    made.x = made.leaves["x"] = made.x.detach().float().requires_grad_()
    made.dy = made.dy.float()
    start = training.start_of(made)
    torch.manual_seed(0)
    block = Block(64, 4)
    initialize(block)
    block, x = block.double(), made.x.detach().double().requires_grad_()
    y = block(x)
    y.backward(made.dy.double())
    expected = {"x": x.grad, **{name: parameter.grad for name, parameter in block.named_parameters()}}
    assert set(start.gradients) == set(expected)
    for name, gradient in start.gradients.items():
        # a bias of the keys has no gradient except noise
        assert (gradient - expected[name]).norm() < 1e-5 * expected[name].norm()
    assert start.losses == pytest.approx(3 * [(y - x).square().mean().item()], rel=1e-5)
    assert made.x.shape == (2, 32, 64)
    assert made.x.std() > 0.9


def test_a_step_of_the_layer_casts_weights_and_moves_scales() -> None:
    made = layer.LayerTraining(EAGER, trainer_precisions.settings(CPU)["lightning_fp8"], False, CPU)
    versions, updates = made.model.up.weight._version, made.scaling.updates
    made.step()
    assert (made.model.up.weight._version, made.scaling.updates) == (versions + 1, updates + 1)
    assert (made.scaling.amax_history[0] > 0).all()


def test_steps_of_the_gpt_are_those_of_a_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "_CLIPPED_TO", 0.05)
    made = train.GptTraining(TRAIN.model, PLAIN, False, CPU)
    torch.manual_seed(0)
    model = ByteGPT(1, 64, 2, 32).double()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, betas=(0.9, 0.95))
    losses = []
    for batches in train.text_of(TRAIN.model)[:2]:
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
    assert [made.loss(made.step()) for _ in range(2)] == pytest.approx(losses, rel=1e-5)
    assert losses[0] != pytest.approx(losses[1], rel=1e-3)
    for got, expected, start in zip(made.model.parameters(), model.parameters(), before):
        assert (got - expected).norm() < 0.01 * (expected - start).norm() + 1e-7
    assert all(parameter.grad is None for parameter in made.model.parameters())


def test_the_start_is_whole_steps_and_the_gradients_of_the_first() -> None:
    start = training.start_of(train.GptTraining(TRAIN.model, PLAIN, False, CPU))
    other = train.GptTraining(TRAIN.model, PLAIN, False, CPU)
    assert start.losses == [other.loss(other.step()) for _ in range(3)]
    torch.manual_seed(0)
    model = ByteGPT(1, 64, 2, 32).double()
    model.loss(train.text_of(TRAIN.model)[0].flatten(0, 1)).backward()
    for name, parameter in model.named_parameters():
        # before they are clipped
        assert (start.gradients[name] - parameter.grad).norm() <= 1e-5 * parameter.grad.norm() + 1e-8


def test_a_step_of_the_gpt_updates_the_scales_once() -> None:
    made = train.GptTraining(TRAIN.model, trainer_precisions.settings(CPU)["lightning_fp8"], False, CPU)
    updates = made.scaling.updates
    made.step()
    assert made.scaling.updates == updates + 1
    assert not made.scaling.amax[: made.scaling.delayed].any()


def test_text_is_the_standard_librarys() -> None:
    text = train.text_of(TRAIN.model)
    assert text.shape == (4, 2, 4, 33)
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    source = b"".join(file.read_bytes() for number, file in enumerate(files) if number % 10 != 9)
    assert bytes(text.flatten().tolist()) == source[: text.numel()]
    made = train.GptTraining(TRAIN.model, PLAIN, False, CPU)
    given = [next(made.steps) for _ in range(5)]
    assert all(torch.equal(got, expected) for got, expected in zip(given, [*text, text[0]]))
    assert made.forward().item() == pytest.approx(made.model.loss(text[0, 0]).item())


def test_the_models_of_a_gpu_are_those_of_the_configurations() -> None:
    cases = train.cases(GPU)
    for case, name in zip(cases[::2], ("1b3", "124m", "350m"), strict=True):
        config = yaml.safe_load((ROOT / "configs" / f"gpt_{name}_fp8.yaml").read_text())
        sizes, of = config["model"]["init_args"], case.model
        assert all(getattr(of, key) == sizes[key] for key in ("layers", "width", "heads", "context"))
        sequences = config["data"]["init_args"]["batch_size"] * config["trainer"]["accumulate_grad_batches"]
        assert of.batch * of.accumulate == sequences


def gradients(*values: float) -> dict[str, Tensor]:
    return {"a": torch.tensor(values[:2]), "b": torch.tensor(values[2:])}


REFERENCE = Start([2.0, 1.0], gradients(3.0, 4.0, 0.0))
# cosines by hand: 25 / (5 * sqrt(25 + d**2)), which is 0.98 at d = 1.0153
WRONG = {
    "a loss": (Start([2.041, 1.0], gradients(3, 4, 0)), "a loss of 2.0410 in step 1, where bf16-mixed has 2.0"),
    "a lower loss": (
        Start([1.959, 1.0], gradients(3, 4, 0)),
        "a loss of 1.9590 in step 1, where bf16-mixed has 2.0",
    ),
    "a later loss": (
        Start([2.0, 1.021], gradients(3, 4, 0)),
        "a loss of 1.0210 in step 2, where bf16-mixed has 1.0",
    ),
    "NaN": (Start([math.nan, 1.0], gradients(3, 4, 0)), "a loss of nan"),
    "no gradient": (Start([2.0, 1.0], {"a": torch.ones(2)}), "no gradient of b of shape (1,)"),
    "another shape": (Start([2.0, 1.0], {"a": torch.ones(2), "b": torch.ones(2)}), "no gradient of b of shape (1,)"),
    "another direction": (Start([2.0, 1.0], gradients(3, 4, 1.02)), "gradients at a cosine of 0.9798 to those of bf16"),
    "no direction": (Start([2.0, 1.0], gradients(0, 0, 0)), "gradients at a cosine of nan"),
    "the opposite": (Start([2.0, 1.0], gradients(-3, -4, 0)), "gradients at a cosine of -1.0000"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_starts_that_are_too_far_apart(wrong: str) -> None:
    start, words = WRONG[wrong]
    assert words in str(training.difference(start, REFERENCE))


def test_starts_that_are_close_enough() -> None:
    for start in (REFERENCE, Start([2.039, 0.981], gradients(3, 4, 1.01)), Start([2.0, 1.0], gradients(6, 8, 0))):
        assert training.difference(start, REFERENCE) is None


def weakened(model: nn.Module) -> nn.Module:
    model.down.weight.data.mul_(0.5)
    return model


def backwards(model: nn.Module) -> nn.Module:
    model.register_full_backward_hook(lambda module, into, out: (-into[0],))
    return model


@pytest.mark.parametrize(("change", "words"), [(weakened, "a loss of"), (backwards, "gradients at a cosine of")])
def test_a_wrong_result_is_named_in_its_row(
    change: Callable[[nn.Module], nn.Module], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def settings(device: torch.device) -> dict[str, Setting]:
        made = trainer_precisions.settings(device)
        return {"bf16-mixed": made["bf16-mixed"], "wrong": Setting(made["bf16-mixed"].plugin, change)}

    monkeypatch.setattr(training, "settings", settings)
    with pytest.raises(SystemExit, match=f"layer 64 wide, 2 x 32 tokens, eager: wrong gave {words}"):
        run(tmp_path, "layer", "--case", "eager")
    eager = written(tmp_path)
    assert [(row["variant"], row["checked"]) for row in eager] == [("bf16-mixed", True), ("wrong", False)]
    assert words in eager[1]["wrong"]


def test_what_does_not_run_costs_its_own_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(model: nn.Module) -> nn.Module:
        raise torch.OutOfMemoryError("not so much")

    def settings(device: torch.device) -> dict[str, Setting]:
        mixed = trainer_precisions.settings(device)["bf16-mixed"]
        return {"large": Setting(mixed.plugin, refuse), "bf16-mixed": mixed}

    monkeypatch.setattr(training, "settings", settings)
    with pytest.raises(SystemExit, match="large: OutOfMemoryError: not so much"):
        run(tmp_path, "layer", "--case", "eager")
    assert [row["variant"] for row in written(tmp_path)] == ["bf16-mixed"]


class Fake:
    """A training run without a model."""

    scaling: Any = None

    def __init__(self) -> None:
        self.steps = 0

    def step(self) -> Tensor:
        self.steps += 1
        return torch.zeros(())


def test_a_training_is_warm_in_its_place_and_gone_outside() -> None:
    work = Work(Fake, lambda: REFERENCE)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="only in `around`"):
        work.step(0)
    with work.around():
        assert work.training.steps == 3
        work.step(0)
        assert work.training.steps == 4
        assert torch._dynamo.config.fail_on_recompile_limit_hit
        gone = weakref.ref(work.training)
    gc.collect()
    assert gone() is None
    with pytest.raises(KeyError), work.around():
        raise KeyError
    assert work.training is None


def test_first_steps_are_never_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    (ours,) = (variant for variant in EAGER.variants(CPU) if variant.name == "lightning_fp8")
    with ours.around():
        pass
    monkeypatch.setattr(ScalingState, "every_tensor_has_history", False)
    with pytest.raises(RuntimeError, match="this would time first steps"), ours.around():
        pass


class Workplace:
    """Variants whose calls take given numbers of microseconds, with a simulated clock and memory."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, times: dict[str, float], own: dict[str, int]) -> None:
        self.events: list[str] = []
        self.now, self.allocated, self.peak = 0.0, 1000, 0
        self.times, self.own = times, own
        monkeypatch.setattr(steps.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(timing, "synchronize", lambda: None)
        monkeypatch.setattr(timing, "release", lambda: self.events.append("release"))
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: self.allocated)
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: self.peak)
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: setattr(self, "peak", 0))

    def variants(self) -> list[Variant]:
        return [self._variant(name) for name in self.times]

    def _variant(self, name: str) -> Variant:
        @contextmanager
        def around() -> Iterator[None]:
            self.events.append(f"+{name}")
            self.allocated += self.own[name]
            yield
            self.allocated -= self.own[name]
            self.events.append(f"-{name}")

        def call(at: int) -> None:
            self.events.append(name)
            self.now += self.times[name]
            self.peak = max(self.peak, self.allocated + 10 * self.own[name])

        return Variant(name, call, lambda: None, around=around, saved_bytes=lambda: self.own[name] + 1)


def test_variants_take_turns_in_one_sitting(monkeypatch: pytest.MonkeyPatch) -> None:
    place = Workplace(monkeypatch, {"a": 0.5, "b": 0.25}, {"a": 7, "b": 5})
    found = steps.time_in_turns(place.variants(), 2, GPU, alone=False)
    assert place.events == ["+a", "a", "+b", "b", "a", "b", "a", "b", "-b", "-a", "release"]
    assert found["a"].times[:3] == pytest.approx((0.5e6, 0.5e6, 0.5e6))
    assert found["b"].times.p50_us == pytest.approx(0.25e6)
    # the memory held between steps plus the peak during a step, without that of the other variants
    assert {name: one.peak_memory_bytes for name, one in found.items()} == {"a": 77, "b": 55}
    assert {name: one.saved_bytes for name, one in found.items()} == {"a": 8, "b": 6}


def test_variants_alone_begin_anew_in_each_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    place = Workplace(monkeypatch, {"a": 0.5, "b": 0.25}, {"a": 7, "b": 5})
    found = steps.time_in_turns(place.variants(), 4, CPU, alone=True)
    turn = ["+a", "a", "a", "a", "-a", "release", "+b", "b", "b", "b", "-b", "release"]
    assert place.events == 3 * turn
    assert {one.peak_memory_bytes for one in found.values()} == {None}
    place.events.clear()
    steps.time_in_turns(place.variants(), 1, CPU, alone=True)
    assert place.events == ["+a", "a", "a", "-a", "release", "+b", "b", "b", "-b", "release"]


def test_short_steps_on_a_gpu_are_timed_together(monkeypatch: pytest.MonkeyPatch) -> None:
    place = Workplace(monkeypatch, {"a": 0.03}, {"a": 1})
    found = steps.time_in_turns(place.variants(), 2, GPU, alone=False)
    assert place.events.count("a") == 1 + 2 * 4
    assert found["a"].times.p50_us == pytest.approx(30000)
    place = Workplace(monkeypatch, {"a": 0.03}, {"a": 1})
    steps.time_in_turns(place.variants(), 2, CPU, alone=False)
    assert place.events.count("a") == 3


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
    copied = nn.Sequential(nn.Linear(16, 16))
    keep_copies(copied, set())
    with torch.autocast("cpu", torch.bfloat16):
        assert memory.saved_bytes(copied, lambda: copied(x)) == 256
    assert memory.bytes_of(memory.weight_copies(copied)) == 512
    model = convert(nn.Sequential(nn.Linear(16, 16)))
    for _ in range(2):
        model(x).float().sum().backward()
        scaling_state(model).update()
    # the FP8 input with its inverse scale in fp32
    assert memory.saved_bytes(model, lambda: model(x)) == 8 * 16 + 4
    # the weight with its inverse scale, in the only layout used on a CPU, and the bias in 16 bits
    assert memory.bytes_of(memory.weight_copies(model)) == 256 + 4 + 32


def row(case: str, variant: str, tokens_per_s: float, peak: int | None) -> dict[str, Any]:
    return {"case": case, "variant": variant, "tokens_per_s": tokens_per_s, "peak_memory_bytes": peak}


def test_bars_of_equal_times_have_no_negative_error() -> None:
    # 7733 * 54.08 / 54.08 is more than 7733 in floating point
    equal = {**row("x", "y", 7733.0, None), "suite": "train", "p20_us": 54.08, "p50_us": 54.08, "p80_us": 54.08}
    assert plot.tokens([equal], "train") == {"x": {"y": (7733.0, 7733.0, 7733.0)}}


def test_the_last_line() -> None:
    rows = [
        row("x, eager", "lightning_fp8", 300.0, 60), row("x, eager", "bf16-mixed", 200.0, 80),
        row("x, eager", "bf16-true", 1.0, 1), row("x, eager", "torchao", 400.0, 120),
        row("x, compiled", "lightning_fp8", 500.0, None), row("x, compiled", "bf16-mixed", 250.0, None),
        row("alone", "lightning_fp8", 500.0, None), row("theirs", "bf16-mixed", 500.0, None),
    ]  # fmt: skip
    assert trainer_precisions.summary(rows) == (
        "lightning_fp8 compared with others. x, eager: 1.50 times the speed of bf16-mixed, 0.75 of its peak memory;"
        " 0.75 times the speed of torchao, 0.50 of its peak memory. x, compiled: 2.00 times the speed of bf16-mixed."
    )
    assert trainer_precisions.summary(rows[-2:]) is None
    assert trainer_precisions.summary([]) is None


@pytest.mark.parametrize("case", [layer.cases(GPU)[0], train.cases(GPU)[0]])
def test_served_where_there_are_kernels(case: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "cast_kernel", lambda *_: "a kernel")
    monkeypatch.setattr(kernels, "weights_kernel", lambda *_: "a kernel")
    assert case.is_served(GPU)
    monkeypatch.setattr(kernels, "weights_kernel", lambda *_: None)
    assert not case.is_served(GPU)
    assert case.is_served(CPU)


def test_notes_are_silent_only_while_a_model_is_made() -> None:
    before = logging.root.manager.disable
    with training._without_notes():
        assert logging.root.manager.disable == logging.INFO
    assert logging.root.manager.disable == before
