"""What is estimated from a count, against a roofline by hand, published measurements and the promises of the docs."""

from __future__ import annotations

import json
import re

import pytest
import torch
from repository import ROOT
from torch import Tensor, nn
from warm import run_warm

import benchmarks.published as published
from lightning_fp8 import CurrentScaling, DelayedScaling, convert, estimate
from lightning_fp8.estimation.case import scaled
from lightning_fp8.estimation.costs import Constants, Implementation, Pricing
from lightning_fp8.estimation.counting import Elementwise, MatrixProduct, Step, count
from lightning_fp8.estimation.devices import GPUS, SOURCES, Gpu
from lightning_fp8.examples import ByteGPT

ROUND = Gpu("round", 100.0, 200.0, 1000.0, 80, 100, 100.0, (9, 0), "H100")
EXACT = Constants(
    bf16=1.0, fp8=1.0, attention=1.0, bandwidth=1.0, fused=0.5, operator=0.0, kernel=0.0, ramp=0.0, overlap=0.0
)


def wide(layers: int = 2, width: int = 4096) -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))


def tokens(number: int, width: int = 4096) -> Tensor:
    return torch.empty(number, width, device="meta")


def test_products_casts_optimizer_and_copies_by_hand() -> None:
    # 100 multiprocessors are full with 100 tiles of 128 x 256
    m, n, k = 1280, 2560, 4096
    step = count(nn.Linear(k, n, bias=False, device="meta"), tokens(m, k).requires_grad_())
    product = 2 * m * n * k
    bf16 = Pricing(ROUND, constants=EXACT).step(step)
    # fprop and wgrad fill the device by 128 x 256; dgrad and wgrad are divided into tiles that do not, and take longer
    assert Pricing(ROUND, constants=EXACT).operator(MatrixProduct(m, n, k)) == pytest.approx(product / 100e12)
    fp8 = Implementation(4, 6, 0, 0)
    assert Pricing(ROUND, constants=EXACT).operator(MatrixProduct(m, n, k), fp8) == pytest.approx(product / 200e12)
    # AdamW reads and writes three tensors and reads the gradient, in fp32
    assert bf16.optimizer == pytest.approx(7 * 4 * n * k / 1000e9)
    in_fp8 = {"weight": frozenset(("fprop", "dgrad", "wgrad"))}
    seconds = Pricing(ROUND, constants=EXACT).step(step, in_fp8, fp8)
    # 4 bytes for each element of x and dy, 6 for each of w
    assert seconds.casts == pytest.approx((4 * (m * k + m * n) + 6 * n * k) / 1000e9)
    # without the copies of x and w in bf16, of 6 bytes for each element
    assert bf16.other - seconds.other == pytest.approx(6 * (m * k + n * k) / 1000e9)
    assert (bf16.casts, bf16.communication) == (0, 0)
    assert seconds.total == seconds.device
    only_fprop = Pricing(ROUND, constants=EXACT).step(step, {"weight": frozenset(("fprop",))}, fp8)
    assert seconds.products < only_fprop.products < bf16.products


@pytest.mark.parametrize("sharded", [False, True])
def test_communication_by_hand(sharded: bool) -> None:
    step = Step(sizes={"a": 10**9, "b": 10**9}, trained=10**9, trained_bytes=4 * 10**9)
    pricing = Pricing(ROUND, gpus=4, sharded=sharded, constants=EXACT)
    # a sum of gradients in fp32 sends each twice; FSDP scatters the sum once and gathers bf16 parameters twice
    sent = (4 + 2 * 2 * 2) if sharded else 8
    assert pricing.step(step).communication == pytest.approx(sent * 3 / 4 * 1e9 / 100e9)
    gathered = pricing.step(step, {"a": frozenset(("fprop",))}, Implementation(0, 0, 0, 0), gathers_fp8=True)
    assert gathered.communication == pytest.approx((sent - 2 * sharded) * 3 / 4 * 1e9 / 100e9)
    # each device updates its shard
    assert pricing.step(step).optimizer == pytest.approx(28e9 / (4 if sharded else 1) / 1000e9)


def test_the_host_decides_where_it_is_slower() -> None:
    step = Step()
    step.operators[Elementwise("add", 1000)] = 100
    step.operators[MatrixProduct(16, 16, 16, weight="w")] = 10
    pricing = Pricing(ROUND, constants=Constants(operator=1e-5, compiled=0.1))
    implementation = Implementation(4, 6, 12, 3)
    in_fp8 = {"w": frozenset(("fprop",))}
    assert pricing.step(step).total == pytest.approx(110e-5)
    assert pricing.step(step, in_fp8, implementation).total == pytest.approx((110 + 12 * 10) * 1e-5)
    compiled = Pricing(ROUND, compiled=True, constants=Constants(operator=1e-5, compiled=0.1))
    assert compiled.step(step, in_fp8, implementation).host == pytest.approx((110 + 3 * 10) * 1e-6)


def test_wide_layers_pay_and_small_models_do_not() -> None:
    found = estimate(wide(), tokens(16384), compiled=True)
    assert found.pays
    assert 1.2 < found.low < found.speedup < found.high < 2
    assert found.verdict.startswith("Estimate: FP8 pays: ")
    assert not found.better_in_bf16
    for compiled in (False, True):
        small = estimate(
            ByteGPT(layers=4, width=448, heads=7), torch.zeros(8, 513, dtype=torch.long), compiled=compiled
        )
        assert not small.pays, small
        assert "does not pay" in small.verdict
    # the host in eager mode, and the casts else: what takes longer in FP8
    assert small.fp8.casts > small.bf16.products - small.fp8.products


def test_layers_that_are_faster_in_bf16_are_named_and_leaving_them_out_gains() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8192, 8192), nn.ReLU(), nn.Linear(8192, 16))
    found = estimate(model, tokens(8192, 8192), compiled=True)
    assert found.better_in_bf16 == ("2",)
    assert found.converted == 2
    suggested = dict(found.suggestions)["leave what is faster in bf16 out"]
    without = estimate(model, tokens(8192, 8192), compiled=True, ignore_modules=["2"])
    assert found.speedup < without.speedup == pytest.approx(suggested)
    assert without.converted == 1
    in_part = estimate(model, tokens(8192, 8192), compiled=True, overrides={"0": {"wgrad": "bf16"}})
    assert in_part.speedup < found.speedup


def test_suggestions_are_what_the_estimate_itself_says() -> None:
    layers, x = wide(), tokens(2048)
    found = estimate(layers, x, recipe=CurrentScaling())
    suggested = dict(found.suggestions)
    # what gains less than 1% is not said
    assert "compile the model" not in suggested
    assert estimate(layers, x, recipe="fp8-current", compiled=True).speedup < found.speedup * 1.01
    eager = estimate(wide(width=512), tokens(2048, 512))
    assert dict(eager.suggestions)["compile the model"] == pytest.approx(
        estimate(wide(width=512), tokens(2048, 512), compiled=True).speedup
    )
    assert estimate(layers, x, recipe=DelayedScaling()).speedup == pytest.approx(suggested['recipe="fp8-delayed"'])
    # gradients of weights do not grow with the batch, but are taken to
    twice = estimate(layers, tokens(4096), recipe="fp8-current")
    assert twice.speedup == pytest.approx(suggested["twice the batch"], rel=0.03)
    double = wide(width=8192)
    assert estimate(double, tokens(2048, 8192), recipe="fp8-current").speedup == pytest.approx(
        suggested["twice the width"], rel=0.03
    )


def test_a_step_of_twice_the_batch_is_counted_the_same() -> None:
    model = ByteGPT(layers=2, width=64, heads=2)
    one, two = (count(model, torch.zeros(size, 33, dtype=torch.long)) for size in (4, 8))
    by_kind = {kind: [] for kind in (MatrixProduct, Elementwise)}  # type: ignore[var-annotated]
    for kind, sums in by_kind.items():
        for step in (scaled(one, tokens=2), two):
            attribute = "flops" if kind is MatrixProduct else "bytes"
            sums.append(sum(getattr(op, attribute) * times for op, times in step.operators.items() if type(op) is kind))
    assert by_kind[MatrixProduct][0] == by_kind[MatrixProduct][1]
    # gradients of parameters, and the loss, do not grow
    assert by_kind[Elementwise][0] == pytest.approx(by_kind[Elementwise][1], rel=0.35)


def test_memory_saved_is_one_byte_of_each_input_that_only_products_keep() -> None:
    found = estimate(wide(3), tokens(1000))
    assert found.memory_saved == 3 * 1000 * 4096


def test_it_prints_as_one_screen_and_as_plain_values() -> None:
    found = estimate(ByteGPT(layers=12, width=768, heads=12), torch.zeros(8, 1025, dtype=torch.long))
    lines = repr(found).splitlines()
    assert len(lines) <= 30
    assert max(map(len, lines)) <= 120
    assert lines[0] == found.verdict
    assert "Estimate" in lines[0]
    assert found.verdict in re.sub("<[^>]*>", "", found._repr_html_())
    values = json.loads(json.dumps(found.as_dict()))
    assert values["speedup"] == values["bf16"]["total"] / values["fp8"]["total"]
    assert len(values["deciding"]) == 5
    assert values["deciding"][0]["bf16"] >= values["deciding"][4]["bf16"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"gpu": "h1000"}, "gpu='h1000' is unknown. Did you mean 'h100'? Known are h100, "),
        ({"gpu": "a100"}, "A100 SXM computes no products in FP8. Devices that do are h100, "),
        ({"recipe": "fp8-mx"}, "H100 SXM cannot run 'fp8-mx'. H100 SXM runs fp8-delayed, fp8-current, fp8-block."),
        ({"recipe": "fp8-delyed"}, "Did you mean 'fp8-delayed'"),
        ({"strategy": "deepspeed"}, "`strategy` must be "),
        ({"strategy": "ddp", "gpus": 0}, "`gpus` must be at least 1, got 0."),
        ({"min_features": 10**6}, "There is nothing to convert in Sequential"),
        ({"ignore_modules": ["blocks"]}, "'blocks'"),
    ],
)
def test_bad_input(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        estimate(wide(), tokens(64), **arguments)  # type: ignore[arg-type]


def test_a_misspelt_argument() -> None:
    with pytest.raises(TypeError, match=r"estimate has no argument 'compile'. Did you mean 'compiled'"):
        estimate(wide(), tokens(64), compile=True)


def test_a_converted_model_is_refused() -> None:
    with pytest.raises(ValueError, match="Linear is converted already: estimate it before, or after `unconvert"):
        estimate(convert(nn.Linear(64, 64)), torch.zeros(2, 64))


def test_layers_that_do_not_run_are_not_counted() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(64, 64), nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x)

    assert estimate(Model(), torch.zeros(32, 64)).converted == 1
    with pytest.raises(ValueError, match="No layer of Model that would run in FP8 runs in the step on this batch"):
        estimate(Model(), torch.zeros(32, 64), ignore_modules=["used"])


def test_every_device_has_a_source_and_the_recipes_that_it_runs() -> None:
    assert {gpu.source for gpu in GPUS.values()} <= SOURCES.keys()
    assert estimate(wide(), tokens(64), gpu="B200", recipe="fp8-mx").gpu == "B200"
    assert estimate(wide(), tokens(64), gpu="rtx 5090", recipe="fp8-mx").speedup > 0
    for name, gpu in GPUS.items():
        if gpu.fp8:
            assert estimate(wide(), tokens(16384), gpu=name, compiled=True).pays, name


def test_no_source_stands_on_both_sides_and_at_most_half_are_for_the_fit() -> None:
    cases = published.cases()
    sides = {side: {case.row["source"] for case in cases if case.held_out is side} for side in (False, True)}
    assert not sides[False] & sides[True]
    held_out = [case for case in cases if case.held_out]
    assert len(held_out) >= len(cases) / 2
    assert len(held_out) >= 10
    assert len(sides[True]) >= 5
    assert {case.row["kind"] for case in held_out} == {"linear", "model"}
    assert any(case.published < 1 for case in held_out if case.row["kind"] == "model")
    # an outcome that changes by a little changes no side
    rows = [{**case.row, "speedup": case.row["speedup"] * 1.001} for case in cases]
    assert published.sources_held_out(rows) == sides[True]


def test_published_layers_that_were_held_out() -> None:
    layers = [case for case in published.cases() if case.held_out and case.row["source"].startswith("torchao#940")]
    layers = [case for case in layers if case.row["kind"] == "linear"]
    found = [case.estimated(Constants()) for case in layers]
    inside = [low <= case.published <= high for case, (_, low, high) in zip(layers, found)]
    assert len(layers) == 13
    assert sum(inside) >= 9
    # whether FP8 pays is right for each: below and above the size where it begins to
    assert [case.published >= 1.05 for case in layers] == [speedup >= 1.05 for speedup, _, _ in found]


def test_command_line() -> None:
    config = ROOT / "configs" / "tiny_gpt_fp8.yaml"
    script = f"""
import sys
sys.argv[0] = "python -m lightning_fp8"
from lightning_fp8.tools.estimate import main
main(["-c", {str(config)!r}, *{{}}])
"""
    found = run_warm("-c", script.format(["--gpu", "h100", "--json"]))
    assert json.loads(found.stdout)["gpu"] == "H100 SXM"
    table = run_warm("-c", script.format([])).stdout
    assert table.startswith("Estimate")
    assert len(table.splitlines()) == 3 + len(GPUS)
    wider = run_warm("-c", script.format(["--gpu", "h100", "--json", "--model.init_args.width=512"]))
    assert json.loads(wider.stdout)["bf16"]["products"] > json.loads(found.stdout)["bf16"]["products"]
    refused = run_warm("-c", script.format(["--gpu", "a100"]))
    assert refused.returncode == 2
    assert (
        refused.stderr.rstrip()
        .splitlines()[-1]
        .startswith("python -m lightning_fp8 estimate: error: A100 SXM computes no products in FP8.")
    )
