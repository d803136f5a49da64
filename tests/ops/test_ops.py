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

from lightning_fp8 import DelayedScaling, ops
from lightning_fp8.ops import reference
from lightning_fp8.ops.cuda import dispatch as cuda
from lightning_fp8.ops.cuda import gemm, plain
from lightning_fp8.ops.dequantize import dequantize, keep_values
from lightning_fp8.ops.library import is_watched
from lightning_fp8.ops.operand import Columns, Fp8Operand, Fp8Tensor, WeightSlot, by_columns
from lightning_fp8.scaling import ScalingState

GRAD = 1
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SIZES = [(32, 16, 48), (1, 1, 1), (17, 15, 129), (130, 33, 7), (5, 3, 0), (0, 16, 32)]


def state_with_history() -> ScalingState:
    state = ScalingState(["a"], DelayedScaling())
    state.amax.fill_(4.0)
    state.update()
    return state


@pytest.mark.parametrize(
    ("size", "out_dtype", "formats", "bias"),
    pairwise(SIZES, DTYPES, [("e4m3", "e4m3"), ("e5m2", "e4m3")], [False, True]),
)
@pytest.mark.parametrize("implementation", [reference, plain])
@pytest.mark.usefixtures("strict_products")
def test_scaled_mm_equals_fp64_within_one_rounding(
    size: tuple[int, int, int], out_dtype: torch.dtype, formats: tuple[str, str], bias: bool, implementation: Any
) -> None:
    m, n, k = size
    a, b = random_payload(m, k, formats[0]), random_payload(n, k, formats[1])
    # fp16 can hold these products, too
    a_inv, b_inv = torch.tensor(3e-4), torch.tensor(7e-5)
    # neither 16-bit format holds it: it is rounded before it is added
    addend = torch.randn(n) if bias else None
    exact = values(a, formats[0]) @ values(b, formats[1]).T * (a_inv * b_inv).double()
    exact = exact if addend is None else exact + addend.to(out_dtype)
    out = implementation.scaled_mm(
        Fp8Tensor(a, a_inv, formats[0]), Fp8Tensor(b, b_inv, formats[1]), addend, out_dtype, True
    )
    assert out.dtype == out_dtype
    assert out.shape == (m, n)
    assert out.is_contiguous()
    # half a unit in the last place, plus the error of fp32 accumulation
    magnitude = values(a, formats[0]).abs() @ values(b, formats[1]).T.abs() * (a_inv * b_inv).double()
    allowed = exact.abs() * torch.finfo(out_dtype).eps / 2 + magnitude * 2e-6 + 1e-7
    assert ((out.double() - exact).abs() <= allowed).all()


@pytest.mark.parametrize("k", [71, 48])
@pytest.mark.parametrize("implementation", [reference, plain, gemm])
def test_of_two_ks_the_shorter_is_the_true_one(implementation: Any, k: int) -> None:
    """An operand by columns has zeros at the end of its rows, as in dgrad, where the other has none."""
    a, b, inv = random_payload(20, k, "e5m2"), random_payload(32, k, "e4m3"), torch.tensor(1e-3)
    rest = (None, torch.float32, False)
    expected = reference.scaled_mm(Fp8Tensor(a, inv, "e5m2"), Fp8Tensor(b, inv, "e4m3"), *rest)
    longer_a, longer_b = (F.pad(one, (0, padded(k) - k)) for one in (a, b))
    for one, other in ((a, longer_b), (longer_a, b), (longer_a, longer_b), (a, longer_b[:, : k + 1])):
        out = implementation.scaled_mm(Fp8Tensor(one, inv, "e5m2"), Fp8Tensor(other, inv, "e4m3"), *rest)
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-4)


def test_scaled_mm_without_bf16_units(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = (Fp8Tensor(random_payload(rows, 40, "e4m3"), torch.tensor(1e-3), "e4m3") for rows in (17, 9))
    args = (a, b, torch.randn(9), torch.bfloat16, True)
    expected = reference.scaled_mm(*args)
    monkeypatch.setattr(reference, "_HAS_BF16_GEMM", False)
    torch.testing.assert_close(reference.scaled_mm(*args), expected, rtol=2**-8, atol=1e-6)


@pytest.mark.usefixtures("host_kernels")
@pytest.mark.parametrize("transposed", [torch.Tensor.t, by_columns], ids=["a view", "padded"])
def test_cuda_path_backward_equals_the_reference(transposed: Callable[[torch.Tensor], torch.Tensor]) -> None:
    state, dy = state_with_history(), torch.randn(20, 12)
    x_fp8, w_fp8 = random_payload(20, 18, "e4m3"), random_payload(12, 18, "e4m3")
    one = torch.tensor(0.01)
    for x, w in ((x_fp8, w_fp8), (None, w_fp8), (x_fp8, None), (None, None)):
        results = []
        for implementation in (reference, cuda):
            state.amax.zero_()
            kept = (Columns(None if payload is None else transposed(payload), one, "e4m3") for payload in (x, w))
            args = (dy, None, "none", *kept, slot_of(state, GRAD, record=True))
            gradients = implementation.linear_backward(*args, torch.float32, torch.float32, True)
            results.append((*gradients, state.amax.clone()))
        for expected, actual in zip(*results, strict=True):
            assert actual.numel() == expected.numel()
            torch.testing.assert_close(actual.flatten(), expected.flatten(), rtol=1e-4, atol=1e-4)


# few and many elements are dequantized by different operations
@pytest.mark.parametrize(("m", "n", "k"), [(4, 3, 8), (64, 48, 48)])
def test_nan_spreads_through_the_gemm_as_in_any_other(m: int, n: int, k: int) -> None:
    a, b = random_payload(m, k, "e4m3"), random_payload(n, k, "e4m3")
    a[1, 2], b[2, 3] = 0x7F, 0xFF
    operands = (Fp8Tensor(payload, torch.tensor(1.0), "e4m3") for payload in (a, b))
    out = reference.scaled_mm(*operands, None, torch.float32, True)
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
    kept = (Columns(payload.t(), one, "e4m3") for payload in (x, w))
    gradients = reference.linear_backward(dy, None, "none", *kept, slot, torch.float32, torch.float32, True)
    expected = [torch.zeros(shape, dtype=torch.bool) for shape in ((m, k), (n, k), (n,))]
    expected[0][3], expected[0][:, 4] = True, True
    expected[1][5], expected[1][:, 1] = True, True
    expected[2][5] = True
    for gradient, is_nan in zip(gradients, expected, strict=True):
        assert torch.equal(gradient.isnan(), is_nan)


def test_blocks_cover_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    state, dy = state_with_history(), torch.randn(37, 20)
    x_fp8, w_fp8, one = random_payload(37, 24, "e4m3"), random_payload(20, 24, "e4m3"), torch.tensor(0.01)
    kept = (Columns(payload.t(), one, "e4m3") for payload in (x_fp8, w_fp8))
    args = (dy, None, "none", *kept, slot_of(state, GRAD, "e5m2"))
    whole = reference.linear_backward(*args, torch.float32, torch.float32, True)
    product = (Fp8Tensor(x_fp8, one, "e4m3"), Fp8Tensor(w_fp8, one, "e4m3"), None, torch.float32, True)
    y = reference.scaled_mm(*product)
    monkeypatch.setattr(reference, "_CHUNK_ELEMENTS", 100)
    for blocked, expected in zip(
        reference.linear_backward(*args, torch.float32, torch.float32, True), whole, strict=True
    ):
        torch.testing.assert_close(blocked, expected, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(reference.scaled_mm(*product), y)


def test_gemm_leaves_the_matmul_precision_as_it_was() -> None:
    matmul = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = matmul.fp32_precision
    a = Fp8Tensor(random_payload(4, 8, "e4m3"), torch.tensor(1.0), "e4m3")
    reference.scaled_mm(a, a, None, torch.float32, True)
    with pytest.raises(RuntimeError):
        reference.scaled_mm(a, a, torch.ones(3), torch.float32, True)
    assert matmul.fp32_precision == before


def some_cases(name: str) -> list[Case]:
    """Each layout, with another scaling and other options each time."""
    every = cases(name)
    scalings = len({case.scaling for case in every})
    firsts = range(0, len(every), scalings * (4 if name.startswith("cast") else 1))
    return [every[first + 7 * number % scalings] for number, first in enumerate(firsts)]


@pytest.mark.filterwarnings("ignore:.*only once for all operators.*")
@pytest.mark.parametrize("half", ["cpu", "cuda"])
@pytest.mark.parametrize("name", OPERATORS)
def test_opcheck(name: str, half: str, request: pytest.FixtureRequest) -> None:
    if half == "cuda":
        request.getfixturevalue("cuda_half")
    operator = getattr(ops, name)
    # each half has every layout
    for case in some_cases(name)[half == "cuda" :: 2]:
        # more than one block each way, or the strides of scales would not matter
        flat = operator.signature.flattened(arguments(case, 130, 24, 144))
        torch.library.opcheck(operator.op, tuple(flat), test_utils="ALL")


@pytest.mark.parametrize("name", OPERATORS)
def test_a_function_called_directly_does_what_its_operator_does(name: str) -> None:
    operator = getattr(ops, name)
    for case in some_cases(name):
        results = []
        for kind in ("operator", "function"):
            torch.manual_seed(0)
            args = arguments(case, 130, 24, 144)
            flat = operator.signature.flattened(args)
            made = operator.op(*flat) if kind == "operator" else operator(*args)
            tensors = [made] if isinstance(made, torch.Tensor) else list(made or ())
            if tensors and tensors[0].requires_grad:
                inputs = [arg for arg in flat if isinstance(arg, torch.Tensor) and arg.requires_grad]
                tensors += torch.autograd.grad(tensors[0].float().square().sum(), inputs)
            # including what is changed in place
            results.append([one.detach() for one in (*tensors, *filter(torch.is_tensor, flat))])
        for one, other in zip(*results, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


def test_where_functions_cannot_serve() -> None:
    class Mine(torch.Tensor):
        pass

    seen: list[bool] = []
    assert is_watched(torch.ones(1).as_subclass(Mine))
    assert is_watched(torch.ones(1, device="meta"))
    torch.func.vmap(lambda x: (seen.append(is_watched(x)), x)[1])(torch.ones(2))
    torch.jit.trace(lambda x: (seen.append(is_watched(x)), x + 1)[1], torch.ones(2), check_trace=False)
    assert seen == [True, True]


@pytest.mark.usefixtures("host_kernels")
@pytest.mark.parametrize("implementation", [reference, plain, cuda])
def test_a_weight_is_scaled_by_what_it_holds(implementation: Any) -> None:
    state = ScalingState(["first", "second"], DelayedScaling(margin=3))
    slot = WeightSlot(torch.tensor([5]), "e4m3", state, False)
    state.amax.fill_(1e6), state.scale.fill_(1e6)
    for factor in (100.0, 0.01, 1.0):
        w = torch.randn(9, 14) * factor
        payload, payload_t, scale_inv = implementation.cast_weight(w, slot, "both")
        amax = w.abs().max()
        expected = fp8_numpy.saturating_cast(w.numpy(), np.float32(448) / amax.numpy(), "e4m3")
        assert np.array_equal(payload.numpy(), expected)
        assert torch.equal(unpadded(payload_t, 9), payload.t())
        assert scale_inv == (torch.tensor(448.0) / amax).reciprocal()
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
    arguments = (Fp8Tensor(a, one, "e4m3"), Fp8Tensor(b, half, "e4m3"), None, out_dtype, True)
    plain = reference.scaled_mm(*arguments)
    keep_values(Fp8Operand(b, b.t(), half, half, "e4m3"))
    assert torch.equal(reference.scaled_mm(*arguments), plain)
    values = (payload.view(torch.float8_e4m3fn).double() for payload in (a, b))
    exact = next(values) @ next(values).t() * 0.5
    torch.testing.assert_close(plain.double(), exact.to(out_dtype).double(), rtol=1e-2, atol=0)


@pytest.mark.parametrize("format", ["e4m3", "e5m2"])
def test_few_elements_are_dequantized_to_the_same_bits(format: str) -> None:
    patterns = torch.arange(256, dtype=torch.uint8)
    few, many = (dequantize(patterns.repeat(times, 1), format) for times in (1, 64))
    assert torch.equal(few.view(torch.int32)[~few.isnan()], many[:1].view(torch.int32)[~few.isnan()])
    assert torch.equal(few.isnan(), many[:1].isnan())
