"""The times of a GEMM's candidates: of right results only, without the host's time, on operands of their own."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from gpu_tables import FAST, PROMOTED, be

from lightning_fp8.ops.cuda import gemm_timing, plain
from lightning_fp8.ops.cuda.gemm_choice import Choice
from lightning_fp8.ops.cuda.gemm_table import Product

CPU = torch.device("cpu")
FPROP, WGRAD = Product(48, 32, 64, False, torch.bfloat16), Product(32, 64, 48, True, torch.float32)
OURS = [Choice(FAST["128x256 s4 c2"]), Choice(FAST["128x128 s6 c1"])]


@pytest.fixture(autouse=True)
def _gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    be(monkeypatch)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Each batch takes the next of these, then 7."""
    batches: list[float] = []

    def batch_us(call: Any, calls: int, device: torch.device) -> float:
        for number in range(calls):
            call(number)
        return batches.pop(0) if batches else 7.0

    monkeypatch.setattr(gemm_timing, "_batch_us", batch_us)
    return batches


def run_plain(choice: Choice, *arguments: Any) -> torch.Tensor:
    *operands, output, promote = arguments
    return plain.scaled_mm(*operands, output, not promote)


def test_medians_in_turns(clock: list[float]) -> None:
    clock += [9.0, 1.0, 2.0] * 2 + [8.0, 5.0, 6.0] * 3
    assert gemm_timing.times(FPROP, OURS, CPU, run_plain) == {Choice(None): 8.0, OURS[0]: 5.0, OURS[1]: 6.0}
    assert clock == []


@pytest.mark.parametrize("product", [FPROP, WGRAD])
def test_operands_are_new_ones_with_random_signs(product: Product, clock: list[float]) -> None:
    seen: list[tuple[Any, ...]] = []

    def run(choice: Choice, *arguments: Any) -> torch.Tensor:
        seen.append(arguments)
        return run_plain(choice, *arguments)

    before = torch.get_rng_state()
    gemm_timing.times(product, OURS[:1], CPU, run)
    assert torch.equal(torch.get_rng_state(), before)
    formats = ("e5m2", "e4m3") if product.promote else ("e4m3", "e4m3")
    dtypes = {"e5m2": torch.float8_e5m2, "e4m3": torch.float8_e4m3fn}
    for a, b, *rest in seen:
        assert (a.payload.shape, b.payload.shape) == ((product.m, product.k), (product.n, product.k))
        assert (a.format, b.format) == formats
        for operand in (a, b):
            values = operand.payload.view(dtypes[operand.format]).float() * operand.scale_inv
            assert values.abs().eq(1).all()
            assert 0.3 < values.gt(0).float().mean() < 0.7
        assert rest == [None, product.output, product.promote]
    # small ones do not stay in the L2 cache: a batch has its most calls, each on a copy
    assert len({arguments[0].payload.data_ptr() for arguments in seen}) == 20


@pytest.mark.parametrize(
    ("sizes", "copies"), [((4096, 4096, 1024), 3), ((4096, 4096, 4096), 2), ((8192, 8192, 8192), 1)]
)
def test_copies_exceed_twice_the_cache_or_are_one_a_call(
    sizes: tuple[int, int, int], copies: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gemm_timing, "_signs", lambda *sizes: sizes)
    product = Product(*sizes, True, torch.bfloat16)
    assert len(gemm_timing._operands(product, 3, CPU)) == copies


def test_a_wrong_result_is_left_out_and_named(clock: list[float]) -> None:
    def run(choice: Choice, *arguments: Any) -> torch.Tensor:
        got = run_plain(choice, *arguments)
        if choice == OURS[1]:
            got[-1, -1] += 1
        return got

    with pytest.warns(UserWarning, match="128x128 s6 c1 is not used for 48x32x64 fast bfloat16: its result differs"):
        assert set(gemm_timing.times(FPROP, OURS, CPU, run)) == {Choice(None), OURS[0]}


@pytest.mark.parametrize("error", [RuntimeError("not supported"), torch.OutOfMemoryError("too small")])
def test_torch_that_refuses_has_no_time_but_memory_is_no_refusal(error: Exception, clock: list[float]) -> None:
    def run(choice: Choice, *arguments: Any) -> torch.Tensor:
        if choice.configuration is None:
            raise error
        return run_plain(choice, *arguments)

    with pytest.raises(torch.OutOfMemoryError) if type(error) is torch.OutOfMemoryError else nullcontext():
        assert gemm_timing.times(WGRAD, [Choice(PROMOTED["256x128 s4 c2"], 2)], CPU, run) == {
            Choice(PROMOTED["256x128 s4 c2"], 2): 7.0
        }


def test_a_gemm_shorter_than_its_call_is_not_the_hosts_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that takes 30 microseconds for a call, and a device that takes 10 for its work and starts when told."""
    now, done = 0.0, 0.0

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = max(now, done)

        def synchronize(self) -> None:
            nonlocal now
            now = max(now, self.at)

        def elapsed_time(self, end: Event) -> float:
            return (end.at - self.at) / 1e3

    def launch(device_us: float, host_us: float = 30.0) -> None:
        nonlocal now, done
        now += host_us
        done = max(done, now) + device_us

    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: launch(cycles / 2000, host_us=1.0))
    for calls in (1, 20):
        assert gemm_timing._batch_us(lambda number: launch(10.0), calls, CPU) == pytest.approx(10.0)
