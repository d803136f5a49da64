"""Counts the casts that run: of weights and other tensors in eager code, and of weights in compiled graphs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd

from lightning_fp8.core import casts as core
from lightning_fp8.modules import weights_together
from lightning_fp8.scalings.base import Scaling


def count_weight_casts(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """How often each weight is cast outside of graphs, by its address."""
    counted: Counter[int] = Counter()
    one, several = core.cast_weight, weights_together.cast_weights

    def counting(weight: Tensor, *args: Any) -> Any:
        if not torch.compiler.is_compiling():
            counted[weight.data_ptr()] += 1
        return one(weight, *args)

    def counting_several(weights: list[Tensor], *args: Any) -> Any:
        counted.update(weight.data_ptr() for weight in weights)
        return several(weights, *args)

    monkeypatch.setattr(core, "cast_weight", counting)
    monkeypatch.setattr(weights_together, "cast_weights", counting_several)
    return counted


def count_input_casts(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often tensors other than weights are cast, by the name of the row that they are recorded in."""
    casts: Counter[str] = Counter()
    original = Scaling.cast

    def counting(self: Scaling, x: Any, slot: Any, *rest: Any) -> Any:
        # those of inputs alone
        if slot.state is not None and (name := slot.state.names[int(slot.index)]).endswith("input"):
            casts[name] += 1
        return original(self, x, slot, *rest)

    monkeypatch.setattr(Scaling, "cast", counting)
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
