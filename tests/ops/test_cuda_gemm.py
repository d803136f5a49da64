"""On a GPU: the GEMM kernels against fp64, repeatable, under load and in graphs."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from gemm_cases import ACCUMULATION, FORMAT_PAIRS, Operands, Problem, assert_close, operands, random_problems
from sqnr import sqnr
from torch import Tensor, nn

from kernels_cuda import gemm, gemm_variants
from kernels_cuda.gemm_variants import Configuration
from kernels_cuda.launch import Kernel
from kernels_cuda.load import load
from lightning_fp8 import BlockScaling, DelayedScaling, MXScaling, convert, scaling_state
from lightning_fp8.core.casts import scaled_mm
from lightning_fp8.modules.feed_forward import fp8_feed_forward
from lightning_fp8.ops.cuda import kernels, rule
from lightning_fp8.scalings import base
from lightning_fp8.scalings.operand import Operand
from lightning_fp8.scalings.per_tensor import PerTensor
from lightning_fp8.scalings.recipe import Recipe

pytestmark = pytest.mark.cuda
GUARD = 512


@pytest.fixture(scope="module")
def gpu() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def configurations() -> tuple[Configuration, ...]:
    """Those for operands with one scale each, which all promote; not on every GPU."""
    return gemm_variants.configurations(torch.cuda.get_device_capability()) if torch.cuda.is_available() else ()


def every_variant() -> list[kernels.Variant]:
    return kernels.variants(torch.cuda.get_device_capability(), every=True) if torch.cuda.is_available() else []


WORDS = ("cast_blocks", "cast_mx", "cast_weights SQUARES=1", "cast_weights MX=1", "B_SCALE_ROWS", "GROUPED")
OF_BLOCKS_AND_GROUPS = [one for one in every_variant() if any(word in one.name for word in WORDS)]


def kernel_of(variant: kernels.Variant, gpu: torch.device) -> Kernel:
    return load(variant.family, variant.defines, variant.layout, variant.block, gpu.index or 0, variant.shared_bytes)


def gemm_kernel(configuration: Configuration, a: str, b: str, output: torch.dtype, gpu: torch.device) -> Kernel:
    return kernel_of(kernels._gemm_variant(configuration, a, b, output, True), gpu)


def on_device(case: Operands, gpu: torch.device) -> Operands:
    return case._replace(**{name: getattr(case, name).to(gpu) for name in ("a", "b", "a_scale_inv", "b_scale_inv")})


def check(result: Tensor, case: Operands, bias: Tensor | None = None) -> None:
    expected, magnitude = case.product(), case.magnitude()
    if bias is not None:
        expected, magnitude = expected + bias.to(result.dtype).double(), magnitude + bias.abs()
    assert_close(result, expected, magnitude, ACCUMULATION[True])


def guarded(m: int, n: int, output: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """A poisoned output with rows of whole 16 bytes, and the memory around it."""
    width = -(-n * output.itemsize // 16) * 16 // output.itemsize
    whole = torch.full((2 * GUARD + m * width,), float("nan"), dtype=output, device=device)
    return whole[GUARD : GUARD + m * width].view(m, width)[:, :n], whole


@pytest.mark.parametrize("configuration", configurations(), ids=lambda configuration: configuration.name)
def test_checks(gpu: torch.device, configuration: Configuration) -> None:
    for pair in FORMAT_PAIRS:
        for output in gemm_variants.OUTPUTS:
            variant = kernels._gemm_variant(configuration, *pair, output, True)
            assert variant.check(gpu, kernel_of(variant, gpu)) is None, variant.name


def compute(problem: Problem, gpu: torch.device) -> None:
    configuration, output, n = problem.configuration, problem.output, problem.n
    case = on_device(problem.case, gpu)
    bias = torch.randn(n, device=gpu) if problem.number % 3 == 0 else None
    kernel = gemm_kernel(configuration, *problem.pair, output, gpu)
    runs = []
    for _ in range(2):
        out, whole = guarded(problem.m, n, output, gpu)
        gemm.gemm(kernel, configuration, *case.scaled, out, bias)
        assert whole[:GUARD].isnan().all()
        assert whole[-GUARD:].isnan().all()
        runs.append(out.clone())
    assert torch.equal(runs[0].view(torch.uint8), runs[1].view(torch.uint8)), "differs from run to run"
    check(runs[0], case, bias)


def test_200_random_shapes(gpu: torch.device) -> None:
    for problem in random_problems(configurations(), configurations()):
        compute(problem, gpu)


def test_small_ragged_shapes(gpu: torch.device) -> None:
    """Those random shapes that are small enough for compute-sanitizer."""
    for problem in random_problems(configurations(), configurations()):
        if problem.m * problem.n * problem.k < 3e6:
            compute(problem, gpu)


def test_ten_thousand_launches_with_other_streams_busy(gpu: torch.device) -> None:
    if not configurations():
        pytest.skip("no GEMMs for operands with one scale each")
    configuration = configurations()[0]
    case = on_device(operands(1100, 520, 1040), gpu)
    kernel = gemm_kernel(configuration, "e4m3", "e4m3", torch.bfloat16, gpu)
    outs = [torch.full((1100, 520), float("nan"), dtype=torch.bfloat16, device=gpu) for _ in range(2)]
    other, busy = torch.cuda.Stream(gpu), torch.randn(2048, 2048, device=gpu)
    for number in range(10_000):
        if number % 50 == 0:
            with torch.cuda.stream(other):
                busy = (busy @ busy).clamp_(-1, 1)
        out = outs[number % 2]
        gemm.gemm(kernel, configuration, *case.scaled, out)
    torch.cuda.synchronize()
    assert torch.equal(*outs)
    check(outs[0], case)


def test_the_operator_in_a_graph(gpu: torch.device) -> None:
    case = on_device(operands(300, 136, 400), gpu)
    a, b = (Operand(*scaled, PerTensor()) for scaled in case.scaled)
    # precise sums, which ours has on some GPUs
    arguments = (a, b, None, torch.bfloat16, False)
    eager = scaled_mm(*arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = scaled_mm(*arguments)
    case.a.copy_(case.a.flip(0))
    graph.replay()
    assert torch.equal(captured, eager.flip(0))


def feed_forward(gpu: torch.device) -> list[Tensor]:
    """Output and gradients of linear - GELU - linear in its fourth step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512)).to(gpu)
    convert(model, DelayedScaling(amax_history_len=4))
    for _ in range(4):
        model.zero_grad()
        x = torch.randn(1024, 512, device=gpu, requires_grad=True)
        with torch.autocast("cuda", torch.bfloat16):
            y = fp8_feed_forward(model[0], "gelu", model[2], x)
        y.float().square().mean().backward()
        scaling_state(model).update()
    return [y.detach(), x.grad, *(parameter.grad for parameter in model.parameters())]


def test_a_feed_forward_by_our_gemms_is_that_by_cublaslt(gpu: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    if not configurations():
        pytest.skip("no GEMMs for operands with one scale each")
    found = []
    for backend in ("kernels", "cublaslt"):
        monkeypatch.setattr(rule, "backend", lambda backend=backend: backend)
        rule.configuration_for.cache_clear()
        found.append(feed_forward(gpu))
    rule.configuration_for.cache_clear()
    for mine, theirs in zip(*found, strict=True):
        assert F.cosine_similarity(mine.flatten().double(), theirs.flatten().double(), dim=0) > 0.998


@pytest.mark.parametrize("variant", OF_BLOCKS_AND_GROUPS, ids=lambda variant: variant.name)
def test_kernels_of_blocks_and_groups_pass_their_checks(gpu: torch.device, variant: kernels.Variant) -> None:
    """All dtypes and configurations; products with the scales of each step; casts in MX, also of weights."""
    assert len(OF_BLOCKS_AND_GROUPS) >= 9
    assert variant.check(gpu, kernel_of(variant, gpu)) is None


def test_experts_in_groups(gpu: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each product in one launch, against one expert after the other; the same again, to the last bit."""
    import experts as made

    from lightning_fp8.ops.cuda import groups

    if groups.grouped_configuration(groups.capability(gpu), True) is None:
        pytest.skip("no GEMMs over groups of rows")
    for name, size in (("WIDTH", 512), ("HIDDEN", 384), ("TOKENS", 1000)):
        monkeypatch.setattr(made, name, size)
    model = convert(made.experts("transposed, biases, interleaved gate")).to(gpu)
    found = []
    for in_groups in (True, True, False):
        if not in_groups:
            monkeypatch.setattr(base, "has_kernels", lambda *_: False)
        x = torch.randn(1000, 512, generator=torch.Generator().manual_seed(0)).to(gpu).requires_grad_()
        model.zero_grad()
        y = model(x, *(one.to(gpu) for one in made.routing(2)))
        y.square().sum().backward()
        found.append([y.detach(), *(parameter.grad.clone() for parameter in model.parameters())])
    for one, again, other in zip(*found, strict=True):
        assert torch.equal(one, again)
        assert (one - other).norm() < 0.05 * other.norm()


@pytest.mark.parametrize("recipe", [BlockScaling(), MXScaling()], ids=lambda recipe: recipe.precision)
@pytest.mark.parametrize("shape", [(8192, 4096, 4096), (333, 250, 1000), (1, 16, 100)])
def test_training_products_in_blocks(gpu: torch.device, shape: tuple[int, int, int], recipe: Recipe) -> None:
    """fprop, dgrad and wgrad of a layer, repeatable, against fp64."""
    if isinstance(recipe, MXScaling) and torch.cuda.get_device_capability(gpu) < (10, 0):
        pytest.skip("no tensor cores for MX")
    m, n, k = shape
    layer = convert(nn.Linear(k, n, bias=False), recipe).to(gpu)
    x = (torch.randn(m, k, device=gpu) * torch.randn(m, 1, device=gpu).exp()).requires_grad_()
    dy, runs = torch.randn(m, n, device=gpu), []
    for _ in range(2):
        x.grad = layer.weight.grad = None
        y = layer(x)
        y.backward(dy)
        runs.append((y.detach(), x.grad, layer.weight.grad))
    for first, second in zip(*runs, strict=True):
        assert torch.equal(first, second)
    with torch.no_grad():
        w, wide = layer.weight.double(), x.double()
        for made, exact in zip(runs[0], (wide @ w.t(), dy.double() @ w, dy.double().t() @ wide), strict=True):
            assert sqnr(made, exact) > 24
