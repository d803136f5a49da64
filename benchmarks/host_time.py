"""Host time of layers in eager training: how long Python and torch take to issue the work of a layer.

    python -m benchmarks.host_time

The CUDA half of the package runs on CPU tensors of 16 features, on one thread, with kernels that do nothing: arguments
are checked, packed and passed on, and nothing is launched. Each layer is in a stack of eight, in the steady state of
training (histories filled, weights cast), under bf16 autocast. torch's plain layers are timed in the same run; they do
compute, which takes next to no time at this size.

The table has microseconds per layer, the smallest of several repetitions, plain and converted in turns: forward, and
forward with backward. The last two lines are the ratios of forward with backward of `Fp8Linear` to `nn.Linear`, and of
a converted Llama block to a plain one.
"""

from __future__ import annotations

import argparse
import cProfile
import functools
import pstats
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.no_kernels import llama_block, serve_cpu, set_steady_state
from lightning_fp8 import convert
from lightning_fp8.modules.feed_forward import fp8_feed_forward
from lightning_fp8.ops.cuda import dispatch as cuda
from lightning_fp8.ops.cuda import gemm
from lightning_fp8.ops.formats import DELAYED_ROLES
from lightning_fp8.ops.operand import Fp8Tensor

FEATURES = 16
LAYERS = 8


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(FEATURES, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0]  # type: ignore[no-any-return]


class _FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(FEATURES, FEATURES), nn.GELU(), nn.Linear(FEATURES, FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(x)))  # type: ignore[no-any-return]


class _Fused(_FeedForward):
    def forward(self, x: Tensor) -> Tensor:
        return fp8_feed_forward(self.up, "gelu", self.down, x)  # type: ignore[arg-type]


class _LlamaBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = llama_block(FEATURES, FEATURES, 2, 16)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x, position_embeddings=self.layer.rotary)
        return y[0] if isinstance(y, tuple) else y


class _NoFunction(torch.autograd.Function):
    """Autograd's own cost for any function of an input, a weight and a bias."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return _like(x, torch.bfloat16)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[override]
        return _like(dy, torch.float32), _like(dy, torch.float32), dy.new_empty(FEATURES, dtype=torch.float32)


def _like(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.new_empty((FEATURES, FEATURES), dtype=dtype)


def _linear() -> nn.Module:
    return nn.Linear(FEATURES, FEATURES)


# plain, converted, shape of the input
CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (_linear, _linear, (16, FEATURES)),
    "linear - gelu - linear": (_FeedForward, _FeedForward, (16, FEATURES)),
    "the same, fused": (_FeedForward, _Fused, (16, FEATURES)),
    "attention": (_Attention, _Attention, (1, 16, FEATURES)),
    "block of Llama": (_LlamaBlock, _LlamaBlock, (1, 16, FEATURES)),
}


def _stack(make: Callable[[], nn.Module], shape: tuple[int, ...], to_fp8: bool) -> tuple[Callable[[], Tensor], Any]:
    """A forward through eight layers, and the layers."""
    torch.manual_seed(0)
    model = nn.Sequential(*(make() for _ in range(LAYERS)))
    x = torch.randn(shape, requires_grad=True)
    if to_fp8:
        convert(model)
        set_steady_state(model)

    def forward() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(x)  # type: ignore[no-any-return]

    return forward, model


def _step(forward: Callable[[], Tensor]) -> None:
    forward().float().sum().backward()


def _microseconds(*runs: Callable[[], object], repetitions: int, calls: int) -> list[float]:
    """This thread's CPU time per call of each, measured in turns; other load on the machine does not count."""
    for run in runs:
        for _ in range(5):
            run()
    best = [float("inf")] * len(runs)
    for _ in range(repetitions):
        for at, run in enumerate(runs):
            start = time.thread_time()
            for _ in range(calls):
                run()
            best[at] = min(best[at], time.thread_time() - start)
    return [1e6 * one / calls for one in best]


def main() -> None:
    """The command."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--repetitions", type=int, default=30)
    options.add_argument("--calls", type=int, default=20)
    options.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    options.add_argument("--profile", choices=list(CASES), help="where the time of this converted case goes")
    asked = options.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    serve_cpu()
    if asked.profile:
        _profile(asked.profile)
        return
    measure = functools.partial(_microseconds, repetitions=asked.repetitions, calls=asked.calls)
    ratios = {}
    print(f"{'microseconds a layer':24}{'':10}{'plain':>10}{'':10}{'converted':>10}")
    print(f"{'':24}{'forward':>10}{'+backward':>10}{'forward':>10}{'+backward':>10}{'ratio':>8}")
    for name in asked.cases:
        plain, converted, shape = CASES[name]
        runs: list[Callable[[], object]] = []
        for make, to_fp8 in ((plain, False), (converted, True)):
            forward, _ = _stack(make, shape, to_fp8)
            runs += [forward, functools.partial(_step, forward)]
        times = [time_us / LAYERS for time_us in measure(*runs)]
        ratios[name] = times[3] / times[1]
        print(f"{name:24}{''.join(f'{one:10.1f}' for one in times)}{ratios[name]:8.2f}", flush=True)
        if name == "linear":
            linear = times[3]
    if "linear" in ratios:
        _show_parts(measure, linear)
    for short, name in (("linear", "linear"), ("block", "block of Llama")):
        if name in ratios:
            print(f"ratio {short} {ratios[name]:.2f}")


def _show_parts(measure: Callable[..., list[float]], whole: float) -> None:
    """Where the time of a converted linear layer goes, forward and backward."""
    forward, model = _stack(_linear, (16, FEATURES), to_fp8=True)
    _step(forward)
    layer = model[0]
    slot, gradient = (layer.fp8[""].slots[role, True] for role in DELAYED_ROLES)
    x, dy = torch.randn(16, FEATURES), torch.randn(16, FEATURES).bfloat16()
    x_fp8, _, x_inv = cuda.cast(x, slot, "none", "both")
    operand = Fp8Tensor(x_fp8, x_inv, "e4m3")
    function = functools.partial(_NoFunction.apply, x.requires_grad_(), layer.weight, layer.bias)
    names = ("cast of the input", "cast of the gradient", "three GEMMs", "autograd, for a function that does nothing")
    times = measure(
        lambda: cuda.cast(x, slot, "none", "both"),
        lambda: cuda.cast_gradient(dy, None, "none", gradient, "both", True),
        lambda: gemm.scaled_mm(operand, operand, None, torch.bfloat16, True),
        lambda: function().backward(dy),
    )
    parts = {name: (3 if name == "three GEMMs" else 1) * one for name, one in zip(names, times, strict=True)}
    print("\nof a converted linear layer, forward and backward")
    for name, time_us in {**parts, "checks, caches, calls": whole - sum(parts.values())}.items():
        print(f"  {name:44}{time_us:8.1f}")
    print()


def _profile(case: str) -> None:
    _, converted, shape = CASES[case]
    forward, _ = _stack(converted, shape, to_fp8=True)
    _microseconds(functools.partial(_step, forward), repetitions=3, calls=20)
    profiler = cProfile.Profile(time.thread_time)
    # backward in this thread, so that the profiler sees it
    with torch.autograd.set_multithreading_enabled(False):
        profiler.enable()
        for _ in range(50):
            _step(forward)
        profiler.disable()
    pstats.Stats(profiler).sort_stats("tottime").print_stats(35)


if __name__ == "__main__":
    main()
