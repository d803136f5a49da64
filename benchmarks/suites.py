"""The suites: the cases of each, how they are timed, and what they are compared with."""

from __future__ import annotations

from benchmarks import baselines, cast, gemm, layer, train
from benchmarks.harness import Suite
from benchmarks.settings import BASELINE

SUITES = {
    "cast": Suite(cast.cases, "device", (baselines.COMPILED,)),
    "gemm": Suite(gemm.cases, "kernels", ("cublaslt",)),
    "blocks": Suite(
        lambda device: [*cast.cases_in_blocks(device), *gemm.cases_in_blocks(device)], "kernels", ("cublaslt", "torch")
    ),
    "linear": Suite(layer.linear_cases, "steps", BASELINE),
    "layer": Suite(layer.cases, "steps", BASELINE),
    "experts": Suite(layer.experts_cases, "steps", BASELINE),
    "train": Suite(train.cases, "steps", BASELINE, alone=True),
}
