"""Right kernels pass their check wherever they are first used, whatever is set there; and nothing there sees it."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from contextlib import AbstractContextManager
from threading import Thread
from typing import Any
from unittest import mock

import pytest
import torch
from host_kernels import HostKernel, host_tensor_map
from repository import ROOT
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode
from warm import run_warm

from kernels_cuda import gemm, gemm_variants
from lightning_fp8.ops.cuda import kernels
from lightning_fp8.runtime.switch import default_dtype

CPU = torch.device("cpu")
PRODUCTS = {
    "gemm_sm89 in blocks": kernels._gemm_variant(
        gemm_variants.configurations((8, 9), in_blocks=True)[-1], "e4m3", "e4m3", torch.bfloat16, True, 128
    ),
    "gemm_sm90": kernels._gemm_variant(gemm_variants.configurations((9, 0))[-1], "e5m2", "e4m3", torch.float32, True),
}
OTHERS = {
    "cast_transpose": kernels._cast_variant(torch.bfloat16, "e4m3", "none", False),
    "cast_weights": kernels._weights_variant(False),
    "cast_blocks": kernels._block_cast_variant(torch.bfloat16, False, "none", False),
    "update_scales": kernels._update_variant(),
}
VARIANTS = PRODUCTS | OTHERS
Found = list[str | None]


def load(family: str, defines: tuple[str, ...], *rest: Any) -> HostKernel:
    kernel = HostKernel((family, defines), *rest)
    # a check has more tiles than these have at once
    kernel.multiprocessors = 2
    return kernel


def failures(*names: str) -> Found:
    """What is wrong with kernels that are used for the first time."""
    replaced = mock.patch.multiple(
        kernels.load, load=load, has_passed=lambda *_: False, remember_pass=lambda *_: None, forget_pass=None
    )
    with replaced, mock.patch.object(gemm, "tensor_map", host_tensor_map):
        return [kernels.try_kernel(VARIANTS[name], CPU).failure for name in names]


def within(context: Callable[[], AbstractContextManager[Any]]) -> Callable[..., Found]:
    def run(*names: str) -> Found:
        with context():
            return failures(*names)

    return run


def with_medium_precision(*names: str) -> Found:
    """Products in fp32 have bf16's precision, whatever this CPU has."""

    def product(a: Tensor, b: Tensor) -> Tensor:
        exact = torch.bmm(a.double()[None], b.double()[None])[0]
        return exact.to(torch.bfloat16 if a.dtype == torch.float32 else a.dtype).to(a.dtype)

    before, library = torch.get_float32_matmul_precision(), torch.library.Library("aten", "IMPL")
    torch.set_float32_matmul_precision("medium")
    library.impl("mm", product, "CPU", allow_override=True)
    try:
        return failures(*names)
    finally:
        library._destroy()
        torch.set_float32_matmul_precision(before)


def deterministically(*names: str) -> Found:
    torch.use_deterministic_algorithms(True)
    try:
        return failures(*names)
    finally:
        torch.use_deterministic_algorithms(False)


def in_another_thread(*names: str) -> Found:
    found: Found = []
    thread = Thread(target=lambda: found.extend(failures(*names)))
    thread.start()
    thread.join()
    return found


def compiled(*names: str) -> Found:
    """In an operator, at the first call of a compiled function."""
    found: Found = []

    @torch.library.custom_op("lightning_fp8_tests::uses_kernels", mutates_args=())
    def operator(x: Tensor) -> Tensor:
        found.extend(failures(*names))
        return x.clone()

    operator.register_fake(torch.empty_like)
    torch.compile(lambda x: operator(x) + 1, backend="aot_eager", fullgraph=True)(torch.ones(2))
    return found


def in_a_forked_process(*names: str) -> Found:
    """As a data loader's worker is one."""
    receiver, sender = multiprocessing.Pipe(duplex=False)

    def run() -> None:
        # the parent's threads are not there
        torch.set_num_threads(1)
        sender.send(failures(*names))

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    found: Found = receiver.recv() if receiver.poll(60) else ["it hangs"]
    process.kill()
    process.join()
    return found


# as `python -O` reads this package, in a process that has imported torch: to read that, too, takes half a minute
WITHOUT_ASSERTIONS = """
import sys
from importlib.machinery import SourceFileLoader
sys.implementation.cache_tag = None
SourceFileLoader.source_to_code = lambda _, data, path: compile(data, path, "exec", dont_inherit=True, optimize=1)
sys.path[:0] = {paths}
import test_right_kernels_are_used
print(test_right_kernels_are_used.failures(*{names}))
"""


def without_assertions(*names: str) -> Found:
    paths = [str(ROOT), str(ROOT / "tests" / "ops"), str(ROOT / "tests" / "support")]
    ran = run_warm("-c", WITHOUT_ASSERTIONS.format(paths=paths, names=names))
    return [None] * len(names) if ran.stdout == f"{[None] * len(names)}\n" else [ran.stdout + ran.stderr]


SETTINGS: dict[str, Callable[..., Found]] = {
    "medium precision of products": with_medium_precision,
    "deterministic algorithms": deterministically,
    "bf16 by default": within(lambda: default_dtype(torch.bfloat16)),
    "fp64 by default": within(lambda: default_dtype(torch.float64)),
    "meta by default": within(lambda: torch.device("meta")),
    "autocast": within(lambda: torch.autocast("cpu", torch.bfloat16)),
    "inference mode": within(torch.inference_mode),
    "no_grad": within(torch.no_grad),
    "another thread": in_another_thread,
    "a compiled function": compiled,
    "a forked process": in_a_forked_process,
    "python -O": without_assertions,
    "fake tensors": within(FakeTensorMode),
}


# each with a product and another kernel, by turns
@pytest.mark.parametrize(("number", "setting"), [*enumerate(SETTINGS)], ids=SETTINGS)
@pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning", "ignore:.*only once for all operators.*")
def test_right_kernels_pass(number: int, setting: str) -> None:
    chosen = [[*some][number % len(some)] for some in (PRODUCTS, OTHERS)]
    assert SETTINGS[setting](*chosen) == [None, None]


def test_a_flop_counter_does_not_count_a_check() -> None:
    with FlopCounterMode(display=False) as counter:
        assert failures("gemm_sm90", "cast_weights") == [None, None]
    assert counter.get_total_flops() == 0
