"""``"fp8-delayed"`` and the other recipes' strings: layers in FP8, the rest in bf16 by autocast."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_only, rank_zero_warn
from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_fp8.conversion.convert import carry_out_for_run, is_converted, scaling_state, unconvert
from lightning_fp8.conversion.one_state import state_now
from lightning_fp8.conversion.plan import NothingToConvertError, conversion_plan
from lightning_fp8.conversion.rows import coverage
from lightning_fp8.conversion.settings import checked_settings
from lightning_fp8.dtypes.attention import DtypeMismatch
from lightning_fp8.dtypes.storage import float64_parameter, store_parameters
from lightning_fp8.modules.all_gather import gather_in_fp8
from lightning_fp8.modules.base import on_sharded_weights
from lightning_fp8.modules.fp8_parameter import is_frozen
from lightning_fp8.modules.paths import as_patterns
from lightning_fp8.plugins.core import PrecisionCore
from lightning_fp8.plugins.loops import LoopWeights
from lightning_fp8.plugins.settings import (
    FP8_PRECISIONS,
    RecipeOfConfiguration,
    arguments_of,
    as_torch_dtype,
    recipe_argument,
)
from lightning_fp8.runtime.warn_once import warn_once
from lightning_fp8.scaling.config import FrozenWeights
from lightning_fp8.scaling.saved import REMEDY
from lightning_fp8.scaling.state import ScalingState
from lightning_fp8.scalings.recipe import RECIPES, Recipe

_NOT_UNDER_FSDP = "`frozen_weights='fp8'` does not work under FSDP, which shards masters. Use DDP, or keep masters."


class Fp8Precision(PrecisionCore):
    """Precision plugin for FP8 training. Its recipe determines its precision string, by default ``"fp8-delayed"``.

    ``Trainer(precision="fp8-delayed")`` makes a plugin with the defaults; ``"fp8-current"`` stands for
    ``CurrentScaling()``, ``"fp8-block"`` for ``BlockScaling()`` and ``"fp8-mx"`` for ``MXScaling()``. For other
    settings, pass a plugin as ``plugins=`` to a Trainer or to Fabric.

    Linear and attention layers compute in FP8 (:func:`lightning_fp8.convert`), all other operations in bf16 by
    autocast, and parameters are fp32 masters. Scales are updated once per optimizer step, after backward. Evaluation
    scales each tensor by its own values and changes no scale. The scaling state is part of the Lightning checkpoint,
    unless the checkpoint holds weights only. If no layer can run in FP8, or the settings exclude all layers, the model
    trains without FP8, and a warning says why.

    Evaluation runs the same code as training (``nn.TransformerEncoder`` included), and the operands of
    ``scaled_dot_product_attention`` are cast to one dtype, as under :class:`Bf16MixedPrecision` and
    :class:`Bf16TruePrecision`.

    Args:
        recipe: how scales are computed: a :class:`~lightning_fp8.DelayedScaling` (the default), a
            :class:`~lightning_fp8.CurrentScaling`, a :class:`~lightning_fp8.BlockScaling`, an
            :class:`~lightning_fp8.MXScaling`, the precision string of one of them, or a mapping of fields: those of
            ``DelayedScaling``, unless ``precision`` selects another recipe, as in
            ``{"precision": "fp8-current", "margin": 1}``. May be given by position.
        ignore_modules: ``fnmatch`` patterns on module paths; matching modules, and everything inside them, are not
            converted.
        param_dtype: dtype in which parameters are stored, ``torch.float32`` (the default) or ``torch.bfloat16``.
        compute_dtype: dtype of everything that is not FP8, ``torch.bfloat16`` or ``torch.float32``.
        keep_fp32: patterns on module paths; matching modules are stored and run in fp32, are not converted, and
            return outputs in the dtype of their inputs.
        dtype_mismatch: what to do if query, key, value or mask of ``scaled_dot_product_attention`` differ in dtype:
            ``"align"`` casts them to the compute dtype, ``"warn"`` also says where, ``"error"`` raises.
        reduce_dtype: dtype in which FSDP sums gradients over the ranks.
        fp8_all_gather: under ``ModelParallelStrategy`` with ``fully_shard``, gather the weights of converted layers in
            FP8: half the bytes of bf16, bit-identical numbers. These layers cannot fall back.
        min_features: layers with fewer features in or out are not converted: 16 by default, 0 for all. This argument
            and the next two are the same as in :func:`lightning_fp8.convert`. Their defaults leave a converted model as
            it is.
        frozen_weights: ``"fp8"`` keeps only the FP8 cast of frozen weights, one byte per parameter: for adapters on a
            frozen base. Checkpoints hold the rounded values. Not under FSDP.
        overrides: by pattern on module paths, the precision of a layer's products in place of the recipe's, such as
            ``{"blocks.0": "bf16", "*.down": {"wgrad": "bf16"}}``.

    Raises:
        ValueError: for an unsupported value, settings that contradict each other, or a recipe field out of range; at
            set-up for a pattern that matches no module.
        TypeError: for a recipe of another type, a string in place of a sequence of patterns, or an unknown argument.
    """

    precision = "fp8-delayed"
    _patterns = ("ignore_modules", "keep_fp32")

    @arguments_of("Fp8Precision", *FP8_PRECISIONS)
    def __init__(
        self,
        recipe: Recipe | str | dict[str, Any] | None = None,
        *,
        ignore_modules: Sequence[str] = (),
        param_dtype: torch.dtype | str | None = None,
        compute_dtype: torch.dtype | str = torch.bfloat16,
        keep_fp32: Sequence[str] = (),
        dtype_mismatch: DtypeMismatch = "align",
        reduce_dtype: torch.dtype | str = torch.float32,
        fp8_all_gather: bool = False,
        min_features: int | None = None,
        frozen_weights: FrozenWeights | None = None,
        overrides: dict[str, str | dict[str, str]] | None = None,
    ) -> None:
        settings = checked_settings(min_features=min_features, frozen_weights=frozen_weights, overrides=overrides)
        self.recipe = recipe_argument(recipe)
        if self.recipe is not None:
            self.precision = self.recipe.precision
        self.ignore_modules = as_patterns(ignore_modules, "ignore_modules")
        self.param_dtype = torch.float32 if param_dtype is None else as_torch_dtype("param_dtype", param_dtype)
        self.compute_dtype = as_torch_dtype("compute_dtype", compute_dtype)
        if self.compute_dtype == torch.float32 and self.param_dtype == torch.bfloat16:
            raise ValueError("`compute_dtype=torch.float32` needs `param_dtype=torch.float32`, got torch.bfloat16.")
        self.fp8_all_gather = fp8_all_gather
        self.min_features = min_features
        self.frozen_weights = frozen_weights
        self.overrides = settings.get("overrides")
        super().__init__(keep_fp32, dtype_mismatch, reduce_dtype)

    @override
    def _argument(self, name: str) -> Any:
        if name == "param_dtype" and self.param_dtype == torch.float32:
            return None
        if name == "recipe" and self.recipe is None and self.precision != Fp8Precision.precision:
            return self.precision
        return super()._argument(name)

    @override
    def _forget_models(self) -> None:
        super()._forget_models()
        # converted models that have not run a forward yet: their layers may have been sharded since
        self._not_run: list[weakref.ref[nn.Module]] = []
        self._loop_weights = LoopWeights()

    @override
    def check_fsdp(self) -> None:
        if self.frozen_weights == "fp8":
            raise ValueError(_NOT_UNDER_FSDP)

    # Conversion

    @override
    def _prepare(self, module: nn.Module) -> None:
        name = float64_parameter(module)
        if name is not None:
            raise TypeError(
                f"The parameter {name!r} is float64, which `{self.precision}` would round."
                " Call `model.float()` first if that is what you want."
            )
        if self._is_under_fsdp and any(map(is_frozen, module.parameters())):
            raise ValueError(_NOT_UNDER_FSDP)
        # before `store_parameters`, whose dtype may be wider, so that masters to be freed are never cast to it
        is_in_fp8 = self._convert(module)
        store_parameters(module, self.param_dtype, self.keep_fp32)
        if is_in_fp8:
            self._not_run.append(weakref.ref(module))

    def _convert(self, module: nn.Module) -> bool:
        """Convert the model; returns whether any layer runs in FP8."""
        try:
            self._convert_layers(module)
        except NothingToConvertError as reason:
            # layers that an earlier run converted, and that these settings exclude
            unconvert(module)
            without_fp8 = "bf16-mixed" if self.compute_dtype == torch.bfloat16 else "32-true"
            _warn_once(
                f"{self.precision}: no layer runs in FP8, and the model computes in {self.compute_dtype}. If you want"
                f' that, `precision="{without_fp8}"` does the same without this warning. The reason: {reason}'
            )
            return False
        return True

    def _convert_layers(self, module: nn.Module) -> None:
        plan = conversion_plan(
            module,
            self.ignore_modules,
            RECIPES[self.precision],
            self.keep_fp32,
            recipe=self.recipe,
            min_features=self.min_features,
            frozen_weights=self.frozen_weights,
            overrides=self.overrides,
        )
        plan.config.recipe.require_precision(self.precision)
        was_plain = not plan.converted
        state = carry_out_for_run(plan)
        if was_plain:
            _say_once(type(module).__qualname__, f"{self.precision}: {coverage(plan)}.")
            self._say_switched(state)

    def _say_switched(self, state: ScalingState) -> None:
        """Name the layers that a checkpoint has moved to bf16 or to current scaling."""
        moved = ((state.fallbacks, "fell back to bf16"), (state.current_modules, "moved to current scaling"))
        for names, change in moved:
            if names:
                rank_zero_info(
                    f"{self.precision}: {len(names)} layers {change} in the run that saved this checkpoint, and stay"
                    f" there: {', '.join(names)}."
                )

    # Steps

    @property
    def _states(self) -> list[ScalingState]:
        """The scaling states of the model of this Trainer's run, or of all models that Fabric has set up."""
        references = self._attention.models[-1:] if self._trainer is not None else self._attention.models
        models = (model for reference in references if (model := reference()) is not None)
        return [*dict.fromkeys(state for model in models if (state := state_now(model)) is not None)]

    @contextmanager
    def _discarding(self) -> Iterator[None]:
        """If a step fails, discard what it recorded, so that the next update does not use it."""
        try:
            yield
        except BaseException:
            for state in self._states:
                state.discard()
            raise

    @override
    @contextmanager
    def forward_context(self) -> Iterator[None]:
        self._look_at_sharding()
        with self._discarding(), super().forward_context():
            yield

    def _look_at_sharding(self) -> None:
        for reference in self._not_run:
            module = reference()
            if module is None:
                continue
            on_sharded_weights(module)
            if self.fp8_all_gather:
                names = gather_in_fp8(module)
                rank_zero_info(f"{self.precision}: the weights of {len(names)} layers are gathered in FP8.")
        self._not_run.clear()

    @override
    @contextmanager
    def backward_context(self) -> Iterator[None]:
        with self._loop_weights.in_backward(), self._discarding(), super().backward_context():
            yield

    @override
    @contextmanager
    def step_context(self) -> Iterator[None]:
        with self._discarding():
            yield
        for state in self._states:
            state.update()

    # A run of a Trainer

    @override
    def connect(
        self, model: nn.Module, optimizers: list[Optimizer], lr_schedulers: list[Any]
    ) -> tuple[nn.Module, list[Optimizer], list[Any]]:
        self._loop_weights = LoopWeights(model)
        trainer = self._trainer
        is_fit = trainer is not None and trainer.state.fn == TrainerFn.FITTING
        for state in self._states if is_fit else ():
            # a schedule belongs to one run
            state.end_schedule()
        return super().connect(model, optimizers, lr_schedulers)

    @contextmanager
    def _in_loop(self, record: bool) -> Iterator[None]:
        if self._loop_weights.is_first_step(self._trainer):
            self._asked_state()
        with self._loop_weights.in_step(self._trainer, record), self.forward_context():
            yield

    @override
    def train_step_context(self) -> Any:
        return self._in_loop(record=True)

    @override
    def val_step_context(self) -> Any:
        return self._in_loop(record=False)

    @override
    def test_step_context(self) -> Any:
        return self._in_loop(record=False)

    @override
    def predict_step_context(self) -> Any:
        return self._in_loop(record=False)

    @override
    def teardown(self) -> None:
        self._asked_state()
        for state in self._states:
            state.model.notices.on_end(state)
        self._loop_weights.end()
        super().teardown()

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        # Lightning keys a plugin's state by its class name, which differs in a user's subclass
        if "Fp8Precision" in checkpoint:
            checkpoint.setdefault(type(self).__qualname__, checkpoint["Fp8Precision"])

    @override
    def state_dict(self) -> dict[str, Any]:
        """The scaling state, keyed by tensor name; empty before set-up, and if no layer runs in FP8."""
        state = self._asked_state()
        return {} if state is None else state.state_dict()

    def _asked_state(self) -> ScalingState | None:
        """The scaling state of the model. Asking for it warns about layers that were added since."""
        model = self._model
        return scaling_state(model) if model is not None and is_converted(model) else None

    @override
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:  # type: ignore[override]
        strict, state = getattr(self._model, "strict_loading", True), self._asked_state()
        # empty if no layer ran in FP8 in the run that saved it
        if state is not None and state_dict:
            state.load_state_dict(state_dict)
            self._say_switched(state)
        elif state_dict:
            names = ", ".join(map(repr, list(state_dict)[:3]))
            reason = f"The checkpoint has FP8 scales ({names}, ...), but here no layer runs in FP8."
            if strict:
                raise ValueError(f"{reason} {REMEDY}")
            rank_zero_warn(f"{reason} They are skipped.")


@rank_zero_only
def _warn_once(message: str) -> None:
    """Warn in the process of rank 0, at a line of this package."""
    warn_once(message)


@functools.cache
def _say_once(kind: str, message: str) -> None:
    """Log what was converted, once per process and model class, as packages may make a new Trainer for each call."""
    rank_zero_info(message)


# jsonargparse checks configurations against this type. It merges overrides of single fields into mappings only.
Fp8Precision.__init__.__annotations__["recipe"] = RecipeOfConfiguration | dict[str, Any] | None
