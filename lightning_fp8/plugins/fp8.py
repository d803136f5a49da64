"""The ``"fp8-"`` precisions: layers in FP8, the rest in bf16 by autocast, over fp32 masters."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from lightning.fabric.utilities.rank_zero import rank_zero_info
from torch import nn
from typing_extensions import override

from lightning_fp8.conversion.convert import carry_out_for_run, unconvert
from lightning_fp8.conversion.coverage import coverage
from lightning_fp8.conversion.plan import NothingToConvertError, conversion_plan
from lightning_fp8.conversion.settings import checked_settings
from lightning_fp8.dtypes.attention import DtypeMismatch
from lightning_fp8.dtypes.storage import float64_parameter, store_parameters
from lightning_fp8.modules.all_gather import gather_in_fp8, note_sharded_weights
from lightning_fp8.modules.paths import as_patterns
from lightning_fp8.plugins.arguments import arguments_of, recipe_argument
from lightning_fp8.plugins.core import FSDPCore, PrecisionCore
from lightning_fp8.plugins.notices import warn_first_process_once
from lightning_fp8.plugins.settings import FP8_PRECISIONS, GemmString, as_torch_dtype
from lightning_fp8.scaling.config import FrozenWeights
from lightning_fp8.scaling.recipe import RECIPES, Recipe
from lightning_fp8.scaling.state import ScalingState


class Fp8Core(PrecisionCore):
    """Converts models, and holds the scaling states of the converted ones.

    Args: see :class:`~lightning_fp8.Fp8Precision`.
    """

    precision = "fp8-delayed"
    precisions = FP8_PRECISIONS
    _patterns = ("ignore_modules", "keep_fp32")

    @arguments_of(*FP8_PRECISIONS)
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
        gemm: GemmString = "auto",
        min_features: int | None = None,
        adapters: bool = False,
        frozen_weights: FrozenWeights | None = None,
        overrides: dict[str, str | dict[str, str]] | None = None,
        bf16_blocks: tuple[int, int] | None = None,
    ) -> None:
        given = checked_settings(
            gemm=gemm,
            min_features=min_features,
            frozen_weights=frozen_weights,
            overrides=overrides,
            bf16_blocks=bf16_blocks,
        )
        if frozen_weights == "fp8" and isinstance(self, FSDPCore):
            raise ValueError(
                "`frozen_weights='fp8'` does not work under FSDP, which shards masters. Use DDP, or leave the argument"
                " out."
            )
        self.recipe = recipe_argument(recipe)
        if self.recipe is not None:
            self.precision = self.recipe.precision
        self.ignore_modules = as_patterns(ignore_modules, "ignore_modules")
        self.param_dtype = torch.float32 if param_dtype is None else as_torch_dtype("param_dtype", param_dtype)
        self.compute_dtype = as_torch_dtype("compute_dtype", compute_dtype)
        if self.compute_dtype == torch.float32 and self.param_dtype == torch.bfloat16:
            raise ValueError("`compute_dtype=torch.float32` needs `param_dtype=torch.float32`, got torch.bfloat16.")
        self.fp8_all_gather = fp8_all_gather
        self.gemm = gemm
        self.min_features = min_features
        self.adapters = adapters
        self.frozen_weights = frozen_weights
        self.overrides, self.bf16_blocks = given.get("overrides"), given.get("bf16_blocks")
        self._states: list[ScalingState] = []
        # converted models without a forward so far: their layers may have been sharded since
        self._not_run: list[weakref.ref[nn.Module]] = []
        super().__init__(keep_fp32, dtype_mismatch, reduce_dtype)

    @override
    def _prepare(self, module: nn.Module) -> None:
        self._refuse_float64(module)
        # before `store_parameters`, whose dtype may be wider: masters that are freed are never cast to it
        state = self._convert(module)
        store_parameters(module, self.param_dtype, self.keep_fp32)
        if state is not None:
            self._add_state(state)
            self._not_run.append(weakref.ref(module))

    def _refuse_float64(self, module: nn.Module) -> None:
        name = float64_parameter(module)
        if name is not None:
            raise TypeError(
                f"The parameter {name!r} is float64, which `{self.precision}` would round."
                " Call `model.float()` first if that is what you want."
            )

    def _convert(self, module: nn.Module) -> ScalingState | None:
        try:
            return self._convert_layers(module)
        except NothingToConvertError as reason:
            # layers that an earlier run converted, and that these settings exclude
            unconvert(module)
            without_fp8 = "bf16-mixed" if self.compute_dtype == torch.bfloat16 else "32-true"
            warn_first_process_once(
                f"{self.precision}: no layer runs in FP8, and the model computes in {self.compute_dtype}. If you want"
                f' that, `precision="{without_fp8}"` does the same without this warning. The reason: {reason}'
            )
            return None

    def _convert_layers(self, module: nn.Module) -> ScalingState:
        plan = conversion_plan(
            module,
            self._not_converted,
            RECIPES[self.precision],
            recipe=self.recipe,
            gemm=self.gemm,
            min_features=self.min_features,
            adapters=self.adapters or None,
            frozen_weights=self.frozen_weights,
            overrides=self.overrides,
            bf16_blocks=self.bf16_blocks,
        )
        recipe = plan.config.recipe
        if recipe.precision != self.precision:
            raise ValueError(
                f"The model is already converted with {recipe}, but this run has precision={self.precision!r}."
                f" Pass `precision={recipe.precision!r}`, or call `lightning_fp8.unconvert(model)` first."
            )
        was_plain = not plan.converted
        state = carry_out_for_run(plan)
        if was_plain:
            _say_once(type(module).__qualname__, f"{self.precision}: {coverage(plan)}.")
            self._say_switched(state)
        return state

    def _say_switched(self, state: ScalingState) -> None:
        """Name the layers that a checkpoint has moved to bf16 or to current scaling."""
        fallen = state.fallbacks
        current = [name for name in state.current_modules if name not in fallen]
        for names, what in ((fallen, "fell back to bf16"), (current, "moved to current scaling")):
            if names:
                rank_zero_info(
                    f"{self.precision}: {len(names)} layers {what} in the run that saved this checkpoint, and stay"
                    f" there: {', '.join(names)}."
                )

    @property
    def _not_converted(self) -> tuple[str, ...]:
        return (*self.ignore_modules, *self.keep_fp32)

    def _add_state(self, state: ScalingState) -> None:
        if not any(state is known for known in self._states):
            self._states.append(state)

    def _update_scales(self) -> None:
        for state in self._states:
            state.update()

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

    @override
    def backward(self, *args: Any, **kwargs: Any) -> None:
        with self._discarding():
            super().backward(*args, **kwargs)

    def _look_at_sharding(self) -> None:
        for known in self._not_run:
            module = known()
            if module is None:
                continue
            note_sharded_weights(module)
            if self.fp8_all_gather:
                names = gather_in_fp8(module)
                rank_zero_info(f"{self.precision}: the weights of {len(names)} layers are gathered in FP8.")
        self._not_run.clear()


@functools.cache
def _say_once(kind: str, message: str) -> None:
    """Log what was converted, once in a process for each class of model: packages make a new Trainer for each call."""
    rank_zero_info(message)


# Configurations give mappings alone: after `recipe=fp8-current`, jsonargparse would take `recipe.margin=1` for all of
# the recipe, and of a class it keeps only the fields, which may be those of another class.
Fp8Core.__init__.__annotations__["recipe"] = dict[str, Any] | None
