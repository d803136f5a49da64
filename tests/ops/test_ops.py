"""The operators: torch's own checks, and GEMMs against fp64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import fp8_numpy
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from by_columns import padded, unpadded
from gemm_in_fp64 import random_payload, values
from operator_cases import OPERATORS, Case, arguments, cases
from pairwise import pairwise
from slots import slot_of
from torch import Tensor

from lightning_fp8 import DelayedScaling
from lightning_fp8.core.casts import cast_weight
from lightning_fp8.core.linear import run_backward
from lightning_fp8.ops import arithmetic
from lightning_fp8.ops.arithmetic import by_columns
from lightning_fp8.ops.cuda import gemm, plain
from lightning_fp8.ops.dequantize import dequantize, keep_values, values_of
from lightning_fp8.ops.library import is_watched
from lightning_fp8.scaling import ScalingState
from lightning_fp8.scalings import emulation
from lightning_fp8.scalings.emulation import product_of_tensors
from lightning_fp8.scalings.operand import Operand, Slot, Want
from lightning_fp8.scalings.per_tensor import PerTensor

GRAD = 1
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SIZES = [(32, 16, 48), (1, 1, 1), (17, 15, 129), (130, 33, 7), (5, 3, 0), (0, 16, 32)]


def operand(codes: Tensor, scale_inv: Tensor, fmt: str = "e4m3") -> Operand:
    return Operand(codes, scale_inv, PerTensor(fmt))


def by_torch(a: Operand, b: Operand, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    return plain.scaled_mm(a, b, bias, dtype, True)


def by_rule(a: Operand, b: Operand, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    return gemm.one_scale(a, b, bias, dtype, False)


def state_with_history() -> ScalingState:
    state = ScalingState(["a"], DelayedScaling())
    state.amax.fill_(4.0)
    state.update()
    return state


@pytest.mark.parametrize(
    ("size", "out_dtype", "formats", "bias"),
    pairwise(SIZES, DTYPES, [("e4m3", "e4m3"), ("e5m2", "e4m3")], [False, True]),
)
@pytest.mark.parametrize("multiply", [product_of_tensors, by_torch])
@pytest.mark.usefixtures("strict_products")
def test_scaled_mm_equals_fp64_within_one_rounding(
    size: tuple[int, int, int], out_dtype: torch.dtype, formats: tuple[str, str], bias: bool, multiply: Any
) -> None:
    m, n, k = size
    a, b = random_payload(m, k, formats[0]), random_payload(n, k, formats[1])
    # fp16 can hold these products, too
    a_inv, b_inv = torch.tensor(3e-4), torch.tensor(7e-5)
    # neither 16-bit format holds it: it is rounded before it is added
    addend = torch.randn(n) if bias else None
    exact = values(a, formats[0]) @ values(b, formats[1]).T * (a_inv * b_inv).double()
    exact = exact if addend is None else exact + addend.to(out_dtype)
    out = multiply(operand(a, a_inv, formats[0]), operand(b, b_inv, formats[1]), addend, out_dtype)
    assert out.dtype == out_dtype
    assert out.shape == (m, n)
    assert out.is_contiguous()
    # half a unit in the last place, plus the error of fp32 accumulation
    magnitude = values(a, formats[0]).abs() @ values(b, formats[1]).T.abs() * (a_inv * b_inv).double()
    allowed = exact.abs() * torch.finfo(out_dtype).eps / 2 + magnitude * 2e-6 + 1e-7
    assert ((out.double() - exact).abs() <= allowed).all()


@pytest.mark.parametrize("k", [71, 48])
@pytest.mark.parametrize("multiply", [product_of_tensors, by_torch, by_rule])
def test_of_two_ks_the_shorter_is_the_true_one(multiply: Any, k: int) -> None:
    """An operand by columns has zeros at the end of its rows, as in dgrad, where the other has none."""
    a, b, inv = random_payload(20, k, "e5m2"), random_payload(32, k, "e4m3"), torch.tensor(1e-3)
    rest = (None, torch.float32)
    expected = product_of_tensors(operand(a, inv, "e5m2"), operand(b, inv), *rest)
    longer_a, longer_b = (F.pad(one, (0, padded(k) - k)) for one in (a, b))
    for one, other in ((a, longer_b), (longer_a, b), (longer_a, longer_b), (a, longer_b[:, : k + 1])):
        out = multiply(operand(one, inv, "e5m2"), operand(other, inv), *rest)
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-4)


def test_scaled_mm_without_bf16_units(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = (operand(random_payload(rows, 40, "e4m3"), torch.tensor(1e-3)) for rows in (17, 9))
    args = (a, b, torch.randn(9), torch.bfloat16)
    expected = product_of_tensors(*args)
    monkeypatch.setattr(emulation, "_HAS_BF16_GEMM", False)
    torch.testing.assert_close(product_of_tensors(*args), expected, rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("transposed", [torch.Tensor.t, by_columns], ids=["a view", "padded"])
def test_cuda_path_backward_equals_the_reference(
    transposed: Callable[[Tensor], Tensor], host_kernels: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    state, dy = state_with_history(), torch.randn(20, 12)
    x_fp8, w_fp8 = random_payload(20, 18, "e4m3"), random_payload(12, 18, "e4m3")
    one = torch.tensor(0.01)
    for x, w in ((x_fp8, w_fp8), (None, w_fp8), (x_fp8, None), (None, None)):
        results = []
        for on_gpu in (False, True):
            monkeypatch.setattr("lightning_fp8.ops.library.cuda_on_cpu", on_gpu)
            state.amax.zero_()
            kept = (None if codes is None else operand(transposed(codes), one) for codes in (x, w))
            gradients = run_backward(
                dy, *kept, slot_of(state, GRAD, record=True), torch.float32, torch.float32, bias=True
            )
            results.append((*gradients, state.amax.clone()))
        assert len(host_kernels) == 1
        for expected, actual in zip(*results, strict=True):
            assert actual.numel() == expected.numel()
            torch.testing.assert_close(actual.flatten(), expected.flatten(), rtol=1e-4, atol=1e-4)


# few and many elements are dequantized by different operations
@pytest.mark.parametrize(("m", "n", "k"), [(4, 3, 8), (64, 48, 48)])
def test_nan_spreads_through_the_gemm_as_in_any_other(m: int, n: int, k: int) -> None:
    a, b = random_payload(m, k, "e4m3"), random_payload(n, k, "e4m3")
    a[1, 2], b[2, 3] = 0x7F, 0xFF
    out = product_of_tensors(*(operand(codes, torch.tensor(1.0)) for codes in (a, b)), None, torch.float32)
    expected = torch.zeros(m, n, dtype=torch.bool)
    expected[1], expected[:, 2] = True, True
    assert torch.equal(out.isnan(), expected)


@pytest.mark.parametrize(("m", "n", "k"), [(4, 6, 8), (64, 48, 48)])
@pytest.mark.parametrize("record", [False, True])
@pytest.mark.parametrize("format", ["e4m3", "e5m2"])
def test_nan_spreads_through_backward_as_in_any_other(format: str, record: bool, m: int, n: int, k: int) -> None:
    dy, x, w = torch.randn(m, n), random_payload(m, k, "e4m3"), random_payload(n, k, "e4m3")
    dy[3, 5], x[2, 1], w[2, 4] = float("nan"), 0x7F, 0xFF
    one, slot = torch.tensor(1.0), slot_of(state_with_history(), GRAD, format, record)
    kept = (operand(codes.t(), one) for codes in (x, w))
    gradients = run_backward(dy, *kept, slot, torch.float32, torch.float32, bias=True)
    expected = [torch.zeros(shape, dtype=torch.bool) for shape in ((m, k), (n, k), (n,))]
    expected[0][3], expected[0][:, 4] = True, True
    expected[1][5], expected[1][:, 1] = True, True
    expected[2][5] = True
    for gradient, is_nan in zip(gradients, expected, strict=True):
        assert torch.equal(gradient.isnan(), is_nan)


def test_blocks_cover_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    state, dy = state_with_history(), torch.randn(37, 20)
    x_fp8, w_fp8, one = random_payload(37, 24, "e4m3"), random_payload(20, 24, "e4m3"), torch.tensor(0.01)
    kept = (operand(codes.t(), one) for codes in (x_fp8, w_fp8))
    args = (dy, *kept, slot_of(state, GRAD, "e5m2"), torch.float32, torch.float32, True)
    whole = run_backward(*args)
    product = (operand(x_fp8, one), operand(w_fp8, one), None, torch.float32)
    y = product_of_tensors(*product)
    monkeypatch.setattr(arithmetic, "CHUNK_ELEMENTS", 100)
    for blocked, expected in zip(run_backward(*args), whole, strict=True):
        torch.testing.assert_close(blocked, expected, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(product_of_tensors(*product), y)


def test_gemm_leaves_the_matmul_precision_as_it_was() -> None:
    matmul = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = matmul.fp32_precision
    a = operand(random_payload(4, 8, "e4m3"), torch.tensor(1.0))
    product_of_tensors(a, a, None, torch.float32)
    with pytest.raises(RuntimeError):
        product_of_tensors(a, a, torch.ones(3), torch.float32)
    assert matmul.fp32_precision == before


def some_cases(name: str) -> list[Case]:
    """Each layout, with another scaling and other options each time."""
    every = cases(name)
    scalings = len({case.scaling for case in every})
    firsts = range(0, len(every), scalings * (2 if name.startswith("cast") else 1))
    return [every[first + 7 * number % scalings] for number, first in enumerate(firsts)]


@pytest.mark.filterwarnings("ignore:.*only once for all operators.*")
@pytest.mark.parametrize("half", ["cpu", "cuda"])
@pytest.mark.parametrize("name", OPERATORS)
def test_opcheck(name: str, half: str, request: pytest.FixtureRequest) -> None:
    if half == "cuda":
        request.getfixturevalue("cuda_half")
    operator = OPERATORS[name]
    # each half has every layout
    for case in some_cases(name)[half == "cuda" :: 2]:
        # more than one block each way, or the strides of scales would not matter
        args = arguments(case, 130, 24, 144)
        flat = operator.signature.flattened(args)
        torch.library.opcheck(operator.op, tuple(flat), test_utils="ALL")


@pytest.mark.parametrize("name", ["mlp", "gated_mlp"])
def test_the_fake_of_a_block_that_keeps_nothing_for_backward(name: str) -> None:
    operator = OPERATORS[name]
    for case in some_cases(name):
        *args, dtype = arguments(case, 130, 24, 144)
        # `keep_a` and `keep_h`
        flat = operator.signature.flattened((*args[:-2], False, False, dtype))
        tensors = [arg.detach() if isinstance(arg, Tensor) else arg for arg in flat]
        torch.library.opcheck(operator.op, tuple(tensors), test_utils="test_faketensor")


@pytest.mark.parametrize("name", OPERATORS)
def test_a_function_called_directly_does_what_its_operator_does(name: str) -> None:
    operator = OPERATORS[name]
    for case in some_cases(name):
        results = []
        for kind in ("operator", "function"):
            torch.manual_seed(0)
            args = arguments(case, 130, 24, 144)
            flat = operator.signature.flattened(args)
            made = operator.op(*flat) if kind == "operator" else operator(*args)
            tensors = [made] if isinstance(made, Tensor) else list(made or ())
            if tensors and tensors[0].requires_grad:
                inputs = [arg for arg in flat if isinstance(arg, Tensor) and arg.requires_grad]
                tensors += torch.autograd.grad(tensors[0].float().square().sum(), inputs)
            # including what is changed in place
            results.append([one.detach() for one in (*tensors, *filter(torch.is_tensor, flat))])
        for one, other in zip(*results, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


def test_where_functions_cannot_serve() -> None:
    class Mine(Tensor):
        pass

    seen: list[bool] = []
    assert is_watched(torch.ones(1).as_subclass(Mine))
    assert is_watched(torch.ones(1, device="meta"))
    torch.func.vmap(lambda x: (seen.append(is_watched(x)), x)[1])(torch.ones(2))
    torch.jit.trace(lambda x: (seen.append(is_watched(x)), x + 1)[1], torch.ones(2), check_trace=False)
    assert seen == [True, True]


@pytest.mark.parametrize("half", ["cpu", "torch's operators", "kernels"])
def test_a_weight_is_scaled_by_what_it_holds(
    half: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    if half != "cpu":
        request.getfixturevalue("cuda_half")
        monkeypatch.setenv("LIGHTNING_FP8_BACKEND", "auto" if half == "kernels" else "reference")
    state, scaling = ScalingState(["first", "second"], DelayedScaling(margin=3)), PerTensor(delayed=True, margin=3)
    slot = Slot(torch.tensor([5]), state, scaling, scaling, generation=state.model.generation)
    state.amax.fill_(1e6), state.scale.fill_(1e6)
    for factor in (100.0, 0.01, 1.0):
        w = torch.randn(9, 14) * factor
        rows, columns, _ = cast_weight(w, slot, Want(True, True))
        amax = w.abs().max()
        expected = fp8_numpy.saturating_cast(w.numpy(), np.float32(448) / amax.numpy(), "e4m3")
        assert np.array_equal(rows.codes.numpy(), expected)
        # a view on the CPU
        columns_codes = columns.codes if half == "cpu" else unpadded(columns.codes, 9)
        assert torch.equal(columns_codes, rows.codes.t())
        assert rows.scale_inv == columns.scale_inv == (torch.tensor(448.0) / amax).reciprocal()
        # the amax and scale that were used are recorded, for this weight only
        assert state.amax.tolist() == [1e6] * 5 + [amax]
        assert state.scale.tolist() == [1e6] * 5 + [(torch.tensor(448.0) / amax).item()]


@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 2, 3, 40])
def test_kept_values_change_no_bit(rows: int, out_dtype: torch.dtype) -> None:
    """A few rows, which use a different GEMM, are exact, too."""
    a = torch.randint(0, 0x7F, (rows, 256), dtype=torch.uint8)
    b = torch.randint(0, 0x7F, (128, 256), dtype=torch.uint8) | 0x80 * torch.randint(0, 2, (128, 1), dtype=torch.uint8)
    one, half = torch.ones(()), torch.full((), 0.5)
    arguments = (operand(a, one), operand(b, half), None, out_dtype)
    plain = product_of_tensors(*arguments)
    keep_values(b, "e4m3")
    assert values_of(b, "e4m3") is values_of(b, "e4m3")
    assert torch.equal(product_of_tensors(*arguments), plain)
    values = (payload.view(torch.float8_e4m3fn).double() for payload in (a, b))
    exact = next(values) @ next(values).t() * 0.5
    torch.testing.assert_close(plain.double(), exact.to(out_dtype).double(), rtol=1e-2, atol=0)


@pytest.mark.parametrize("format", ["e4m3", "e5m2"])
def test_few_elements_are_dequantized_to_the_same_bits(format: str) -> None:
    patterns = torch.arange(256, dtype=torch.uint8)
    few, many = (dequantize(patterns.repeat(times, 1), format) for times in (1, 64))
    assert torch.equal(few.view(torch.int32)[~few.isnan()], many[:1].view(torch.int32)[~few.isnan()])
    assert torch.equal(few.isnan(), many[:1].isnan())
