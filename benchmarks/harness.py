"""What the benchmarks have in common: variants take turns, and a row says what it needs to be read later."""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch


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
    """What each variant printed last, as JSON, in each round: this program's own command again, with ``--variant``."""
    runs: dict[str, list[dict[str, Any]]] = {variant: [] for variant in variants}
    for _ in range(rounds):
        for variant, results in runs.items():
            command = [sys.executable, *sys.argv, "--variant", variant]
            child = subprocess.run(command, capture_output=True, text=True, check=False)
            if child.returncode:
                sys.exit(f"{variant} failed:\n{child.stderr}")
            results.append(json.loads(child.stdout.splitlines()[-1]))
    return runs


def percentiles(runs: list[dict[str, Any]]) -> dict[str, float]:
    """Of the ``times`` of all runs together."""
    p20, p50, p80 = statistics.quantiles([time for run in runs for time in run["times"]], n=10)[1::3]
    return {"p20_ms": p20, "p50_ms": p50, "p80_ms": p80}


def environment(*packages: str) -> dict[str, Any]:
    """CPU, threads, versions of torch and of further packages, commit and command."""
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return {
        "cpu": cpu_name(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        **{package: _version(package) for package in packages},
        "commit": git.stdout.strip(),
        "command": " ".join(["python", *sys.argv]),
    }


def cpu_name() -> str:
    """The CPU, with the matrix extension that bf16 speed depends on."""
    info = Path("/proc/cpuinfo")
    if not info.exists():
        return platform.processor()
    text = info.read_text()
    name = next((line.split(":")[1].strip() for line in text.splitlines() if line.startswith("model name")), "")
    return name + (" with amx_bf16" if "amx_bf16" in text else " with avx512_bf16" if "avx512_bf16" in text else "")


def append(rows: list[dict[str, Any]], path: Path | None) -> None:
    """Append the rows to a file of JSON lines, where there is one."""
    if path is not None:
        with path.open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)


def table(rows: list[dict[str, Any]], columns: dict[str, tuple[str, float, str]], markdown: bool = False) -> str:
    """The rows, aligned; ``columns`` has title, unit and format of each number, None becomes ``-``."""
    cells = [["variant", *(title for title, _, _ in columns.values())]]
    for row in rows:
        numbers = [(row[key], unit, form) for key, (_, unit, form) in columns.items()]
        cells.append([row["variant"], *("-" if x is None else format(x / unit, form) for x, unit, form in numbers)])
    widths = [max(map(len, column)) for column in zip(*cells)]
    lines = [[line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])] for line in cells]
    if not markdown:
        return "\n".join("  ".join(line) for line in lines)
    lines.insert(1, ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
