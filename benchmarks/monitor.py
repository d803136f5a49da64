"""What ``Fp8Monitor`` costs at its default: 50 steps of a GPT in FP8, with one check, and the same without it.

    python -m benchmarks.monitor [--pairs 5] [--width 256]

Both train a converted ``ByteGPT`` from the same weights, on one thread of a CPU or on the first GPU, in turns. The line
has the median time of the steps with and without the monitor, and the median of the pairs' ratios.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time
from collections.abc import Sequence

import torch

from lightning_fp8 import Fp8Monitor, convert, scaling_state
from lightning_fp8.examples import ByteGPT

STEPS = 50


def seconds(model: ByteGPT, monitor: Fp8Monitor | None, steps: int = STEPS) -> float:
    """The time of these steps."""
    device = next(model.parameters()).device
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    batches = torch.randint(256, (steps, 16, 65), generator=torch.Generator().manual_seed(0)).to(device)
    _wait(device)
    begin = time.perf_counter()
    for batch in batches:
        with torch.autocast(device.type, torch.bfloat16):
            logits = model(batch[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        scaling_state(model).update()
        if monitor is not None:
            monitor.check(model, loss)
        optimizer.zero_grad()
    _wait(device)
    return time.perf_counter() - begin


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main(arguments: Sequence[str]) -> None:
    """Print what it costs."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.monitor", description=__doc__)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--width", type=int, default=256)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    plain = convert(ByteGPT(layers=2, width=options.width, heads=2, context=64).to(device))
    seconds(plain, None, 5)
    pairs = []
    for number in range(options.pairs):
        order = (False, True) if number % 2 else (True, False)
        pairs.append({with_it: seconds(copy.deepcopy(plain), Fp8Monitor() if with_it else None) for with_it in order})
    without, with_it = (statistics.median(pair[key] for pair in pairs) for key in (False, True))
    ratio = statistics.median(pair[True] / pair[False] for pair in pairs)
    print(f"{STEPS} steps without Fp8Monitor {without:.2f} s, with it {with_it:.2f} s: {ratio - 1:+.1%} ({device})")


if __name__ == "__main__":
    main(sys.argv[1:])
