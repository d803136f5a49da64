"""Counts the casts that run: of weights and other tensors in eager code, and of weights in compiled graphs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd

from lightning_fp8.ops import basic


def count_weight_casts(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """How often each weight is cast outside of graphs, by its address."""
    counted: Counter[int] = Counter()
    original = basic.cast_weight

    def counting(weight: Tensor, *args: object) -> object:
        if not torch.compiler.is_compiling():
            counted[weight.data_ptr()] += 1
        return original(weight, *args)

    monkeypatch.setattr(basic, "cast_weight", counting)
    return counted


def count_input_casts(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often tensors other than weights are cast, by the name of the row that they are recorded in."""
    casts: Counter[str] = Counter()
    original = basic.cast

    def counting(x: Tensor, slot: Any, *rest: Any) -> Any:
        if slot.state is not None:
            casts[slot.state.names[int(slot.index)]] += 1
        return original(x, slot, *rest)

    # an operator calls the function of a device directly where nothing watches operators
    counting.cpu = counting.cuda = counting  # type: ignore[attr-defined]
    monkeypatch.setattr(basic, "cast", counting)
    return casts


class Compiled:
    """A backend that counts AOTAutograd's forward graphs, their runs, and the casts of weights in those that ran."""

    def __init__(self) -> None:
        self.graphs = self.runs = self.weight_casts = 0

    def __call__(self, graph: Any, inputs: Any) -> Any:
        return aot_autograd(fw_compiler=self._forward, bw_compiler=lambda graph, _: graph)(graph, inputs)

    def _forward(self, graph: Any, _: Any) -> Callable[..., Any]:
        self.graphs += 1
        targets = [str(node.target) for node in graph.graph.nodes]

        def run(*args: Any) -> Any:
            self.runs += 1
            self.weight_casts += targets.count("lightning_fp8.cast_weight.default")
            return graph(*args)

        return run
