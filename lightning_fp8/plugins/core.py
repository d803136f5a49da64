"""What the precision plugins of the Trainer and of Fabric have in common."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ClassVar, Literal, get_args

import torch
from lightning.fabric.plugins.precision.precision import Precision
from lightning.fabric.utilities.rank_zero import rank_zero_info
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecision as FSDPMixedPrecision
from typing_extensions import Self, override

from lightning_fp8.convert import convert, describe, is_converted, scaling_state, unconvert
from lightning_fp8.recipe import DelayedScaling
from lightning_fp8.scaling import ScalingState

PrecisionString = Literal["fp8-delayed", "bf16-mixed", "bf16-true"]
PRECISIONS: tuple[PrecisionString, ...] = get_args(PrecisionString)
# fp16 masters are refused: without loss scaling their gradients underflow
_PARAM_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class PrecisionCore(Precision):
    """Settings, conversion and contexts of the three precisions.

    Args:
        precision: ``"fp8-delayed"``, ``"bf16-mixed"`` or ``"bf16-true"``.
        recipe: how scales follow the tensors, as :class:`~lightning_fp8.DelayedScaling` or a mapping of its fields.
        ignore_modules: ``fnmatch`` patterns on module paths; what they match is not converted.
        param_dtype: dtype in which parameters are stored, ``torch.float32`` (masters) or ``torch.bfloat16``.

    ``recipe``, ``ignore_modules`` and ``param_dtype`` concern ``"fp8-delayed"`` only.

    Raises:
        ValueError: for another precision or ``param_dtype``, or a recipe field outside its rule.
        TypeError: for a recipe of another kind.
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
        param_dtype: torch.dtype | str = torch.float32,
    ) -> None:
        if precision not in PRECISIONS:
            raise ValueError(f"`precision` must be one of {', '.join(map(repr, PRECISIONS))}, got {precision!r}.")
        if isinstance(ignore_modules, str):
            raise TypeError(f"`ignore_modules` must be a sequence of patterns, got the string {ignore_modules!r}.")
        self.recipe = _as_recipe(recipe)
        self.ignore_modules = tuple(ignore_modules)
        self.param_dtype = _as_param_dtype(param_dtype)
        self._states: list[ScalingState] = []
        self._module: weakref.ref[nn.Module] | None = None
        self.precision = precision  # type: ignore[assignment]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_module": None}  # a weak reference cannot be pickled, as launchers that spawn do

    @property
    def settings(self) -> dict[str, Any]:
        """The constructor arguments, to make a plugin of another family with the same behaviour."""
        return {
            "precision": self.precision,
            "recipe": self.recipe,
            "ignore_modules": self.ignore_modules,
            "param_dtype": self.param_dtype,
        }

    @property
    def _is_fp8(self) -> bool:
        return str(self.precision) == "fp8-delayed"

    @override
    def convert_module(self, module: nn.Module) -> nn.Module:
        self._module = weakref.ref(module)
        if self._is_fp8:
            _store_parameters_as(module, self.param_dtype)
            self._convert(module)
            self._add_state(scaling_state(module))
            return module
        if is_converted(module):
            rank_zero_info(
                f"The model was converted to FP8 before; for {self.precision!r} its layers become plain again."
            )
            unconvert(module)
        return module.to(torch.bfloat16) if self.precision == "bf16-true" else module

    def _convert(self, module: nn.Module) -> None:
        if not is_converted(module):
            convert(module, self.recipe, self.ignore_modules)
            rows = describe(module)
            rank_zero_info(
                f"fp8-delayed: {sum(row.converted for row in rows)} of {len(rows)} linear layers run in FP8."
            )
            return
        # Converted by the user or by an earlier run: it stays as it is, unless this plugin was told otherwise.
        existing = scaling_state(module).recipe
        if self.recipe is not None and self.recipe != existing:
            raise ValueError(
                f"The model is already converted with {existing}, but this plugin has {self.recipe}."
                " Call `lightning_fp8.unconvert(model)` first; the scales start anew then."
            )
        if self.ignore_modules:
            convert(module, existing, self.ignore_modules)

    def _add_state(self, state: ScalingState) -> None:
        if not any(state is known for known in self._states):
            self._states.append(state)

    def _update_scales(self) -> None:
        for state in self._states:
            state.update()

    def _updating_scales(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        def closure_then_update() -> Any:
            # The closure runs forward and backward (in manual optimization they have run before); weights change next.
            result = closure()
            self._update_scales()
            return result

        return closure_then_update

    @override
    def tensor_init_context(self) -> AbstractContextManager[Any]:
        if self.precision == "bf16-mixed":
            return nullcontext()
        return _default_dtype(self.param_dtype if self._is_fp8 else torch.bfloat16)

    @override
    def module_init_context(self) -> AbstractContextManager[Any]:
        return self.tensor_init_context()

    @override
    def forward_context(self) -> AbstractContextManager[Any]:
        if self.precision == "bf16-true":
            return _default_dtype(torch.bfloat16)
        autocast = torch.autocast(self._device_type(), dtype=torch.bfloat16, cache_enabled=False)
        return _layers_own_forwards(autocast) if self._is_fp8 else autocast

    def _device_type(self) -> str:
        # Asked for at each step: plugins convert a model before the strategy moves it.
        module = self._module() if self._module is not None else None
        parameter = next(module.parameters(), None) if module is not None else None
        if parameter is not None and parameter.device.type != "meta":
            return parameter.device.type
        return "cuda" if torch.cuda.is_available() else "cpu"


def as_dtype(data: Any, dtype: torch.dtype) -> Any:
    """The floating point tensors of a batch in ``dtype``, everything else as it is."""
    return apply_to_collection(data, Tensor, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)


def fsdp_mixed_precision() -> FSDPMixedPrecision:
    """bf16 for computation, fp32 for the sum over ranks; buffers as they are."""
    return FSDPMixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


@contextmanager
def _layers_own_forwards(inner: AbstractContextManager[Any]) -> Iterator[None]:
    """``inner`` without the fast path that ``nn.TransformerEncoder`` takes in evaluation.

    It reads the weights of ``linear1`` and ``linear2`` directly: validation would measure another model than training.
    """
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with inner:
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _as_recipe(recipe: Any) -> DelayedScaling | None:
    if isinstance(recipe, Mapping):
        return DelayedScaling(**recipe)
    if recipe is None or isinstance(recipe, DelayedScaling):
        return recipe
    raise TypeError(f"`recipe` must be a DelayedScaling or a mapping of its fields, got {recipe!r}.")


def _as_param_dtype(dtype: torch.dtype | str) -> torch.dtype:
    name = str(dtype).removeprefix("torch.")
    if name not in _PARAM_DTYPES:
        raise ValueError(f"`param_dtype` must be torch.float32 or torch.bfloat16, got {dtype!r}.")
    return _PARAM_DTYPES[name]


def _store_parameters_as(module: nn.Module, dtype: torch.dtype) -> None:
    """Give every floating point parameter the storage dtype, on the same ``Parameter`` objects. Buffers stay."""
    for name, parameter in module.named_parameters():
        if parameter.dtype == torch.float64:
            raise TypeError(
                f"The parameter {name!r} is float64, which `fp8-delayed` would round."
                " Call `model.float()` first if that is what you want."
            )
        if parameter.is_floating_point() and parameter.dtype != dtype and parameter.element_size() >= 2:
            parameter.data = parameter.data.to(dtype)
