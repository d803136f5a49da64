"""``python -m lightning_fp8.tools.tune.child``: runs the jobs that are created here, one after the other."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch

from kernels_cuda.gemm_variants import Configuration, configurations
from lightning_fp8.ops.cuda.gemm import run_choice
from lightning_fp8.ops.cuda.gemm_choice import Choice
from lightning_fp8.tools import timing
from lightning_fp8.tools.tune import trial
from lightning_fp8.tools.tune.shapes import Gemm
from lightning_fp8.tools.worker import Job, serve


def command() -> list[str]:
    """The command that starts a process for the jobs."""
    return [sys.executable, "-m", "lightning_fp8.tools.tune.child"]


def trial_job(gemm: Gemm, choice: Choice) -> Job:
    """A job that checks a choice's result; the answer is ``{"wrong": None}``, or says what is wrong."""
    return {"kind": "trial", "gemm": gemm.as_json(), "choices": _named([choice])}


def timing_job(gemm: Gemm, choices: Sequence[Choice], rounds: int) -> Job:
    """A job that times choices; the answer is a row of the table."""
    return {"kind": "timing", "gemm": gemm.as_json(), "choices": _named(choices), "rounds": rounds}


def work(job: Job) -> dict[str, Any]:
    """The answer to a job."""
    with torch.no_grad():
        return {"trial": _try, "timing": _time}[job["kind"]](job)


def _try(job: Job) -> dict[str, Any]:
    gemm, (choice,), device = _read(job)
    return {"wrong": trial.unserved(gemm, choice, device) or trial.wrong(gemm, choice, device, run_choice)}


def _time(job: Job) -> dict[str, Any]:
    gemm, choices, device = _read(job)
    served = [choice for choice in choices if trial.unserved(gemm, choice, device) is None]
    # the number of copies of the inputs depends on the free memory
    timing.release()
    return trial.timed(gemm, served, job["rounds"], device, run_choice)


def _named(choices: Sequence[Choice]) -> list[list[Any]]:
    return [[choice.configuration.name, choice.splits] for choice in choices if choice.configuration is not None]


def _device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def _read(job: Job) -> tuple[Gemm, list[Choice], torch.device]:
    gemm, device = Gemm.from_json(job["gemm"]), _device()
    ours = configurations(torch.cuda.get_device_capability(device), gemm.promote)
    known: dict[str | None, Configuration | None] = {None: None, **{one.name: one for one in ours}}
    return gemm, [Choice(known[name], splits) for name, splits in job["choices"]], device


if __name__ == "__main__":
    serve(work)
