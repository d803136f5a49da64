"""Host time of layers in eager training: how long Python and torch take to issue the work of a layer.

    python -m benchmarks.host_time

The CUDA half of the package runs on CPU tensors of 16 features, on one thread, with kernels that do nothing: arguments
are checked, packed and passed on, and nothing is launched. Each layer is in a stack of eight, in the steady state of
training (histories filled, weights cast), under bf16 autocast. torch's plain layers are timed in the same run; they do
compute, which takes next to no time at this size.

The table has microseconds per layer, the smallest of several repetitions, plain and converted in turns: forward,
forward with backward, and a forward of evaluation, within `weights_unchanged`, which measures each input before its
cast. The last two lines are the ratios of forward with backward of `Fp8Linear` to `nn.Linear`, and of a converted
Llama block to a plain one.
"""

from __future__ import annotations

import argparse
import cProfile
import functools
import pstats
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack

import torch
from torch import Tensor, nn

from benchmarks.no_kernels import LlamaBlock, serve_cpu, set_steady_state
from lightning_fp8 import convert, weights_unchanged

# contexts of what is timed, which last as long as the process
_OPEN = ExitStack()
FEATURES = 16
LAYERS = 8


# by its name in the last lines: creates a layer, and the shape of its input
CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(FEATURES, FEATURES), (16, FEATURES)),
    "block": (lambda: LlamaBlock(FEATURES, FEATURES, 2, 16), (1, 16, FEATURES)),
}


def _stack(name: str, is_converted: bool, evaluates: bool = False) -> Callable[[], Tensor]:
    """A forward through eight layers."""
    make, shape = CASES[name]
    torch.manual_seed(0)
    model = nn.Sequential(*(make() for _ in range(LAYERS)))
    x = torch.randn(shape, requires_grad=True)
    if is_converted:
        convert(model)
        set_steady_state(model)

    def forward() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(x)  # type: ignore[no-any-return]

    def evaluate() -> Tensor:
        with torch.no_grad():
            return forward()

    if evaluates:
        model.eval()
        _OPEN.enter_context(weights_unchanged(model))
    return evaluate if evaluates else forward


def _step(forward: Callable[[], Tensor]) -> None:
    forward().float().sum().backward()


def _microseconds(runs: list[Callable[[], object]], repetitions: int, calls: int) -> list[float]:
    """This thread's CPU time per layer of each, measured in turns; other load on the machine does not count."""
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
    return [1e6 * spent / calls / LAYERS for spent in best]


def main() -> None:
    """The command."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--repetitions", type=int, default=30)
    options.add_argument("--calls", type=int, default=20)
    options.add_argument("--profile", choices=list(CASES), help="where the time of this converted case goes")
    arguments = options.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    serve_cpu()
    if arguments.profile:
        _profile(arguments.profile)
        return
    print(f"{'microseconds a layer':24}{'':20}{'plain':>10}{'':20}{'converted':>10}")
    print(f"{'':24}" + 2 * f"{'forward':>10}{'+backward':>10}{'evaluation':>11}")
    ratios = {}
    for name in CASES:
        runs: list[Callable[[], object]] = []
        for is_converted in (False, True):
            forward = _stack(name, is_converted)
            runs += [forward, functools.partial(_step, forward), _stack(name, is_converted, evaluates=True)]
        times = _microseconds(runs, arguments.repetitions, arguments.calls)
        ratios[name] = times[4] / times[1]
        print(f"{name:24}{''.join(f'{us:10.1f}' for us in times)}", flush=True)
    for name, ratio in ratios.items():
        print(f"ratio {name} {ratio:.2f}")


def _profile(name: str) -> None:
    forward = _stack(name, is_converted=True)
    _microseconds([functools.partial(_step, forward)], repetitions=3, calls=20)
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
