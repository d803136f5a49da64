"""What a case of a suite is, and when two results of one count as the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from lightning_fp8.ops.cuda.self_test import same_codes
from lightning_fp8.tools.timing import Variant

# what came out, by name: one tensor, or one for each weight of a model
Results = dict[str, Sequence[Tensor]]


class Case(Protocol):
    """One piece of work, at one size."""

    @property
    def name(self) -> str:
        """In rows, and what ``--case`` looks in."""
        ...

    @property
    def bytes(self) -> int | None:
        """Read and written by an ideal implementation, without single numbers; None where that is not the point."""
        ...

    @property
    def flops(self) -> int | None:
        """Of its matrix products; None where that is not the point."""
        ...

    def is_served(self, device: torch.device) -> bool:
        """Whether ``lightning_fp8`` has a kernel of its own here, or is on the CPU, where it has none."""
        ...

    def variants(self, device: torch.device) -> list[Variant]:
        """All variants, with inputs on the device."""
        ...


@dataclass(frozen=True)
class Tolerance:
    """How far results may be apart; not at all if left out.

    Attributes:
        codes: share of FP8 codes that may be the neighbouring one.
        relative: by the names of other results.
        absolute: by the names of other results.
    """

    codes: float = 0.0
    relative: tuple[tuple[str, float], ...] = ()
    absolute: tuple[tuple[str, float], ...] = ()


EXACT = Tolerance()


def difference(got: Results, expected: Results, tolerance: Tolerance = EXACT) -> str | None:
    """None where all agree, else the first that does not: ``"another payload"``."""
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
