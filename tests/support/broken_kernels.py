"""Kernels that do their work and then damage what they wrote."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

from host_kernels import HostKernel


class Broken(HostKernel):
    """Runs the kernel, and then something else."""

    damage: Callable[[Sequence[int | float]], None]

    def __call__(self, grid: int, *arguments: int | float) -> None:
        super().__call__(grid, *arguments)
        type(self).damage(arguments)


def poke(position: int, byte: int = 0, add: int = 8) -> Callable[[Sequence[int | float]], None]:
    """Changes one byte of the tensor that an argument points to."""

    def damage(arguments: Sequence[int | float]) -> None:
        address = int(arguments[position])
        if address:
            target = (ctypes.c_uint8 * (byte + 1)).from_address(address)
            target[byte] = (target[byte] + add) % 256

    return damage
