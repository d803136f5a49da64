"""The precision plugins of ``lightning.pytorch.Trainer``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.types import Optimizable
from lightning.pytorch.plugins.precision import FSDPPrecision, HalfPrecision, MixedPrecision, Precision
from lightning.pytorch.utilities import GradClipAlgorithmType
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import nn
from torch.distributed.fsdp import MixedPrecision as FSDPMixedPrecision
from torch.optim import Optimizer
from typing_extensions import override

from lightning_fp8.conversion.convert import is_converted, scaling_state
from lightning_fp8.plugins.core import PrecisionCore, as_dtype


class _TrainerPrecision(PrecisionCore, Precision):
    @override
    def connect(
        self, model: nn.Module, optimizers: list[Optimizer], lr_schedulers: list[Any]
    ) -> tuple[nn.Module, list[Optimizer], list[Any]]:
        if self._is_fp8:
            # the state of this model and no other: the plugin may have served another one before
            self._states = [scaling_state(model)] if is_converted(model) else []
        return model, optimizers, lr_schedulers

    @override
    def convert_input(self, data: Any) -> Any:
        return as_dtype(data, torch.bfloat16) if self.precision == "bf16-true" else data

    @override
    def optimizer_step(  # type: ignore[override]
        self, optimizer: Optimizable, model: pl.LightningModule, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        # once, however often the optimizer calls the closure
        with self._discarding():
            result = super().optimizer_step(optimizer, model=model, closure=closure, **kwargs)
        self._update_scales()
        return result

    @override
    @contextmanager
    def train_step_context(self) -> Iterator[None]:  # type: ignore[override]
        # teachers and target networks are evaluated before the first update as well
        with self._silent(), super().train_step_context():
            yield

    @override
    @contextmanager
    def val_step_context(self) -> Iterator[None]:  # type: ignore[override]
        model = self._attention.models[-1]() if self._attention.models else None
        is_sanity_check = (
            isinstance(model, pl.LightningModule) and model._trainer is not None and model._trainer.sanity_checking
        )
        with self._silent() if is_sanity_check else nullcontext(), super().val_step_context():
            yield

    @contextmanager
    def _silent(self) -> Iterator[None]:
        with ExitStack() as stack:
            for state in self._states:
                stack.enter_context(state.notices.silent())
            yield

    @override
    def teardown(self) -> None:
        for state in self._states:
            state.notices.see_end(state)
        super().teardown()

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        # Lightning keys a plugin's state by its class name; a run may be resumed under another strategy's plugin.
        mine = type(self).__qualname__
        for other in ("Fp8Precision", "Fp8FSDPPrecision"):
            if self._is_fp8 and mine not in checkpoint and other in checkpoint:
                checkpoint[mine] = checkpoint[other]

    @override
    def state_dict(self) -> dict[str, Any]:
        """The scaling state, keyed by tensor name: empty before set-up, and where no layer runs in FP8."""
        return self._states[0].state_dict() if self._states else {}

    @override
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:  # type: ignore[override]
        if not self._states:
            if self._is_fp8 and state_dict:
                raise ValueError(
                    f"The checkpoint has FP8 scales ({', '.join(list(state_dict)[:3])}, ...), and here no layer runs in"
                    " FP8. Convert the same modules as in the run that saved it (`ignore_modules`, `min_features`), or"
                    " load the weights only."
                )
            return
        self._states[0].load_state_dict(state_dict)
        fallen = self._states[0].fallbacks
        if fallen:
            rank_zero_info(
                f"fp8-delayed: {len(fallen)} layers fell back to bf16 in the run that saved this checkpoint, and stay"
                f" there: {', '.join(fallen)}."
            )


class Fp8Precision(_TrainerPrecision):
    """Precision plugin for FP8 training with delayed scaling, and for bf16.

    ``Trainer(precision="fp8-delayed")`` makes one with the defaults; pass one as ``plugins=`` for anything else.

    In ``"fp8-delayed"`` linear and attention layers compute in FP8 (:func:`lightning_fp8.convert`), all other
    operations in bf16 by autocast, and parameters are fp32 masters. Scales are updated once per optimizer step, after
    backward; evaluation moves none. The scaling state is part of the Lightning checkpoint. A model without a layer that
    can run in FP8, or whose layers the settings all leave out, trains without FP8, and a warning says why.

    With ``precision="bf16-mixed"`` or ``"bf16-true"`` the plugin is also an instance of Lightning's ``MixedPrecision``
    or ``HalfPrecision`` and trains with the numbers of these.

    In all three, evaluation runs what training runs (``nn.TransformerEncoder`` included), and the operands of
    ``scaled_dot_product_attention`` come in one dtype.

    Args:
        precision: ``"fp8-delayed"``, ``"bf16-mixed"`` or ``"bf16-true"``.
        recipe: how scales follow the tensors, as :class:`~lightning_fp8.DelayedScaling` or a mapping of its fields.
        ignore_modules: ``fnmatch`` patterns on module paths; what they match, and what is inside, is not converted.
        param_dtype: dtype in which parameters are stored, ``torch.float32`` or ``torch.bfloat16``. Without it: bf16 in
            ``"bf16-true"``, fp32 masters in ``"fp8-delayed"``, as they came in ``"bf16-mixed"``.
        compute_dtype: dtype of everything that is not FP8; ``torch.float32`` is for ``"fp8-delayed"`` only.
        keep_fp32: patterns on module paths; what they match is stored and runs in fp32, is not converted, and gives
            its outputs in the dtype of its input.
        dtype_mismatch: what to do where query, key, value or mask of ``scaled_dot_product_attention`` differ in dtype:
            ``"align"`` brings them to the compute dtype, ``"warn"`` also says where, ``"error"`` raises.
        weight_copy: for ``"bf16-mixed"``, keep a bf16 copy of linear and attention weights, made once per optimizer
            step: gradient accumulation pays for the cast once, two bytes a parameter pay for it.
        reduce_dtype: dtype in which FSDP sums gradients over the ranks.
        fp8_all_gather: for ``"fp8-delayed"`` under ``ModelParallelStrategy`` with ``fully_shard``: gather the weights
            of converted layers in FP8, half the bytes of bf16, with the same numbers bit for bit. These layers cannot
            fall back.
        gemm: for ``"fp8-delayed"``, what runs the FP8 GEMMs on a GPU: ``"auto"``, whichever was measured to be faster
            there (``python -m lightning_fp8 tune`` measures); ``"rawkernel"``, the kernels of this package;
            ``"cublaslt"``, those of ``torch._scaled_mm``.
        min_features: for ``"fp8-delayed"``, layers with fewer features in or out, in any of their weights, are not
            converted; 0 leaves a model that was converted before as it is. ``"auto"`` is the size from which FP8 was
            measured to be faster on the process's GPU (``python -m lightning_fp8 tune --min-features`` measures),
            unmeasured an estimate of 1024; on a machine without a GPU it is 0. It may be another one on another GPU,
            and a checkpoint belongs to the layers that were converted: give the number, which is logged, to resume
            there.

    Raises:
        ValueError: for another precision, dtype or word, settings that contradict each other, a recipe field outside
            its rule; at set-up for a pattern that matches no module.
        TypeError: for a recipe of another kind, a string in place of a sequence of patterns.
    """


class Bf16MixedPrecision(Fp8Precision, MixedPrecision):  # type: ignore[misc]
    """``Fp8Precision(precision="bf16-mixed")``: Lightning's ``MixedPrecision`` with what this package adds."""

    def __init__(self, precision: Any = "bf16-mixed", *args: Any, **kwargs: Any) -> None:
        Fp8Precision.__init__(self, precision, *args, **kwargs)
        MixedPrecision.__init__(self, "bf16-mixed", device=self._device_type())

    @override
    def clip_gradients(
        self,
        optimizer: Optimizer,
        clip_val: int | float = 0.0,
        gradient_clip_algorithm: GradClipAlgorithmType = GradClipAlgorithmType.NORM,
    ) -> None:
        # Lightning's own refuses fused optimizers, as they would unscale gradients themselves: in bf16 none are scaled
        Precision.clip_gradients(self, optimizer, clip_val, gradient_clip_algorithm)


class Bf16TruePrecision(Fp8Precision, HalfPrecision):  # type: ignore[misc]
    """``Fp8Precision(precision="bf16-true")``: Lightning's ``HalfPrecision`` with what this package adds."""

    def __init__(self, precision: Any = "bf16-true", *args: Any, **kwargs: Any) -> None:
        Fp8Precision.__init__(self, precision, *args, **kwargs)
        HalfPrecision.__init__(self, "bf16-true")


Fp8Precision._variants = {"bf16-mixed": Bf16MixedPrecision, "bf16-true": Bf16TruePrecision}


class Fp8FSDPPrecision(_TrainerPrecision, FSDPPrecision):
    """:class:`Fp8Precision` for ``FSDPStrategy``: parameters are gathered in bf16, gradients are reduced in fp32.

    ``compute_dtype`` and ``reduce_dtype`` say otherwise.
    """

    def __init__(self, precision: Any = "fp8-delayed", *args: Any, **kwargs: Any) -> None:
        FSDPPrecision.__init__(self, "bf16-true" if precision == "bf16-true" else "bf16-mixed")
        PrecisionCore.__init__(self, precision, *args, **kwargs)

    @property
    @override
    def mixed_precision_config(self) -> FSDPMixedPrecision:
        return self._fsdp_config()
