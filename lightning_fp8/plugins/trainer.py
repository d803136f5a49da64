"""The precision plugins of ``lightning.pytorch.Trainer``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.types import Optimizable
from lightning.pytorch.plugins.precision import FSDPPrecision, HalfPrecision, MixedPrecision, Precision
from torch import nn
from torch.distributed.fsdp import MixedPrecision as FSDPMixedPrecision
from torch.optim import Optimizer
from typing_extensions import override

from lightning_fp8.convert import scaling_state
from lightning_fp8.plugins.core import PrecisionCore, as_dtype, fsdp_mixed_precision


class _TrainerPrecision(PrecisionCore, Precision):
    @override
    def connect(
        self, model: nn.Module, optimizers: list[Optimizer], lr_schedulers: list[Any]
    ) -> tuple[nn.Module, list[Optimizer], list[Any]]:
        if self._is_fp8:
            # the state of this model and no other: the plugin may have served another one before
            self._states = [scaling_state(model)]
        return model, optimizers, lr_schedulers

    @override
    def convert_input(self, data: Any) -> Any:
        return as_dtype(data, torch.bfloat16) if self.precision == "bf16-true" else data

    @override
    def optimizer_step(  # type: ignore[override]
        self, optimizer: Optimizable, model: pl.LightningModule, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        closure = self._updating_scales(closure)
        return super().optimizer_step(optimizer, model=model, closure=closure, **kwargs)

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        # Lightning keys a plugin's state by its class name; a run may be resumed under another strategy's plugin.
        mine = type(self).__qualname__
        for other in ("Fp8Precision", "Fp8FSDPPrecision"):
            if self._is_fp8 and mine not in checkpoint and other in checkpoint:
                checkpoint[mine] = checkpoint[other]

    @override
    def state_dict(self) -> dict[str, Any]:
        """The scaling state, keyed by tensor name: empty before set-up and in the bf16 precisions."""
        return self._states[0].state_dict() if self._states else {}

    @override
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:  # type: ignore[override]
        if self._states:
            self._states[0].load_state_dict(state_dict)


class Fp8Precision(_TrainerPrecision):
    """Precision plugin for FP8 training with delayed scaling, and for bf16.

    ``Trainer(precision="fp8-delayed")`` makes one with the defaults; pass one as ``plugins=`` for anything else.

    In ``"fp8-delayed"`` every ``nn.Linear`` computes in FP8 (:func:`lightning_fp8.convert`), all other operations in
    bf16 by autocast, and parameters are fp32 masters. Scales are updated once per optimizer step, after backward;
    evaluation moves none. The scaling state is part of the Lightning checkpoint.

    With ``precision="bf16-mixed"`` or ``"bf16-true"`` the plugin is also an instance of Lightning's ``MixedPrecision``
    or ``HalfPrecision`` and does what these do.

    Args:
        precision: ``"fp8-delayed"``, ``"bf16-mixed"`` or ``"bf16-true"``. The other arguments concern the first only.
        recipe: how scales follow the tensors, as :class:`~lightning_fp8.DelayedScaling` or a mapping of its fields.
        ignore_modules: ``fnmatch`` patterns on module paths; what they match is not converted.
        param_dtype: dtype in which parameters are stored, ``torch.float32`` (masters) or ``torch.bfloat16``.

    Raises:
        ValueError: for another precision or ``param_dtype``, or a recipe field outside its rule.
        TypeError: for a recipe of another kind.
    """


class Bf16MixedPrecision(Fp8Precision, MixedPrecision):  # type: ignore[misc]
    """``Fp8Precision(precision="bf16-mixed")``: Lightning's ``MixedPrecision`` with what this package adds."""

    def __init__(self, precision: Any = "bf16-mixed", *args: Any, **kwargs: Any) -> None:
        Fp8Precision.__init__(self, precision, *args, **kwargs)
        MixedPrecision.__init__(self, "bf16-mixed", device=self._device_type())


class Bf16TruePrecision(Fp8Precision, HalfPrecision):  # type: ignore[misc]
    """``Fp8Precision(precision="bf16-true")``: Lightning's ``HalfPrecision`` with what this package adds."""

    def __init__(self, precision: Any = "bf16-true", *args: Any, **kwargs: Any) -> None:
        Fp8Precision.__init__(self, precision, *args, **kwargs)
        HalfPrecision.__init__(self, "bf16-true")


Fp8Precision._variants = {"bf16-mixed": Bf16MixedPrecision, "bf16-true": Bf16TruePrecision}


class Fp8FSDPPrecision(_TrainerPrecision, FSDPPrecision):
    """:class:`Fp8Precision` for ``FSDPStrategy``: parameters are gathered in bf16, gradients are reduced in fp32."""

    def __init__(self, precision: Any = "fp8-delayed", *args: Any, **kwargs: Any) -> None:
        FSDPPrecision.__init__(self, "bf16-true" if precision == "bf16-true" else "bf16-mixed")
        PrecisionCore.__init__(self, precision, *args, **kwargs)

    @property
    @override
    def mixed_precision_config(self) -> FSDPMixedPrecision:
        return fsdp_mixed_precision()
