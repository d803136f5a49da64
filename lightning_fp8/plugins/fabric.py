"""The precision plugins of ``lightning.fabric.Fabric``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lightning.fabric.plugins.precision import HalfPrecision, MixedPrecision
from lightning.fabric.plugins.precision.fsdp import FSDPPrecision
from lightning.fabric.utilities.types import Optimizable
from torch.distributed.fsdp import MixedPrecision as FSDPMixedPrecision
from typing_extensions import override

from lightning_fp8.plugins.core import PrecisionCore, as_dtype


class Fp8FabricPrecision(PrecisionCore):
    """:class:`~lightning_fp8.Fp8Precision` for Fabric: scales of every model set up are updated at ``optimizer.step``.

    ``Fabric(precision="fp8-delayed")`` makes one, and so does ``Fabric(plugins=Fp8Precision(...))``. As with Fabric's
    own mixed precision, floating point inputs of ``forward`` arrive in the compute dtype, and outputs leave in the
    default dtype. To checkpoint the scales, add them to what ``fabric.save`` and ``fabric.load`` get:
    ``{"model": model, "scaling": scaling_state(model)}``. Where they are left out, both warn.
    """

    @override
    def convert_input(self, data: Any) -> Any:
        return as_dtype(data, self.compute_dtype)

    @override
    def convert_output(self, data: Any) -> Any:
        return as_dtype(data, torch.get_default_dtype())

    @override
    def optimizer_step(self, optimizer: Optimizable, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        with self._discarding():
            result = optimizer.step(**kwargs) if closure is None else optimizer.step(closure=closure, **kwargs)
        self._update_scales()
        return result


class Bf16MixedFabricPrecision(Fp8FabricPrecision, MixedPrecision):
    """Fabric's ``MixedPrecision`` in bf16 with what this package adds."""

    def __init__(self, precision: Any = "bf16-mixed", *args: Any, **kwargs: Any) -> None:
        PrecisionCore.__init__(self, precision, *args, **kwargs)
        MixedPrecision.__init__(self, "bf16-mixed", device=self._device_type())


class Bf16TrueFabricPrecision(Fp8FabricPrecision, HalfPrecision):
    """Fabric's ``HalfPrecision`` in bf16 with what this package adds."""

    def __init__(self, precision: Any = "bf16-true", *args: Any, **kwargs: Any) -> None:
        PrecisionCore.__init__(self, precision, *args, **kwargs)
        HalfPrecision.__init__(self, "bf16-true")


Fp8FabricPrecision._variants = {"bf16-mixed": Bf16MixedFabricPrecision, "bf16-true": Bf16TrueFabricPrecision}


class Fp8FabricFSDPPrecision(Fp8FabricPrecision, FSDPPrecision):
    """:class:`Fp8FabricPrecision` for Fabric's ``FSDPStrategy``."""

    def __init__(self, precision: Any = "fp8-delayed", *args: Any, **kwargs: Any) -> None:
        FSDPPrecision.__init__(self, "bf16-true" if precision == "bf16-true" else "bf16-mixed")
        PrecisionCore.__init__(self, precision, *args, **kwargs)

    @property
    @override
    def mixed_precision_config(self) -> FSDPMixedPrecision:
        return self._fsdp_config()
