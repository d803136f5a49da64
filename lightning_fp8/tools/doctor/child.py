"""``python -m lightning_fp8.tools.doctor.child``: tests one kernel per job, see :func:`job`."""

from __future__ import annotations

import sys
from typing import Any

import torch

from kernels_cuda.compile import architecture, is_cached
from lightning_fp8.ops.cuda import kernels
from lightning_fp8.tools.worker import Job, serve


def command() -> list[str]:
    """The command that starts a process for the jobs."""
    return [sys.executable, "-m", "lightning_fp8.tools.doctor.child"]


def job(device: torch.device, kernel: str) -> Job:
    """A job for one kernel. The answer has ``cached``, whether it had been compiled before, and the fields of an
    :class:`~lightning_fp8.ops.cuda.kernels.Attempt`, with the kernel's ``resources`` in place of the kernel itself.
    """
    return {"device": str(device), "kernel": kernel}


def test(job: Job) -> dict[str, Any]:
    """The answer to a job."""
    device = torch.device(job["device"])
    capability = torch.cuda.get_device_capability(device)
    (variant,) = (one for one in kernels.variants(capability) if one.name == job["kernel"])
    cached = is_cached(variant.family, architecture(capability), variant.defines)
    attempt = kernels.try_kernel(variant, device, test_again=True)
    resources = None if attempt.kernel is None else attempt.kernel.resources
    return {"cached": cached, "resources": resources, **attempt._replace(kernel=None)._asdict()}


if __name__ == "__main__":
    serve(test)
