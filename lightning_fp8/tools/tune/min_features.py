"""Measures the size from which a linear layer's forward and backward are faster in FP8, for ``min_features``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from lightning_fp8.conversion.convert import convert
from lightning_fp8.tools import timing
from lightning_fp8.tools.timing import Variant
from lightning_fp8.tools.tune.iteration import Precision, bf16_precisions, variants_of

SIZES, TOKENS = (128, 256, 512, 768, 1024, 1536, 2048, 3072, 4096), 8192
FP8, BF16 = "lightning_fp8", "bf16 autocast"

# a size -> the layer in FP8 and in bf16
Variants = Callable[[int], Sequence[Variant]]


class Timed(NamedTuple):
    """One size: a layer with this many features in and out.

    Attributes:
        features: in, and out.
        fp8: microseconds of an iteration, with the cast of the weights.
        bf16: the same under autocast to bf16.
    """

    features: int
    fp8: timing.Times
    bf16: timing.Times

    @property
    def speedup(self) -> float:
        """Speedup of FP8 over bf16, from the medians."""
        return self.bf16.p50_us / self.fp8.p50_us

    def as_json(self) -> dict[str, Any]:
        """The row for the table."""
        times = {"fp8": self.fp8, "bf16": self.bf16}
        percentiles = {
            f"{name}_{which}": getattr(times[name], which) for name in times for which in ("p20_us", "p50_us", "p80_us")
        }
        return {"features": self.features, **percentiles}


def variants(device: torch.device) -> Variants:
    """Square layers with a bias, given 8192 tokens; their fp32 weights change in each iteration."""

    def of_size(features: int) -> list[Variant]:
        precisions = {FP8: Precision(convert, in_fp8=True), BF16: bf16_precisions()[BF16]}
        return variants_of(lambda: nn.Linear(features, features), (TOKENS, features, features), precisions, device)

    return of_size


def timed(sizes: Iterable[int], variants: Variants, rounds: int, batch: timing.Batch) -> Iterator[Timed]:
    """For each size, check the variants and time them in turns.

    Args:
        sizes: features of the layers.
        variants: creates the variants of a size, named :data:`FP8` and :data:`BF16`.
        rounds: batches of each variant.
        batch: times a batch.

    Raises:
        RuntimeError: for a variant whose check fails; the message names it.
    """
    for features in sizes:
        made = variants(features)
        for variant in made:
            wrong = variant.check()
            if wrong is not None:
                raise RuntimeError(f"{variant.name} at {features} features gave {wrong}")
        times = timing.time_in_turns(made, rounds, batch, batch_us=timing.ITERATIONS_US)
        yield Timed(features, times[FP8], times[BF16])
        # free this size's memory before the next size is created
        del made, variant
        timing.release()


def smallest_that_pays(measured: Sequence[Timed]) -> int:
    """The smallest size from which FP8 is faster at all measured sizes; the largest plus 1 if there is none."""
    smallest = max(one.features for one in measured) + 1
    for one in sorted(measured, key=lambda one: one.features, reverse=True):
        if one.speedup <= 1:
            break
        smallest = one.features
    return smallest
