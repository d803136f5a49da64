"""Contexts that overlap in threads and asyncio tasks: whose settings apply, and that torch's own are restored."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, ExitStack
from typing import Any, TypeVar

import pytest
import torch
import torch.nn.functional as F
from backward_thread import in_a_backward_thread
from torch import Tensor, nn

from lightning_fp8 import Fp8Precision
from lightning_fp8.dtypes import attention
from lightning_fp8.plugins import Bf16TruePrecision
from lightning_fp8.plugins.core import PrecisionCore
from lightning_fp8.plugins.trainer import PLUGINS
from lightning_fp8.runtime.switch import Switch
from lightning_fp8.scalings import emulation
from lightning_fp8.scalings.operand import Operand
from lightning_fp8.scalings.per_tensor import PerTensor

MODES = ("fp8-delayed", "bf16-mixed", "bf16-true")
Result = TypeVar("Result")
# the first out first, the last out first, and both mixed
ORDERS = [(0, 1, 2), (1, 0, 2), (2, 1, 0), (1, 2, 0)]
LIMIT = 60  # seconds after which a thread counts as hanging


class Thread:
    """A thread that runs functions one after another, each on request."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1)
        self.stack = ExitStack()

    def start(self, function: Callable[..., Result], *args: Any) -> Future[Result]:
        return self._pool.submit(function, *args)

    def run(self, function: Callable[..., Result], *args: Any) -> Result:
        return self.start(function, *args).result(LIMIT)

    def enter(self, context: AbstractContextManager[Any]) -> None:
        self.run(self.stack.enter_context, context)

    def leave(self) -> None:
        self.run(self.stack.close)

    def stop(self) -> None:
        self._pool.shutdown(wait=False)


@pytest.fixture
def threads() -> Iterator[list[Thread]]:
    made = [Thread() for _ in range(4)]
    yield made
    for thread in made:
        thread.stop()


@pytest.fixture(autouse=True)
def _as_torch_starts() -> Iterator[None]:
    before = state()
    yield
    # a failing test must not affect others
    torch.backends.mha.set_fastpath_enabled(before["fast path"])
    torch.set_default_dtype(before["default dtype"])
    torch.backends.mkldnn.matmul.fp32_precision = before["fp32 precision"]
    torch.set_autocast_enabled("cpu", before["autocast"][0])


def state() -> dict[str, Any]:
    """Everything that our contexts change, in the calling thread."""
    key, stash = torch._C.DispatchKey.AutocastIPU, "lightning_fp8.dtypes.attention"
    return {
        "fast path": torch.backends.mha.get_fastpath_enabled(),
        "default dtype": torch.get_default_dtype(),
        "fp32 precision": torch.backends.mkldnn.matmul.fp32_precision,
        "autocast": (
            torch.is_autocast_enabled("cpu"),
            torch.get_autocast_dtype("cpu"),
            torch.is_autocast_cache_enabled(),
        ),
        "included": torch._C._dispatch_tls_is_dispatch_key_included(key),
        "excluded": torch._C._dispatch_tls_is_dispatch_key_excluded(key),
        "stash": torch._C._get_obj_in_tls(stash) if torch._C._is_key_in_tls(stash) else None,
    }


def attend(query: torch.dtype = torch.float32, key: torch.dtype = torch.bfloat16) -> torch.dtype:
    """The dtype of attention's result for a query whose dtype differs from that of key and value."""
    x = torch.ones(1, 1, 3, 8)
    return F.scaled_dot_product_attention(x.to(query), x.to(key), x.to(key)).dtype


def outcome(function: Callable[[], Any] = attend) -> str:
    """``align``, ``error``, or ``torch`` outside all contexts."""
    try:
        function()
    except TypeError as error:
        assert "dtype_mismatch='align'" in str(error)  # noqa: PT017
        return "error"
    except RuntimeError as error:
        assert "same dtype" in str(error)  # noqa: PT017
        return "torch"
    return "align"


# ---------------------------------------------------------------------------------------------- torch's own state


@pytest.mark.parametrize(("order", "fast_path"), [*zip(ORDERS, (True, False, True, False), strict=True)])
def test_the_last_thread_out_restores(threads: list[Thread], order: tuple[int, ...], fast_path: bool) -> None:
    torch.backends.mha.set_fastpath_enabled(fast_path)
    before = state()
    plugins = [PLUGINS[precision]() for precision in ("bf16-true", "fp8-delayed", "bf16-true")]
    for thread, plugin in zip(threads, plugins):
        thread.enter(plugin.forward_context())
    for count, leaving in enumerate(order):
        assert not torch.backends.mha.get_fastpath_enabled()
        expected = torch.bfloat16 if {0, 2} - set(order[:count]) else torch.float32
        assert torch.get_default_dtype() == expected
        assert state()["autocast"] == before["autocast"]
        threads[leaving].leave()
    assert state() == before
    assert all(thread.run(state) == before for thread in threads)


@pytest.mark.parametrize("order", ORDERS)
def test_contexts_of_one_thread_end_in_any_order(order: tuple[int, ...]) -> None:
    before = state()
    plugins = [PLUGINS[precision](dtype_mismatch="error") for precision in MODES]
    contexts = [plugin.forward_context() for plugin in plugins]
    for context in contexts:
        context.__enter__()
    for leaving in order:
        assert outcome() == "error"
        contexts[leaving].__exit__(None, None, None)
    assert state() == before
    assert outcome() == "torch"


def test_autocast_comes_back_to_what_the_user_has() -> None:
    with torch.autocast("cpu", dtype=torch.float16):
        before = state()
        with Fp8Precision().forward_context():
            assert state()["autocast"] == (True, torch.bfloat16, False)
        assert before["autocast"] == (True, torch.float16, True)
        assert state() == before


def test_what_is_set_inside_is_lost_with_the_last_context(threads: list[Thread]) -> None:
    before = state()
    threads[0].enter(Bf16TruePrecision().forward_context())
    torch.backends.mha.set_fastpath_enabled(True)
    torch.set_default_dtype(torch.float64)
    threads[1].enter(Bf16TruePrecision().forward_context())
    assert not torch.backends.mha.get_fastpath_enabled()
    assert torch.get_default_dtype() == torch.bfloat16
    torch.set_default_dtype(torch.float64)
    threads[0].leave()
    assert torch.get_default_dtype() == torch.bfloat16
    torch.set_default_dtype(torch.float64)
    threads[1].leave()
    assert state() == before


@pytest.mark.parametrize("precision", MODES)
def test_a_generator_that_another_thread_closes(threads: list[Thread], precision: Any) -> None:
    before = state()

    def answers() -> Iterator[str]:
        with PLUGINS[precision]().forward_context():
            yield outcome()

    generator = answers()
    assert threads[0].run(next, generator) == "align"
    threads[1].run(generator.close)
    assert state() == before
    assert threads[1].run(state) == before
    if precision == "bf16-true":  # without autocast, which would cast the operands to one dtype
        assert threads[0].run(outcome) == "torch"
    # the next context there restores what its own thread still has
    threads[0].enter(PLUGINS[precision]().forward_context())
    threads[0].leave()
    assert threads[0].run(state) == before


def test_one_thread_saves_while_another_waits(threads: list[Thread]) -> None:
    """A context that enters while another reads the setting would make the other save the switched value."""
    value, entering = ["off"], []

    def get() -> str:
        if not entering:
            entering.append(threads[0].start(threads[0].stack.enter_context, switch.at("on")))
            wait(entering, 0.2)  # in vain, unless nothing prevents it
        return value[0]

    switch = Switch(get, lambda new: value.__setitem__(0, new))
    with switch.at("on"):
        entering[0].result(LIMIT)
    assert value == ["on"]
    threads[0].leave()
    assert value == ["off"]


def test_a_context_that_ends_while_another_one_begins() -> None:
    """This happens when the garbage collector closes an abandoned generator at an arbitrary point of the thread."""
    value, abandoned = ["off"], ExitStack()

    def set_value(new: str) -> None:
        value[0] = new
        if new == "second":
            abandoned.close()

    switch = Switch(lambda: value[0], set_value)

    def overlap() -> None:
        abandoned.enter_context(switch.at("first"))
        with switch.at("second"):
            assert value == ["second"]

    thread = threading.Thread(target=overlap, daemon=True)
    thread.start()
    thread.join(LIMIT)
    assert not thread.is_alive()
    assert value == ["off"]


# -------------------------------------------------------------------------------------------------- fp32 products


def product(out_dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(8, 64, generator=generator).to(torch.float8_e4m3fn).view(torch.uint8) for _ in range(2))
    operands = (Operand(codes, torch.ones(()), PerTensor()) for codes in (a, b))
    return emulation.product_of_tensors(*operands, None, out_dtype)


def test_four_threads_inside_an_fp32_product(threads: list[Thread], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emulation, "_HAS_BF16_GEMM", True)
    before, alone = state(), product(torch.float32)
    inside, leave = ([threading.Event() for _ in threads] for _ in range(2))
    seen, running = [], threading.local()
    original = torch.addmm

    def addmm(*args: Any, **kwargs: Any) -> Tensor:
        inside[running.number].set()
        assert leave[running.number].wait(LIMIT)
        seen.append(torch.backends.mkldnn.matmul.fp32_precision)
        return original(*args, **kwargs)

    def multiply(number: int) -> Tensor:
        running.number = number
        return product(torch.float32)

    monkeypatch.setattr(torch, "addmm", addmm)
    products = []
    for number, thread in enumerate(threads):
        products.append(thread.start(multiply, number))
        assert inside[number].wait(LIMIT)
    for number, future in enumerate(products):
        leave[number].set()
        assert torch.equal(future.result(LIMIT), alone)
    assert seen == ["bf16"] * 4
    assert state() == before


# ------------------------------------------------------------------------------------------------- whose settings


def plugin_of(mismatch: Any) -> PrecisionCore:
    return Bf16TruePrecision(dtype_mismatch=mismatch)


async def overlap(bodies: list[Callable[..., Any]], order: tuple[int, ...], between: Callable[[], None]) -> list[Any]:
    """Tasks that are inside their contexts at the same time, and leave them in this order."""
    inside, leave = ([asyncio.Event() for _ in bodies] for _ in range(2))
    tasks = []
    for body, mine, go in zip(bodies, inside, leave):
        tasks.append(asyncio.create_task(body(mine, go)))
        await mine.wait()
    for leaving in order:
        between()
        leave[leaving].set()
        await tasks[leaving]
    return [task.result() for task in tasks]


def test_without_the_removal_of_torch_2_13(threads: list[Thread], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._C, "_remove_obj_from_tls", raising=False)
    before = state()
    with plugin_of("error").forward_context():
        assert outcome() == "error"
        assert threads[0].run(outcome) == "torch"
    assert outcome() == "torch"
    assert state() == before


@pytest.mark.parametrize("order", ORDERS)
def test_tasks_keep_their_own_settings(order: tuple[int, ...]) -> None:
    before, mismatches = state(), ("error", "align", "error")

    def body(mismatch: str) -> Callable[..., Any]:
        async def task(inside: asyncio.Event, leave: asyncio.Event) -> list[str]:
            seen = [outcome()]
            with plugin_of(mismatch).forward_context():
                inside.set()
                await leave.wait()
                seen += [outcome()]
                with plugin_of("error").forward_context():
                    seen += [outcome()]
                seen += [outcome()]
            return [*seen, outcome()]

        return task

    def outside() -> None:
        assert outcome() == "torch"

    seen = asyncio.run(overlap([body(mismatch) for mismatch in mismatches], order, outside))
    assert seen == [["torch", mismatch, "error", mismatch, "torch"] for mismatch in mismatches]
    assert state() == before


# ------------------------------------------------------------------------------------------------------- backward


class Around(torch.autograd.Function):
    """Runs a function inside backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, function: Callable[[], Any]) -> Tensor:
        ctx.function = function
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        ctx.function()
        return dy, None


def inside_backward(function: Callable[[], Result]) -> Result:
    found: list[Result] = []
    x = torch.zeros((), requires_grad=True)
    with torch.enable_grad():  # as in a checkpoint, where one backward runs inside another
        y = Around.apply(x, lambda: found.append(function()))
    y.backward()
    return found[0]


def test_a_backward_thread_has_the_settings_of_its_caller(threads: list[Thread]) -> None:
    def backward(nested: bool) -> str:
        innermost = (lambda: inside_backward(outcome)) if nested else outcome
        return inside_backward(lambda: in_a_backward_thread(innermost))

    def with_a_context_of_its_own() -> tuple[str, str, str]:
        first = outcome()
        with plugin_of("error").forward_context():
            return first, outcome(), outcome()

    for thread, mismatch in zip(threads, ("error", "align")):
        thread.enter(plugin_of(mismatch).recomputation_context())
    for nested in (False, True):  # as in a reentrant checkpoint, whose backward is called by a backward thread
        assert [thread.run(backward, nested) for thread in threads[:3]] == ["error", "align", "torch"]
    inside = threads[1].run(inside_backward, lambda: in_a_backward_thread(with_a_context_of_its_own))
    assert inside == ("align", "error", "error")
    for thread in threads[:2]:
        thread.leave()
    assert [thread.run(backward, True) for thread in threads[:3]] == ["torch"] * 3


# -------------------------------------------------------------------------------------------- compiled, evaluated


@pytest.mark.parametrize("precision", MODES)
def test_a_compiled_function_may_enter_a_context(precision: Any) -> None:
    torch._dynamo.reset()
    before, plugin = state(), PLUGINS[precision]()
    torch.manual_seed(0)
    model = plugin.convert_module(nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16)))
    x = torch.randn(8, 16).to(torch.bfloat16 if precision == "bf16-true" else torch.float32)

    def forward(x: Tensor) -> Tensor:
        with plugin.forward_context():
            return model[0](x)

    with torch.no_grad():
        assert torch.equal(torch.compile(forward, backend="aot_eager")(x), forward(x))
    assert state() == before


def test_what_is_stashed_is_held() -> None:
    """torch keeps it for other threads, even if all references by name are gone."""
    entry, outside = attention._Entry(Fp8Precision()._attention, None), attention._dispatch()
    held = sys.getrefcount(entry)
    for times in range(3):
        attention._set_dispatch(outside._replace(entry=entry))
        assert sys.getrefcount(entry) == held + 1, times
    attention._set_dispatch(outside)
    assert sys.getrefcount(entry) == held
