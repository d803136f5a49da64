"""Shared by the benchmarks: variants that take turns in separate processes."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.rows import append
from lightning_fp8.runtime.cpu import emulates_bf16
from lightning_fp8.runtime.environment import environment
from lightning_fp8.tools import timing
from lightning_fp8.tools.tables import table

__all__ = ["append", "baseline", "environment", "parser", "percentiles", "table", "take_turns"]


def baseline(device: str) -> str:
    """The precision that others are compared with: bf16-mixed, or 32-true on a CPU that emulates bf16 products.

    Prints a note on standard error for such a CPU, where a step in bf16 takes many times as long as in fp32.
    """
    if device == "cuda" or not emulates_bf16():
        return "bf16-mixed"
    print(
        "This CPU emulates bf16 products: bf16 precisions are left out, and 32-true takes their place as the baseline.",
        file=sys.stderr,
    )
    return "32-true"


def parser(description: str | None, variants: Iterable[str], steps: int) -> argparse.ArgumentParser:
    """The options that all benchmarks take; ``--variant`` is for the processes of :func:`take_turns`."""
    options = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--config", type=Path, default=Path(__file__).parent.parent / "configs" / "tiny_gpt_fp8.yaml")
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--steps", type=int, default=steps)
    options.add_argument("--out", type=Path)
    options.add_argument("--variant", choices=list(variants), help=argparse.SUPPRESS)
    return options


def take_turns(variants: Iterable[str], rounds: int) -> dict[str, list[dict[str, Any]]]:
    """Rerun this program with ``--variant`` for each variant in turn; gives the JSON that each run printed last."""
    runs: dict[str, list[dict[str, Any]]] = {variant: [] for variant in variants}
    for _ in range(rounds):
        for variant, results in runs.items():
            command = [sys.executable, *sys.orig_argv[1:], "--variant", variant]
            child = subprocess.run(command, capture_output=True, text=True, check=False)
            if child.returncode:
                sys.exit(f"{variant} failed:\n{child.stderr}")
            results.append(json.loads(child.stdout.splitlines()[-1]))
    return runs


def percentiles(runs: list[dict[str, Any]]) -> dict[str, float]:
    """Percentiles of the ``times`` of all runs together."""
    p20, p50, p80 = timing.percentiles([time for run in runs for time in run["times"]])
    return {"p20_ms": p20, "p50_ms": p50, "p80_ms": p80}
