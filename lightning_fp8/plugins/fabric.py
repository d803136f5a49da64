"""The precision plugins of ``lightning.fabric.Fabric``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lightning.fabric.plugins.precision import HalfPrecision, MixedPrecision
from lightning.fabric.plugins.precision.fsdp import FSDPPrecision
from lightning.fabric.utilities.types import Optimizable
from typing_extensions import override

from lightning_fp8.plugins.bf16 import Bf16MixedCore, Bf16TrueCore
from lightning_fp8.plugins.core import FSDPCore, PrecisionCore, as_dtype, by_string
from lightning_fp8.plugins.fp8 import Fp8Core


class _FabricPrecision(PrecisionCore):
    @override
    def convert_input(self, data: Any) -> Any:
        return as_dtype(data, self.compute_dtype)

    @override
    def convert_output(self, data: Any) -> Any:
        return as_dtype(data, torch.get_default_dtype())


class Fp8FabricPrecision(_FabricPrecision, Fp8Core):
    """:class:`~lightning_fp8.Fp8Precision` for Fabric: ``optimizer.step`` updates the scales of every model set up.

    ``Fabric(precision="fp8-delayed")`` makes one, and so does ``Fabric(plugins=Fp8Precision(...))``. As with Fabric's
    own mixed precision, floating point inputs of ``forward`` arrive in the compute dtype, and outputs leave in the
    default dtype. ``fabric.save`` and ``fabric.load`` take the scales of a model along.
    """

    @override
    def optimizer_step(self, optimizer: Optimizable, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        with self._discarding():
            result = optimizer.step(**kwargs) if closure is None else optimizer.step(closure=closure, **kwargs)
        self._update_scales()
        return result


class Bf16MixedFabricPrecision(_FabricPrecision, Bf16MixedCore, MixedPrecision):
    """Fabric's ``MixedPrecision`` in bf16 with this package's additions."""

    @override
    def _init_lightning(self) -> None:
        MixedPrecision.__init__(self, "bf16-mixed", device=self._device_type())


class Bf16TrueFabricPrecision(_FabricPrecision, Bf16TrueCore, HalfPrecision):  # type: ignore[misc]
    """Fabric's ``HalfPrecision`` in bf16 with this package's additions."""

    @override
    def _init_lightning(self) -> None:
        HalfPrecision.__init__(self, "bf16-true")


class _FSDP(FSDPCore, _FabricPrecision, FSDPPrecision):
    _lightnings = FSDPPrecision


class Fp8FabricFSDPPrecision(Fp8FabricPrecision, _FSDP):
    """:class:`Fp8FabricPrecision` for Fabric's ``FSDPStrategy``."""


class Bf16MixedFabricFSDPPrecision(_FSDP, Bf16MixedCore):
    """:class:`Bf16MixedFabricPrecision` for Fabric's ``FSDPStrategy``."""


class Bf16TrueFabricFSDPPrecision(_FSDP, Bf16TrueCore):
    """:class:`Bf16TrueFabricPrecision` for Fabric's ``FSDPStrategy``."""


FABRIC_PLUGINS = by_string(Fp8FabricPrecision, Bf16MixedFabricPrecision, Bf16TrueFabricPrecision)
FABRIC_FSDP_PLUGINS = by_string(Fp8FabricFSDPPrecision, Bf16MixedFabricFSDPPrecision, Bf16TrueFabricFSDPPrecision)
