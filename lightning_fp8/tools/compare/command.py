"""Run a configuration under several precisions, with the same seed and data, and recommend one.

Each precision trains in a separate process, for --steps optimizer steps from the start; a learning-rate schedule over
the length of the run spans these steps. Loggers, checkpoints, progress bars, early stopping and this package's own
callbacks are left out. Further arguments, such as --trainer.devices=1, go to the command line of `fit`.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import yaml

from lightning_fp8.runtime.cpu import emulates_bf16
from lightning_fp8.runtime.environment import environment
from lightning_fp8.runtime.program import program
from lightning_fp8.tools.arguments import positive
from lightning_fp8.tools.compare import results
from lightning_fp8.tools.compare.advice import advise
from lightning_fp8.tools.compare.processes import UsageError, run
from lightning_fp8.tools.compare.variants import BF16, EMULATED_BASELINE, VARIANTS, baseline_of, by_default, checked

STEPS_ON_GPU = 200
STEPS_ON_CPU = 30
WARMUP = 10


def main(arguments: Sequence[str]) -> None:
    """Compare; exits with 1 if a precision failed, or with 2 and a message if nothing could run."""
    parser = _parser()
    options, further = parser.parse_known_args(arguments)
    for path in options.config:
        if not path.is_file():
            parser.error(f"--config: there is no file {path}")
    on_gpu = _on_gpu(options.config, further)
    steps = options.steps or (STEPS_ON_GPU if on_gpu else STEPS_ON_CPU)
    if options.warmup >= steps:
        parser.error(f"--warmup must be smaller than the number of steps, {steps}, got {options.warmup}")
    folder = options.out or Path("runs", "compare", options.config[-1].stem)
    unnamed = _without_class(options.config)
    classes = {part: [f"--{part}", value] for part in ("model", "data") if (value := getattr(options, part))}
    fit = [
        "fit",
        # a configuration without a class gives arguments to the class before it
        *(word for part in unnamed for word in classes.get(part, [])),
        *(word for path in options.config for word in ("--config", str(path))),
        *(word for part, words in classes.items() if part not in unnamed for word in words),
        *further,
    ]
    emulated = not on_gpu and emulates_bf16()
    variants = list(dict.fromkeys(options.precisions or by_default(emulated)))
    baseline = baseline_of(variants, emulated)
    if emulated:
        print(_about_emulation(variants), flush=True)
    about = {
        "suite": "compare",
        "baseline": baseline,
        "case": ", ".join(map(str, options.config)),
        **environment("lightning-fp8", "lightning", command=f"python -m lightning_fp8 compare {shlex.join(arguments)}"),
    }
    try:
        rows = _run_all(variants, folder, steps, options.warmup, fit)
    except UsageError as error:
        advice = _how_to_adapt([part for part in unnamed if part not in classes])
        parser.exit(2, f"The configuration is refused:\n{error}\n{advice}")
    except KeyboardInterrupt:
        parser.exit(130, f"\nStopped. What has run is in {folder}.\n")
    rows = [{**row, **about} for row in rows]
    _show(rows, baseline, folder)
    if results.failures(rows):
        sys.exit(1)


def _run_all(variants: list[str], folder: Path, steps: int, warmup: int, fit: list[str]) -> list[dict[str, Any]]:
    rows = []
    width = max(map(len, variants))
    for variant in variants:
        print(f"{variant.ljust(width)}  {steps} steps ... ", end="", flush=True)
        start = time.perf_counter()
        try:
            row = {"variant": variant, **run(variant, folder / variant, steps, warmup, fit)}
        # end the unfinished line
        except BaseException:
            print(flush=True)
            raise
        row["wall_s"] = time.perf_counter() - start
        print(f"{'failed' if row.get('error') else 'done'} in {row['wall_s']:.0f} s", flush=True)
        rows.append(row)
    return rows


def _about_emulation(variants: Sequence[str]) -> str:
    """The note for a CPU that emulates bf16 products."""
    slow = ", ".join(name for name in BF16 if name in variants)
    rest = (
        f"Steps of {slow} take many times as long as in fp32; `--precisions {' '.join(by_default(emulated=True))}`"
        " avoids them."
        if slow
        else f"The baseline is {EMULATED_BASELINE}, and {', '.join(BF16)} run only if `--precisions` names them."
    )
    return f"This CPU emulates bf16 products. {rest}"


def _show(rows: list[dict[str, Any]], baseline: str, folder: Path) -> None:
    ran = [row for row in rows if not row.get("error")]
    advice = advise(rows, baseline)
    written = results.write(rows, advice, folder)
    print()
    print(results.as_table(rows))
    print("", *results.failures(rows), *advice, sep="\n")
    if ran:
        row = ran[0]
        where = row["gpu"] or f"{row['device']}, {row['cpu']}, {row['threads']} threads"
        print(f"\n{where}; {row['steps']} steps, the first {row['warmup']} not timed; seed {row['seed']}.")
        print("Loss: mean of the last tenth of the steps. State: parameters, gradients and optimizer state.")
    if ran and ran[0]["left_out"]:
        print(f"Callbacks left out: {', '.join(ran[0]['left_out'])}.")
    print(f"Written: {', '.join(map(str, written))}")
    if not find_spec("matplotlib"):
        print("The plot needs matplotlib: pip install matplotlib")
    if ran:
        folders = shlex.join(str(folder / row["variant"]) for row in ran)
        print(f"Everything the runs logged: python -m lightning_fp8 report {folders}")


def _without_class(configs: Sequence[Path]) -> list[str]:
    """The parts of a configuration that name no class, as for a ``LightningCLI`` with a fixed model or data class."""
    found = {part: [value for path in configs if (value := _read(path).get(part))] for part in ("model", "data")}
    return [
        part
        for part, values in found.items()
        if values and all(isinstance(value, dict) and "class_path" not in value for value in values)
    ]


def _how_to_adapt(unnamed: Sequence[str]) -> str:
    return "".join(
        f"`{part}` in the configuration names no class, as for a `LightningCLI` with one of its own. Name it:"
        f" --{part} my_module.MyClass, from a module in the current folder or an installed one.\n"
        for part in unnamed
    )


def _read(path: Path) -> dict[str, Any]:
    """A configuration, unchecked; empty if it cannot be read, in which case `fit` says what is wrong."""
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return found if isinstance(found, dict) else {}


def _on_gpu(configs: Sequence[Path], further: Sequence[str]) -> bool:
    """Whether a GPU will be used, as far as the configuration and arguments tell before `fit` parses them."""
    accelerator = "auto"
    for path in configs:
        trainer = _read(path).get("trainer")
        accelerator = trainer.get("accelerator", accelerator) if isinstance(trainer, dict) else accelerator
    for position, part in enumerate(further):
        name, _, value = part.partition("=")
        if name == "--trainer.accelerator":
            accelerator = value or (further[position + 1] if position + 1 < len(further) else "")
    return accelerator in ("auto", "gpu", "cuda") and torch.cuda.is_available()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"{program()} compare", description=__doc__, allow_abbrev=False)
    files = "as for `fit`; may be given more than once: later files override earlier ones"
    parser.add_argument("-c", "--config", action="append", required=True, type=Path, metavar="FILE", help=files)
    name = "class of the {}, where the configuration has only its arguments: my_module.MyClass"
    parser.add_argument("--model", metavar="CLASS", help=name.format("model"))
    parser.add_argument("--data", metavar="CLASS", help=name.format("data"))
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
