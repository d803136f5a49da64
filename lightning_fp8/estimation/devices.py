"""Peaks of devices according to their vendors, without sparsity, from the documents named in ``SOURCES``."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_fp8.runtime.did_you_mean import did_you_mean


@dataclass(frozen=True)
class Gpu:
    """One device.

    Attributes:
        title: the device's name.
        bf16: peak of dense bf16 products with fp32 accumulation, in TFLOP/s.
        fp8: peak of dense FP8 products with fp32 accumulation, in TFLOP/s; None if the hardware has no FP8.
        bandwidth: memory bandwidth, in GB/s.
        memory: memory size, in GB.
        multiprocessors: number of multiprocessors, among which the tiles of a product are divided.
        link: bandwidth to other devices in the same machine, in one direction, in GB/s.
        capability: CUDA compute capability, which decides what recipes run.
        source: key of ``SOURCES``.
    """

    title: str
    bf16: float
    fp8: float | None
    bandwidth: float
    memory: float
    multiprocessors: int
    link: float
    capability: tuple[int, int]
    source: str


SOURCES = {
    "A100": "NVIDIA A100 datasheet, 2021",
    "H100": "NVIDIA H100 datasheet, and the Hopper architecture whitepaper for multiprocessors",
    "H200": "NVIDIA H200 datasheet, 2024",
    "B200": "NVIDIA DGX B200 datasheet and HGX pages (per device: an eighth), 2025",
    "L40S": "NVIDIA L40S datasheet, 2023",
    "Ada": "NVIDIA Ada GPU architecture whitepaper: FP8 with fp32 accumulation",
    "Blackwell RTX": "NVIDIA RTX Blackwell GPU architecture whitepaper: FP8 with fp32 accumulation",
}

GPUS = {
    "h100": Gpu("H100 SXM", 989.4, 1978.9, 3350, 80, 132, 450, (9, 0), "H100"),
    "h100-pcie": Gpu("H100 PCIe", 756, 1513, 2000, 80, 114, 64, (9, 0), "H100"),
    "h100-nvl": Gpu("H100 NVL", 835.5, 1671, 3900, 94, 132, 300, (9, 0), "H100"),
    "h200": Gpu("H200", 989.4, 1978.9, 4800, 141, 132, 450, (9, 0), "H200"),
    "h200-nvl": Gpu("H200 NVL", 835.5, 1671, 4800, 141, 132, 450, (9, 0), "H200"),
    "b200": Gpu("B200", 2250, 4500, 8000, 180, 148, 900, (10, 0), "B200"),
    "b300": Gpu("B300", 2250, 4500, 8000, 288, 148, 900, (10, 3), "B200"),
    "l40s": Gpu("L40S", 362, 733, 864, 48, 142, 32, (8, 9), "L40S"),
    "rtx-4090": Gpu("GeForce RTX 4090", 165.2, 330.3, 1008, 24, 128, 32, (8, 9), "Ada"),
    "rtx-5090": Gpu("GeForce RTX 5090", 209.5, 419, 1792, 32, 170, 64, (12, 0), "Blackwell RTX"),
    "a100": Gpu("A100 SXM", 312, None, 2039, 80, 108, 300, (8, 0), "A100"),
}


def gpu_named(name: str) -> Gpu:
    """The device of this name.

    Raises:
        ValueError: for an unknown one, with those that are known.
    """
    key = str(name).lower().replace("_", "-").replace(" ", "-")
    if key not in GPUS:
        raise ValueError(f"gpu={name!r} is unknown.{did_you_mean(key, GPUS)} Known are {', '.join(GPUS)}.")
    return GPUS[key]
