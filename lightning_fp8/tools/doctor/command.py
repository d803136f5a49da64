"""Examine this machine: what it has, what runs in FP8, what to install or change."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Sequence
from functools import partial
from typing import NoReturn

from lightning_fp8.runtime.program import program
from lightning_fp8.tools.arguments import positive
from lightning_fp8.tools.doctor.examination import LIMIT_S, examine
from lightning_fp8.tools.doctor.kernel_checks import ARCHITECTURES
from lightning_fp8.tools.doctor.page import page

_STATUSES = """exit status:
  0  fp8-delayed runs with its own kernels on every visible GPU; or there is no
     GPU, and all that can be checked without one is fine: it runs as a
     reference on the CPU
  1  fp8-delayed runs, but slower, on torch's own operators or not on every GPU:
     CuPy or NVRTC is missing or newer than the driver, a kernel fails to
     compile or fails its self-test, the cache cannot be written,
     LIGHTNING_FP8_BACKEND=reference
  2  fp8-delayed cannot run: no GPU of compute capability 8.9 or newer among
     those there are, torch too old, torch._scaled_mm failing, a Lightning
     without the place for the precision strings; or the arguments are wrong

Without a GPU the kernels are compiled all the same, for sm_90a. Each is named
as it is tried, on stderr with --json, and one that hangs or crashes ends after
its time limit."""


def main(arguments: Sequence[str]) -> NoReturn:
    """Examine this machine, print the page, and exit with the status."""
    options = _parser().parse_args(arguments)
    architectures = options.compile
    if architectures is not None:
        architectures = list(dict.fromkeys(architectures)) or ARCHITECTURES
    # printed at once, so that the output so far remains if the machine hangs or is lost
    progress = partial(print, end="", file=sys.stderr if options.json else sys.stdout, flush=True)
    diagnosis = examine(
        compile=not options.quick, architectures=architectures, limit_s=options.time_limit, progress=progress
    )
    if options.json:
        print(json.dumps(diagnosis.as_dict(), indent=2))
    else:
        print(page(diagnosis, shutil.get_terminal_size().columns))
    sys.exit(diagnosis.status)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"{program()} doctor",
        description=__doc__,
        epilog=_STATUSES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="the same as JSON, with every kernel")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--quick", action="store_true", help="compile and test no kernels")
    also = (
        f"compile every kernel for these as well, by default for all of {', '.join(ARCHITECTURES)}, into"
        " LIGHTNING_FP8_CACHE_DIR: another machine with the same NVRTC can use a copy of that folder"
    )
    which.add_argument("--compile", nargs="*", choices=ARCHITECTURES, metavar="ARCH", help=also)
    limit = "seconds for compiling and testing one kernel on a GPU (%(default)g)"
    parser.add_argument("--time-limit", type=positive, default=LIMIT_S, metavar="S", help=limit)
    return parser
