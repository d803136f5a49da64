"""What the parts of this package use of a scaling state; documented in :class:`lightning_fp8.ScalingState`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_fp8.ops.formats import Role
from lightning_fp8.scaling.config import Fp8Config
from lightning_fp8.scaling.precision import Choice, LayerPrecision, Origin
from lightning_fp8.scaling.recipe import Recipe


class Scales(Protocol):
    """A scaling state."""

    config: Fp8Config
    module_names: tuple[str, ...]
    precisions: tuple[LayerPrecision, ...]
    input_owners: dict[int, int]
    scale: Tensor
    amax: Tensor
    amax_history: Tensor
    nonfinite_steps: Tensor
    indices: tuple[Tensor, ...]
    updates: int
    model: Any

    @property
    def recipe(self) -> Recipe: ...  # noqa: D102

    @property
    def names(self) -> Sequence[str]: ...  # noqa: D102

    @property
    def delayed(self) -> int: ...  # noqa: D102

    @property
    def device(self) -> torch.device: ...  # noqa: D102

    @property
    def rows_in_fp8(self) -> Tensor: ...  # noqa: D102

    def switch(self, origin: Origin, choices: Mapping[int, Choice]) -> None: ...  # noqa: D102

    def row_of(self, module: int, role: Role) -> int: ...  # noqa: D102

    def module_of(self, row: int) -> int: ...  # noqa: D102

    def record_weight(self, index: Tensor, amax: Tensor, scale: Tensor) -> None: ...  # noqa: D102

    def update(self) -> None: ...  # noqa: D102

    def fill_sharers(self, recorded: Tensor) -> Tensor: ...  # noqa: D102

    def load_state_dict(self, state_dict: Mapping[str, Mapping[str, Tensor]]) -> None: ...  # noqa: D102
