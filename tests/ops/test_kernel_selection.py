"""Which kernel is used: only one that passes its self-test; one warning names what fails or is missing."""

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
from host_kernels import FEW_VARIANTS, VARIANTS, HostKernel
from slots import slot_of
from torch._subclasses import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode
from warm import run_warm

from kernels_cuda import casts, gemm_variants, load, scales
from kernels_cuda.compile import CompileError, KernelsUnavailable
from kernels_cuda.gemm import Operand
from lightning_fp8 import DelayedScaling
from lightning_fp8.ops.amaxes import by_element
from lightning_fp8.ops.cuda import dispatch as cuda
from lightning_fp8.ops.cuda import kernels, plain, self_test, self_test_gemm
from lightning_fp8.runtime.switch import default_dtype
from lightning_fp8.runtime.warn_once import warn_once
from lightning_fp8.scaling import ScalingState

CPU = torch.device("cpu")


def cast(x: torch.Tensor, implementation: object = cuda) -> tuple[torch.Tensor, ...]:
    state = ScalingState(["a"], DelayedScaling())
    made = implementation.cast(x, slot_of(state, record=True), "none", "both")  # type: ignore[attr-defined]
    return (*made, state.amax)


PLAIN = [(dtype, fmt, "none", False) for dtype in casts.INPUTS for fmt in casts.FORMATS]


@pytest.mark.parametrize("variant", [*PLAIN, *FEW_VARIANTS[::3]])
def test_every_kernel_passes_its_self_test(variant: tuple[torch.dtype, str, str, bool]) -> None:
    defines = casts.variant(*variant)
    kernel = HostKernel(("cast_transpose", defines), casts.layout(defines), casts.THREADS, 0)
    assert self_test.cast_transpose(CPU, *variant, kernel) is None


def test_the_kernels_for_weights_and_scales_pass_theirs() -> None:
    weights = HostKernel(("cast_weights", ()), casts.CAST_WEIGHTS_LAYOUT, casts.THREADS, 0)
    assert self_test.cast_weights(CPU, weights) is None
    assert self_test.update_scales(CPU, HostKernel(("update_scales", ()), scales.LAYOUT, scales.THREADS, 0)) is None


@pytest.mark.usefixtures("host_kernels")
def test_self_tests_do_not_depend_on_what_is_around_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel is tested where it is first used; nor does what is there see the test."""
    with_kernels(monkeypatch, HostKernel, [])
    ada = gemm_variants.grouped_configuration((8, 9), True)
    variants = [
        kernels._gemm_variant(ada, "e4m3", "e4m3", torch.float32, True, grouped="rows"),  # type: ignore[arg-type]
        kernels._cast_variant(torch.float32, "e5m2", "none", False),
        kernels._block_cast_variant(torch.bfloat16, False, "swiglu", True),
        *(kernels._weights_variant(False), kernels._update_variant()),
    ]
    for mode in (FlopCounterMode(display=False), FakeTensorMode()):
        with default_dtype(torch.bfloat16), torch.device("meta"), torch.autocast("cpu", torch.bfloat16), mode:
            assert [kernels.try_kernel(variant, CPU).failure for variant in variants] == [None] * 5
        assert isinstance(mode, FakeTensorMode) or mode.get_total_flops() == 0


@pytest.mark.parametrize("b_scale_rows", [0, 128])
def test_an_exact_gemm_passes_whatever_its_output(b_scale_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The operands are the same for each output, and stay as they are though a bias of each dtype is added."""

    def exact(
        kernel: object, configuration: object, a_fp8: Operand, b_fp8: Operand, out: torch.Tensor, bias: torch.Tensor
    ) -> None:
        (a, a_inv), (b, b_inv) = a_fp8, b_fp8
        a_inv, b_inv = (by_element(inv, payload) if b_scale_rows else inv for inv, payload in ((a_inv, a), (b_inv, b)))
        a, b = a.view(torch.float8_e5m2).double() * a_inv, b.view(torch.float8_e4m3fn).double() * b_inv
        out.copy_(a @ b.t() + bias.to(out.dtype) + fault * out[0, 0].new_ones(()))

    monkeypatch.setattr(self_test_gemm.kernels, "gemm", exact)
    (ada,) = gemm_variants.configurations((8, 9), True)
    kernel, fault = SimpleNamespace(multiprocessors=3), 0.0
    for output in gemm_variants.OUTPUTS:
        assert self_test_gemm.gemm(CPU, ada, "e5m2", "e4m3", output, kernel, b_scale_rows) is None
    fault = 1.0
    assert "other sums" in str(self_test_gemm.gemm(CPU, ada, "e5m2", "e4m3", torch.float32, kernel, b_scale_rows))


@pytest.mark.parametrize(
    ("capability", "default", "every"),
    [
        ((8, 9), {"gemm_sm89": 4, "sum_splits": 3}, {"gemm_sm89": 36, "sum_splits": 3}),
        ((9, 0), {"gemm_sm90": 18, "sum_splits": 3}, {"gemm_sm90": 126, "sum_splits": 3}),
        ((10, 0), {}, {}),
        ((12, 0), {"gemm_sm89": 4, "sum_splits": 3}, {"gemm_sm89": 39, "sum_splits": 3}),
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


class FlushingInput(HostKernel):
    """Flushes subnormal inputs to zero, as code compiled with ``-ftz=true`` does."""

    def __call__(self, grid: int, *arguments: int | float | bytes) -> None:
        torch.set_flush_denormal(True)
        try:
            super().__call__(grid, *arguments)
        finally:
            torch.set_flush_denormal(False)


# wrong casts by a description of the fault: each differs in a few codes of rare numbers
FAULTS = {
    "half away from zero": "ROUND=std::round",
    "half down": "ROUND(units)=std::ceil((units) - 0.5)",
    "rounded to bf16 before": "FAULT(value, min_exponent)=__uint_as_float((u32)to_bf16(value) << 16)",
    "subnormals flushed": "FAULT(value, min_exponent)=value * (std::fabs(value) >= std::ldexp(1.0, min_exponent))",
    "no negative zero": "FAULT(value, min_exponent)=value + 0.0f",
    "inf becomes NaN": "FAULT(value, min_exponent)=std::isinf(value) ? NAN : value",
    "NaN saturates": "FAULT(value, min_exponent)=std::isnan(value) ? INFINITY : value",
}
FOUND_AT_RANDOM = ("rounded to bf16 before", "subnormals flushed")


@pytest.mark.parametrize("fault", FAULTS)
def test_the_self_test_finds_wrong_casts(fault: str) -> None:
    defines = (*casts.variant(torch.float32, "e4m3"), FAULTS[fault])
    kernel = HostKernel(("cast_transpose", defines), casts.layout(defines), casts.THREADS, 0)
    found = str(self_test.cast_transpose(CPU, torch.float32, "e4m3", "none", False, kernel))
    # random numbers are enough to find some faults
    assert re.search("other codes" if fault in FOUND_AT_RANDOM else "hard to round gave .*codes", found)


def test_the_self_test_finds_wrong_casts_of_weights() -> None:
    kernel = HostKernel(("cast_weights", (FAULTS["subnormals flushed"],)), casts.CAST_WEIGHTS_LAYOUT, casts.THREADS, 0)
    assert re.search(r"\d+ other codes", str(self_test.cast_weights(CPU, kernel)))


@pytest.mark.parametrize("dtype", casts.INPUTS)
def test_the_self_test_finds_flushed_inputs(dtype: torch.dtype) -> None:
    family = ("cast_transpose", casts.variant(dtype, "e5m2"))
    kernel = FlushingInput(family, casts.layout(family[1]), casts.THREADS, 0)
    found = self_test.cast_transpose(CPU, dtype, "e5m2", "none", False, kernel)
    # fp16's subnormals are normal numbers in fp32
    assert (found is None) == (dtype == torch.float16)


def test_the_self_test_finds_an_amax_without_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Broken, "damage", staticmethod(poke(14, byte=3, add=1)), raising=False)
    defines = casts.variant(torch.float32, "e4m3")
    kernel = Broken(("cast_transpose", defines), casts.layout(defines), casts.THREADS, 0)
    assert "in place of NaN" in str(self_test._compare_rounding(CPU, torch.float32, "e4m3", kernel))


# a kernel, which of its arguments is damaged at which byte (see the argument structs of kernels_cuda/casts.py and
# scales.py), and what its self-test says
DAMAGES = {
    "a payload": ("cast_transpose", 2, 3, r"\d+ other codes|transpose"),
    "a transposed payload": ("cast_transpose", 3, 3, "transpose"),
    "column sums": ("cast_transpose", 4, 3, "column sums"),
    "the amax": ("cast_transpose", 14, 3, "amax|scale_inv|codes"),
    "the scale_inv": ("cast_transpose", 15, 3, "scale_inv"),
    "the amax of weights": ("cast_weights", 3, 2, "the amax"),
    "the scale of weights": ("cast_weights", 2, 2, "the scale "),
    "the last bits of an amax": ("cast_transpose", 14, 0, "amax"),
    **{f"argument {at} of an update": ("update_scales", at, 3, "another") for at in (0, 1, 2, 4)},
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
    with pytest.warns(UserWarning, match=rf"{family}.* is not used on cpu: its self-test.*({words})"):
        first = use()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        second = use()
    assert passed == []
    for found in (first, second):
        assert found is None if family != "cast_transpose" else all(map(torch.equal, found, cast(x, plain)))


@pytest.mark.usefixtures("host_kernels")
def test_a_pass_is_remembered_and_spares_the_next_test(monkeypatch: pytest.MonkeyPatch) -> None:
    passed: list[str] = []
    with_kernels(monkeypatch, HostKernel, passed)
    assert kernels.update_kernel(CPU) is not None
    assert passed == ["update_scales"]
    kernels.update_kernel.cache_clear()
    monkeypatch.setattr(kernels.load, "has_passed", lambda *_: True)
    monkeypatch.setattr(self_test, "update_scales", lambda *_: "must not run")
    assert kernels.update_kernel(CPU) is not None


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
    # if the cache is not writable, the test runs again; nothing else changes
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
    assert all(map(torch.equal, results, cast(torch.ones(40, 24), plain)))


@pytest.mark.usefixtures("host_kernels")
@pytest.mark.parametrize("place", ["load", "test"])
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
            full.setattr(*((kernels.load, "load") if place == "load" else (self_test, "update_scales")), failing)
            with pytest.raises(torch.OutOfMemoryError, match=f"to load and test update_scales: .*{error}"):
                kernels.update_kernel(CPU)
            # nor is an earlier pass forgotten
            full.setattr(kernels.load, "has_passed", lambda *_: True)
            assert kernels.try_kernel(kernels._update_variant(), CPU, test_again=True).out_of_memory
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
            assert all(map(torch.equal, cast(x), cast(x, plain)))
        assert kernels.update_kernel(CPU) is None
    (message,) = (str(warning.message) for warning in said)
    assert "pip install cupy-cuda13x" in message


def test_backends(host_kernels: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTNING_FP8_BACKEND", "reference")
    x = torch.randn(40, 24)
    assert all(map(torch.equal, cast(x), cast(x, plain)))
    assert host_kernels == []
    monkeypatch.setenv("LIGHTNING_FP8_BACKEND", "cuda")
    for function in (kernels.backend, kernels.cast_kernel):
        function.cache_clear()
    with pytest.raises(ValueError, match="LIGHTNING_FP8_BACKEND must be one of auto, reference, got 'cuda'"):
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


def test_kernel_without_cupy_says_what_to_install() -> None:
    program = (
        "import sys; sys.modules['cupy_backends'] = None\n"
        "import torch, kernels_cuda.load as load\n"
        "try: load.load('update_scales', (), 'P', 32, 0)\n"
        "except RuntimeError as error: print(error)\n"
    )
    ran = run_warm("-c", program, check=True)
    assert "pip install cupy-cuda1" in ran.stdout
