"""Which devices can run FP8, and the errors for those that cannot."""

from __future__ import annotations

from typing import NamedTuple

import torch

# Ada: the first generation with FP8 matrix units
MIN_CAPABILITY = (8, 9)


class Gpu(NamedTuple):
    """What the choice of kernels depends on."""

    name: str
    capability: tuple[int, int]
    multiprocessors: int


# for tests, which run a CPU as such a GPU
stand_in: Gpu | None = None


def gpu_of(device: torch.device) -> Gpu | None:
    """The GPU as torch reports it; None for a CPU."""
    if stand_in is not None:
        return stand_in
    if device.type != "cuda":
        return None
    gpu = torch.cuda.get_device_properties(device)
    return Gpu(gpu.name, (gpu.major, gpu.minor), gpu.multi_processor_count)


def check_device(device: torch.device) -> None:
    """Raise if FP8 layers cannot run on ``device``.

    Raises:
        RuntimeError: for a CUDA device below compute capability 8.9, an AMD GPU, or a device other than a CPU or a CUDA
            GPU.
    """
    gpu = gpu_of(device)
    if gpu is not None:
        # torch calls AMD's "cuda" too
        if torch.version.hip is not None:
            raise RuntimeError(
                f"FP8 training runs on NVIDIA GPUs, and this torch is built for ROCm {torch.version.hip}; {device} is"
                f' {gpu.name}. Use `precision="bf16-mixed"` there.'
            )
        if gpu.capability < MIN_CAPABILITY:
            raise RuntimeError(
                f"FP8 training needs a GPU of compute capability {_dotted(MIN_CAPABILITY)} or newer (Ada, Hopper,"
                f" Blackwell), but {device} is {gpu.name}, {_dotted(gpu.capability)}."
                ' Use `precision="bf16-mixed"` there ("16-mixed" before compute capability 8.0).'
            )
    elif device.type != "cpu":
        raise RuntimeError(
            f"FP8 training runs on CUDA GPUs and, as a reference, on the CPU; got {device}."
            ' Use `precision="bf16-mixed"` there.'
        )


def is_capturing(on_gpu: bool) -> bool:
    """Whether GPU work is being captured into a CUDA graph, whose replays would reuse cached casts forever."""
    return on_gpu and torch.cuda.is_current_stream_capturing()


def _dotted(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"
