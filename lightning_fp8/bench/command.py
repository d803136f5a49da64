"""``python -m lightning_fp8 bench --suite cast``: check every variant, time them in turns, show and keep the rows."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from lightning_fp8.bench import baselines, cast, launch, rows, timing
from lightning_fp8.bench.case import Case, Variant
from lightning_fp8.device import MIN_CAPABILITY


class Suite(NamedTuple):
    """A suite of cases, and whether it is the device that is timed, beside a copy's bandwidth, or the host."""

    cases: Callable[[torch.device], list[Case]]
    on_device: bool


SUITES = {"cast": Suite(cast.cases, True), "launch": Suite(launch.cases, False)}
ROUNDS = 20
# read and written by the copy that is the ceiling
_CEILING_BYTES = {"cuda": 2 << 30, "cpu": 32 << 20}
# title, unit and format
_COLUMNS = {
    "p20_us": ("p20 us", 1.0, ".2f"),
    "p50_us": ("p50 us", 1.0, ".2f"),
    "p80_us": ("p80 us", 1.0, ".2f"),
    "host_us": ("host us", 1.0, ".2f"),
    "gb_per_s": ("GB/s", 1.0, ".1f"),
    "share_of_ceiling": ("of the ceiling", 1.0, ".1%"),
}


@dataclass(frozen=True)
class _Copy:
    """One large copy, whose bandwidth all others are compared with."""

    bytes: int

    @property
    def name(self) -> str:
        return f"copy of {self.bytes >> 21} MiB, the ceiling"

    def is_served(self, device: torch.device) -> bool:
        return True

    def variants(self, device: torch.device) -> list[Variant]:
        return [baselines.copy(self.bytes, device)]


def main(arguments: Sequence[str]) -> None:
    """Run one suite; exits with a message where it cannot, where a result is wrong and where a variant did not run."""
    options = _parser().parse_args(arguments)
    device = _device(options.device)
    suite = SUITES[options.suite]
    chosen = _chosen(suite.cases(device), options.case)
    if options.out is not None and not options.out.parent.is_dir():
        sys.exit(f"--out: there is no folder {options.out.parent} to write {options.out.name} in.")
    if suite.on_device and rows.package_version("torchao") is None:
        print("torchao: not installed")
    command = f"python -m lightning_fp8 bench {shlex.join(arguments)}"
    about = {**rows.gpu_environment(device), **rows.environment("torchao", command=command)}
    run = _Run(options.suite, suite.on_device, device, options.rounds, about)
    with torch.no_grad():
        for case in ([_Copy(_CEILING_BYTES[device.type])] if suite.on_device else []) + chosen:
            if made := run.measure(case):
                print(f"\n{case.name}\n{rows.table(made, _COLUMNS)}", flush=True)
                rows.append(made, options.out)
            timing.release()
    if run.failures:
        sys.exit("\nThese did not run:\n" + "\n".join(run.failures))


class _Run:
    """What all cases of one run share: above all the ceiling, which its first case measures."""

    def __init__(self, suite: str, on_device: bool, device: torch.device, rounds: int, about: dict[str, Any]) -> None:
        self.suite, self.device, self.rounds, self.about = suite, device, rounds, about
        self.batch = timing.host_batch
        self.host: timing.Batch | None = None
        if on_device:
            self.batch = timing.device_batch if device.type == "cuda" else timing.wall_batch
            self.host = timing.host_batch if device.type == "cuda" else None
        self.ceiling: float | None = None
        self.failures: list[str] = []

    def measure(self, case: Case) -> list[dict[str, Any]]:
        """Check and time all variants of a case: one row each."""
        if not case.is_served(self.device):
            sys.exit(
                f"{case.name}: no kernel of lightning_fp8 serves it on {self.device}, and torch's own operators, which"
                " would take over, are not what is to be timed. The warning above says why; LIGHTNING_FP8_BACKEND"
                " must not be `reference`."
            )
        try:
            variants = [variant for variant in case.variants(self.device) if self._is_right(case, variant)]
            times = timing.time_in_turns(variants, self.rounds, self.batch, self.host)
        except torch.OutOfMemoryError as error:
            self.failures.append(f"{case.name}: {error}")
            return []
        if isinstance(case, _Copy):
            self.ceiling = next((_bandwidth(case, found) for found in times.values()), None)
        return [self._row(case, name, found) for name, found in times.items()]

    def _is_right(self, case: Case, variant: Variant) -> bool:
        """Whether it runs; where it gives another result than it should, the program ends."""
        try:
            wrong = variant.check()
        # whatever a compiler or another package raises costs its own rows and the exit status, not the other rows
        except Exception as error:
            self.failures.append(f"{case.name}: {variant.name}: {type(error).__name__}: {str(error)[:500]}")
            return False
        if wrong is not None:
            sys.exit(f"{case.name}: {variant.name} gave {wrong}. Nothing of this case is timed.")
        return True

    def _row(self, case: Case, variant: str, times: timing.Times) -> dict[str, Any]:
        bandwidth = _bandwidth(case, times)
        share = None if bandwidth is None or self.ceiling is None else bandwidth / self.ceiling
        return {
            "suite": self.suite,
            "case": case.name,
            "variant": variant,
            **times._asdict(),
            "bytes": case.bytes,
            "gb_per_s": bandwidth,
            "share_of_ceiling": share,
            "ceiling_gb_per_s": self.ceiling,
            "checked": True,
            **self.about,
        }


def _bandwidth(case: Case, times: timing.Times) -> float | None:
    """In 1e9 bytes per second."""
    return None if case.bytes is None else case.bytes / times.p50_us / 1e3


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m lightning_fp8 bench", description=__doc__)
    parser.add_argument("--suite", choices=sorted(SUITES), required=True)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--case", metavar="SUBSTRING", help="only the cases whose name has it")
    parser.add_argument("--rounds", type=_positive, default=ROUNDS, help="batches of each variant")
    parser.add_argument("--out", type=Path, metavar="FILE", help="append the rows as lines of JSON")
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be an integer of at least 1, got {text!r}")
    return int(text)


def _device(asked: str) -> torch.device:
    if asked == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        came = "none was found"
    elif torch.cuda.get_device_capability() < MIN_CAPABILITY:
        came = "{} has {}.{}".format(torch.cuda.get_device_name(), *torch.cuda.get_device_capability())
    else:
        return torch.device("cuda", torch.cuda.current_device())
    sys.exit(
        "--device cuda needs a CUDA GPU of compute capability {}.{} or newer, and {}; ".format(*MIN_CAPABILITY, came)
        + "`--device cpu` runs small sizes to try the command."
    )


def _chosen(cases: list[Case], part: str | None) -> list[Case]:
    chosen = [case for case in cases if part is None or part in case.name]
    if not chosen:
        sys.exit(f"--case: no name has {part!r} in it. There are:\n" + "\n".join(f"  {case.name}" for case in cases))
    return chosen
