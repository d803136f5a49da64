"""Which GEMM an operator runs, the kernel's arguments, and its results."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from feed_forward_step import training_step
from gemm_cases import ACCUMULATION
from gemm_in_fp64 import GemmKernel, Gemms, random_payload, values
from machines import B200, H100, RTX_4090, RTX_5090, run_as
from pairwise import pairwise
from torch import Tensor, nn

from kernels_cuda.gemm_variants import configurations
from lightning_fp8 import DelayedScaling, convert
from lightning_fp8.core.casts import scaled_mm
from lightning_fp8.modules.feed_forward import fp8_feed_forward
from lightning_fp8.ops.cuda import gemm, rule
from lightning_fp8.runtime.device import Gpu
from lightning_fp8.scalings.operand import Operand
from lightning_fp8.scalings.per_tensor import PerTensor

pytestmark = pytest.mark.filterwarnings("ignore:.*only once for all operators.*")
# the last one has a row for which one more small tile would be needed than an H100 has multiprocessors
SIZES = [(32, 16, 48), (1, 1, 1), (17, 15, 129), (130, 33, 7), (40, 64, 700), (132 * 128 + 1, 1, 16)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
A_INV, B_INV = torch.tensor(3e-4), torch.tensor(7e-5)
CPU = torch.device("cpu")
LARGE, SMALL = configurations(H100.capability)


@pytest.fixture
def gemms(strict_products: None, monkeypatch: pytest.MonkeyPatch) -> Gemms:
    return Gemms(monkeypatch)


def operands(m: int, n: int, k: int) -> tuple[Operand, Operand]:
    a, b = random_payload(m, k, "e5m2"), random_payload(n, k, "e4m3")
    return Operand(a, A_INV, PerTensor("e5m2")), Operand(b, B_INV, PerTensor())


def assert_one_rounding(
    actual: Tensor, a: Operand, b: Operand, addend: Tensor | float = 0.0, of_sums: float = 2e-6
) -> None:
    """Half a unit in the last place away from fp64 at most, plus ``of_sums`` times the magnitudes for sums in fp32."""
    inv = (A_INV * B_INV).double()
    of_a, of_b = values(a.codes, "e5m2"), values(b.codes, "e4m3")
    exact = of_a @ of_b.T * inv + addend
    magnitude = of_a.abs() @ of_b.T.abs() * inv
    allowed = exact.abs() * torch.finfo(actual.dtype).eps / 2 + magnitude * of_sums + 1e-7
    assert ((actual.double() - exact).abs() <= allowed).all()


# each operand with one scale, fast sums and precise ones; blocks; MX
KINDS: list[tuple[rule.Scales, bool]] = [("one", True), ("one", False), ("blocks", False), ("mx", True)]
GPUS = H100, RTX_4090, RTX_5090, B200
# for each, by the setting: o ours, t torch's, ! an error
OURS = {
    "auto": ("toot", "ttot", "ttoo", "tttt"),
    "kernels": ("ooo!", "!!o!", "!!oo", "!!!!"),
    "cublaslt": ("tttt",) * 4,
    "reference": ("tttt",) * 4,
}


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name)
@pytest.mark.parametrize("backend", OURS)
def test_the_rule(backend: str, gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rule, "backend", lambda: backend)
    run_as(gpu, monkeypatch)
    for (scales, fast), which in zip(KINDS, OURS[backend][GPUS.index(gpu)], strict=True):
        product = CPU, 8192, 4096, scales, fast
        if which == "!":
            with pytest.raises(RuntimeError, match=rf"_BACKEND=kernels: .* no GEMM kernel for .*{gpu.name}"):
                rule.configuration_for(*product)
        else:
            assert (rule.configuration_for(*product) is not None) == (which == "o")


@pytest.mark.parametrize(
    ("m", "n", "expected"),
    [(8192, 4096, LARGE), (1, 1, SMALL), (256, 2048, SMALL), (4096, 2048, LARGE), (1024, 1024, SMALL)],
)
def test_tiles_by_the_time_that_they_take(m: int, n: int, expected: object, monkeypatch: pytest.MonkeyPatch) -> None:
    run_as(H100, monkeypatch)
    assert rule.configuration_for(CPU, m, n, "one", False) == expected


@pytest.mark.parametrize(("size", "output", "bias"), pairwise(SIZES, DTYPES, [None, *DTYPES]))
def test_a_kernel_gives_the_product(
    gemms: Gemms, size: tuple[int, int, int], output: torch.dtype, bias: torch.dtype | None
) -> None:
    m, n, _ = size
    a, b = operands(*size)
    # neither contiguous nor in the output's dtype
    addend = None if bias is None else torch.randn(n, 2).to(bias)[:, 1]
    out = gemm.one_scale(a, b, addend, output, False)
    assert out.shape == (m, n)
    assert out.dtype == output
    assert out.is_contiguous()
    assert_one_rounding(out, a, b, 0.0 if addend is None else addend.to(output).double())
    configuration = LARGE if m > 132 * 128 else SMALL
    assert gemms.kernels == [GemmKernel(configuration, "e5m2", "e4m3", output, True)]


@pytest.mark.parametrize("m, n, k", [(0, 16, 32), (4, 0, 32), (5, 3, 0)])  # noqa: PT006
def test_nothing_is_launched_where_there_is_nothing_to_compute(gemms: Gemms, m: int, n: int, k: int) -> None:
    a, b, bias = *operands(m, n, k), torch.randn(n)
    out = gemm.one_scale(a, b, bias, torch.bfloat16, False)
    assert torch.equal(out, bias.bfloat16().expand(m, n))
    assert gemms.kernels == []


def test_payloads_may_lie_anywhere(gemms: Gemms) -> None:
    a, b = operands(20, 24, 48)
    for place in (
        lambda t: t,
        lambda t: t.t().contiguous().t(),
        lambda t: torch.cat([t.new_zeros(5), t.flatten()])[5:].view(t.shape),
        lambda t: torch.cat([t, t], dim=1)[:, : t.shape[1]],
    ):
        placed = (operand._replace(codes=place(operand.codes)) for operand in (a, b))
        out = gemm.one_scale(*placed, None, torch.float32, False)
        assert_one_rounding(out, a, b)
    assert len(gemms.kernels) == 4


@pytest.fixture
def torch_products(gemms: Gemms, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Shape and accumulation of each of torch's own products."""
    seen: list[tuple[Any, ...]] = []
    real = torch._scaled_mm

    def recording(a: Tensor, b: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        seen.append((*a.shape, b.shape[1], kwargs["use_fast_accum"]))
        return real(a, b, *args, **kwargs)

    monkeypatch.setattr(torch, "_scaled_mm", recording)
    return seen


def test_torchs_gemm_takes_the_place_of_a_kernel_that_is_not_to_be_had(
    gemms: Gemms, torch_products: list[tuple[Any, ...]]
) -> None:
    gemms.are_missing = True
    a, b = operands(17, 15, 400)
    out = gemm.one_scale(a, b, torch.ones(15), torch.bfloat16, False)
    assert_one_rounding(out, a, b, 1.0)
    assert torch_products == [(17, 400, 16, False)]


@pytest.mark.parametrize(
    ("m", "n", "k"),
    [(17, 15, 129), (17, 15, 128), (17, 16, 129), (17, 16, 128), (0, 16, 128), (17, 0, 128), (17, 16, 0)],
)
def test_by_the_rule_torchs_gemm_runs(
    gemms: Gemms, m: int, n: int, k: int, torch_products: list[tuple[Any, ...]]
) -> None:
    a, b = operands(m, n, k)
    # cuBLASLt would take its neighbours for it
    bias = torch.randn(n, 2).bfloat16()[:, 1]
    for output in (torch.bfloat16, torch.float32):
        out = gemm.one_scale(a, b, bias, output, True)
        assert out.is_contiguous()
        assert_one_rounding(out, a, b, bias.to(output).double())
    # cuBLASLt takes multiples of 16
    assert torch_products == ([(m, -(-k // 16) * 16, 16, True)] * 2 if m and n and k else [])
    assert gemms.kernels == []


def test_kernels_from_their_sources_are_given_what_they_take(
    cuda_half: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_as(H100, monkeypatch)
    a, b = operands(70, 37, 300)
    bias = torch.randn(37)
    out = scaled_mm(a, b, bias, torch.float32, False)
    assert_one_rounding(out, a, b, bias.double(), ACCUMULATION[True])
    assert {name.split()[0]: count for name, count in cuda_half.items()} == {"gemm_sm90": 1}


def test_a_training_step_from_the_sources(cuda_half: Counter[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Linear - ReLU - linear, in the step after the first: launches, and the results of torch's own products."""
    x, results = torch.randn(150, 32), []
    for gpu in (H100, RTX_4090):
        run_as(gpu, monkeypatch)
        torch.manual_seed(0)
        model = convert(nn.Sequential(nn.Linear(32, 48), nn.Linear(48, 16)), DelayedScaling(amax_history_len=4))
        for _ in range(2):
            cuda_half.clear()
            with torch.autocast("cpu", torch.bfloat16):
                step = training_step(model, lambda x, model=model: fp8_feed_forward(model[0], "relu", model[1], x), x)
        launches = Counter(name.split()[0] for name in cuda_half.elements())
        # x, the hidden tensor and their gradients; the weights together, measured first; three products a layer
        casts = {"cast_transpose": 4, "cast_weights": 2, "update_scales": 1}
        assert launches == casts | ({"gemm_sm90": 4} if gpu == H100 else {})
        results.append(step)
    # sums that differ in their last bits are cast to neighbouring codes now and then
    for ours, theirs in zip(*results, strict=True):
        assert F.cosine_similarity(ours.flatten().double(), theirs.flatten().double(), dim=0) > 0.99
