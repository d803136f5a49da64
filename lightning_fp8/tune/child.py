"""``python -m lightning_fp8.tune.child trial|timing``: does the jobs of :func:`lightning_fp8.tune.children.answers`."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from typing import Any

import torch

from kernels_cuda.gemm import configurations
from lightning_fp8.bench import timing
from lightning_fp8.ops.gemm import run_choice
from lightning_fp8.ops.gemm_choice import Choice
from lightning_fp8.tune import trial
from lightning_fp8.tune.children import Job
from lightning_fp8.tune.shapes import Gemm


def command(kind: str) -> list[str]:
    """What starts a process that works on jobs of this kind."""
    return [sys.executable, "-m", "lightning_fp8.tune.child", kind]


def trial_job(gemm: Gemm, choice: Choice) -> Job:
    """Is answered by ``{"wrong": None}``, or by what is wrong."""
    return {"gemm": gemm.as_json(), "choices": _named([choice])}


def timing_job(gemm: Gemm, choices: Sequence[Choice], rounds: int) -> Job:
    """Is answered by a row of the table."""
    return {"gemm": gemm.as_json(), "choices": _named(choices), "rounds": rounds}


def main(arguments: Sequence[str]) -> None:
    """Answer one line of standard output for each line of standard input."""
    work = {"trial": _try, "timing": _time}[arguments[0]]
    # what libraries print goes elsewhere
    with os.fdopen(os.dup(1), "w") as output, torch.no_grad():
        os.dup2(2, 1)
        for line in sys.stdin:
            output.write(f"{json.dumps(work(json.loads(line)))}\n")
            output.flush()


def _try(job: Job) -> dict[str, Any]:
    gemm, (choice,), device = _read(job)
    return {"wrong": trial.unserved(gemm, choice, device) or trial.wrong(gemm, choice, device, run_choice)}


def _time(job: Job) -> dict[str, Any]:
    gemm, choices, device = _read(job)
    served = [choice for choice in choices if trial.unserved(gemm, choice, device) is None]
    row = trial.timed(gemm, served, job["rounds"], device, run_choice)
    timing.release()
    return row


def _named(choices: Sequence[Choice]) -> list[list[Any]]:
    return [[choice.configuration.name, choice.splits] for choice in choices if choice.configuration is not None]


def _device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def _read(job: Job) -> tuple[Gemm, list[Choice], torch.device]:
    gemm, device = Gemm.from_json(job["gemm"]), _device()
    known = {one.name: one for one in configurations(torch.cuda.get_device_capability(device), gemm.promote)}
    return gemm, [Choice(known[name], splits) for name, splits in job["choices"]], device


if __name__ == "__main__":
    main(sys.argv[1:])
