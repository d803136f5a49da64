"""Run a configuration under several precisions, with the same seed and data, and recommend one.

Each precision trains in a separate process, for --steps optimizer steps from the start; a learning-rate schedule over
the length of the run spans these steps. Loggers, checkpoints, progress bars, early stopping and this package's own
callbacks are left out, except that an Fp8Monitor gives its verdict. Further arguments, such as --trainer.devices=1, go
to the command line of `fit`, and come before what a configuration says. For a configuration that has only the arguments
of a class, name the class: --model my_module.MyClass --config FILE. From Python:
`from lightning_fp8.tools.compare import compare`.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import Any, NamedTuple

import torch

from lightning_fp8.runtime.cpu import emulates_bf16
from lightning_fp8.runtime.environment import environment
from lightning_fp8.runtime.program import program
from lightning_fp8.runtime.run_files import RUN_FILE
from lightning_fp8.tools import worker
from lightning_fp8.tools.arguments import fit_arguments, how_to_adapt, positive, read
from lightning_fp8.tools.compare.advice import advise, in_short
from lightning_fp8.tools.compare.variants import (
    BASELINE,
    BF16,
    EMULATED_BASELINE,
    MEASURED_FILE,
    VARIANTS,
    by_default,
    checked,
)
from lightning_fp8.tools.report.records import HPARAMS_FILE
from lightning_fp8.tools.report.runs import CSV_FILE
from lightning_fp8.tools.tables import table

STEPS_ON_GPU = 200
STEPS_ON_CPU = 30
WARMUP = 10
LOG_FILE = "log.txt"
# what argparse and jsonargparse exit with
_USAGE = 2
_MIB = 2**20
# title, unit and format
_COLUMNS: dict[str, tuple[str, float, str]] = {
    "tokens_per_s": ("tokens/s", 1.0, ",.0f"),
    "samples_per_s": ("samples/s", 1.0, ",.1f"),
    "p20_ms": ("p20 ms", 1.0, ",.2f"),
    "p50_ms": ("p50 ms", 1.0, ",.2f"),
    "p80_ms": ("p80 ms", 1.0, ",.2f"),
    "peak_bytes": ("peak MiB", _MIB, ",.0f"),
    "state_bytes": ("state MiB", _MIB, ",.1f"),
    "loss": ("loss", 1.0, ".4f"),
    "val_loss": ("val loss", 1.0, ".4f"),
}


class UsageError(ValueError):
    """A configuration or argument that is refused before anything runs."""


class Comparison(NamedTuple):
    """What a comparison found; ``print`` shows it.

    Attributes:
        rows: for each precision what it measured, as in the file ``compare.jsonl``, or an ``error``.
        baseline: the precision that the others are compared with.
        folder: has this file, and a folder for each precision with its logs.
    """

    rows: list[dict[str, Any]]
    baseline: str
    folder: Path

    def __str__(self) -> str:
        failures = [f"{row['variant']} failed: {row['error']}" for row in self.rows if "error" in row]
        ran = [row for row in self.rows if "error" not in row]
        columns = {key: about for key, about in _COLUMNS.items() if any(row.get(key) is not None for row in ran)}
        cells = [{"variant": row["variant"], **{key: row.get(key) for key in columns}} for row in self.rows]
        lines = ["", table(cells, columns), "", *failures, *advise(self.rows, self.baseline)]
        for row in ran[:1]:
            where = row["gpu"] or f"{row['device']}, {row['cpu']}, {row['threads']} threads"
            lines += [
                f"\n{where}; {row['steps']} steps, the first {row['warmup']} not timed; seed {row['seed']}.",
                "Loss: mean of the last tenth of the steps. State: parameters, gradients and optimizer state.",
                *([f"Callbacks left out: {', '.join(row['left_out'])}."] if row["left_out"] else []),
            ]
        lines.append(f"Written: {self.folder / 'compare.jsonl'}")
        if ran:
            folders = shlex.join(str(self.folder / row["variant"]) for row in ran)
            lines.append(f"Everything the runs logged, as curves: python -m lightning_fp8 report {folders}")
        return "\n".join([*lines, in_short(self.rows, self.baseline)]).rstrip()


def compare(
    config: str | Path | Sequence[str | Path],
    precisions: Sequence[str] = (),
    *,
    steps: int | None = None,
    warmup: int = WARMUP,
    out: str | Path | None = None,
    arguments: Sequence[str] = (),
) -> Comparison:
    """Run a configuration under several precisions, each in a separate process; prints steps while it runs.

    Args:
        config: a file, or several, of which later ones override earlier ones.
        precisions: see ``--precisions`` of the command line, as are all defaults.
        steps: optimizer steps of each run.
        warmup: how many of them are not timed.
        out: a folder for results and logs.
        arguments: further ones of ``fit``, such as ``"--trainer.devices=1"``.

    Raises:
        ValueError: for an argument or a configuration that is refused.
    """
    paths = [Path(path) for path in ([config] if isinstance(config, str | Path) else config)]
    for path in paths:
        if not path.is_file():
            raise UsageError(f"--config: there is no file {path}")
    configs = [read(path) for path in paths]
    fit, accelerator = fit_arguments(paths, configs, arguments)
    on_gpu = _on_gpu(configs, accelerator)
    steps = steps or (STEPS_ON_GPU if on_gpu else STEPS_ON_CPU)
    if not 1 <= warmup < steps:
        raise UsageError(f"--warmup must be from 1 to less than the number of steps, {steps}, got {warmup}")
    emulated = not on_gpu and emulates_bf16()
    try:
        variants = [*dict.fromkeys(map(checked, precisions or by_default(emulated)))]
    except argparse.ArgumentTypeError as error:
        raise UsageError(f"--precisions: {error}") from None
    baseline = EMULATED_BASELINE if emulated and EMULATED_BASELINE in variants else BASELINE
    if emulated:
        print(
            f"This CPU emulates bf16 products. The baseline is {baseline}. Steps of {', '.join(BF16)} take many times"
            " as long as in fp32, and run only if `--precisions` names them.",
            flush=True,
        )
    given = [
        "--config",
        *map(str, paths),
        "--precisions",
        *variants,
        f"--steps={steps}",
        f"--warmup={warmup}",
        *arguments,
    ]
    about = {
        "suite": "compare",
        "baseline": baseline,
        "case": ", ".join(map(str, paths)),
        **environment("lightning-fp8", "lightning", command=f"python -m lightning_fp8 compare {shlex.join(given)}"),
    }
    folder, rows = Path(out or Path("runs", "compare", paths[-1].stem)), []
    for variant in variants:
        print(f"{variant}  {steps} steps ...", flush=True)
        start = time.perf_counter()
        try:
            result = run(variant, folder / variant, steps, warmup, fit)
        except UsageError as error:
            raise UsageError(f"the configuration is refused: {error}\n{how_to_adapt(configs)}".rstrip()) from None
        rows.append({"variant": variant, **result, "wall_s": time.perf_counter() - start, **about})
        print(f"{variant}  {'failed' if 'error' in result else 'done'} in {rows[-1]['wall_s']:.0f} s", flush=True)
    summaries = ({key: value for key, value in row.items() if key != "losses"} for row in rows)
    (folder / "compare.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in summaries), encoding="utf-8")
    return Comparison(rows, baseline, folder)


def main(arguments: Sequence[str]) -> None:
    """Compare; exits with 1 if a precision failed, or with 2 and a message if nothing could run."""
    parser = _parser()
    options, others = parser.parse_known_args(arguments)
    try:
        found = compare(**vars(options), arguments=others)
    except UsageError as error:
        parser.exit(_USAGE, f"{parser.prog}: error: {error}\n")
    except KeyboardInterrupt:
        parser.exit(130, "\nStopped. What has run is in its folder.\n")
    print(found)
    if any("error" in row for row in found.rows):
        sys.exit(1)


def run(variant: str, folder: Path, steps: int, warmup: int, fit: Sequence[str]) -> dict[str, Any]:
    """What a run measured, in a separate process, so that it affects no other; or ``{"error": why}`` with one line.

    Raises:
        UsageError: if the command line is refused, as it then is for every variant.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name in (MEASURED_FILE, LOG_FILE, CSV_FILE, HPARAMS_FILE, RUN_FILE):
        (folder / name).unlink(missing_ok=True)
    log, measured = folder / LOG_FILE, folder / MEASURED_FILE
    child = [sys.executable, "-m", "lightning_fp8.tools.compare.run"]
    with log.open("w") as output, _showing_steps(log):
        status = worker.run([*child, variant, str(folder), str(steps), str(warmup), *fit], output)
    result: dict[str, Any] = json.loads(measured.read_text(encoding="utf-8")) if measured.exists() else {}
    if status == 0 and result:
        return result
    printed = log.read_text(errors="replace").strip()
    if status == _USAGE and not result:
        # only the message after the long usage
        raise UsageError(printed.rpartition("\nerror: ")[2])
    return {"error": f"{result.get('error') or worker.why_it_ended(status, printed)} (see {log})"}


@contextmanager
def _showing_steps(log: Path) -> Iterator[None]:
    """Print each line about a step that another process adds to its log."""
    ended = Event()

    def follow() -> None:
        shown, is_last = 0, False
        while not is_last:
            is_last = ended.wait(0.5)
            lines = re.findall(r"^step .*(?=\n)", log.read_text(errors="replace"), re.MULTILINE)
            for line in lines[shown:]:
                print(f"  {line}", flush=True)
            shown = len(lines)

    thread = Thread(target=follow, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _on_gpu(configs: Sequence[Mapping[str, Any]], accelerator: str | None) -> bool:
    """Whether a GPU will be used, as far as the configuration and arguments tell before `fit` parses them."""
    trainers = [config["trainer"] for config in configs if isinstance(config.get("trainer"), dict)]
    named = [accelerator, *(trainer.get("accelerator") for trainer in reversed(trainers)), "auto"]
    return next(filter(None, named)) in ("auto", "gpu", "cuda") and torch.cuda.is_available()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"{program()} compare", description=__doc__, allow_abbrev=False)
    files = "as for `fit`; later files override earlier ones"
    parser.add_argument("-c", "--config", nargs="+", action="extend", required=True, metavar="FILE", help=files)
    precisions = (
        f"of {', '.join(VARIANTS)}; those of FP8 also with fields of the recipe, such as fp8-delayed,wgrad=bf16; by"
        f" default {', '.join(by_default(emulated=False))}; on a CPU that emulates bf16 products"
        f" {', '.join(by_default(emulated=True))}"
    )
    parser.add_argument("--precisions", nargs="+", default=(), type=checked, metavar="PRECISION", help=precisions)
    steps = f"optimizer steps, by default {STEPS_ON_GPU} on a GPU and {STEPS_ON_CPU} on the CPU"
    parser.add_argument("--steps", type=positive, metavar="N", help=steps)
    warmup = "how many of the first steps are not timed (%(default)s)"
    parser.add_argument("--warmup", type=positive, default=WARMUP, metavar="N", help=warmup)
    out = "for results and logs, by default runs/compare/<config name>"
    parser.add_argument("--out", metavar="FOLDER", help=out)
    return parser
