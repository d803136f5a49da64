"""Dtypes, shapes and strides: of an operator's results on either half, with kernels and without, and of its fakes.

A compiled graph is made for the fakes, and takes the memory of real results at their word.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from operator_cases import IN_BLOCKS, OPERATORS, Case, arguments, cases
from torch import Tensor
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from kernels_cuda import gemm_variants
from lightning_fp8 import DelayedScaling
from lightning_fp8.core.casts import cast, cast_weight, cast_weights
from lightning_fp8.core.operators import LIBRARY
from lightning_fp8.ops import library
from lightning_fp8.ops.cuda import rule
from lightning_fp8.scaling import ScalingState
from lightning_fp8.scalings.base import Scaling
from lightning_fp8.scalings.mx import MX
from lightning_fp8.scalings.operand import Cast, Slot, Want
from lightning_fp8.scalings.per_block import PerBlock
from lightning_fp8.scalings.per_tensor import PerTensor

pytestmark = pytest.mark.filterwarnings("ignore:.*only once for all operators.*")
# rows, outputs and inputs: all different from each other, and so are their multiples of 16
SYMBOLIC = (41, 58, 100)
RAGGED = [(130, 17, 48), (17, 48, 130), (128, 130, 15), (16, 15, 128)]
SPECIAL = [(0, 16, 130), (1, 130, 1), (130, 1, 17)]
(ADA,) = gemm_variants.configurations((8, 9), True)
HALVES = ["cpu", "kernels that do nothing", "torch's operators"]


@pytest.fixture
def half(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What runs the operators."""
    if request.param == "kernels that do nothing":
        request.getfixturevalue("idle_half")
        # products by torch and by a kernel
        choices = itertools.cycle([None, ADA])
        monkeypatch.setattr(rule, "configuration_for", lambda *_: next(choices))
    if request.param == "torch's operators":
        request.getfixturevalue("cuda_half")
        monkeypatch.setenv("LIGHTNING_FP8_BACKEND", "reference")
        # the CPU has no such product
        monkeypatch.setattr(F, "scaled_mm", no_product)


def no_product(a: Tensor, b: Tensor, *_: Any, output_dtype: torch.dtype) -> Tensor:
    return a.new_empty(len(a), b.shape[1], dtype=output_dtype)


def layout(tensor: Tensor, value: Callable[[Any], int] = int) -> str:
    """Dtype, shape, and the strides that matter."""
    shape = [value(size) for size in tensor.shape]
    strides = [value(stride) if size > 1 and all(shape) else None for size, stride in zip(shape, tensor.stride())]
    return f"{tensor.dtype} {shape} {strides}"


def layouts(cast: Cast) -> list[str]:
    """Of the codes and the scales of both operands."""
    return [layout(one) for side in cast[:2] if side is not None for one in side[:2]]


def flat_arguments(case: Case, *sizes: int) -> list[Any]:
    """Arguments of torch's operator."""
    return OPERATORS[case.name].signature.flattened(arguments(case, *sizes))


def results(call: Callable[..., Any], given: list[Any]) -> list[Tensor]:
    """What a call returns, if anything, and the gradients."""
    made = call()
    found = [made] if isinstance(made, Tensor) else [*(made or ())]
    trained = [one for one in given if isinstance(one, Tensor) and one.requires_grad]
    return [*found, *torch.autograd.grad(found[0].float().square().sum(), trained)] if trained else found


class Fakes:
    """The results for fakes of the arguments; of those of :data:`SYMBOLIC` sizes, the sizes are symbols."""

    def __init__(self, case: Case, sizes: tuple[int, int, int]) -> None:
        self.shapes = ShapeEnv() if sizes == SYMBOLIC else None
        mode, operator = FakeTensorMode(shape_env=self.shapes), OPERATORS[case.name].op
        self.given = [
            mode.from_tensor(one, source=ConstantSource(f"given{at}")) if isinstance(one, Tensor) else one
            for at, one in enumerate(flat_arguments(case, *sizes))
        ]
        with mode:
            self.results = results(lambda: operator(*self.given), self.given)

    def layouts(self, given: list[Any]) -> list[str] | None:
        """Those of the results for these arguments; None if they need another graph."""
        values: dict[Any, int] = {}
        for fake, real in zip(self.given, given, strict=True):
            for symbol, value in zip(fake.shape, real.shape, strict=True) if isinstance(fake, Tensor) else ():
                if isinstance(symbol, torch.SymInt):
                    assert values.setdefault(symbol.node.expr, value) == value
        shapes = self.shapes
        if shapes is not None and not all(shapes.replace(guard.expr).subs(values) for guard in shapes.guards):
            return None
        return [layout(one, lambda size: _at(values, size)) for one in self.results]


def _at(values: dict[Any, int], size: int | torch.SymInt) -> int:
    return int(size.node.expr.subs(values)) if isinstance(size, torch.SymInt) else size


@functools.cache
def symbolic(case: Case, k_major: bool) -> Fakes:
    fakes = Fakes(case, SYMBOLIC)
    pinned = [symbol for symbol, value in fakes.shapes.replacements.items() if value.is_number]
    assert not pinned, f"{case} needs a graph for each size: {fakes.shapes.guards}"
    return fakes


def _scaling_of_the_fake(case: Case) -> str:
    """Among scalings that give results of the same layout, the first."""
    returns_scales = case.name.startswith("cast") or case.name in ("mlp", "gated_mlp")
    if returns_scales and case.scaling in IN_BLOCKS:
        return case.scaling if case.scaling.startswith("mx") else "blocks"
    return cases(case.name)[0].scaling


# the same for kernels and torch's operators
@functools.cache
def faked(case: Case, sizes: tuple[int, int, int], k_major: bool) -> list[str]:
    given = flat_arguments(case, *sizes)
    # graphs are made again for sizes of 0 and 1; those of several tensors in tiles may be equal for some sizes only
    may_be_symbols = min(sizes) > 1 and not (case.name.endswith("mlp") and case.scaling.startswith("mx"))
    found = symbolic(case, k_major).layouts(given) if may_be_symbols else None
    return Fakes(case, sizes).layouts(given) if found is None else found


def differences(case: Case, sizes: tuple[int, int, int]) -> Iterator[str]:
    operator, args = OPERATORS[case.name], arguments(case, *sizes)
    given = operator.signature.flattened(args)
    like = case._replace(scaling=_scaling_of_the_fake(case))
    real, fakes = results(lambda: operator(*args), given), faked(like, sizes, library.cuda_on_cpu)
    for number, (one, fake) in enumerate(zip(real, fakes, strict=True)):
        if layout(one) != fake:
            yield f"result {number}: {layout(one)}, its fake {fake}; m, n, k = {sizes}, {case}"
    yield from (f"{said}; m, n, k = {sizes}, {case}" for said in aliases(real, given))


def aliases(real: list[Tensor], given: list[Any]) -> Iterator[str]:
    """Results that share memory with an argument or with each other."""
    taken = {one.untyped_storage().data_ptr() for one in given if isinstance(one, Tensor) and one.numel()}
    for number, one in enumerate(real):
        if one.numel() and one.untyped_storage().data_ptr() in taken:
            yield f"result {number} shares memory"
        taken.add(one.untyped_storage().data_ptr())


@pytest.mark.parametrize("half", HALVES, indirect=True)
@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.usefixtures("half")
def test_results_are_as_faked(name: str) -> None:
    every, wrong = cases(name), []
    # half of them on the CPU, which has no kernels that could differ
    for number, case in enumerate(every if library.cuda_on_cpu else every[: len(every) // 2]):
        for sizes in (RAGGED[number % 2], RAGGED[2 + number // 2 % 2], SPECIAL[number % len(SPECIAL)]):
            wrong += differences(case, sizes)
    assert not wrong, "\n".join([f"{len(wrong)} differ", *wrong[:5]])


@pytest.mark.usefixtures("idle_half")
@pytest.mark.parametrize("name", OPERATORS)
def test_fakes_on_a_gpu_are_those_of_the_cuda_half(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    operator = OPERATORS[name].op
    # each layout, with and without the flag
    every = [case for case in cases(name) if not case.scaling.startswith("mx")]
    for case in {(case.layout, case.flag): case for case in every}.values():
        given, expected = flat_arguments(case, *RAGGED[0]), faked(case, RAGGED[0], True)
        with FakeTensorMode(), monkeypatch.context() as patch:
            patch.setattr(library, "cuda_on_cpu", False)
            made = operator(*(on_gpu(one) if isinstance(one, Tensor) else one for one in given))
        fakes = [made] if isinstance(made, Tensor) else made or ()
        # without gradients: torch's autograd needs the device
        assert [layout(one) for one in fakes] == expected[: len(fakes)]
        assert all(one.is_cuda for one in fakes)


def on_gpu(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cuda")


@pytest.mark.parametrize("half", HALVES, indirect=True)
@pytest.mark.usefixtures("half")
def test_payloads_by_columns_end_at_a_multiple_of_16_and_scales_of_rows_lie_in_columns() -> None:
    every = Want(True, True)
    for rows, padded in ((130, 144), (144, 144)):
        x, one = torch.randn(rows, 257).bfloat16(), "torch.float32 [] []"
        codes, turned = f"torch.uint8 [{rows}, 257] [257, 1]", f"torch.uint8 [257, {padded}] [{padded}, 1]"
        if not library.cuda_on_cpu:
            turned = f"torch.uint8 [257, {rows}] [1, 257]"
        for made in (cast, cast_weight):
            slot = Slot(torch.zeros(1).long(), None, PerTensor(), PerTensor())
            assert layouts(made(x, slot, every)) == [codes, one, turned, one]
        # operands in blocks are copies everywhere
        turned = f"torch.uint8 [257, {padded}] [{padded}, 1]"
        of_rows = [codes, f"torch.float32 [{rows}, 3] [1, {rows}]", turned, "torch.float32 [257, 2] [1, 257]"]
        assert layouts(cast(x, Slot(torch.zeros(1).long(), None, PerBlock(), PerBlock()), every)) == of_rows


@pytest.mark.usefixtures("idle_half")
@pytest.mark.parametrize("scaling", [PerTensor(), PerBlock(squares=True), MX(), MX(squares=True)], ids=str)
def test_weights_cast_together_are_as_one_that_is_cast_by_itself(scaling: Scaling) -> None:
    state, shapes = ScalingState(["a"] * 4, DelayedScaling()), [(17, 48), (48, 130), (1, 15), (16, 1)]
    slot = Slot(state.indices[0], state, scaling, scaling, record=True, generation=state.model.generation)
    together = cast_weights([torch.ones(shape) for shape in shapes], [slot] * 4, [None] * 4, Want(True, True))
    for shape, made in zip(shapes, together, strict=True):
        assert layouts(made) == layouts(cast_weight(torch.ones(shape), slot, Want(True, True)))


def test_every_operator_is_compared() -> None:
    # tests/ops/test_groups.py has those of groups
    of_groups = "cast_groups", "linear_groups", "linear_groups_backward"
    assert {f"lightning_fp8::{name}" for name in (*OPERATORS, *of_groups)} == LIBRARY._op_defs
