"""How host time grows with the number of layers: each operation on a stack of small linear layers must stay linear.

    python -m benchmarks.growth [--layers 10 100 1000 5000] [--out FILE]

On a CPU, one thread, layers of 16 features: conversion, conversion again with one more layer, the first forward with
its backward, later ones, the update of the scales, the optimizer's step, ``state_dict`` of the scales, and loading it.
Each layer takes the same input, as a chain of 5,000 would exceed Python's recursion limit. Each row has microseconds of
this process's time per layer: of one call for what happens once, else the smallest of three.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.harness import append
from lightning_fp8 import convert, scaling_state
from lightning_fp8.runtime.environment import environment

FEATURES = 16


class Stack(nn.Module):
    """The sum of all layers' outputs for one input."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(FEATURES, FEATURES) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        """x ``[M, 16]`` -> ``[M, 16]``."""
        return torch.stack([layer(x) for layer in self.layers]).sum(0)


def measure(layers: int) -> dict[str, float]:
    """Microseconds per layer by operation."""
    model, x, us_per_layer = Stack(layers), torch.randn(16, FEATURES), {}

    def timed(name: str, run: Callable[[], object], times: int = 1) -> None:
        taken = []
        for _ in range(times):
            start = time.process_time()
            run()
            taken.append(time.process_time() - start)
        us_per_layer[name] = 1e6 * min(taken) / layers

    def step() -> None:
        model(x).sum().backward()

    timed("convert", lambda: convert(model))
    timed("first forward and backward", step)
    timed("forward and backward", step, 3)
    optimizer, state = torch.optim.SGD(model.parameters(), lr=1e-3), scaling_state(model)
    timed("update", state.update, 3)
    timed("optimizer step", optimizer.step, 3)
    timed("state_dict", state.state_dict, 3)
    entries = state.state_dict()
    timed("load_state_dict", lambda: state.load_state_dict(entries), 3)
    model.layers.append(nn.Linear(FEATURES, FEATURES))
    timed("convert again", lambda: convert(model))
    return us_per_layer


def main() -> None:
    """Parse, measure, print, and append rows to ``--out``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=[10, 100, 1000, 5000])
    parser.add_argument("--out", type=Path, help="append the rows to this file, as lines of JSON")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    measure(10)
    about = environment(command=f"python -m benchmarks.growth {shlex.join(sys.argv[1:])}")
    rows: list[dict[str, Any]] = []
    for layers in arguments.layers:
        us_per_layer = measure(layers)
        rows.append({"layers": layers, "us_per_layer": us_per_layer, **about})
        each = ", ".join(f"{name} {us:.1f}" for name, us in us_per_layer.items())
        print(f"{layers:5} layers, us per layer: {each}", flush=True)
    append(rows, arguments.out)


if __name__ == "__main__":
    main()
