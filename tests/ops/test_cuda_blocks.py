"""The block casts and products of ``ops.cuda``, with kernels that run on the CPU from their own sources."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import pytest
import torch
from broken_kernels import Broken, poke
from gemm_cases import ACCUMULATION, assert_close
from host_kernels import HostKernel, on_host
from in_blocks import linear
from machines import RTX_5090, run_as
from outermost import NO_LAUNCH, is_outermost
from sqnr import sqnr
from torch import Tensor, nn

from kernels_cuda import gemm_variants
from lightning_fp8 import BlockScaling, MXScaling, convert, ops, scaling_state
from lightning_fp8.modules.phase import Phase
from lightning_fp8.ops import blocks, reference
from lightning_fp8.ops.amaxes import by_element
from lightning_fp8.ops.cuda import kernels
from lightning_fp8.ops.cuda.kernels import Variant
from lightning_fp8.ops.operand import CurrentScale, Fp8Tensor, Slot, WeightSlot
from lightning_fp8.scaling import ScalingState
from lightning_fp8.scaling.recipe import Recipe

pytestmark = pytest.mark.filterwarnings("ignore:.*only once for all operators.*")
CPU = torch.device("cpu")
(ADA,) = gemm_variants.configurations((8, 9), True)


@pytest.fixture
def chosen(cuda_half: Counter[str], monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Launches on a GPU with this kernel, because Hopper's kernel takes several times as long to compile."""
    run_as(RTX_5090, monkeypatch)
    return cuda_half


def slots(kind: str, record: bool = True) -> tuple[ScalingState, Slot, WeightSlot]:
    recipe = BlockScaling(power_of_2_scales=kind == "power of 2") if "e8m0" not in kind else MXScaling()
    state = ScalingState(["layer"], recipe)
    current = CurrentScale(blocks=kind)
    slot = Slot(state.scale, torch.zeros(1, 2), torch.tensor([0]), "e4m3", state, record, current)
    return state, slot, WeightSlot(torch.tensor([2]), "e4m3", state, record, current)


@pytest.mark.parametrize("layout", ["rows", "columns", "both"])
@pytest.mark.parametrize("kind", ["float32", "power of 2", "e8m0", "e8m0 squares"])
def test_casts_equal_the_reference(cuda_half: Counter[str], kind: str, layout: str) -> None:
    wide = torch.randn(200, 310) * torch.randn(200, 1).exp()
    wide[3, 4] = float("inf")
    # transposed, the last one without a copy; nothing is recorded of the second
    for number, x in enumerate((wide, wide[:, 7:290], wide[:0], wide.t(), wide[:192, :304].t())):
        both = slots(kind, number != 1), slots(kind, number != 1)
        (theirs, slot, weight_slot), (ours, our_slot, our_weight_slot) = both
        expected = blocks.cast(x, slot, "none", layout), blocks.cast_weight(x, weight_slot, layout)
        cuda_half.clear()
        made = ops.cast_blocks(x, our_slot, "none", layout), ops.cast_weight_blocks(x, our_weight_slot, layout)
        assert len(cuda_half) == (2 if len(x) else 0)
        for at, (one, other) in enumerate(zip((*made[0], *made[1]), (*expected[0], *expected[1]), strict=True)):
            # in E8M0, a block with an infinity is NaN
            payloads = at % 4 < 2
            assert torch.equal(*(without_signs_of_nan(codes) if payloads else codes for codes in (one, other)))
        assert torch.equal(ours.amax, theirs.amax)
        assert number != 1 or ours.amax[0] == 0
        assert torch.equal(ours.scale.nan_to_num(0), theirs.scale.nan_to_num(0))


def without_signs_of_nan(codes: Tensor) -> Tensor:
    return torch.where(codes & 0x7F == 0x7F, 0x7F, codes)


@pytest.mark.parametrize("squares", [True, False])
def test_products_are_those_of_the_values(chosen: Counter[str], squares: bool) -> None:
    _, slot, weight_slot = slots("float32")
    # K is not a multiple of 16, so operands are padded
    a, b = (torch.randn(rows, 300) * torch.randn(rows, 300).mul(3).exp() for rows in (70, 140))
    a_fp8, _, a_inv, _ = ops.cast_blocks(a, slot, "none", "rows")
    if squares:
        # as dgrad takes them: the payload by columns is padded, and its scales are a transposed view
        _, b_fp8, b_inv, _ = ops.cast_weight_blocks(b.t().contiguous(), weight_slot, "both")
        assert b_fp8.shape == (140, 304)
        b_inv = b_inv.t()
    else:
        b_fp8, _, b_inv, _ = ops.cast_blocks(b, slot, "none", "rows")
    chosen.clear()
    bias, operands = torch.randn(140), (Fp8Tensor(a_fp8, a_inv, "e4m3"), Fp8Tensor(b_fp8, b_inv, "e4m3"))
    out = ops.scaled_mm(*operands, bias, torch.bfloat16, squares)
    assert any(name.startswith("gemm_sm89") and name.endswith(f"={128 if squares else 1}") for name in chosen)
    values = [
        payload[:, :300].view(torch.float8_e4m3fn).double() * by_element(inverse, payload[:, :300])
        for payload, inverse in ((a_fp8, a_inv), (b_fp8, b_inv))
    ]
    exact, size = values[0] @ values[1].t() + bias.bfloat16(), values[0].abs() @ values[1].abs().t()
    assert_close(out, exact, size, ACCUMULATION[True])
    # the reference adds in a different order, and exactly
    other = reference.scaled_mm(*operands, bias, torch.bfloat16, True)
    assert sqnr(out, other) > 50


def train(model: nn.Module) -> list[Tensor]:
    """Losses and the gradients of the last step."""
    generator, losses = torch.Generator().manual_seed(1), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(2):
        optimizer.zero_grad()
        loss = model(torch.randn(3, 50, 200, generator=generator)).square().mean()
        loss.backward()
        losses.append(loss.detach())
        scaling_state(model).update()
        optimizer.step()
    return [torch.stack(losses), *(parameter.grad for parameter in model.parameters())]


def layers() -> nn.Module:
    torch.manual_seed(0)
    return convert(nn.Sequential(nn.Linear(200, 144), nn.GELU(), nn.Linear(144, 40)), BlockScaling(), min_features=0)


@pytest.fixture(scope="module")
def by_reference() -> list[Tensor]:
    return train(layers())


def test_training_is_that_of_the_reference(by_reference: list[Tensor], chosen: Counter[str]) -> None:
    for actual, expected in zip(train(layers()), by_reference, strict=True):
        assert sqnr(actual, expected) > 35
    families = Counter[str]()
    for name, times in chosen.items():
        family, *defines = name.split()
        families[" ".join((family, *(one for one in defines if one.startswith(("SQUARES", "B_SCALE")))))] += times
    # two layers, two steps: input and gradient, and the weights, at first each by itself, then together; fprop, dgrad
    # (not for the model's input) and wgrad
    assert families == {
        "cast_blocks": 8,
        "cast_weights SQUARES=1": 2 + 1,
        "gemm_sm89 B_SCALE_ROWS=128": 6,
        "gemm_sm89 B_SCALE_ROWS=1": 4,
        "update_scales": 2,
    }


@pytest.mark.parametrize("tokens", [51, 384])
def test_launches_of_a_layer(chosen: Counter[str], tokens: int) -> None:
    """Ragged tokens are copied nowhere, and the bias gradient comes out of the cast."""
    layer, x = linear(BlockScaling(), 208, 144, bias=True), torch.randn(3, tokens // 3, 208, requires_grad=True)
    dy = torch.randn(3, tokens // 3, 144)
    layer(x).backward(dy)
    layer.bias.grad = layer.weight.grad = x.grad = None
    chosen.clear()
    with torch.profiler.profile() as profiler:
        # with the cast of the weight that the first micro-batch has made
        layer(x).backward(dy)
    torch.testing.assert_close(layer.bias.grad, dy.sum((0, 1)), rtol=1e-5, atol=1e-4)
    torchs = Counter(event.name.removeprefix("aten::") for event in profiler.events() if is_outermost(event))
    # up to 128 rows, the sums of one tile are the bias gradient
    launches = {name: count for name, count in torchs.items() if name not in {*NO_LAUNCH, "alias"}}
    assert launches == ({"sum": 1} if tokens > 128 else {})
    assert sum(chosen.values()) == 2 + 3


@pytest.mark.parametrize(("recipe", "variant"), [(BlockScaling(), "SQUARES=1"), (MXScaling(), "MX=1")], ids=str)
def test_all_weights_of_a_model_in_one_launch(chosen: Counter[str], recipe: Recipe, variant: str) -> None:
    """In training, from the second step on; each has the payloads, scales, amax and scale of a cast by itself."""
    from transformers.pytorch_utils import Conv1D

    torch.manual_seed(0)
    # one that is stored transposed, with and without padding; one in bf16
    plain_layers = (nn.Linear(48, 144), Conv1D(160, 144), Conv1D(72, 160), nn.Linear(72, 40).bfloat16())
    model = convert(nn.Sequential(*plain_layers), recipe, min_features=0)
    state, x = scaling_state(model), torch.randn(40, 48)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    launches, cleared = [], []
    for _ in range(3):
        chosen.clear()
        with torch.profiler.profile() as profiler, torch.autocast("cpu", torch.bfloat16):
            for _ in range(2):  # micro-batches
                model(x).float().square().mean().backward()
        cleared.append(sum(event.name == "aten::zeros" for event in profiler.events()))
        launches.append(chosen[f"cast_weights {variant}"])
        state.update()
        made = [layer.fp8[""].weight_cast._cast for layer in model]
        noted = state.amax.clone(), state.scale.clone()
        for layer, operand in zip(model, made, strict=True):
            rows = layer.fp8[""]
            alone = ops.cast_weight_operand(
                rows.n_by_k(layer.weight.detach()), rows.slots["weight", Phase.EVALUATION], True
            )
            for one, other in zip(operand[:4], alone[:4], strict=True):
                assert one.dtype == other.dtype
                assert torch.equal(one, other)
        assert all(map(torch.equal, (state.amax, state.scale), noted))
        assert state.amax[8:].tolist() == [layer.weight.abs().max().item() for layer in model]
        optimizer.step()
        optimizer.zero_grad()
    assert launches == [4, 1, 1]
    # the table on the host
    assert cleared[1:] == [1, 1]


class Cast(NamedTuple):
    """A kernel's check, and which byte of each result is damaged.

    Attributes:
        variant: the kernel.
        places: what the check calls a result, and the byte, by the position of its address among the arguments.
        add: to the byte; behind an activation, the next number may be as good.
    """

    variant: Variant
    places: dict[int, tuple[str, int]]
    add: int = 1

    def check(self, kind: type[HostKernel] = HostKernel) -> str | None:
        return self.variant.check(CPU, on_host(self.variant, kind))


def of_input(mx: bool) -> Cast:
    words = "payload", "payload by columns", "column sums", "scale_inv", "scale_inv by columns", "amax"
    # the second number of the state
    places = zip(words, (2, 2, 2, 2, 2, 6))
    return Cast(kernels._block_cast_variant(torch.float32, mx, "none", False), dict(zip((2, 3, 4, 10, 11, 13), places)))


def of_gate(mx: bool) -> Cast:
    words = "values", "values by columns", "column sums", "values", "values by columns", "amax"
    # where numbers are large: in the fifth row, and in the fifteenth of the first column
    places = [*zip(words, (4 * 512 + 3, 14, 3, 4 * 16 if mx else 4 * 4 + 3, 3, 7))]
    # the gradient of up has its own
    positions = (2, 3, 4, 10, 11, 13), (16, 17, 18, 20, 21, 23)
    variant = kernels._block_cast_variant(torch.float32, mx, "swiglu", True)
    return Cast(variant, {at: place for some in positions for at, place in zip(some, places)}, add=8)


def of_weights(squares: bool, mx: bool) -> Cast:
    words = "scale", "amax", "payload", "transposed payload", "scale_inv", "scale_inv by columns"
    # squares of 128 x 128 have no other scales by columns
    positions = (2, 3, 9, 10, 18, 19) if mx else (2, 3, 9, 10, 18)
    return Cast(kernels._weights_variant(squares, mx), {at: (word, 2) for at, word in zip(positions, words)})


CASTS = {
    "blocks": of_input(False),
    "squares": of_weights(True, False),
    "mx": of_input(True),
    "gated blocks": of_gate(False),
    "gated mx": of_gate(True),
    "mx weights": of_weights(False, True),
    "mx squares": of_weights(True, True),
}


@pytest.mark.parametrize("name", CASTS)
def test_the_check_of_casts_finds_each_wrong_output(name: str) -> None:
    cast = CASTS[name]
    assert cast.check() is None
    for position, (words, byte) in cast.places.items():
        damage = staticmethod(poke(position, byte, cast.add))
        found = str(cast.check(type("Damaging", (Broken,), {"damage": damage})))
        assert f" in {words}, with scales in " in found, (position, found)


class OneScale(HostKernel):
    """A fault: all weights but the first are left out of a table."""

    def __call__(self, grid: int, *arguments: int | float | bytes) -> None:
        super().__call__(1 if arguments[0] else grid, *arguments)


def test_the_check_of_squares_reads_tables() -> None:
    assert "in payload" in str(CASTS["squares"].check(OneScale))


class OneStep(HostKernel):
    """A fault: the scales of b's first step are used for all steps."""

    def __call__(self, grid: int, *arguments: int | float | bytes) -> None:
        super().__call__(grid, *arguments[:-1], 0)


@pytest.mark.parametrize("rows", [1, 128])
def test_the_check_of_products_finds_scales_of_another_step(rows: int) -> None:
    output = torch.float32 if rows == 1 else torch.bfloat16
    variant = kernels._gemm_variant(ADA, "e4m3", "e4m3", output, True, rows)
    assert variant.check(CPU, on_host(variant)) is None
    assert "other numbers in sums" in str(variant.check(CPU, on_host(variant, OneStep)))
