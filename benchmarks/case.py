"""What a case of a suite is, and when two of its results count as equal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from lightning_fp8.ops.cuda.self_test import same_codes
from lightning_fp8.tools.timing import Variant

# the results of a case by name: one tensor, or one for each weight of a model
Results = dict[str, Sequence[Tensor]]


class Case(Protocol):
    """One piece of work, at one size."""

    @property
    def name(self) -> str:
        """The name in rows, which ``--case`` matches."""
        ...

    @property
    def bytes(self) -> int | None:
        """Bytes that an ideal implementation reads and writes, scalars excluded; None where they do not matter."""
        ...

    @property
    def flops(self) -> int | None:
        """FLOPs of its matrix products; None where they do not matter."""
        ...

    def is_served(self, device: torch.device) -> bool:
        """Whether ``lightning_fp8`` has its own kernel here; true on the CPU, where it has none."""
        ...

    def variants(self, device: torch.device) -> list[Variant]:
        """All variants, with inputs on the device."""
        ...


@dataclass(frozen=True)
class Tolerance:
    """How far results may differ; by default not at all.

    Attributes:
        codes: share of FP8 codes that may be off by one.
        relative: relative tolerance of the other results, by name.
        absolute: absolute tolerance of the other results, by name.
    """

    codes: float = 0.0
    relative: tuple[tuple[str, float], ...] = ()
    absolute: tuple[tuple[str, float], ...] = ()


EXACT = Tolerance()


def difference(got: Results, expected: Results, tolerance: Tolerance = EXACT) -> str | None:
    """None if all results agree, else the first that does not: ``"another payload"``."""
    for what, tensors in expected.items():
        for number, (mine, theirs) in enumerate(zip(got[what], tensors, strict=True)):
            if not _same(what, mine, theirs, tolerance):
                return f"another {what}" + (f" of tensor {number}" if len(tensors) > 1 else "")
    return None


def _same(what: str, got: Tensor, expected: Tensor, tolerance: Tolerance) -> bool:
    if got.shape != expected.shape or got.dtype != expected.dtype:
        return False
    if got.dtype.itemsize == 1:
        return same_codes(got, expected, tolerance.codes)
    relative, absolute = dict(tolerance.relative).get(what, 0.0), dict(tolerance.absolute).get(what, 0.0)
    return torch.allclose(got, expected, rtol=relative, atol=absolute)
