"""The run of a suite: all variants of a case are checked, then timed in turns; a failure affects no other case."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from benchmarks import baselines, steps, sustained
from benchmarks.case import Case
from benchmarks.clock import clock
from benchmarks.steps import Measured
from benchmarks.suites import Suite
from benchmarks.sustained import Sustained
from lightning_fp8.runtime.peaks import dense_fp8_flops
from lightning_fp8.tools import timing
from lightning_fp8.tools.timing import Variant

# bytes read and written by the copy that is the ceiling
_CEILING_BYTES = {"cuda": 2 << 30, "cpu": 32 << 20}
_WITH_GRADIENTS = ("iterations", "steps", "steps alone")
# prefixes of the names of our own variants; the others are baselines
_OURS = ("lightning_fp8", "auto", "Kernel")


@dataclass(frozen=True)
class LargeCopy:
    """One large copy, whose bandwidth is the ceiling of all cases."""

    bytes: int

    flops = None

    @property
    def name(self) -> str:
        """Its size."""
        return f"copy of {self.bytes >> 21} MiB, the ceiling"

    def is_served(self, device: torch.device) -> bool:
        """True on every device."""
        return True

    def variants(self, device: torch.device) -> list[Variant]:
        """The only variant."""
        return [baselines.copy(self.bytes, device)]


class Run:
    """What all cases of one suite share: above all the ceilings, a copy's bandwidth and the GPU's FP8 peak.

    Attributes:
        failures: variants that did not run or gave a wrong result, one line each.
    """

    def __init__(self, name: str, suite: Suite, device: torch.device, rounds: int, about: dict[str, Any]) -> None:
        self.name, self.suite, self.device, self.rounds, self.about = name, suite, device, rounds, about
        self.clock = clock(suite.timed, device)
        # from data sheets; None for a CPU, and for a GPU that is not in the table
        peak = dense_fp8_flops(about["gpu"]) if about.get("gpu") else None
        self.ceiling_tflops = None if peak is None else peak / 1e12
        self.ceiling_gb_per_s: float | None = None
        self.failures: list[str] = []

    def ceiling(self) -> list[Case]:
        """The case measured before all others, if any."""
        return [LargeCopy(_CEILING_BYTES[self.device.type])] if self.suite.copy_is_ceiling else []

    def measure(self, case: Case) -> list[dict[str, Any]]:
        """Check and time all variants of a case: one row each.

        If one of our variants is wrong, nothing of the case is timed; a wrong baseline is marked in its row.
        """
        if not case.is_served(self.device):
            self.failures.append(
                f"{case.name}: lightning_fp8 has no kernel for it on {self.device}, and torch's own operators, which"
                " would replace it, are not timed here. The warning above says why; LIGHTNING_FP8_BACKEND"
                " must not be `reference`."
            )
            return []
        try:
            with torch.set_grad_enabled(self.suite.timed in _WITH_GRADIENTS):
                made = case.variants(self.device)
                wrong = self._wrong(case, made)
                variants = [variant for variant in made if variant.name in wrong]
                found = self._timed(case, variants)
        except torch.OutOfMemoryError as error:
            self.failures.append(f"{case.name}: {error}")
            return []
        if isinstance(case, LargeCopy):
            right = (times.times for name, times in found.items() if wrong[name] is None)
            self.ceiling_gb_per_s = next((_gb_per_s(case, times) for times in right), None)
        return [self._row(case, variant, found[variant.name], wrong[variant.name]) for variant in variants]

    def _timed(self, case: Case, variants: list[Variant]) -> dict[str, Measured]:
        if self.suite.timed in ("steps", "steps alone"):
            return steps.time_in_turns(variants, self.rounds, self.device, alone=self.suite.timed == "steps alone")
        times = timing.time_in_turns(variants, self.rounds, *self.clock)
        lasting: dict[str, Sustained] = {}
        if self.device.type == "cuda" and sustained.is_large(case):
            lasting = {one.name: sustained.measure(one, times[one.name].p50_us, self.device) for one in variants}
        return {name: Measured(found, sustained=lasting.get(name, Sustained())) for name, found in times.items()}

    def _wrong(self, case: Case, variants: list[Variant]) -> dict[str, str | None]:
        """By name of each variant that is to be timed: what is wrong with its result, or None."""
        found: dict[str, str | None] = {}
        for variant in variants:
            try:
                wrong = variant.check()
            # an error in a compiler or another package costs this variant's row and the exit status, not other rows
            except Exception as error:
                self.failures.append(f"{case.name}: {variant.name}: {type(error).__name__}: {str(error)[:500]}")
                continue
            if wrong is not None:
                is_ours = variant.name.startswith(_OURS)
                end = ". Nothing of this case is timed." if is_ours else "."
                self.failures.append(f"{case.name}: {variant.name} gave {wrong}{end}")
                if is_ours:
                    return {}
            found[variant.name] = wrong
        return found

    def _row(self, case: Case, variant: Variant, found: Measured, wrong: str | None) -> dict[str, Any]:
        times = found.times
        gb_per_s = _gb_per_s(case, times)
        tflops = None if case.flops is None else case.flops / times.p50_us / 1e6
        shares = [_share(gb_per_s, self.ceiling_gb_per_s), _share(tflops, self.ceiling_tflops)]
        return {
            "suite": self.name,
            "case": case.name,
            "variant": variant.name,
            **times._asdict(),
            **found.sustained._asdict(),
            "bytes": case.bytes,
            "gb_per_s": gb_per_s,
            "flops": case.flops,
            "tflops": tflops,
            "share_of_ceiling": next((share for share in shares if share is not None), None),
            "ceiling_gb_per_s": self.ceiling_gb_per_s,
            "ceiling_tflops": None if case.flops is None else self.ceiling_tflops,
            "tokens_per_s": None if variant.tokens is None else variant.tokens / times.p50_us * 1e6,
            "peak_memory_bytes": found.peak_memory_bytes,
            "saved_bytes": found.saved_bytes,
            "checked": wrong is None,
            "wrong": wrong,
            **self.about,
        }


def _gb_per_s(case: Case, times: timing.Times) -> float | None:
    return None if case.bytes is None else case.bytes / times.p50_us / 1e3


def _share(reached: float | None, ceiling: float | None) -> float | None:
    return None if reached is None or ceiling is None else reached / ceiling
