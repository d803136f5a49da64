"""``python -m lightning_fp8.tools.doctor.child``: tests one kernel per job."""

from __future__ import annotations

from typing import Any

import torch

from kernels_cuda.compile import architecture, is_cached
from lightning_fp8.ops.cuda import kernels
from lightning_fp8.tools.doctor.diagnosis import NOT_LOADED
from lightning_fp8.tools.worker import Job, serve


def test(job: Job) -> dict[str, Any]:
    """The answer to a job with the names of a ``device`` and a ``kernel``.

    It has the fields of a :class:`~.diagnosis.KernelCheck` that say how it went, and whether the toolchain is
    ``unavailable`` to every kernel.
    """
    device = torch.device(job["device"])
    capability = torch.cuda.get_device_capability(device)
    (variant,) = (kernel for kernel in kernels.variants(capability) if kernel.name == job["kernel"])
    compiled = "from the cache" if is_cached(variant.family, architecture(capability), variant.defines) else "compiled"
    attempt = kernels.try_kernel(variant, device, test_again=True)
    passed = "passed" if attempt.failure is None else "failed"
    was_loaded = attempt.testing_s is not None
    return {
        "compiled": compiled if was_loaded else "failed",
        "compile_s": attempt.loading_s,
        "self_test": passed if was_loaded else NOT_LOADED,
        "self_test_s": attempt.testing_s,
        "failure": attempt.failure,
        "resources": None if attempt.kernel is None else attempt.kernel.resources,
        "unavailable": attempt.unavailable,
    }


if __name__ == "__main__":
    serve(test)
