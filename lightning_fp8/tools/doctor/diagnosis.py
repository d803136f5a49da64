"""What an examination finds, as plain data."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

# exit statuses, also the severities of problems
FINE, SLOWER, CANNOT = 0, 1, 2
NOT_LOADED = "not run: not loaded"


class Section(NamedTuple):
    """A table of the output page; every row has a cell for each column."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Problem:
    """Something to fix.

    Attributes:
        status: 1 if `fp8-delayed` still runs, but slower or on torch's operators, or not on every GPU; 2 if it cannot
            run.
        what: what is wrong.
        do: what to do about it, with the exact command where there is one.
    """

    status: int
    what: str
    do: str


@dataclass(frozen=True)
class KernelCheck:
    """How compiling and self-testing one kernel went.

    Attributes:
        kernel: family and definitions.
        place: the device that it was compiled for, loaded and tested on; or the architecture alone.
        compiled: ``"compiled"``, ``"from the cache"`` or ``"failed"``.
        compile_s: seconds that compiling or reading the cache took, including loading if it was loaded.
        self_test: ``"passed"``, ``"failed"``, or ``"not run: "`` and why.
        self_test_s: seconds that the self-test took, or None.
        failure: what went wrong, or None.
        resources: :attr:`kernels_cuda.launch.Kernel.resources`; None if it was not loaded or failed its self-test.
    """

    kernel: str
    place: str
    compiled: str
    compile_s: float
    self_test: str
    self_test_s: float | None
    failure: str | None
    resources: dict[str, int] | None = None


@dataclass
class Diagnosis:
    """All that an examination has found so far.

    Attributes:
        status: 0, 1 or 2, as ``python -m lightning_fp8 doctor --help`` explains them.
        verdict: the status in a sentence.
        problems: what to fix, the most serious first.
        sections: the tables of the page.
        kernels: every kernel that was tried.
    """

    status: int = FINE
    verdict: str = ""
    problems: list[Problem] = field(default_factory=list)
    sections: list[Section] = field(default_factory=list)
    kernels: list[KernelCheck] = field(default_factory=list)

    def problem(self, status: int, what: str, do: str) -> None:
        """Add something to fix."""
        self.problems.append(Problem(status, what, do))

    def section(self, title: str, columns: tuple[str, ...], *rows: tuple[str, ...]) -> None:
        """Add a table."""
        self.sections.append(Section(title, columns, rows))

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON, with rows keyed by the names of their columns."""
        rows = {section.title: [dict(zip(section.columns, row)) for row in section.rows] for section in self.sections}
        return {**asdict(self), "sections": rows}
