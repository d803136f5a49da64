"""The run of a suite: every variant of a case is checked, then timed in turns; each gives a row.

A row has the percentiles of all batches, the ratio to the baseline of the same case, what the case adds (bytes, FLOPs,
tokens, memory), the GPU, driver, versions, commit and command.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.sustained import under_load
from benchmarks.timing import Measured, Variant, release, time_in_turns
from lightning_fp8.runtime.cpu import emulates_bf16
from lightning_fp8.runtime.device import MIN_CAPABILITY
from lightning_fp8.runtime.environment import environment, gpu_environment, package_version
from lightning_fp8.runtime.peaks import dense_fp8_flops
from lightning_fp8.tools.arguments import positive
from lightning_fp8.tools.tables import percentiles, table

# of calls that occupy a whole GPU, and are also timed under load
_LARGE_FLOPS, _LARGE_BYTES = 1e11, 2**28
# prefixes of the names of our own variants; the others are baselines
_OURS = ("lightning_fp8", "kernel")
_MIB = 2**20
# title, unit and format of the columns that are printed where a row has them
_COLUMNS = {
    "p20_us": ("p20 us", 1.0, ".2f"),
    "p50_us": ("p50 us", 1.0, ".2f"),
    "p80_us": ("p80 us", 1.0, ".2f"),
    "times_baseline": ("x baseline", 1.0, ".2f"),
    "host_us": ("host us", 1.0, ".2f"),
    "sustained_us": ("sustained us", 1.0, ".2f"),
    "sm_clock_mhz": ("SM MHz", 1.0, ".0f"),
    "power_w": ("W", 1.0, ".0f"),
    "gb_per_s": ("GB/s", 1.0, ".1f"),
    "tflops": ("TFLOP/s", 1.0, ".1f"),
    "share_of_peak": ("of the peak", 1.0, ".1%"),
    "tokens_per_s": ("tokens/s", 1.0, ".0f"),
    "peak_memory_bytes": ("peak MiB", _MIB, ".1f"),
    "parameter_bytes": ("parameters MiB", _MIB, ".2f"),
    "gradient_bytes": ("gradients MiB", _MIB, ".2f"),
    "optimizer_bytes": ("optimizer MiB", _MIB, ".2f"),
    "weight_copy_bytes": ("weight copies MiB", _MIB, ".2f"),
    "saved_bytes": ("saved MiB", _MIB, ".2f"),
    "loss": ("loss", 1.0, ".4f"),
    "unchanged_fraction": ("unchanged", 1.0, ".4%"),
}
Row = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """One piece of work, at one size.

    Attributes:
        name: in rows; ``--case`` matches it.
        variants: creates all variants, with inputs on the device.
        is_served: whether ``lightning_fp8`` has its own kernels for it on a GPU.
        bytes: that an ideal implementation reads and writes, scalars excluded; None where they do not matter.
        flops: of its matrix products; None where they do not matter.
    """

    name: str
    variants: Callable[[torch.device], list[Variant]]
    is_served: Callable[[torch.device], bool] = lambda device: True
    bytes: int | None = None
    flops: int | None = None

    @property
    def is_large(self) -> bool:
        """Whether a call occupies a whole GPU: 1e11 FLOPs, or 2^28 bytes read and written."""
        return (self.flops or 0) >= _LARGE_FLOPS or (self.bytes or 0) >= _LARGE_BYTES


class Suite(NamedTuple):
    """A suite of cases, and how they are timed.

    Attributes:
        cases: gives all cases for a device; small ones on the CPU.
        timed: ``"device"``, ``"kernels"`` or ``"steps"``, see :func:`benchmarks.timing.batch`. Steps run
            with gradients, the others do not.
        baseline: the variant that others are compared with; of several names, the first that ran and was right.
        alone: whether only one variant is in memory at a time.
    """

    cases: Callable[[torch.device], list[Case]]
    timed: str
    baseline: tuple[str, ...]
    alone: bool = False


class Run:
    """The run of one suite.

    Attributes:
        failures: variants that did not run or gave a wrong result, one line each.
    """

    def __init__(self, name: str, suite: Suite, device: torch.device, rounds: int, about: Row) -> None:
        self.name, self.suite, self.device, self.rounds, self.about = name, suite, device, rounds, about
        # from data sheets; None for a CPU, and for a GPU that is not in the table
        self.peak = dense_fp8_flops(about["gpu"]) if about.get("gpu") else None
        self.failures: list[str] = []

    def measure(self, case: Case) -> list[Row]:
        """Check and time all variants of a case: one row each.

        If one of our variants is wrong, nothing of the case is timed; a wrong baseline is marked in its row.
        """
        if self.device.type == "cuda" and not case.is_served(self.device):
            self.failures.append(
                f"{case.name}: lightning_fp8 has no kernel for it on {self.device}, and torch's own operators, which"
                " would replace it, are not timed here. The warning above says why; LIGHTNING_FP8_BACKEND"
                " must not be `reference`."
            )
            return []
        try:
            with torch.set_grad_enabled(self.suite.timed == "steps"):
                variants = case.variants(self.device)
                wrong = self._wrong(case, variants)
                variants = [self._with_load(case, variant) for variant in variants if variant.name in wrong]
                measurements = time_in_turns(variants, self.rounds, self.suite.timed, self.device, self.suite.alone)
        except torch.OutOfMemoryError as error:
            self.failures.append(f"{case.name}: {error}")
            return []
        rows = [self._row(case, variant, measurements[variant.name], wrong[variant.name]) for variant in variants]
        return _with_baseline(rows, self.suite.baseline)

    def _wrong(self, case: Case, variants: list[Variant]) -> dict[str, str | None]:
        """By name of each variant that is to be timed: what is wrong with its result, or None."""
        errors: dict[str, str | None] = {}
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
            errors[variant.name] = wrong
        return errors

    def _with_load(self, case: Case, variant: Variant) -> Variant:
        if self.device.type != "cuda" or not case.is_large:
            return variant
        return replace(variant, figures=lambda: {**variant.figures(), **under_load(variant, self.device)})

    def _row(self, case: Case, variant: Variant, measured: Measured, wrong: str | None) -> Row:
        p20, p50, p80 = percentiles([time.us for time in measured.times])
        on_gpu, in_steps = self.device.type == "cuda", self.suite.timed == "steps"
        return {
            "suite": self.name,
            "case": case.name,
            "variant": variant.name,
            "p20_us": p20,
            "p50_us": p50,
            "p80_us": p80,
            "host_us": statistics.median(time.host_us for time in measured.times) if on_gpu else None,
            "bytes": case.bytes,
            "gb_per_s": None if case.bytes is None else case.bytes / p50 / 1e3,
            "flops": case.flops,
            "tflops": None if case.flops is None else case.flops / p50 / 1e6,
            "share_of_peak": None if None in (case.flops, self.peak) else 1e6 * case.flops / p50 / self.peak,  # type: ignore[operator]
            "tokens_per_s": None if variant.tokens is None else variant.tokens / p50 * 1e6,
            "peak_memory_bytes": max(measured.peaks) if on_gpu and in_steps else None,
            **measured.figures,
            "checked": wrong is None,
            "wrong": wrong,
            **self.about,
        }


def _with_baseline(rows: list[Row], names: Sequence[str]) -> list[Row]:
    """The rows with the baseline's name and the ratio to its p50."""
    right = {row["variant"]: row["p50_us"] for row in rows if row["checked"]}
    base = next((variant for name in names for variant in right if variant.startswith(name)), None)
    return [{**row, "baseline": base, "times_baseline": row["p50_us"] / right[base] if base else None} for row in rows]


def main(arguments: Sequence[str], suites: Mapping[str, Suite]) -> None:
    """Run one suite or all; exits with a message if that is impossible, or a variant did not run or was wrong."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--suite", choices=(*sorted(suites), "all"), required=True, help="all: every suite")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--case", metavar="SUBSTRING", help="only cases whose name contains it")
    parser.add_argument("--rounds", type=positive, default=20, help="batches of each variant")
    parser.add_argument("--out", type=Path, metavar="FILE", help="append the rows, of all suites, as lines of JSON")
    options = parser.parse_args(arguments)
    device = _device(options.device)
    selection = suites if options.suite == "all" else {options.suite: suites[options.suite]}
    chosen = _chosen({name: suite.cases(device) for name, suite in selection.items()}, options.case)
    if options.out is not None and not options.out.parent.is_dir():
        sys.exit(f"--out: there is no folder {options.out.parent} to write {options.out.name} in.")
    if package_version("torchao") is None:
        print("torchao is not installed; its variants are left out")
    if device.type == "cpu" and emulates_bf16():
        print("This CPU emulates bf16 products: 32-true takes the place of bf16-mixed, other times in bf16 mean little")
    command = f"python -m benchmarks {shlex.join(arguments)}"
    about = {**gpu_environment(device), **environment("torchao", command=command)}
    failures = []
    for name, cases in chosen.items():
        run = Run(name, selection[name], device, options.rounds, about)
        for case in cases:
            _report(case, run.measure(case), options.out)
            release()
        failures += run.failures
    if failures:
        sys.exit("\nThese did not run, or gave a wrong result:\n" + "\n".join(failures))


def _report(case: Case, rows: list[Row], out: Path | None) -> None:
    """Print and save the rows of a case, as soon as it is done."""
    if rows:
        keys = [key for key in _COLUMNS if any(row.get(key) is not None for row in rows)]
        numbers = [{"variant": row["variant"], **{key: row.get(key) for key in keys}} for row in rows]
        print(f"\n{case.name}\n{table(numbers, {key: _COLUMNS[key] for key in keys})}", flush=True)
    for row in rows:
        if row["wrong"] is not None:
            print(f"{row['variant']} gave {row['wrong']}")
    append(rows, out)


def append(rows: list[Row], path: Path | None) -> None:
    """Append the rows to a file of JSON lines, where there is one."""
    if path is not None:
        with path.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)


def _device(name: str) -> torch.device:
    if name == "cpu":
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


def _chosen(suites: dict[str, list[Case]], part: str | None) -> dict[str, list[Case]]:
    """The cases with ``part`` in their name, by suite; suites without any are left out."""
    matches = {name: [case for case in cases if part is None or part in case.name] for name, cases in suites.items()}
    chosen = {name: cases for name, cases in matches.items() if cases}
    if not chosen:
        every = [case for cases in suites.values() for case in cases]
        sys.exit(f"--case: no name has {part!r} in it. There are:\n" + "\n".join(f"  {case.name}" for case in every))
    return chosen
