"""For each GEMM: tries all candidates in another process, and times the correct ones in turns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from lightning_fp8.ops.cuda.gemm_choice import Choice
from lightning_fp8.tools.tune import child
from lightning_fp8.tools.tune.shapes import Gemm
from lightning_fp8.tools.worker import Answer, Worker

# a candidate that has crashed or timed out this often is not tried again
_MOST_LOST = 2


class Tried(NamedTuple):
    """A candidate for a GEMM, its name, and why it is left out, or None."""

    gemm: Gemm
    name: str
    failure: str | None


class Measured(NamedTuple):
    """A GEMM's row for the table; or None, and why there is none."""

    gemm: Gemm
    row: dict[str, Any] | None
    failure: str | None


def measure(
    candidates: Mapping[Gemm, Sequence[Choice]], rounds: int, limit_s: float, command: Sequence[str]
) -> Iterator[Tried | Measured]:
    """All results as they come, one GEMM after the other.

    Args:
        candidates: ours, by GEMM.
        rounds: batches of each candidate.
        limit_s: seconds for trying one candidate, or for timing it.
        command: starts a process that does the jobs of :mod:`lightning_fp8.tools.tune.child`.
    """
    lost: Counter[str] = Counter()
    with Worker(command) as worker:
        for gemm, choices in candidates.items():
            right = []
            for choice in choices:
                job = child.trial_job(gemm, choice)
                failure = _failure(_answer(worker, job, limit_s, lost, f"{choice.name} {gemm.promote}"))
                yield Tried(gemm, choice.name, failure)
                if failure is None:
                    right.append(choice)
            answer = worker.answer(child.timing_job(gemm, right, rounds), limit_s * (1 + len(right)))
            yield Measured(gemm, answer.found, answer.failure)


def _failure(answer: Answer) -> str | None:
    """What is wrong with a candidate; None if nothing is."""
    return answer.failure if answer.found is None else answer.found["wrong"]


def _answer(worker: Worker, job: dict[str, Any], limit_s: float, lost: Counter[str], name: str) -> Answer:
    if lost[name] >= _MOST_LOST:
        return Answer(None, f"not tried again, after {_MOST_LOST} crashes or timeouts")
    answer = worker.answer(job, limit_s)
    lost[name] += answer.failure is not None
    return answer
