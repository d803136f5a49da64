"""Which kernel is used: only one that passes its check; one warning names what fails or is missing."""

from __future__ import annotations

import re
import warnings
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from broken_kernels import Broken, poke
from host_kernels import FEW_VARIANTS, VARIANTS, HostKernel, on_host
from machines import H100, run_as
from slots import slot_of
from tensor_cores import HOPPER
from warm import run_warm

from kernels_cuda import casts, load
from kernels_cuda.compile import CompileError, KernelsUnavailable
from kernels_cuda.gemm import Operand
from kernels_cuda.gemm_variants import configurations
from lightning_fp8 import DelayedScaling
from lightning_fp8.ops import library
from lightning_fp8.ops.cuda import check, kernels, rule
from lightning_fp8.runtime.warn_once import warn_once
from lightning_fp8.scaling import ScalingState
from lightning_fp8.scalings.operand import Want

CPU = torch.device("cpu")


def cast(x: torch.Tensor, by_torch: bool = False) -> tuple[torch.Tensor, ...]:
    """The cast of a GPU: codes and scales of both layouts, and the amaxes."""
    state = ScalingState(["a"], DelayedScaling())
    slot, want = slot_of(state, record=True), Want(True, True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library, "cuda_on_cpu", True)
        made = (slot.rows.by_reference if by_torch else slot.rows.cast)(x, slot, want)
    return *made.rows[:2], *made.columns[:2], state.amax  # type: ignore[index]


PLAIN = [(dtype, fmt, "none", False) for dtype in casts.INPUTS for fmt in casts.FORMATS]


@pytest.mark.parametrize("variant", [*PLAIN, *FEW_VARIANTS[::3]])
def test_every_kernel_passes_its_check(variant: tuple[torch.dtype, str, str, bool]) -> None:
    of_cast = kernels._cast_variant(*variant)
    assert of_cast.check(CPU, on_host(of_cast)) is None


@pytest.mark.parametrize(
    ("capability", "default", "every"),
    [
        ((8, 9), {}, {"gemm_sm89": 18}),
        ((9, 0), {"gemm_sm90": 6}, {"gemm_sm90": 42}),
        ((10, 0), {}, {}),
        ((12, 0), {}, {"gemm_sm89": 21}),
    ],
)
def test_kernels_that_can_be_compiled_ahead(
    capability: tuple[int, int], default: dict[str, int], every: dict[str, int]
) -> None:
    """Those of the default recipe, and those of any formats, dtypes, recipes and configurations."""
    of_any = {"cast_transpose": len(VARIANTS), "update_scales": 1}
    of_blocks = {"cast_weights": 4, "cast_blocks": 33, "cast_mx": 33}
    names = [{variant.name for variant in kernels.variants(capability, every=both)} for both in (False, True)]
    found = [Counter(name.split()[0] for name in those) for those in names]
    assert found == [of_any | {"cast_weights": 1} | default, of_any | of_blocks | every]
    assert names[0] < names[1]


# wrong casts by a description of the fault: each differs in a few codes of rare numbers
FAULTS = {
    "half away from zero": "ROUND=std::round",
    "half down": "ROUND(units)=std::ceil((units) - 0.5)",
    "rounded to bf16 before": "FAULT(value, min_exponent)=__uint_as_float((u32)to_bf16(value) << 16)",
    "subnormals flushed": "FAULT(value, min_exponent)=value * (std::fabs(value) >= std::ldexp(1.0, min_exponent))",
    "inf becomes NaN": "FAULT(value, min_exponent)=std::isinf(value) ? NAN : value",
    "NaN saturates": "FAULT(value, min_exponent)=std::isnan(value) ? INFINITY : value",
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("variant", PLAIN[::3])
def test_the_check_finds_wrong_casts(variant: tuple[torch.dtype, str, str, bool], fault: str) -> None:
    of_cast = kernels._cast_variant(*variant)
    faulty = on_host(of_cast._replace(defines=(*of_cast.defines, FAULTS[fault])))
    assert "other numbers in payload" in str(of_cast.check(CPU, faulty))


class OneGroup(HostKernel):
    """A fault: all rows are cast as those of the first group."""

    def __call__(self, grid: int, *arguments: int | float) -> None:
        # `group_of_tile`
        super().__call__(grid, *arguments[:-3], 0, *arguments[-2:])


@pytest.mark.parametrize("variant", PLAIN[::3])
def test_the_check_finds_groups_that_are_cast_as_one(variant: tuple[torch.dtype, str, str, bool]) -> None:
    of_cast = kernels._cast_variant(*variant)
    assert "in groups of rows" in str(of_cast.check(CPU, on_host(of_cast, OneGroup)))


def test_the_check_finds_wrong_casts_of_weights() -> None:
    of_cast = kernels._weights_variant(False)
    faulty = on_host(of_cast._replace(defines=(FAULTS["subnormals flushed"],)))
    assert "other numbers in payload" in str(of_cast.check(CPU, faulty))


@pytest.mark.parametrize("promotes", [True, False])
def test_the_check_finds_sums_that_stay_in_tensor_cores(promotes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def product(kernel: object, at: object, a: Operand, b: Operand, out: torch.Tensor, bias: torch.Tensor) -> None:
        values = a[0].view(torch.float8_e5m2).double(), b[0].view(torch.float8_e4m3fn).double()
        out.copy_(HOPPER.sums(*values, ("e5m2", "e4m3"), promotes) * (a[1] * b[1]) + bias)

    monkeypatch.setattr(check.gemms, "gemm", product)
    variant = kernels._gemm_variant(configurations((9, 0))[-1], "e5m2", "e4m3", torch.float32, True)
    found = variant.check(CPU, SimpleNamespace(multiprocessors=1))  # type: ignore[arg-type]
    assert found is None if promotes else "other numbers in sums" in str(found)


def test_the_check_finds_sums_of_groups_that_stay_in_tensor_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    run_as(H100, monkeypatch)
    variant = kernels._gemm_variant(configurations((9, 0))[-1], "e4m3", "e4m3", torch.float32, True, grouped="rows")
    other = tuple(define.replace("PROMOTE=1", "PROMOTE=0") for define in variant.defines)
    assert "other numbers in sums" in str(variant.check(CPU, on_host(variant._replace(defines=other))))


# a kernel, which of its arguments is damaged at which byte (see the argument structs of kernels_cuda/casts.py and
# scales.py), and what its check says
DAMAGES = {
    "a payload": ("cast_transpose", 2, 3, "transposed payload"),
    "a transposed payload": ("cast_transpose", 3, 3, "transposed payload"),
    "column sums": ("cast_transpose", 4, 3, "column sums"),
    "the amax": ("cast_transpose", 14, 3, "amax"),
    "the scale_inv": ("cast_transpose", 15, 3, "scale_inv"),
    "the amax of weights": ("cast_weights", 3, 2, "amax"),
    "the scale of weights": ("cast_weights", 2, 2, "scale"),
    "the last bits of an amax": ("cast_transpose", 14, 0, "amax|scale_inv"),
    **{
        f"the {name} of an update": ("update_scales", at, 3, name)
        for at, name in ((0, "amax"), (1, "amax_history"), (2, "scale"), (4, "nonfinite_steps"))
    },
}


def with_kernels(monkeypatch: pytest.MonkeyPatch, kind: type[HostKernel], passed: list[str]) -> None:
    monkeypatch.setattr(kernels.load, "load", lambda family, defines, *rest: kind((family, tuple(defines)), *rest))
    monkeypatch.setattr(kernels.load, "has_passed", lambda *_: False)
    monkeypatch.setattr(kernels.load, "remember_pass", lambda family, defines, device: passed.append(family))


@pytest.mark.usefixtures("host_kernels")
@pytest.mark.parametrize("case", DAMAGES)
def test_a_kernel_that_fails_is_named_once_and_not_used(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    family, position, byte, words = DAMAGES[case]
    passed: list[str] = []
    monkeypatch.setattr(Broken, "damage", staticmethod(poke(position, byte=byte)), raising=False)
    with_kernels(monkeypatch, Broken, passed)
    x = torch.randn(40, 24)
    use = {
        "cast_transpose": lambda: cast(x),
        "cast_weights": lambda: kernels.weights_kernel(CPU, False),
        "update_scales": lambda: kernels.update_kernel(CPU),
    }[family]
    with pytest.warns(UserWarning, match=rf"{family}.* is not used on cpu: its check gave .* in ({words})\b"):
        first = use()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        second = use()
    assert passed == []
    for found in (first, second):
        assert found is None if family != "cast_transpose" else all(map(torch.equal, found, cast(x, by_torch=True)))


@pytest.mark.usefixtures("host_kernels")
def test_a_pass_is_remembered_and_spares_the_next_check(monkeypatch: pytest.MonkeyPatch) -> None:
    passed: list[str] = []
    with_kernels(monkeypatch, HostKernel, passed)
    assert kernels.update_kernel(CPU) is not None
    assert passed == ["update_scales"]
    kernels.update_kernel.cache_clear()
    monkeypatch.setattr(kernels.load, "has_passed", lambda *_: True)
    monkeypatch.setattr(check, "update_scales", lambda *_: "must not run")
    assert kernels.update_kernel(CPU) is not None
    # repeated, it may fail
    forgotten: list[str] = []
    monkeypatch.setattr(kernels.load, "forget_pass", lambda family, *_: forgotten.append(family))
    assert kernels.try_kernel(kernels._update_variant(), CPU, check_again=True).kernel is None
    assert forgotten == ["update_scales"]


def test_passes_belong_to_device_driver_and_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTNING_FP8_CACHE_DIR", str(tmp_path))
    place = {"capability": (9, 0), "name": "GPU A", "driver": 13000, "source": "one"}
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: place["capability"])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: place["name"])
    monkeypatch.setattr(load, "_driver_version", lambda: place["driver"])
    monkeypatch.setattr(load, "source_key", lambda *args: f"{place['source']} {args}")
    arguments = ("update_scales", (), 0)
    assert not load.has_passed(*arguments)
    load.remember_pass(*arguments)
    assert load.has_passed(*arguments)
    assert not load.has_passed("update_scales", ("A=1",), 0)
    for key, other in {"capability": (8, 9), "name": "GPU B", "driver": 12080, "source": "two"}.items():
        before, place[key] = place[key], other
        assert not load.has_passed(*arguments)
        place[key] = before
    assert load.has_passed(*arguments)
    # if the cache is not writable, the check runs again; nothing else changes
    monkeypatch.setenv("LIGHTNING_FP8_CACHE_DIR", str(tmp_path / "a file" / "below"))
    (tmp_path / "a file").write_text("")
    load.remember_pass(*arguments)
    assert not load.has_passed(*arguments)


@pytest.mark.usefixtures("host_kernels")
@pytest.mark.parametrize("error", [CompileError("NVRTC refused"), RuntimeError("CUDA_ERROR_NO_BINARY_FOR_GPU")])
def test_what_does_not_compile_or_load_is_named_and_not_used(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels.load, "load", Mock(side_effect=error))
    words = f"{type(error).__name__}: {error}"
    with pytest.warns(UserWarning, match=rf"cast_transpose.*is not used on cpu: {words}.*torch's own operators"):
        results = cast(torch.ones(40, 24))
    assert all(map(torch.equal, results, cast(torch.ones(40, 24), by_torch=True)))


@pytest.mark.usefixtures("host_kernels")
@pytest.mark.parametrize("place", ["load", "check"])
def test_a_want_of_memory_is_not_remembered(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    passed: list[str] = []
    forgotten: list[str] = []
    with_kernels(monkeypatch, HostKernel, passed)
    monkeypatch.setattr(kernels.load, "forget_pass", lambda family, *_: forgotten.append(family))
    # in the words of torch's allocator and of CuPy
    errors = [torch.OutOfMemoryError("CUDA out of memory."), RuntimeError("CUDA_ERROR_OUT_OF_MEMORY: out of memory")]
    for error in errors:
        with monkeypatch.context() as full:
            failing = Mock(side_effect=error)
            full.setattr(*((kernels.load, "load") if place == "load" else (check, "update_scales")), failing)
            with pytest.raises(torch.OutOfMemoryError, match=f"to load and check update_scales: .*{error}"):
                kernels.update_kernel(CPU)
            # nor is an earlier pass forgotten
            full.setattr(kernels.load, "has_passed", lambda *_: True)
            assert kernels.try_kernel(kernels._update_variant(), CPU, check_again=True).out_of_memory
    assert passed == forgotten == []
    assert kernels.update_kernel(CPU) is not None
    assert passed == ["update_scales"]


@pytest.mark.usefixtures("host_kernels")
def test_a_missing_toolchain_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels.load, "load", Mock(side_effect=KernelsUnavailable("Run `pip install cupy-cuda13x`.")))
    warn_once.cache_clear()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for x in (torch.ones(4, 4), torch.ones(4, 4, dtype=torch.bfloat16)):
            assert all(map(torch.equal, cast(x), cast(x, by_torch=True)))
        assert kernels.update_kernel(CPU) is None
    (message,) = (str(warning.message) for warning in said)
    assert "pip install cupy-cuda13x" in message


def test_backends(host_kernels: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTNING_FP8_BACKEND", "reference")
    x = torch.randn(40, 24)
    assert all(map(torch.equal, cast(x), cast(x, by_torch=True)))
    assert host_kernels == []
    monkeypatch.setenv("LIGHTNING_FP8_BACKEND", "cuda")
    for function in (rule.backend, kernels.cast_kernel):
        function.cache_clear()
    with pytest.raises(ValueError, match="LIGHTNING_FP8_BACKEND must be one of auto, kernels, cublaslt, reference, "):
        cast(torch.ones(2, 2))


@pytest.mark.usefixtures("host_kernels")
def test_a_first_use_inside_a_graph_capture_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "is_capturing", lambda _: True)
    with pytest.raises(RuntimeError, match=re.escape("for the first time while a CUDA graph is captured")):
        cast(torch.ones(2, 2))
    monkeypatch.setattr(kernels, "is_capturing", lambda _: False)
    expected = cast(torch.ones(2, 2))
    monkeypatch.setattr(kernels, "is_capturing", lambda _: True)
    assert all(map(torch.equal, cast(torch.ones(2, 2)), expected))


def test_importing_needs_neither_cupy_nor_a_driver() -> None:
    program = "import sys; sys.modules['cupy'] = None; import lightning_fp8; assert 'cupy_backends' not in sys.modules"
    run_warm("-c", program, check=True)
