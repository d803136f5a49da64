"""Where products take every layout of their operands, casts write one payload: the same numbers from fewer bytes."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import strict_scaled_mm
import torch
from feed_forward_blocks import BLOCKS, HIDDEN, WIDTH
from machines import B200, B300, H100, RTX_5090, run_as
from published_weights import with_codes
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from kernels_cuda import casts
from lightning_fp8 import BlockScaling, CurrentScaling, DelayedScaling, convert, scaling_state
from lightning_fp8.core.casts import cast_weight
from lightning_fp8.ops.cuda import layouts
from lightning_fp8.runtime.device import Gpu
from lightning_fp8.runtime.switch import default_dtype
from lightning_fp8.scaling.plan import plan_of
from lightning_fp8.scalings.operand import Slot, Want
from lightning_fp8.scalings.recipe import Recipe

pytestmark = pytest.mark.filterwarnings("ignore:.*only once for all operators.*")
LAYERS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(WIDTH, HIDDEN),
    # sizes that are no multiples of 16: of an output, an input, and a weight on both sides
    "ragged": lambda: nn.Sequential(nn.Linear(WIDTH, 40), nn.Linear(40, 20), nn.Linear(20, WIDTH)),
    "k by n": lambda: nn.Sequential(Conv1D(HIDDEN, WIDTH), Conv1D(WIDTH, HIDDEN)),
    **{name: BLOCKS[name] for name in ("gelu", "Llama", "Phi-3", "encoder layer")},
}
DELAYED = DelayedScaling(amax_history_len=4)


def steps(model: nn.Module, tokens: tuple[int, ...]) -> list[Tensor]:
    """Outputs, gradients and weights of steps with so many tokens."""
    generator = torch.Generator().manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    found: list[Tensor] = []
    for count in tokens:
        x = torch.randn(count, WIDTH, generator=generator).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            y = model(x)
        y.float().square().mean().backward()
        scaling_state(model).update()
        optimizer.step()
        parameters = [one for one in model.parameters() if one.grad is not None]
        found += [y.detach(), *(one.grad for one in (x, *parameters)), *(one.detach().clone() for one in parameters)]  # type: ignore[list-item]
        optimizer.zero_grad()
    return found


@pytest.mark.parametrize("recipe", [DELAYED, CurrentScaling()], ids=lambda recipe: recipe.precision)
@pytest.mark.parametrize("layer", LAYERS)
def test_numbers_are_those_with_a_transposed_payload(
    layer: str, recipe: Recipe, cuda_half: Counter[str], request: pytest.FixtureRequest
) -> None:
    torch.manual_seed(0)
    model = convert(LAYERS[layer](), recipe, min_features=0)
    twin = copy.deepcopy(model)
    # the second number of tokens is no multiple of 16
    expected = steps(model, (64, 77, 64))
    cuda_half.clear()
    request.getfixturevalue("every_layout")
    assert all(map(torch.equal, steps(twin, (64, 77, 64)), expected))
    assert sum(cuda_half.values()) > 0


def uint8_bytes(tensors: list[Tensor]) -> int:
    """Bytes of all payloads among these, each memory once."""
    memory = {
        one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors if one.dtype == torch.uint8
    }
    return sum(memory.values())


@pytest.mark.parametrize("every", [False, True])
@pytest.mark.parametrize("layer", ["linear", "Llama"])
def test_bytes_that_casts_write_and_backward_keeps(
    layer: str, every: bool, cuda_half: Counter[str], request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    if every:
        request.getfixturevalue("every_layout")
    written: list[int] = []

    def counting(launch: Any) -> Any:
        def counted(*arguments: Any) -> None:
            results = [one for one in arguments if isinstance(one, casts.Result)]
            written.append(sum(codes.nbytes for one in results for codes in (one.y, one.y_t) if codes is not None))
            launch(*arguments)

        return counted

    for name in ("cast_transpose", "cast_gated"):
        monkeypatch.setattr(casts, name, counting(getattr(casts, name)))
    model = convert(LAYERS[layer](), DELAYED)
    steps(model, (64, 64))
    written.clear()
    saved: list[Tensor] = []
    x = torch.randn(64, WIDTH, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda one: saved.append(one) or one, lambda one: one):
        y = model(x)
    y.sum().backward()
    # of bf16, a cast reads two bytes an element and writes one in place of two
    payloads = 1 if every else 2
    casts_of = {"linear": [WIDTH, HIDDEN], "Llama": [WIDTH, HIDDEN, WIDTH, 2 * HIDDEN]}[layer]
    assert written == [payloads * 64 * width for width in casts_of]
    # inputs are kept once in any case
    inputs, weights = {"linear": (WIDTH, 1), "Llama": (WIDTH + HIDDEN, 3)}[layer]
    assert uint8_bytes(saved) == 64 * inputs + weights * WIDTH * HIDDEN
    for gemm in (one for part in model.modules() for one in getattr(part, "fp8", {}).values()):
        rows, columns, _ = gemm.weight_cast._cast
        assert uint8_bytes([rows.codes, columns.codes]) == payloads * WIDTH * HIDDEN
        assert torch.equal(columns.codes, rows.codes.t())


def test_a_frozen_base_keeps_one_byte_a_parameter(cuda_half: Counter[str], request: pytest.FixtureRequest) -> None:
    def gradient() -> tuple[Tensor, list[Tensor]]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)).requires_grad_(False)
        convert(model, CurrentScaling(), frozen_weights="fp8")
        x = torch.randn(64, WIDTH, requires_grad=True)
        model(x).square().sum().backward()
        held = [one.content for one in model.parameters() if hasattr(one, "content")]
        return x.grad, [one for content in held for one in vars(content).values() if isinstance(one, Tensor)]  # type: ignore[return-value]

    expected, with_transposes = gradient()
    request.getfixturevalue("every_layout")
    found, alone = gradient()
    assert torch.equal(found, expected)
    assert (uint8_bytes(with_transposes), uint8_bytes(alone)) == (4 * WIDTH * HIDDEN, 2 * WIDTH * HIDDEN)


@pytest.mark.usefixtures("idle_half", "every_layout")
@pytest.mark.parametrize("kind", ["blocks", "rows"])
def test_operands_with_several_scales_are_k_major(kind: str) -> None:
    weight, recipe = torch.randn(256, 128), BlockScaling()
    if kind == "blocks":
        slot = Slot(torch.zeros(1).long(), None, *plan_of(recipe).weight)
        assert cast_weight(weight, slot, Want(True, True)).columns.codes.is_contiguous()
    held = with_codes(nn.Linear(128, 256), kind).weight
    assert held.codes()[1].is_contiguous()


@pytest.mark.usefixtures("strict_products")
def test_the_probe_finds_a_layout_that_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, real = torch.device("cpu"), strict_scaled_mm._product
    assert "MN-major, raises _scaled_gemm: Only multiplication of row-major" in str(layouts.probe(cpu))
    monkeypatch.setattr(strict_scaled_mm, "CAPABILITY", (10, 0))
    with torch.device("meta"), default_dtype(torch.bfloat16):
        assert layouts.probe(cpu) is None

    def misreading(a: Tensor, b: Tensor, *rest: Any) -> Tensor:
        # an operand that is read as if it were K-major
        return real(a if a.is_contiguous() else torch.as_strided(a, a.shape, (a.shape[1], 1)), b, *rest)

    monkeypatch.setattr(strict_scaled_mm, "_product", misreading)
    assert "torch.bfloat16 of operands in e4m3 and e4m3, MN-major and K-major, has other sums" in str(
        layouts.probe(cpu)
    )


@pytest.mark.parametrize(
    ("gpu", "failure", "takes"),
    [(H100, None, False), (RTX_5090, None, False), (B200, None, True), (B300, "other sums", False)],
)
def test_the_property_of_a_device(gpu: Gpu, failure: str | None, takes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    probed: list[torch.device] = []
    run_as(gpu, monkeypatch)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(layouts, "probe", lambda device: probed.append(device) or failure)
    layouts._passes.cache_clear()
    cpu = torch.device("cpu")
    if failure is None:
        assert layouts.takes_every_layout(cpu) is takes
    else:
        with pytest.warns(UserWarning, match=r"on cpu do not take every layout .*other sums.* write a transposed"):
            assert layouts.takes_every_layout(cpu) is takes
    layouts.takes_every_layout(cpu)
    # once, and only where it is expected to pass
    assert probed == ([cpu] if gpu.capability[0] == 10 else [])
    layouts._passes.cache_clear()
    if takes:
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        with pytest.raises(RuntimeError, match="tested for the first time while a CUDA graph is captured"):
            layouts.takes_every_layout(cpu)


@pytest.mark.cuda
def test_layouts_on_the_device() -> None:
    gpu = torch.device("cuda", torch.cuda.current_device())
    assert (layouts.probe(gpu) is None) == layouts.takes_every_layout(gpu) or not layouts.is_expected(gpu)
