"""The precision plugins of ``lightning.pytorch.Trainer``."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.types import Optimizable
from lightning.pytorch.plugins.precision import FSDPPrecision, HalfPrecision, MixedPrecision, Precision
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import GradClipAlgorithmType
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_fp8.conversion.convert import is_converted, scaling_state
from lightning_fp8.plugins.bf16 import Bf16MixedCore, Bf16TrueCore
from lightning_fp8.plugins.core import FSDPCore, PrecisionCore, as_dtype, by_string
from lightning_fp8.plugins.fp8 import Fp8Core
from lightning_fp8.plugins.loops import LoopWeights
from lightning_fp8.scaling.model import Fp8Model
from lightning_fp8.scaling.notices import FORWARDS_BEFORE_TRAINING
from lightning_fp8.scaling.saved import REMEDY, load_entries


class _TrainerPrecision(PrecisionCore, Precision):
    @override
    def convert_input(self, data: Any) -> Any:
        return as_dtype(data, torch.bfloat16) if self.precision == "bf16-true" else data

    @override
    def _clip_gradients(
        self,
        model: Any,
        optimizer: Any,
        clip_val: int | float | None = None,
        gradient_clip_algorithm: GradClipAlgorithmType | None = None,
    ) -> None:
        # Lightning's method clips only for its own LightningModule, and does nothing for that of `pytorch_lightning`
        if model.automatic_optimization:
            values: dict[str, Any] = {"gradient_clip_val": clip_val, "gradient_clip_algorithm": gradient_clip_algorithm}
            call._call_lightning_module_hook(model.trainer, "configure_gradient_clipping", optimizer, **values)


class _Fp8TrainerPrecision(_TrainerPrecision, Fp8Core):
    _loop_weights = LoopWeights()
    _known: Sequence[Fp8Model] = ()

    @override
    def _prepare(self, module: nn.Module) -> None:
        super()._prepare(module)
        # DDP broadcasts them before `connect`: that changes no values
        self._known = [state.model for state in self._states if state.model.look()]

    @override
    def connect(
        self, model: nn.Module, optimizers: list[Optimizer], lr_schedulers: list[Any]
    ) -> tuple[nn.Module, list[Optimizer], list[Any]]:
        # only the state of this model: the plugin may have been used with another one before
        self._states = [scaling_state(model)] if is_converted(model) else []
        for known in self._known:
            known.take_as_known()
        self._known = ()
        self._loop_weights = LoopWeights(model)
        trainer = self._trainer
        self._allow_forwards(math.inf if trainer is not None and trainer.state.fn == TrainerFn.FITTING else 0)
        return model, optimizers, lr_schedulers

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
        with self._loop_weights.in_step(self._trainer, record=True), super().train_step_context():
            yield

    @override
    @contextmanager
    def val_step_context(self) -> Iterator[None]:  # type: ignore[override]
        if self._trainer is not None and not self._trainer.sanity_checking:
            self._allow_forwards(0)
        with self._loop_weights.in_step(self._trainer, record=False), super().val_step_context():
            yield

    @override
    @contextmanager
    def test_step_context(self) -> Iterator[None]:  # type: ignore[override]
        with self._loop_weights.in_step(self._trainer, record=False), super().test_step_context():
            yield

    @override
    @contextmanager
    def predict_step_context(self) -> Iterator[None]:  # type: ignore[override]
        with self._loop_weights.in_step(self._trainer, record=False), super().predict_step_context():
            yield

    @override
    def backward(self, *args: Any, **kwargs: Any) -> None:
        with self._loop_weights.in_backward():
            super().backward(*args, **kwargs)

    @property
    def _model(self) -> nn.Module | None:
        return self._attention.models[-1]() if self._attention.models else None

    @property
    def _trainer(self) -> pl.Trainer | None:
        return getattr(self._model, "_trainer", None)

    def _allow_forwards(self, before_training: float) -> None:
        for state in self._states:
            state.model.notices.forwards_before_training = before_training

    @override
    def teardown(self) -> None:
        self._allow_forwards(FORWARDS_BEFORE_TRAINING)
        for state in self._states:
            state.model.notices.on_end(state)
        self._loop_weights.end()
        super().teardown()

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        # Lightning keys a plugin's state by its class name; a run may be resumed under another strategy's plugin.
        mine = type(self).__qualname__
        for other in ("Fp8Precision", "Fp8FSDPPrecision"):
            if mine not in checkpoint and other in checkpoint:
                checkpoint[mine] = checkpoint[other]

    @override
    def state_dict(self) -> dict[str, Any]:
        """The scaling state, keyed by tensor name: empty before set-up, and where no layer runs in FP8."""
        return self._states[0].state_dict() if self._states else {}

    @override
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:  # type: ignore[override]
        strict = getattr(self._model, "strict_loading", True)
        if self._states:
            load_entries(self._states[0], state_dict, strict)
            self._say_switched(self._states[0])
        elif state_dict:
            names = ", ".join(map(repr, list(state_dict)[:3]))
            reason = f"The checkpoint has FP8 scales ({names}, ...), but here no layer runs in FP8."
            if strict:
                raise ValueError(f"{reason} {REMEDY}")
            rank_zero_warn(f"{reason} They are skipped.")


class Fp8Precision(_Fp8TrainerPrecision):
    """Precision plugin for FP8 training: ``"fp8-delayed"``, or by its recipe ``"fp8-current"`` or ``"fp8-block"``.

    ``Trainer(precision="fp8-delayed")`` makes one with the defaults, ``"fp8-current"`` one with ``CurrentScaling()``,
    and ``"fp8-block"`` one with ``BlockScaling()``; pass one as ``plugins=`` for anything else, to a Trainer or to
    Fabric.

    Linear and attention layers compute in FP8 (:func:`lightning_fp8.convert`), all other operations in bf16 by
    autocast, and parameters are fp32 masters. Scales are updated once per optimizer step, after backward, never in
    evaluation. The scaling state is part of the Lightning checkpoint. A model without a layer that can run in FP8, or
    whose layers the settings all exclude, trains without FP8, and a warning says why.

    Evaluation runs the same code as training (``nn.TransformerEncoder`` included), and the operands of
    ``scaled_dot_product_attention`` are cast to one dtype, as under :class:`Bf16MixedPrecision` and
    :class:`Bf16TruePrecision`.

    Args:
        recipe: how scales are computed: a :class:`~lightning_fp8.DelayedScaling` (the default), a
            :class:`~lightning_fp8.CurrentScaling`, a :class:`~lightning_fp8.BlockScaling`, the precision string of one
            of them, or a mapping of fields: those of ``DelayedScaling``, unless ``precision`` selects another recipe,
            as in ``{"precision": "fp8-current", "margin": 1}``. May be given by position.
        ignore_modules: ``fnmatch`` patterns on module paths; matching modules, and everything inside them, are not
            converted.
        param_dtype: dtype in which parameters are stored, ``torch.float32`` (the default) or ``torch.bfloat16``.
        compute_dtype: dtype of everything that is not FP8, ``torch.bfloat16`` or ``torch.float32``.
        keep_fp32: patterns on module paths; matching modules are stored and run in fp32, are not converted, and
            return outputs in the dtype of their inputs.
        dtype_mismatch: what to do where query, key, value or mask of ``scaled_dot_product_attention`` differ in dtype:
            ``"align"`` casts them to the compute dtype, ``"warn"`` also says where, ``"error"`` raises.
        reduce_dtype: dtype in which FSDP sums gradients over the ranks.
        fp8_all_gather: under ``ModelParallelStrategy`` with ``fully_shard``, gather the weights of converted layers in
            FP8: half the bytes of bf16, bit-identical numbers. These layers cannot fall back.
        gemm: the backend of FP8 GEMMs on a GPU: ``"auto"``, whichever is faster there, measured when a
            product first runs; ``"rawkernel"``, the kernels of this package; ``"cublaslt"``, those of
            ``torch._scaled_mm``.
        min_features: layers with fewer features in or out, in any of their weights, are not converted; 0 converts all.
            None, the default, means 16, and leaves a model that was converted before as it is. A
            checkpoint fits only the layers that were converted.
        adapters: whether the linear layers of PEFT's adapters, such as ``lora_A`` and ``lora_B``, run in FP8 too;
            False leaves a model that was converted before as it is.
        frozen_weights: ``"fp8"`` keeps only the FP8 cast of frozen weights of converted layers, one byte per parameter,
            and frees their masters: for adapters on a frozen base. Checkpoints hold the rounded values. ``"master"``
            keeps masters; None, the default, means ``"master"``, or for a converted model its current setting. See
            :func:`lightning_fp8.convert`. Not under FSDP.
        overrides: by pattern on module paths, the precision of a layer's products in place of the recipe's, such as
            ``{"blocks.0": "bf16", "*.down": {"wgrad": "bf16"}}``; see :func:`lightning_fp8.convert`. None leaves a
            model that was converted before as it is.
        bf16_blocks: how many of the first and of the last blocks of the longest ``nn.ModuleList`` stay in bf16, for
            example ``(1, 1)``; see :func:`lightning_fp8.convert`.

    Raises:
        ValueError: for an unsupported value, settings that contradict each other, a recipe field out of range; at
            set-up for a pattern that matches no module.
        TypeError: for a recipe of another kind, a string in place of a sequence of patterns, an argument that belongs
            to another plugin.
    """


class Bf16MixedPrecision(_TrainerPrecision, Bf16MixedCore, MixedPrecision):  # type: ignore[misc]
    """``"bf16-mixed"``: Lightning's ``MixedPrecision``, with the same numerics, without its dtype errors.

    ``Trainer(precision="bf16-mixed")`` makes one with the defaults, unless Lightning's own was kept
    (:func:`lightning_fp8.register`). Operations run in bf16 by autocast, parameters keep their dtypes.

    Args:
        param_dtype: dtype in which parameters are stored, ``torch.float32`` or ``torch.bfloat16``; by default they
            keep their dtypes.
        keep_fp32: see :class:`Fp8Precision`.
        dtype_mismatch: see :class:`Fp8Precision`.
        weight_copy: keep a bf16 copy of linear and attention weights, made once per optimizer step: one
            cast per step under gradient accumulation, for two more bytes per parameter.
        reduce_dtype: dtype in which FSDP sums gradients over the ranks.

    Raises:
        ValueError: for an unsupported value, ``weight_copy`` of bf16 parameters; at set-up for a pattern that matches
            no module.
        TypeError: for a string in place of a sequence of patterns, an argument that belongs to another plugin.
    """

    @override
    def _init_lightning(self) -> None:
        MixedPrecision.__init__(self, "bf16-mixed", device=self._device_type())

    @override
    def clip_gradients(
        self,
        optimizer: Optimizer,
        clip_val: int | float = 0.0,
        gradient_clip_algorithm: GradClipAlgorithmType = GradClipAlgorithmType.NORM,
    ) -> None:
        # Lightning's method rejects fused optimizers, which unscale gradients themselves: in bf16 none are scaled
        Precision.clip_gradients(self, optimizer, clip_val, gradient_clip_algorithm)


class Bf16TruePrecision(_TrainerPrecision, Bf16TrueCore, HalfPrecision):  # type: ignore[misc]
    """``"bf16-true"``: Lightning's ``HalfPrecision`` in bf16, with the same numerics, without its dtype errors.

    ``Trainer(precision="bf16-true")`` makes one with the defaults, unless Lightning's own was kept
    (:func:`lightning_fp8.register`). Parameters are stored in bf16, and everything computes in it.

    Args:
        keep_fp32: see :class:`Fp8Precision`.
        dtype_mismatch: see :class:`Fp8Precision`.
        reduce_dtype: dtype in which FSDP sums gradients over the ranks.

    Raises:
        ValueError: for an unsupported value; at set-up for a pattern that matches no module.
        TypeError: for a string in place of a sequence of patterns, an argument that belongs to another plugin.
    """

    @override
    def _init_lightning(self) -> None:
        HalfPrecision.__init__(self, "bf16-true")


class _FSDP(FSDPCore, _TrainerPrecision, FSDPPrecision):
    _lightnings = FSDPPrecision


class Fp8FSDPPrecision(_Fp8TrainerPrecision, _FSDP):
    """:class:`Fp8Precision` for ``FSDPStrategy``: parameters are gathered in bf16, gradients are reduced in fp32.

    ``compute_dtype`` and ``reduce_dtype`` change these.
    """


class Bf16MixedFSDPPrecision(_FSDP, Bf16MixedCore):
    """:class:`Bf16MixedPrecision` for ``FSDPStrategy``."""


class Bf16TrueFSDPPrecision(_FSDP, Bf16TrueCore):
    """:class:`Bf16TruePrecision` for ``FSDPStrategy``."""


PLUGINS = by_string(Fp8Precision, Bf16MixedPrecision, Bf16TruePrecision)
FSDP_PLUGINS = by_string(Fp8FSDPPrecision, Bf16MixedFSDPPrecision, Bf16TrueFSDPPrecision)
