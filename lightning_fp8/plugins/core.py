"""What the precision plugins of the Trainer and of Fabric have in common."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from inspect import signature
from typing import Any, ClassVar

import torch
from lightning.fabric.plugins.precision.precision import Precision
from lightning.fabric.utilities.rank_zero import rank_zero_info, rank_zero_only
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecision as FSDPMixedPrecision
from typing_extensions import Self, override

from lightning_fp8.conversion.convert import carry_out, give_settings, is_converted, unconvert
from lightning_fp8.conversion.coverage import coverage
from lightning_fp8.conversion.min_features import MinFeatures, as_agreed_number
from lightning_fp8.conversion.plan import NothingToConvertError, conversion_plan
from lightning_fp8.dtypes.attention import AttentionDtypes, DtypeMismatch
from lightning_fp8.dtypes.encoder import layers_own_forwards
from lightning_fp8.dtypes.storage import agree_inputs, float64_parameter, release_inputs, store_parameters
from lightning_fp8.modules.all_gather import gather_in_fp8, note_sharded_weights
from lightning_fp8.modules.paths import as_patterns, check_patterns, modules_inside
from lightning_fp8.modules.weight_copy import drop_copies, keep_copies
from lightning_fp8.plugins.contexts import autocast, default_dtype
from lightning_fp8.plugins.settings import (
    GemmString,
    PrecisionString,
    as_recipe,
    as_torch_dtype,
    check_dtype_mismatch,
    check_dtypes,
    check_fp8_all_gather,
    check_gemm_of,
    check_min_features_of,
    check_precision,
    check_weight_copy,
)
from lightning_fp8.runtime.warn_once import warn_once
from lightning_fp8.scaling.recipe import DelayedScaling
from lightning_fp8.scaling.state import ScalingState


class PrecisionCore(Precision):
    """Settings, conversion and contexts of the three precisions.

    Args: see :class:`~lightning_fp8.Fp8Precision`.
    """

    # filled in by each family's base class: the class that is also a subclass of Lightning's own plugin
    _variants: ClassVar[dict[str, type[PrecisionCore]]] = {}

    def __new__(cls, precision: PrecisionString = "fp8-delayed", *_: Any, **__: Any) -> Self:
        """Make the variant of this family that belongs to ``precision``."""
        return super().__new__(vars(cls).get("_variants", {}).get(precision, cls))

    def __init__(
        self,
        precision: PrecisionString = "fp8-delayed",
        recipe: DelayedScaling | dict[str, Any] | None = None,
        ignore_modules: Sequence[str] = (),
        param_dtype: torch.dtype | str | None = None,
        compute_dtype: torch.dtype | str = torch.bfloat16,
        keep_fp32: Sequence[str] = (),
        dtype_mismatch: DtypeMismatch = "align",
        weight_copy: bool = False,
        reduce_dtype: torch.dtype | str = torch.float32,
        fp8_all_gather: bool = False,
        gemm: GemmString = "auto",
        min_features: MinFeatures = 0,
    ) -> None:
        check_precision(precision)
        check_dtype_mismatch(dtype_mismatch)
        self.recipe = as_recipe(recipe)
        self.ignore_modules = as_patterns(ignore_modules, "ignore_modules")
        default = torch.bfloat16 if precision == "bf16-true" else torch.float32
        self._asked_param_dtype = None if param_dtype is None else as_torch_dtype("param_dtype", param_dtype)
        self.param_dtype = self._asked_param_dtype or default
        self.compute_dtype = as_torch_dtype("compute_dtype", compute_dtype)
        self.keep_fp32 = as_patterns(keep_fp32, "keep_fp32")
        self.dtype_mismatch = dtype_mismatch
        self.weight_copy = weight_copy
        self.reduce_dtype = as_torch_dtype("reduce_dtype", reduce_dtype)
        check_dtypes(precision, self.param_dtype, self.compute_dtype)
        check_weight_copy(precision, self.param_dtype, weight_copy)
        check_fp8_all_gather(precision, fp8_all_gather)
        check_gemm_of(precision, gemm)
        check_min_features_of(precision, min_features)
        self.fp8_all_gather = fp8_all_gather
        self.gemm = gemm
        self.min_features = min_features
        self.precision = precision  # type: ignore[assignment]
        self._states: list[ScalingState] = []
        # models that have had no forward yet, whose layers may have been sharded since they were converted
        self._not_run: list[weakref.ref[nn.Module]] = []
        self._attention = AttentionDtypes(self.compute_dtype, dtype_mismatch)

    @property
    def settings(self) -> dict[str, Any]:
        """The constructor arguments, to make a plugin of another family with the same behaviour."""
        names = [name for name in signature(PrecisionCore.__init__).parameters if name != "self"]
        return {**{name: getattr(self, name) for name in names}, "param_dtype": self._asked_param_dtype}

    @property
    def _is_fp8(self) -> bool:
        return str(self.precision) == "fp8-delayed"

    @override
    def convert_module(self, module: nn.Module) -> nn.Module:
        for patterns, argument in ((self.ignore_modules, "ignore_modules"), (self.keep_fp32, "keep_fp32")):
            check_patterns(module, patterns, argument)
        others = [known for known in self._attention.models if known() not in (None, module)]
        self._attention.models = [*others, weakref.ref(module)]
        # what an earlier run may have left, under this precision or another
        drop_copies(module)
        release_inputs(module)
        if self._is_fp8:
            self._refuse_float64(module)
            store_parameters(module, self.param_dtype, self.keep_fp32)
            state = self._convert(module)
            if state is not None:
                self._add_state(state)
                self._not_run.append(weakref.ref(module))
        else:
            self._make_plain(module)
            # under bf16-mixed parameters stay as they came, as with Lightning's own, unless a dtype was asked for
            if self.precision == "bf16-true" or self._asked_param_dtype or self.keep_fp32:
                store_parameters(module, self.param_dtype, self.keep_fp32)
            if self.weight_copy:
                keep_copies(module, leave_alone=modules_inside(module, self.keep_fp32))
        agree_inputs(module, self.keep_fp32, under_autocast=self._autocasts)
        return module

    def _refuse_float64(self, module: nn.Module) -> None:
        name = float64_parameter(module)
        if name is not None:
            raise TypeError(
                f"The parameter {name!r} is float64, which `fp8-delayed` would round."
                " Call `model.float()` first if that is what you want."
            )

    def _make_plain(self, module: nn.Module) -> None:
        if is_converted(module):
            rank_zero_info(
                f"The model was converted to FP8 before; for {self.precision!r} its layers become plain again."
            )
            unconvert(module)

    def _convert(self, module: nn.Module) -> ScalingState | None:
        try:
            return self._convert_layers(module)
        except NothingToConvertError as reason:
            # what an earlier run has converted, and these settings leave out
            unconvert(module)
            without_fp8 = "bf16-mixed" if self.compute_dtype == torch.bfloat16 else "32-true"
            rank_zero_only(warn_once)(
                f"fp8-delayed: no layer runs in FP8, and the model computes in {self.compute_dtype}. If you want that,"
                f' `precision="{without_fp8}"` does the same without this warning. The reason: {reason}'
            )
            return None

    def _convert_layers(self, module: nn.Module) -> ScalingState:
        asked = as_agreed_number(self.min_features) if self.min_features else None
        plan = conversion_plan(module, self.recipe, self._not_converted, self.gemm, asked)
        if not plan.converted:
            state = carry_out(plan)
            rank_zero_info(f"fp8-delayed: {coverage(plan)}.")
            return state
        # Converted by the user or by an earlier run: it stays as it is, unless this plugin was told otherwise. Only
        # what runs the GEMMs is each run's own.
        state = plan.state
        if plan.recipe != state.recipe:
            raise ValueError(
                f"The model is already converted with {state.recipe}, but this plugin has {self.recipe}."
                " Call `lightning_fp8.unconvert(model)` first; the scales start anew then."
            )
        if self._not_converted or self.min_features:
            return carry_out(plan)
        give_settings((layer for _, layer in plan.converted), plan.settings)
        return state

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
        """What was recorded in a step that an error ends is no part of the next update."""
        try:
            yield
        except BaseException:
            for state in self._states:
                state.discard()
            raise

    @override
    def tensor_init_context(self) -> AbstractContextManager[Any]:
        if self.precision == "bf16-mixed" and not self._asked_param_dtype:
            return nullcontext()
        return default_dtype(self.param_dtype)

    @override
    def module_init_context(self) -> AbstractContextManager[Any]:
        return self.tensor_init_context()

    @override
    @contextmanager
    def forward_context(self) -> Iterator[None]:  # type: ignore[override]
        """Computation in the compute dtype, encoders without torch's fast path, attention operands in one dtype.

        Contexts of several threads or asyncio tasks may overlap, and end in any order. The attention settings are those
        of the thread or task, autocast is the thread's. torch has one fast path switch for the process and, for
        ``"bf16-true"``, one default dtype: they are as here in all threads until the last such context ends.
        """
        self._look_at_sharding()
        with self._discarding(), self.recomputation_context(), self._autocast():
            yield

    def _look_at_sharding(self) -> None:
        for known in self._not_run:
            module = known()
            if module is None:
                continue
            note_sharded_weights(module)
            if self.fp8_all_gather:
                names = gather_in_fp8(module)
                rank_zero_info(f"fp8-delayed: the weights of {len(names)} layers are gathered in FP8.")
        self._not_run.clear()

    @contextmanager
    def recomputation_context(self) -> Iterator[None]:
        """What a forward needs that runs inside backward; autocast is brought back by the checkpointing itself."""
        in_bf16 = default_dtype(torch.bfloat16) if self.precision == "bf16-true" else nullcontext()
        with layers_own_forwards(), self._attention.context(), in_bf16:
            yield

    @override
    def backward(self, *args: Any, **kwargs: Any) -> None:
        with self._discarding(), self.recomputation_context():
            super().backward(*args, **kwargs)

    def _autocast(self) -> AbstractContextManager[Any]:
        if not self._autocasts:
            return nullcontext()
        return autocast(self._device_type(), self.compute_dtype)

    @property
    def _autocasts(self) -> bool:
        return self.precision != "bf16-true" and self.compute_dtype == torch.bfloat16

    def _fsdp_config(self) -> FSDPMixedPrecision:
        """What is gathered for computation, and what gradients are summed in over the ranks; buffers stay."""
        return FSDPMixedPrecision(param_dtype=self.compute_dtype, reduce_dtype=self.reduce_dtype)

    def _device_type(self) -> str:
        # Asked for at each step: plugins convert a model before the strategy moves it.
        module = self._attention.models[-1]() if self._attention.models else None
        parameter = next(module.parameters(), None) if module is not None else None
        if parameter is not None and parameter.device.type != "meta":
            return parameter.device.type
        return "cuda" if torch.cuda.is_available() else "cpu"


def as_dtype(data: Any, dtype: torch.dtype) -> Any:
    """The floating point tensors of a batch in ``dtype``, everything else as it is."""
    return apply_to_collection(data, Tensor, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)
