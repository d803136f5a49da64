"""``python -m benchmarks --suite cast``: check every variant, time them in turns, print and save the rows."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from benchmarks import rows
from benchmarks.case import Case
from benchmarks.plot import draw
from benchmarks.progress import progress
from benchmarks.run import Run
from benchmarks.suites import SUITES
from lightning_fp8.runtime.cpu import emulates_bf16
from lightning_fp8.runtime.device import MIN_CAPABILITY
from lightning_fp8.runtime.environment import environment, gpu_environment, package_version
from lightning_fp8.tools import timing
from lightning_fp8.tools.arguments import positive
from lightning_fp8.tools.tables import table

ROUNDS = 20
_MIB = 2**20
# title, unit and format
_COLUMNS = {
    "p20_us": ("p20 us", 1.0, ".2f"),
    "p50_us": ("p50 us", 1.0, ".2f"),
    "p80_us": ("p80 us", 1.0, ".2f"),
    "host_us": ("host us", 1.0, ".2f"),
    "events_us": ("events us", 1.0, ".2f"),
    "sustained_us": ("sustained us", 1.0, ".2f"),
    "sm_clock_mhz": ("SM MHz", 1.0, ".0f"),
    "power_w": ("W", 1.0, ".0f"),
    "gb_per_s": ("GB/s", 1.0, ".1f"),
    "tflops": ("TFLOP/s", 1.0, ".1f"),
    "share_of_ceiling": ("of the ceiling", 1.0, ".1%"),
    "tokens_per_s": ("tokens/s", 1.0, ".0f"),
    "peak_memory_bytes": ("peak MiB", _MIB, ".0f"),
    "saved_bytes": ("saved MiB", _MIB, ".2f"),
}


def main(arguments: Sequence[str]) -> None:
    """Run one suite or all; exits with a message if that is impossible, or a variant did not run or was wrong."""
    options = _parser().parse_args(arguments)
    device = _device(options.device)
    suites = SUITES if options.suite == "all" else {options.suite: SUITES[options.suite]}
    chosen = _chosen({name: suite.cases(device) for name, suite in suites.items()}, options.case)
    _check_files(options.out, options.plot)
    if package_version("torchao") is None:
        print("torchao is not installed; its variants are left out")
    if device.type == "cpu" and emulates_bf16():
        print("This CPU emulates bf16 products: nothing follows from times of the variants in bf16")
    command = f"python -m benchmarks {shlex.join(arguments)}"
    about = {**gpu_environment(device), **environment("torchao", command=command)}
    runs = {name: Run(name, suites[name], device, options.rounds, about) for name in chosen}
    made: list[dict[str, Any]] = []
    with progress(sum(len(runs[name].ceiling()) + len(cases) for name, cases in chosen.items())) as begin:
        for name, cases in chosen.items():
            made += _measure(runs[name], cases, options.out, begin)
    if options.plot is not None:
        baselines = {name: suite.baseline for name, suite in suites.items()}
        drawn = draw(made, baselines, options.plot)
        print(f"\n{options.plot}" if drawn else "\n--plot: no case has the variant that its suite compares with.")
    failures = [failure for run in runs.values() for failure in run.failures]
    if failures:
        sys.exit("\nThese did not run, or gave a wrong result:\n" + "\n".join(failures))


def _measure(run: Run, cases: list[Case], out: Path | None, begin: Callable[[str], None]) -> list[dict[str, Any]]:
    """Measure the cases of one suite; the rows of each are printed and saved as soon as it is done."""
    found: list[dict[str, Any]] = []
    for case in [*run.ceiling(), *cases]:
        begin(f"{run.name}: {case.name}")
        if made := run.measure(case):
            columns = {key: column for key, column in _COLUMNS.items() if any(row[key] is not None for row in made)}
            print(f"\n{case.name}\n{table(made, columns)}", flush=True)
            rows.append(made, out)
            # the row of a wrong variant is reported and saved, but nothing is compared with it
            for row in made:
                if row["wrong"] is not None:
                    print(f"{row['variant']} gave {row['wrong']}")
            found += [row for row in made if row["checked"]]
        timing.release()
    if run.suite.summary is not None and (line := run.suite.summary(found)):
        print(f"\n{line}", flush=True)
    return found


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--suite", choices=(*sorted(SUITES), "all"), required=True, help="all: every suite")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--case", metavar="SUBSTRING", help="only cases whose name contains it")
    parser.add_argument("--rounds", type=positive, default=ROUNDS, help="batches of each variant")
    parser.add_argument("--out", type=Path, metavar="FILE", help="append the rows, of all suites, as lines of JSON")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the rows of this run; needs matplotlib")
    return parser


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


def _chosen(suites: dict[str, list[Case]], part: str | None) -> dict[str, list[Case]]:
    """The cases with ``part`` in their name, by suite; suites without any are left out."""
    found = {name: [case for case in cases if part is None or part in case.name] for name, cases in suites.items()}
    chosen = {name: cases for name, cases in found.items() if cases}
    if not chosen:
        every = [case for cases in suites.values() for case in cases]
        sys.exit(f"--case: no name has {part!r} in it. There are:\n" + "\n".join(f"  {case.name}" for case in every))
    return chosen


def _check_files(out: Path | None, plot: Path | None) -> None:
    """Exit now if the results could not be written at the end."""
    for option, path in (("--out", out), ("--plot", plot)):
        if path is not None and not path.parent.is_dir():
            sys.exit(f"{option}: there is no folder {path.parent} to write {path.name} in.")
    if plot is not None and plot.suffix != ".png":
        sys.exit(f"--plot: the picture is a PNG, so its name must end in .png, got {plot.name}.")
    if plot is not None and find_spec("matplotlib") is None:
        sys.exit("--plot needs matplotlib: pip install matplotlib")
