"""Show the logs of one or more runs as one HTML page that needs no network, and as PNGs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from lightning_fp8.runtime.program import program
from lightning_fp8.tools.report.page import write_page
from lightning_fp8.tools.report.pictures import write_pictures
from lightning_fp8.tools.report.runs import ReadError, read_runs
from lightning_fp8.tools.report.verdict import headline


def main(arguments: Sequence[str]) -> None:
    """Make a report; exits with a message if it cannot."""
    options = _parser().parse_args(arguments)
    # in the given folder, even if a version_N inside it is read
    page = options.out or options.runs[0] / "report.html"
    pictures = options.png or page.with_name(f"{page.stem}_png")
    try:
        runs = read_runs(options.runs)
        for run in runs:
            print(f"{run.name}: {run.note}", headline(run), sep="\n")
        write_page(runs, page)
        written = write_pictures(runs, pictures)
    except ReadError as error:
        sys.exit(str(error))
    except ModuleNotFoundError as error:
        package = str(error.name).partition(".")[0]
        sys.exit(f"A report needs {package}: pip install {package}")
    except OSError as error:
        sys.exit(f"The report cannot be written: {error}.")
    print(page, *written, sep="\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"{program()} report", description=__doc__)
    parser.add_argument(
        "runs",
        nargs="+",
        type=Path,
        metavar="LOGDIR",
        help="a run's folder, or an experiment's with version_N in it: the newest is read",
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="the page; else report.html in the first LOGDIR")
    parser.add_argument("--png", type=Path, metavar="FOLDER", help="for the PNGs; else report_png next to the page")
    return parser
