"""Run a configuration under several precisions, with the same seed and data, and recommend one.

Each precision trains in a separate process, for --steps optimizer steps from the start; a learning-rate schedule over
the length of the run spans these steps. Loggers, checkpoints, progress bars, early stopping and this package's own
callbacks are left out. Further arguments, such as --trainer.devices=1, go to the command line of `fit`. For a
configuration that has only the arguments of a class, name the class before it: --model my_module.MyClass --config FILE.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml

from lightning_fp8.runtime.cpu import emulates_bf16
from lightning_fp8.runtime.environment import environment
from lightning_fp8.runtime.program import program
from lightning_fp8.runtime.run_files import RUN_FILE
from lightning_fp8.tools import worker
from lightning_fp8.tools.arguments import positive
from lightning_fp8.tools.compare import MEASURED_FILE
from lightning_fp8.tools.compare.advice import advise
from lightning_fp8.tools.compare.variants import BASELINE, BF16, EMULATED_BASELINE, VARIANTS, by_default, checked
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


class UsageError(Exception):
    """A configuration or argument that is refused before anything runs; the message is the command line's own."""


def main(arguments: Sequence[str]) -> None:
    """Compare; exits with 1 if a precision failed, or with 2 and a message if nothing could run."""
    own = _own_parser()
    parser = argparse.ArgumentParser(
        prog=f"{program()} compare", description=__doc__, parents=[own], allow_abbrev=False
    )
    files = "as for `fit`; may be given more than once: later files override earlier ones"
    parser.add_argument("-c", "--config", action="append", required=True, type=Path, metavar="FILE", help=files)
    parser.add_argument("--trainer.accelerator", help=argparse.SUPPRESS)
    options, _ = parser.parse_known_args(arguments)
    # in the given order, as `fit` gives a configuration without a class to the class before it
    fit = ["fit", *own.parse_known_args(arguments)[1]]
    for path in options.config:
        if not path.is_file():
            parser.error(f"--config: there is no file {path}")
    configs = [_read(path) for path in options.config]
    on_gpu = _on_gpu(configs, getattr(options, "trainer.accelerator"))
    steps = options.steps or (STEPS_ON_GPU if on_gpu else STEPS_ON_CPU)
    if options.warmup >= steps:
        parser.error(f"--warmup must be smaller than the number of steps, {steps}, got {options.warmup}")
    folder = options.out or Path("runs", "compare", options.config[-1].stem)
    emulated = not on_gpu and emulates_bf16()
    variants = list(dict.fromkeys(options.precisions or by_default(emulated)))
    baseline = EMULATED_BASELINE if emulated and EMULATED_BASELINE in variants else BASELINE
    if emulated:
        print(
            f"This CPU emulates bf16 products. The baseline is {baseline}. Steps of {', '.join(BF16)} take many times"
            " as long as in fp32, and run only if `--precisions` names them.",
            flush=True,
        )
    about = {
        "suite": "compare",
        "baseline": baseline,
        "case": ", ".join(map(str, options.config)),
        **environment("lightning-fp8", "lightning", command=f"python -m lightning_fp8 compare {shlex.join(arguments)}"),
    }
    rows = []
    try:
        for variant in variants:
            print(f"{variant.ljust(max(map(len, variants)))}  {steps} steps ... ", end="", flush=True)
            start = time.perf_counter()
            result = run(variant, folder / variant, steps, options.warmup, fit)
            rows.append({"variant": variant, **result, "wall_s": time.perf_counter() - start, **about})
            print(f"{'failed' if 'error' in result else 'done'} in {rows[-1]['wall_s']:.0f} s", flush=True)
    except UsageError as error:
        parser.exit(_USAGE, f"\nThe configuration is refused:\n{error}\n{_how_to_adapt(configs)}")
    except KeyboardInterrupt:
        parser.exit(130, f"\nStopped. What has run is in {folder}.\n")
    _show(rows, baseline, folder)
    if any("error" in row for row in rows):
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
    with log.open("w") as output:
        status = worker.run([*child, variant, str(folder), str(steps), str(warmup), *fit], output)
    result: dict[str, Any] = json.loads(measured.read_text(encoding="utf-8")) if measured.exists() else {}
    if status == 0 and result:
        return result
    printed = log.read_text(errors="replace").strip()
    if status == _USAGE and not result:
        # only the message after the long usage
        raise UsageError(printed.rpartition("\nerror: ")[2])
    return {"error": f"{result.get('error') or worker.why_it_ended(status, printed)} (see {log})"}


def as_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The table; columns without any number are left out, and a run that failed has dashes."""
    columns = {key: about for key, about in _COLUMNS.items() if any(row.get(key) is not None for row in rows)}
    return table([{"variant": row["variant"], **{key: row.get(key) for key in columns}} for row in rows], columns)


def _show(rows: Sequence[Mapping[str, Any]], baseline: str, folder: Path) -> None:
    path = folder / "compare.jsonl"
    summaries = [{key: value for key, value in row.items() if key != "losses"} for row in rows]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in summaries), encoding="utf-8")
    failures = [f"{row['variant']} failed: {row['error']}" for row in rows if "error" in row]
    print("", as_table(rows), "", *failures, *advise(rows, baseline), sep="\n")
    ran = [row for row in rows if "error" not in row]
    if ran:
        row = ran[0]
        where = row["gpu"] or f"{row['device']}, {row['cpu']}, {row['threads']} threads"
        print(f"\n{where}; {row['steps']} steps, the first {row['warmup']} not timed; seed {row['seed']}.")
        print("Loss: mean of the last tenth of the steps. State: parameters, gradients and optimizer state.")
        if row["left_out"]:
            print(f"Callbacks left out: {', '.join(row['left_out'])}.")
    print(f"Written: {path}")
    if ran:
        folders = shlex.join(str(folder / row["variant"]) for row in ran)
        print(f"Everything the runs logged, as curves: python -m lightning_fp8 report {folders}")


def _how_to_adapt(configs: Sequence[Mapping[str, Any]]) -> str:
    parts = {part: [config[part] for config in configs if config.get(part)] for part in ("model", "data")}
    return "".join(
        f"`{part}` in the configuration names no class, as for a `LightningCLI` with one of its own. Name it:"
        f" --{part} my_module.MyClass before --config, from a module in the current folder or an installed one.\n"
        for part, values in parts.items()
        if values and all(isinstance(value, dict) and "class_path" not in value for value in values)
    )


def _read(path: Path) -> dict[str, Any]:
    """A configuration, unchecked; empty if it cannot be read, in which case `fit` says what is wrong."""
    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return config if isinstance(config, dict) else {}


def _on_gpu(configs: Sequence[Mapping[str, Any]], accelerator: str | None) -> bool:
    """Whether a GPU will be used, as far as the configuration and arguments tell before `fit` parses them."""
    trainers = [config["trainer"] for config in configs if isinstance(config.get("trainer"), dict)]
    named = [accelerator, *(trainer.get("accelerator") for trainer in reversed(trainers)), "auto"]
    return next(filter(None, named)) in ("auto", "gpu", "cuda") and torch.cuda.is_available()


def _own_parser() -> argparse.ArgumentParser:
    """The options that do not go to `fit`."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    steps = f"optimizer steps, by default {STEPS_ON_GPU} on a GPU and {STEPS_ON_CPU} on the CPU"
    parser.add_argument("--steps", type=positive, metavar="N", help=steps)
    warmup = "how many of the first steps are not timed (%(default)s)"
    parser.add_argument("--warmup", type=positive, default=WARMUP, metavar="N", help=warmup)
    precisions = (
        f"of {', '.join(VARIANTS)}; those of FP8 also with fields of the recipe, such as fp8-delayed,wgrad=bf16; by"
        f" default {', '.join(by_default(emulated=False))}; on a CPU that emulates bf16 products"
        f" {', '.join(by_default(emulated=True))}"
    )
    parser.add_argument("--precisions", nargs="+", type=checked, metavar="PRECISION", help=precisions)
    out = "for results and logs, by default runs/compare/<config name>"
    parser.add_argument("--out", type=Path, metavar="FOLDER", help=out)
    return parser
