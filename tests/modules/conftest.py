from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_fp8.modules import feed_forward
from lightning_fp8.scalings.base import Scaling


@pytest.fixture
def weight_casts(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """Shapes of the weights that were cast, in order."""
    shapes: list[torch.Size] = []
    original = Scaling.cast_weights

    def counting(self: Scaling, weights: list[Tensor], *args: Any) -> Any:
        shapes.extend(weight.shape for weight in weights)
        return original(self, weights, *args)

    monkeypatch.setattr(Scaling, "cast_weights", counting)
    return shapes


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The operators' names of the activations of blocks that ran fused; "gated" for those with gate and up."""
    calls: list[str] = []
    plain, gated = feed_forward.fp8_feed_forward, feed_forward.fp8_gated_feed_forward

    def counting(first: Any, activation: str, second: Any, x: Tensor) -> Tensor:
        calls.append(activation)
        return plain(first, activation, second, x)

    def counting_gated(gate: Any, up: Any, down: Any, x: Tensor) -> Tensor:
        calls.append("gated")
        return gated(gate, up, down, x)

    monkeypatch.setattr(feed_forward, "fp8_feed_forward", counting)
    monkeypatch.setattr(feed_forward, "fp8_gated_feed_forward", counting_gated)
    return calls


@pytest.fixture(params=["reference", "kernels"])
def half(request: pytest.FixtureRequest) -> str:
    """Which half of the operators runs, on the CPU in any case."""
    if request.param == "kernels":
        request.getfixturevalue("cuda_half")
    return request.param  # type: ignore[no-any-return]


@pytest.fixture
def no_caches() -> Iterator[None]:
    """Nothing compiled is found again: a graph that is found in a cache is not compiled."""
    torch._dynamo.reset()
    with torch._inductor.config.patch(force_disable_caches=True):
        yield
