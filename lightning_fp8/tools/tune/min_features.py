"""From which size on a linear layer's forward and backward are faster in FP8 than in bf16: for ``min_features``."""

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
        """Of FP8, by the medians."""
        return self.bf16.p50_us / self.fp8.p50_us

    def as_json(self) -> dict[str, Any]:
        """For the table."""
        times = {"fp8": self.fp8, "bf16": self.bf16}
        percentiles = {
            f"{name}_{which}": getattr(times[name], which) for name in times for which in ("p20_us", "p50_us", "p80_us")
        }
        return {"features": self.features, **percentiles}


def variants(device: torch.device) -> Variants:
    """A square layer with a bias and fp32 weights that change from one iteration to the next, given 8192 tokens."""

    def of_size(features: int) -> list[Variant]:
        precisions = {FP8: Precision(convert, in_fp8=True), BF16: bf16_precisions()[BF16]}
        return variants_of(lambda: nn.Linear(features, features), (TOKENS, features, features), precisions, device)

    return of_size


def timed(sizes: Iterable[int], variants: Variants, rounds: int, batch: timing.Batch) -> Iterator[Timed]:
    """Each size, its variants checked and then timed in turns.

    Args:
        sizes: features of the layers.
        variants: makes those of a size, with the names :data:`FP8` and :data:`BF16`.
        rounds: batches of each variant.
        batch: times one.

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
        # what this size has in memory, before the next one is made
        del made, variant
        timing.release()


def smallest_that_pays(measured: Sequence[Timed]) -> int:
    """The smallest size at which FP8 is faster, as it is at all larger ones; above the largest where there is none."""
    smallest = max(one.features for one in measured) + 1
    for one in sorted(measured, key=lambda one: one.features, reverse=True):
        if one.speedup <= 1:
            break
        smallest = one.features
    return smallest
