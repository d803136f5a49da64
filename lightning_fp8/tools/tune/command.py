"""Measure the GEMM kernels on this GPU, and keep which is fastest for which shape.

For each GEMM, every candidate first runs in another process, where it must give
torch's result within a time limit. The candidates that do are timed in turns
with torch._scaled_mm. Each result is written at once, so an interrupted run
keeps its results. From then on gemm="auto" chooses by these measurements.

With --min-features it measures the size from which linear layers are faster in
FP8 than in bf16, with the GEMMs that gemm="auto" chooses at the time. From then
on min_features="auto" uses that size.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from kernels_cuda.cache import make_folder
from kernels_cuda.compile import nvrtc_version
from kernels_cuda.gemm_variants import configurations
from lightning_fp8.ops.cuda import gemm_table, kernels
from lightning_fp8.ops.cuda.gemm_choice import Choice
from lightning_fp8.runtime.device import MIN_CAPABILITY, check_device
from lightning_fp8.runtime.environment import environment, gpu_environment
from lightning_fp8.runtime.program import program
from lightning_fp8.tools import timing
from lightning_fp8.tools.arguments import positive
from lightning_fp8.tools.tables import aligned
from lightning_fp8.tools.tune import child, min_features
from lightning_fp8.tools.tune.min_features import Timed
from lightning_fp8.tools.tune.search import Tried, measure
from lightning_fp8.tools.tune.shapes import LAYERS, Gemm, Layer, candidates, gemms_of, parse_layers

ROUNDS, LIMIT_S = 20, 60.0
_COLUMNS = ("GEMM, MxNxK", "fastest of ours", "us", "TFLOP/s", "cuBLASLt", "ours / cuBLASLt")
_SIZE_COLUMNS = ("features in and out", "FP8, us", "bf16, us", "FP8 / bf16")


def main(arguments: Sequence[str]) -> None:
    """Measure, save and print; exits with a message if it cannot, or if a GEMM could not be measured."""
    options = _parser().parse_args(arguments)
    device = _device(for_gemms=False) if options.min_features else _device()
    gpu = torch.cuda.get_device_name(device)
    path = options.out or gemm_table.own_path(gpu)
    _check_folder(path, is_asked_for=options.out is not None)
    about = _about(device, f"python -m lightning_fp8 {shlex.join(['tune', *arguments])}")
    if options.min_features:
        _find_min_features(device, options.rounds, path, about)
        return
    ways = _ways(gemms_of(options.shapes), device)
    print(f"{gpu}: {len(ways)} GEMMs, {sum(map(len, ways.values()))} candidates, into {path}", flush=True)
    failures: dict[Gemm, str] = {}
    measured: dict[Gemm, dict[str, Any]] = {}
    begun: set[Gemm] = set()
    for one in measure(ways, options.rounds, options.time_limit, child.command()):
        if one.gemm not in begun:
            begun.add(one.gemm)
            print(f"[{len(begun)}/{len(ways)}] {one.gemm.name}", flush=True)
        if isinstance(one, Tried):
            if one.failure is not None:
                print(f"left out: {one.name} for {one.gemm.name}: {one.failure}", flush=True)
        elif one.row is None:
            failures[one.gemm] = f"{one.gemm.name}: {one.failure}"
        else:
            gemm_table.write(path, about, [one.row])
            measured[one.gemm] = one.row
            print("  ".join(_cells(one.gemm, one.row)), flush=True)
    print(f"\n{_table(measured)}\nWritten: {path}")
    if failures:
        sys.exit("\nThese could not be measured:\n" + "\n".join(failures.values()))


def _find_min_features(device: torch.device, rounds: int, path: Path, about: dict[str, Any]) -> None:
    """Measure all sizes, print them, and only then save the result."""
    sizes, tokens = min_features.SIZES, min_features.TOKENS
    print(f"{about['gpu']}: {len(sizes)} sizes of linear layers, {tokens} tokens, into {path}", flush=True)
    measured = []
    try:
        for one in min_features.timed(sizes, min_features.variants(device), rounds, timing.device_batch):
            measured.append(one)
            print(f"{one.features}: {one.speedup:.3f}", flush=True)
    except RuntimeError as error:
        sys.exit(f"tune: {error}. Nothing is written.")
    smallest = min_features.smallest_that_pays(measured)
    found = {"features": smallest, "tokens": tokens, "rows": [one.as_json() for one in measured]}
    gemm_table.write_min_features(path, about, found)
    print(f"\n{_table_of_sizes(measured)}")
    if smallest > sizes[-1]:
        print("FP8 is not faster at the largest of these sizes.")
    print(f'min_features="auto" is {smallest} on {about["gpu"]} from now on.\nWritten: {path}')


def _ways(gemms: Sequence[Gemm], device: torch.device) -> dict[Gemm, list[Choice]]:
    gpu = torch.cuda.get_device_properties(device)
    ours = {promote: configurations((gpu.major, gpu.minor), promote) for promote in (False, True)}
    return {gemm: candidates(gemm, ours[gemm.promote], gpu.multi_processor_count) for gemm in gemms}


def _about(device: torch.device, command: str) -> dict[str, Any]:
    """How a table was measured: GPU, driver, versions, commit and command."""
    found = {**environment("lightning-fp8", command=command), **gpu_environment(device)}
    versions = {name: found[name] for name in ("torch", "cupy", "lightning-fp8")}
    return {**{name: found[name] for name in ("gpu", "driver", "commit", "command")}, "versions": versions}


def _table(measured: Mapping[Gemm, dict[str, Any]]) -> str:
    return "\n".join(
        map("  ".join, aligned([_COLUMNS, *(_cells(gemm, row) for gemm, row in measured.items())], words=2))
    )


def _table_of_sizes(measured: Sequence[Timed]) -> str:
    cells = [
        (str(one.features), f"{one.fp8.p50_us:.1f}", f"{one.bf16.p50_us:.1f}", f"{one.speedup:.3f}") for one in measured
    ]
    return "\n".join(map("  ".join, aligned([_SIZE_COLUMNS, *cells], words=0)))


def _cells(gemm: Gemm, row: dict[str, Any]) -> tuple[str, ...]:
    ours, theirs = row["p50_us"], row["cublaslt_p50_us"]
    splits = f", K in {row['splits']}" if row["splits"] > 1 else ""
    return (
        gemm.name,
        "none" if row["configuration"] is None else f"{row['configuration']}{splits}",
        "-" if ours is None else f"{ours:.1f}",
        _tflops(gemm, ours),
        _tflops(gemm, theirs),
        "-" if ours is None or theirs is None else f"{theirs / ours:.3f}",
    )


def _tflops(gemm: Gemm, us: float | None) -> str:
    return "-" if us is None else f"{2 * gemm.m * gemm.n * gemm.k / us / 1e6:.0f}"


def _device(for_gemms: bool = True) -> torch.device:
    """The current GPU; exits if there is none, or it has no kernels to measure (GEMM kernels if ``for_gemms``)."""
    if not torch.cuda.is_available():
        least = "{}.{}".format(*MIN_CAPABILITY)
        sys.exit(f"tune measures on a CUDA GPU of compute capability {least} or newer, and none was found.")
    device = torch.device("cuda", torch.cuda.current_device())
    capability = torch.cuda.get_device_capability(device)
    if for_gemms and not configurations(capability, promote=False):
        gpu = "{} has compute capability {}.{}".format(torch.cuda.get_device_name(device), *capability)
        sys.exit(f"tune: {gpu}, which has no GEMM kernels: FP8 GEMMs run with torch._scaled_mm there, if at all.")
    if kernels.backend() == "reference":
        sys.exit("tune: LIGHTNING_FP8_BACKEND=reference turns all kernels off; there is nothing to measure.")
    try:
        check_device(device)
        nvrtc_version()
    except RuntimeError as error:
        sys.exit(f"tune: {error}")
    return device


def _check_folder(path: Path, is_asked_for: bool) -> None:
    if is_asked_for:
        if not path.parent.is_dir():
            sys.exit(f"--out: there is no folder {path.parent} to write {path.name} in.")
        return
    try:
        make_folder(path.parent)
    except OSError as error:
        sys.exit(f"tune: the table cannot be written ({error}). Set LIGHTNING_FP8_CACHE_DIR, or give --out.")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"{program()} tune", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = parser.add_mutually_exclusive_group()
    sizes = (
        "measure the size from which layers are faster in FP8: square layers of 128 to 4096 features, 8192 tokens,"
        " forward and backward"
    )
    what.add_argument("--min-features", action="store_true", help=sizes)
    shapes = (
        "linear layers, separated by commas, each measured in its three GEMMs; by default 2048, 8192 and 32768"
        " tokens in the projections of transformers of width 1024, 4096 and 8192"
    )
    what.add_argument("--shapes", type=_layers, default=LAYERS, metavar="TOKENSxINxOUT", help=shapes)
    out = "by default the table in the cache folder, which training uses; rows of other GEMMs in it are kept"
    parser.add_argument("--out", type=Path, metavar="FILE", help=out)
    parser.add_argument("--rounds", type=positive, default=ROUNDS, help="batches of each candidate (%(default)s)")
    limit = "seconds for trying one candidate, or for timing it (%(default)g)"
    parser.add_argument("--time-limit", type=positive, default=LIMIT_S, metavar="S", help=limit)
    return parser


def _layers(text: str) -> tuple[Layer, ...]:
    try:
        return parse_layers(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
