from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_rows import written
from torch import Tensor, nn

from benchmarks import baselines, command, iteration, linear
from benchmarks.iteration import Iteration, Precision
from kernels_cuda.gemm_variants import Configuration
from lightning_fp8 import scaling_state
from lightning_fp8.conversion.plan import conversion_plan
from lightning_fp8.ops import basic
from lightning_fp8.ops.cuda import gemm_choice, kernels
from lightning_fp8.scaling.state import ScalingState

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
LINEAR, FEED_FORWARD = linear.cases(CPU)
OURS = ["lightning_fp8", "lightning_fp8 cublaslt"]


def run(path: Path, case: str = "") -> None:
    options = ["--device", "cpu", "--rounds", "2", "--case", case, "--out", str(path / "rows.jsonl")]
    command.main(["--suite", "linear", *options])


def test_the_whole_suite_on_the_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(tmp_path)
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for row in written(tmp_path):
        found.setdefault(row["case"], {})[row["variant"]] = row
    theirs = [*baselines.torchao_precisions(CPU), "bf16 autocast", "bf16"]
    assert {case: list(variants) for case, variants in found.items()} == {
        "linear, 64 tokens, 32 -> 48": ["lightning_fp8", "lightning_fp8 same weights", *theirs],
        "linear-GELU-linear, 64 tokens, 32 -> 96 -> 32": [*OURS, *theirs],
    }
    flops = (3 * 2 * 64 * 32 * 48, 6 * 2 * 64 * 32 * 96)
    for expected, variants in zip(flops, found.values(), strict=True):
        for row in variants.values():
            assert row["flops"] == expected
            assert row["tflops"] == pytest.approx(expected / row["p50_us"] / 1e6)
            assert (row["suite"], row["events_us"], row["share_of_ceiling"]) == ("linear", None, None)
    assert "TFLOP/s" in capsys.readouterr().out


def made(precision: Precision, block: nn.Module | None = None) -> Iteration:
    torch.manual_seed(0)
    block = block or nn.Linear(32, 48)
    x, dy = torch.randn(64, 32).bfloat16().requires_grad_(), torch.randn(64, 48).mul(1e-3).bfloat16()
    return Iteration(precision.make(block), x, dy, precision)


def exact(given: Iteration) -> dict[str, Tensor]:
    """Reference in fp64: output and gradients of the linear layer."""
    layer, x, dy = given.block, given.x.detach().double(), given.dy.double()
    weight, bias = layer.weight.detach().double(), layer.bias.detach().double()
    return {
        "y": x @ weight.t() + bias,
        "gradient of x": dy @ weight,
        "gradient of weight": dy.t() @ x,
        "gradient of bias": dy.sum(dim=0),
    }


FP8 = Precision(linear.convert, in_fp8=True)


@pytest.mark.parametrize("precision", [FP8, Precision(lambda block: block)], ids=["fp8", "bf16 autocast"])
def test_results_are_those_of_the_layer(precision: Precision) -> None:
    given = made(precision)
    expected = exact(given)
    for _ in range(2):
        # gradients of an earlier iteration are not accumulated
        results = given.results()
        assert set(results) == set(expected)
        assert iteration.difference(given, expected) is None
    assert results["y"].dtype == torch.bfloat16
    assert not results["y"].requires_grad
    # and they have the requested precision
    noise = (results["y"].double() - expected["y"]).norm() / expected["y"].norm()
    assert 0.01 < noise < 0.1 if precision.in_fp8 else noise < 0.01


def test_bf16_without_autocast_has_bf16_weights() -> None:
    precision = iteration.bf16_precisions()["bf16"]
    given = made(precision)
    results = given.results()
    assert not precision.autocast
    assert {tensor.dtype for tensor in results.values()} == {torch.bfloat16}


def test_fp32_is_what_all_are_compared_with(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[dict[str, Tensor]] = []
    monkeypatch.setattr(iteration, "difference", lambda iteration, exact: given.append(exact))
    one = made(Precision(lambda block: block))
    block, x, dy = one.block, one.x.detach(), one.dy
    (variant,) = iteration.variants(block, x, dy, {"any": Precision(lambda block: block)}, 1)
    variant.check()
    for name, expected in exact(one).items():
        assert given[0][name].dtype == torch.float32
        assert torch.allclose(given[0][name].double(), expected, rtol=1e-5, atol=1e-6 * float(expected.abs().max()))


@pytest.mark.parametrize("autocast", [True, False])
def test_autocast_is_on_where_it_is_asked_for(autocast: bool) -> None:
    given = made(Precision(lambda block: block.bfloat16(), autocast=autocast))
    found: list[bool] = []
    given.block.register_forward_hook(lambda *_: found.append(torch.is_autocast_enabled("cpu")))
    given.run()
    assert found == [autocast]


@pytest.mark.parametrize("name", ["y", "gradient of x", "gradient of weight", "gradient of bias"])
def test_each_result_is_compared(name: str) -> None:
    given = made(Precision(lambda block: block))
    right = exact(given)

    def compare(change: Any) -> str | None:
        return iteration.difference(given, {**right, name: change(right[name])})

    least = 20 if name == "y" else 15
    # 20 and 15 dB are a tenth and 0.178 of the signal
    inside, outside = (1.08, 1.12) if name == "y" else (1.15, 1.22)
    assert compare(lambda x: x * inside) is None
    words = f"^{name} with an SQNR of {least - 1}\\.\\d dB against fp32, where {least} is the least$"
    assert re.match(words, str(compare(lambda x: x * outside)))
    assert "SQNR of nan" in str(compare(lambda x: x * float("nan")))
    assert compare(lambda x: x[..., 1:]) == f"no {name} of shape {tuple(right[name][..., 1:].shape)}"


def test_a_gradient_that_is_missing_is_named() -> None:
    given = made(Precision(lambda block: block))
    right = exact(given)
    given.block.bias.requires_grad_(False)
    assert iteration.difference(given, right) == "no gradient of bias of shape (48,)"


def test_a_wrong_result_is_not_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(block: nn.Module, **options: Any) -> nn.Module:
        with torch.no_grad():
            block.weight.mul_(1.2)
        return real(block, **options)

    real = linear.convert
    monkeypatch.setattr(linear, "convert", wrong)
    words = r"\nlinear, 64 tokens, 32 -> 48: lightning_fp8 gave y with an SQNR of 1\d\.\d dB against fp32, where 20 is"
    with pytest.raises(SystemExit, match=words):
        run(tmp_path, "linear, 64")
    assert {row["case"].partition(",")[0] for row in written(tmp_path)} == {"linear-GELU-linear"}


def precisions_of(case: Any, monkeypatch: pytest.MonkeyPatch, device: torch.device = CPU) -> dict[str, Precision]:
    given: list[dict[str, Precision]] = []
    with monkeypatch.context() as patch:
        patch.setattr(iteration, "variants", lambda block, x, dy, precisions, copies: given.append(precisions))
        case.variants(device)
    return given[0]


@pytest.mark.parametrize(("variant", "casts"), [("lightning_fp8", 3), ("lightning_fp8 same weights", 0)])
def test_weights_are_cast_where_they_have_changed(variant: str, casts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    given = made(precisions_of(LINEAR, monkeypatch)[variant])
    iteration.reach_steady_state(given)
    given.run()
    seen: list[str] = []

    def counting(name: str) -> Any:
        cast = getattr(basic, name)
        return lambda *arguments: (seen.append(name), cast(*arguments))[1]

    for name in ("cast", "cast_weight"):
        monkeypatch.setattr(basic, name, counting(name))
    for _ in range(3):
        given.run()
    assert (seen.count("cast"), seen.count("cast_weight")) == (3, casts)


def test_the_gemms_of_linear_gelu_linear(monkeypatch: pytest.MonkeyPatch) -> None:
    precisions = precisions_of(FEED_FORWARD, monkeypatch)
    found = {}
    for name in OURS:
        block = precisions[name].make(linear.Block(16, 32))
        assert block.as_one
        found[name] = conversion_plan(block).config.gemm
    assert found == dict(zip(OURS, ("rawkernel", "cublaslt")))
    assert not linear.Block(16, 32).as_one
    # the linear layer runs as users call it
    assert (
        conversion_plan(precisions_of(LINEAR, monkeypatch)["lightning_fp8"].make(nn.Linear(16, 32))).config.gemm
        == "auto"
    )


def test_as_one_means_in_one_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(linear, "fp8_feed_forward", lambda first, activation, second, x: calls.append(activation))
    block = linear._as_one(linear.Block(16, 32), "auto")
    block(torch.randn(4, 8))
    assert calls == ["gelu"]


def test_copies_are_blocks_of_their_own_and_in_the_steady_state(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks: list[nn.Module] = []

    def make(block: nn.Module) -> nn.Module:
        blocks.append(block)
        return linear.convert(block)

    block = nn.Linear(32, 48)
    x, dy = torch.randn(64, 32).bfloat16(), torch.randn(64, 48).bfloat16()
    (variant,) = iteration.variants(block, x, dy, {"ours": Precision(make, in_fp8=True)}, 3)
    # created at the check, where a failure counts as the variant's own
    assert blocks == []
    assert variant.check() is None
    assert variant.check() is None
    assert len({id(each) for each in blocks}) == 3
    assert not any(each is block for each in blocks)
    assert all(scaling_state(each).every_tensor_has_history for each in blocks)
    for each in blocks:
        each.weight.grad = None
    assert variant.call(2) is None
    assert [each.weight.grad is not None for each in blocks] == [False, False, True]
    assert x.grad is None
    monkeypatch.setattr(ScalingState, "every_tensor_has_history", False)
    with pytest.raises(RuntimeError, match="this would time the first steps"):
        iteration.reach_steady_state(Iteration(blocks[0], x.requires_grad_(), dy, FP8))


def test_the_block_comes_without_a_touch_of_the_generator(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    monkeypatch.setattr(iteration, "variants", lambda *arguments: given.append(arguments))
    before = torch.random.get_rng_state()
    LINEAR.variants(CPU)
    LINEAR.variants(CPU)
    assert torch.equal(torch.random.get_rng_state(), before)
    (one, x, dy, _, copies), (other, *_) = given
    assert torch.equal(one.weight, other.weight)
    assert (x.shape, dy.shape, x.dtype, dy.dtype, copies) == ((64, 32), (64, 48), torch.bfloat16, torch.bfloat16, 2)


def test_torchao_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(baselines, "find_spec", lambda name: None)
    assert baselines.torchao_precisions(CPU) == {}
    monkeypatch.setattr(baselines, "find_spec", lambda name: "found" if name == "torchao" else None)

    class Float8:
        Float8LinearConfig = dict

        @staticmethod
        def convert_to_float8_training(block: Any, config: Any) -> Any:
            return block, config

    monkeypatch.setitem(sys.modules, "torchao.float8", Float8)
    for device, name, emulate in ((CPU, "torchao(emulated)", True), (GPU, "torchao", False)):
        ((found, precision),) = baselines.torchao_precisions(device).items()
        assert found == name
        assert precision.make("a block") == ("a block", {"emulate": emulate})


CASTS = [("e4m3", "none", False), ("e5m2", "none", False)]
GELU = [("e4m3", "gelu", False), ("e5m2", "gelu", True)]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Records what is requested; ``missing`` has no kernel, and ``configuration`` and ``splits`` are chosen."""
    found: dict[str, Any] = {"missing": None, "configuration": Configuration("gemm_sm90", 256, 128, 4), "splits": 1}
    found["asked"] = []

    def kernel(*what: Any) -> Any:
        found["asked"].append(what)
        return None if what == found["missing"] else "a kernel"

    def choose(device: Any, word: str, m: int, n: int, k: int, *_: Any) -> gemm_choice.Choice:
        found["sizes"] = [*found.get("sizes", []), (m, n, k)]
        return gemm_choice.Choice(found["configuration"], found["splits"])

    monkeypatch.setattr(kernels, "cast_kernel", lambda device, dtype, *rest: kernel("cast", *rest))
    monkeypatch.setattr(kernels, "weights_kernel", lambda *_: kernel("weights"))
    monkeypatch.setattr(gemm_choice, "choose", choose)
    monkeypatch.setattr(kernels, "gemm_kernel", lambda device, _, *rest: kernel("gemm", *rest), raising=False)
    monkeypatch.setattr(kernels, "sum_splits_kernel", lambda device, *rest: kernel("sum", *rest), raising=False)
    return found


def test_a_linear_layer_is_served_by_its_casts(asked: dict[str, Any]) -> None:
    assert LINEAR.is_served(GPU)
    needed = [*(("cast", *cast) for cast in CASTS), ("weights",)]
    assert sorted(asked["asked"]) == sorted(needed)
    for missing in needed:
        asked["missing"] = missing
        assert not LINEAR.is_served(GPU)
    assert LINEAR.is_served(CPU)


def test_linear_gelu_linear_is_served_by_casts_and_gemms(asked: dict[str, Any]) -> None:
    assert FEED_FORWARD.is_served(GPU)
    bf16, fp32 = torch.bfloat16, torch.float32
    gemms = [
        ("gemm", "e4m3", "e4m3", bf16, False),
        ("gemm", "e5m2", "e4m3", bf16, True),
        ("gemm", "e5m2", "e4m3", fp32, True),
    ]
    needed = {*(("cast", *cast) for cast in (*CASTS, *GELU)), ("weights",), *gemms}
    assert set(asked["asked"]) == needed
    up, down = [(64, 96, 32), (64, 32, 96), (96, 32, 64)], [(64, 32, 96), (64, 96, 32), (32, 96, 64)]
    assert asked["sizes"] == [*up, *down]
    for missing in needed:
        asked["missing"] = missing
        assert not FEED_FORWARD.is_served(GPU)
    assert FEED_FORWARD.is_served(CPU)
