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
from lightning_fp8 import BlockScaling, DelayedScaling, MXScaling, convert, scaling_state
from lightning_fp8.core.casts import cast, cast_weight
from lightning_fp8.modules.phase import Phase
from lightning_fp8.ops import library
from lightning_fp8.ops.amaxes import by_element
from lightning_fp8.ops.cuda import kernels
from lightning_fp8.ops.cuda.kernels import Variant
from lightning_fp8.scaling import ScalingState
from lightning_fp8.scaling.plan import plan_of
from lightning_fp8.scalings.emulation import product_of_blocks
from lightning_fp8.scalings.operand import Cast as Made
from lightning_fp8.scalings.operand import Slot, Want
from lightning_fp8.scalings.products import multiply
from lightning_fp8.scalings.recipe import Recipe

pytestmark = pytest.mark.filterwarnings("ignore:.*only once for all operators.*")
CPU = torch.device("cpu")
(ADA,) = gemm_variants.configurations((8, 9), True)


@pytest.fixture
def chosen(cuda_half: Counter[str], monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Launches on a GPU with this kernel, because Hopper's kernel takes several times as long to compile."""
    run_as(RTX_5090, monkeypatch)
    return cuda_half


KINDS: dict[str, Recipe] = {
    "float32": BlockScaling(),
    "power of 2": BlockScaling(power_of_2_scales=True),
    "e8m0": MXScaling(),
    "e8m0 squares": MXScaling(weight_blocks=(32, 32)),
}


def slots(kind: str, record: bool = True) -> tuple[ScalingState, Slot, Slot]:
    """Of an input and of a weight."""
    state = ScalingState(["layer"], KINDS[kind])
    plan, generation = plan_of(state.recipe), state.model.generation
    of_input = Slot(torch.tensor([0]), state, *plan.input, record, generation=generation)
    return state, of_input, Slot(torch.tensor([2]), state, *plan.weight, record, generation=generation)


@pytest.mark.parametrize("want", [Want(), Want(False, True), Want(True, True, True)], ids=["rows", "columns", "all"])
@pytest.mark.parametrize("kind", KINDS)
def test_casts_equal_the_reference(
    cuda_half: Counter[str], kind: str, want: Want, monkeypatch: pytest.MonkeyPatch
) -> None:
    wide = torch.randn(200, 310) * torch.randn(200, 1).exp()
    wide[3, 4] = float("inf")
    # transposed, the last one without a copy; nothing is recorded of the second
    for number, x in enumerate((wide, wide[:, 7:290], wide[:0], wide.t(), wide[:192, :304].t())):
        (theirs, *their_slots), (ours, *our_slots) = slots(kind, number != 1), slots(kind, number != 1)
        of_weight = want._replace(sums=False)
        monkeypatch.setattr(library, "cuda_on_cpu", False)
        expected = cast(x, their_slots[0], want), cast_weight(x, their_slots[1], of_weight)
        monkeypatch.setattr(library, "cuda_on_cpu", True)
        cuda_half.clear()
        made = cast(x, our_slots[0], want), cast_weight(x, our_slots[1], of_weight)
        assert len(cuda_half) == (2 if len(x) else 0)
        for one, other in zip(made, expected, strict=True):
            assert_same(one, other, len(x))
        assert torch.equal(ours.amax, theirs.amax)
        assert number != 1 or ours.amax[0] == 0
        assert torch.equal(ours.scale.nan_to_num(0), theirs.scale.nan_to_num(0))


def assert_same(made: Made, expected: Made, rows: int) -> None:
    for one, other in zip(made[:2], expected[:2], strict=True):
        assert (one is None) == (other is None)
        if one is None or other is None:
            continue
        assert one.scaling == other.scaling
        # on the CPU, the codes of squares by columns are a view, which is not padded
        codes = one.codes[:, : other.codes.shape[1]], other.codes
        assert not one.codes[:, other.codes.shape[1] :].any()
        # in E8M0, a block with an infinity is NaN
        assert torch.equal(*map(without_signs_of_nan, codes))
        assert torch.equal(one.scale_inv, other.scale_inv)
    assert (made.sums is None) == (expected.sums is None)
    if made.sums is not None:
        torch.testing.assert_close(made.sums, expected.sums, rtol=1e-5, atol=1e-4)


def without_signs_of_nan(codes: Tensor) -> Tensor:
    return torch.where(codes & 0x7F == 0x7F, 0x7F, codes)


@pytest.mark.parametrize("squares", [True, False])
def test_products_are_those_of_the_values(chosen: Counter[str], squares: bool) -> None:
    _, slot, weight_slot = slots("float32")
    # K is not a multiple of 16, so operands are padded
    a, b = (torch.randn(rows, 300) * torch.randn(rows, 300).mul(3).exp() for rows in (70, 140))
    a_fp8 = cast(a, slot, Want()).rows
    if squares:
        # as dgrad takes them: the codes by columns are padded, and their scales are a transposed view
        b_fp8 = cast_weight(b.t().contiguous(), weight_slot, Want(True, True)).columns
        assert b_fp8.codes.shape == (140, 304)
    else:
        b_fp8 = cast(b, slot, Want()).rows
    chosen.clear()
    bias = torch.randn(140)
    out = multiply(a_fp8, b_fp8, bias, torch.bfloat16, squares)
    assert any(name.startswith("gemm_sm89") and name.endswith(f"={128 if squares else 1}") for name in chosen)
    values = [
        one.codes[:, :300].view(torch.float8_e4m3fn).double() * by_element(one.scale_inv, one.codes[:, :300])
        for one in (a_fp8, b_fp8)
    ]
    exact, size = values[0] @ values[1].t() + bias.bfloat16(), values[0].abs() @ values[1].abs().t()
    assert_close(out, exact, size, ACCUMULATION[True])
    # the reference adds in a different order, and exactly
    other = product_of_blocks(a_fp8, b_fp8, bias, torch.bfloat16)
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


@pytest.mark.parametrize("recipe", [BlockScaling(), MXScaling(), DelayedScaling()], ids=str)
def test_the_first_kernel_is_compiled_with_the_others_of_a_layer(
    chosen: Counter[str], recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    together: list[set[str]] = []
    monkeypatch.setattr(
        kernels, "compile_ahead", lambda of, _: together.append({" ".join((name, *defines)) for name, defines in of})
    )
    layer, x = linear(recipe, 208, 144), torch.randn(51, 208, dtype=torch.bfloat16, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        layer(x).sum().backward()
    assert set() < {*chosen} <= together[0]


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
        for layer, kept in zip(model, made, strict=True):
            gemm = layer.fp8[""]
            weight = gemm.n_by_k(layer.weight.detach())
            alone = cast_weight(weight, gemm.slots["weight", Phase.EVALUATION], Want(True, True))
            for one, other in zip(kept[:2], alone[:2], strict=True):
                assert one.scaling == other.scaling
                for part, of_other in zip(one[:2], other[:2], strict=True):
                    assert part.dtype == of_other.dtype
                    assert torch.equal(part, of_other)
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
