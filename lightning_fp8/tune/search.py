"""All candidates for all GEMMs: tried apart from each other, then those that are right timed in turns."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from lightning_fp8.ops.gemm_choice import Choice
from lightning_fp8.tune import child
from lightning_fp8.tune.children import answers
from lightning_fp8.tune.shapes import Gemm

# what starts a process for jobs of a kind: `lightning_fp8.tune.child.command`
Command = Callable[[str], Sequence[str]]


class Tried(NamedTuple):
    """A candidate for a GEMM, and why it is left out; None where it is not."""

    gemm: Gemm
    choice: Choice
    failure: str | None


class Measured(NamedTuple):
    """A GEMM's row for the table; or None, and why there is none."""

    gemm: Gemm
    row: dict[str, Any] | None
    failure: str | None


def try_candidates(candidates: Mapping[Gemm, Sequence[Choice]], limit_s: float, command: Command) -> Iterator[Tried]:
    """Each candidate on each of its GEMMs; a process serves one configuration and kind of GEMM."""
    groups: dict[tuple[Any, ...], list[tuple[Gemm, Choice]]] = defaultdict(list)
    for gemm, choices in candidates.items():
        for choice in choices:
            groups[choice.configuration, gemm.promote, gemm.output].append((gemm, choice))
    for group in groups.values():
        jobs = [child.trial_job(gemm, choice) for gemm, choice in group]
        for (gemm, choice), answer in zip(group, answers(command("trial"), jobs, lambda _: limit_s)):
            yield Tried(gemm, choice, answer.failure if answer.found is None else answer.found["wrong"])


def time_candidates(
    right: Mapping[Gemm, Sequence[Choice]], rounds: int, limit_s: float, command: Command
) -> Iterator[Measured]:
    """Those that are right, beside ``torch._scaled_mm``; the limit is for each of them."""
    jobs = [child.timing_job(gemm, choices, rounds) for gemm, choices in right.items()]
    found = answers(command("timing"), jobs, lambda job: limit_s * (1 + len(job["choices"])))
    for gemm, answer in zip(right, found):
        yield Measured(gemm, answer.found, answer.failure)
