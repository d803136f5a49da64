"""A precision plugin as ``lightning.fabric.Fabric`` calls it."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from lightning.fabric.plugins.precision import MixedPrecision
from lightning.fabric.plugins.precision.fsdp import FSDPPrecision
from lightning.fabric.utilities.types import Optimizable
from torch import nn
from torch.distributed.fsdp import MixedPrecision as FSDPMixedPrecision
from typing_extensions import override

from lightning_fp8.plugins.core import PrecisionCore, as_dtype


class FabricPrecision(MixedPrecision, FSDPPrecision):  # type: ignore[misc]
    """One of this package's plugins in Fabric, with any strategy. Fabric makes it from a string or a plugin.

    As with Fabric's own mixed precision, floating point inputs of ``forward`` are cast to the compute dtype, outputs to
    the default dtype. ``optimizer.step`` updates the scales of all models that were set up; ``fabric.save`` and
    ``fabric.load`` include these scales.

    Args:
        plugin: the plugin whose settings apply.

    Attributes:
        plugin: a plugin with the same settings, for this Fabric alone.
    """

    precision: Any

    def __init__(self, plugin: PrecisionCore) -> None:
        self.plugin = plugin.unused()
        super().__init__("bf16-mixed", device="")
        self.precision = plugin.precision
        self._desired_input_dtype = plugin.compute_dtype

    @property
    def mixed_precision_config(self) -> FSDPMixedPrecision:
        """See :class:`~lightning_fp8.plugins.core.PrecisionCore`."""
        return self.plugin.mixed_precision_config

    @override
    def convert_module(self, module: nn.Module) -> nn.Module:
        return self.plugin.convert_module(module)

    @override
    def tensor_init_context(self) -> AbstractContextManager[Any]:
        return self.plugin.tensor_init_context()

    @override
    def module_init_context(self) -> AbstractContextManager[Any]:
        return self.plugin.module_init_context()

    @override
    def forward_context(self) -> AbstractContextManager[Any]:
        return self.plugin.forward_context()

    @override
    def convert_input(self, data: Any) -> Any:
        return as_dtype(data, self.plugin.compute_dtype)

    @override
    def convert_output(self, data: Any) -> Any:
        return as_dtype(data, torch.get_default_dtype())

    @override
    def backward(self, *args: Any, **kwargs: Any) -> None:
        with self.plugin.backward_context():
            super().backward(*args, **kwargs)

    @override
    def optimizer_step(self, optimizer: Optimizable, **kwargs: Any) -> Any:
        with self.plugin.step_context():
            return super().optimizer_step(optimizer, **kwargs)
