"""What a case of a suite is, and when two results of one count as the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_fp8.ops.cuda.self_test import same_codes

# what came out, by name: one tensor, or one for each weight of a model
Results = dict[str, Sequence[Tensor]]


@dataclass(frozen=True)
class Variant:
    """One way of doing the work of a case.

    Attributes:
        name: in rows and messages.
        call: does the work once, on this copy of the inputs, and gives what must not be freed at once.
        check: does it once more and gives None, or what is wrong.
        copies: of the inputs, which calls take in turn.
        refill: makes all copies fit for one more call each, where a call uses them up.
        around: entered before and left after the calls of a step of training; what is made there is gone afterwards.
        tokens: that a call trains on, where it is a step of training.
        saved_bytes: tells what one forward of it leaves for its backward.
    """

    name: str
    call: Callable[[int], Any]
    check: Callable[[], str | None]
    copies: int = 1
    refill: Callable[[], None] | None = None
    around: Callable[[], AbstractContextManager[None]] = nullcontext
    tokens: int | None = None
    saved_bytes: Callable[[], int] | None = None

    @property
    def is_ours(self) -> bool:
        """Whether it is this package that is measured, and no baseline."""
        return self.name.startswith(("lightning_fp8", "auto", "Kernel"))


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
