"""Which modules of a converted model run in FP8, and which have fallen back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_fp8.ops.formats import ROLES


@dataclass
class Switch:
    """Whether the GEMMs of one module run in FP8. Each forward reads it."""

    in_fp8: bool = True
    may_fall_back: bool = True


class Switches:
    """The switches of all converted modules, by position in the scaling state."""

    def __init__(self, module_names: Sequence[str]) -> None:
        self._names = tuple(module_names)
        self._switches = tuple(Switch() for _ in module_names)

    def __getitem__(self, module: int) -> Switch:
        return self._switches[module]

    def fall_back(self, module_name: str) -> None:
        """See :func:`lightning_fp8.fall_back`."""
        if module_name not in self._names:
            raise ValueError(
                f"There is no converted module {module_name!r} to fall back. The first ones are:"
                f" {', '.join(map(repr, self._names[:6]))}."
            )
        switch = self._switches[self._names.index(module_name)]
        if not switch.may_fall_back:
            raise ValueError(f"{module_name!r} cannot fall back: its weight is gathered in FP8 (`fp8_all_gather`).")
        switch.in_fp8 = False

    @property
    def fallbacks(self) -> tuple[str, ...]:
        """See :func:`lightning_fp8.fallbacks`."""
        return tuple(name for name, switch in zip(self._names, self._switches, strict=True) if not switch.in_fp8)

    @property
    def rows_in_fp8(self) -> Tensor:
        """``[R] bool`` on the CPU: for each tensor of the scaling state, whether its module runs in FP8."""
        return torch.tensor([switch.in_fp8 for _ in ROLES for switch in self._switches], dtype=torch.bool)
