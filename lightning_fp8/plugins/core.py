"""The base class of the precision plugins of all modes."""

from __future__ import annotations

import copy
import weakref
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from inspect import signature
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.precision import FSDPPrecision, Precision
from lightning.pytorch.trainer import call
from lightning.pytorch.utilities import GradClipAlgorithmType
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecision as FSDPMixedPrecision
from torch.optim import Optimizer
from typing_extensions import Self, override

from lightning_fp8.dtypes.attention import DTYPE_MISMATCH, AttentionDtypes, DtypeMismatch
from lightning_fp8.dtypes.encoder import layers_own_forwards
from lightning_fp8.dtypes.storage import agree_inputs, release_inputs
from lightning_fp8.modules.paths import as_patterns, check_patterns_among, named_modules
from lightning_fp8.plugins.settings import as_torch_dtype
from lightning_fp8.runtime.choice import check_choice
from lightning_fp8.runtime.switch import Switch, default_dtype

_RUNS: weakref.WeakKeyDictionary[Any, ExitStack] = weakref.WeakKeyDictionary()  # they cannot be pickled with a plugin


class PrecisionCore(FSDPPrecision):
    """Contexts and dtypes that all modes share; a subclass is one mode and prepares models for it.

    One object serves a Trainer with any strategy: ``FSDPStrategy`` requires Lightning's ``FSDPPrecision``, whose own
    contexts and dtypes are all replaced. For Fabric, see :class:`~lightning_fp8.plugins.fabric.FabricPrecision`.

    Attributes:
        precision: the precision string of the mode.
        param_dtype: dtype in which parameters are stored.
        compute_dtype: dtype of everything that is not FP8.
    """

    precision: Any
    param_dtype: torch.dtype
    compute_dtype = torch.bfloat16
    # arguments that are patterns on module paths
    _patterns: tuple[str, ...] = ("keep_fp32",)

    def __init__(
        self, keep_fp32: Sequence[str], dtype_mismatch: DtypeMismatch, reduce_dtype: torch.dtype | str
    ) -> None:
        check_choice("`dtype_mismatch`", dtype_mismatch, DTYPE_MISMATCH)
        precision = self.precision
        # Lightning's plugin has no FP8
        FSDPPrecision.__init__(self, "bf16-true" if precision == "bf16-true" else "bf16-mixed")
        self.precision = precision
        self.keep_fp32 = as_patterns(keep_fp32, "keep_fp32")
        self.dtype_mismatch = dtype_mismatch
        self.reduce_dtype = as_torch_dtype("reduce_dtype", reduce_dtype)
        self._forget_models()

    def __repr__(self) -> str:
        ours = next(kind for kind in type(self).__mro__ if kind.__module__.startswith("lightning_fp8."))
        parameters = [*signature(ours).parameters.values()]
        values = {parameter.name: self._argument(parameter.name) for parameter in parameters}
        shown = (f"{p.name}={values[p.name]!r}" for p in parameters if values[p.name] != p.default)
        return f"{type(self).__name__}({', '.join(shown)})"

    def _argument(self, name: str) -> Any:
        """The value of an argument that makes an equal plugin."""
        return getattr(self, name)

    def unused(self) -> Self:
        """A plugin with the same settings that has had no model yet."""
        plugin = copy.copy(self)
        plugin._forget_models()
        return plugin

    def _forget_models(self) -> None:
        self._attention = AttentionDtypes(self.compute_dtype, self.dtype_mismatch)

    def check_fsdp(self) -> None:
        """Raise a ValueError for settings that do not work under ``FSDPStrategy``."""

    @property
    def mixed_precision_config(self) -> FSDPMixedPrecision:
        """The dtypes in which parameters are gathered and gradients are summed over the ranks; buffers keep theirs."""
        return FSDPMixedPrecision(param_dtype=self.compute_dtype, reduce_dtype=self.reduce_dtype)

    @override
    def convert_module(self, module: nn.Module) -> nn.Module:
        modules = list(named_modules(module))
        for argument in self._patterns:
            check_patterns_among(modules, getattr(self, argument), argument)
        if all(reference() is not module for reference in self._attention.models):
            self._attention.said.clear()
        other_models = [reference for reference in self._attention.models if reference() not in (None, module)]
        self._attention.models = [*other_models, weakref.ref(module)]
        # left by an earlier run, under this precision or another
        release_inputs(module)
        self._prepare(module)
        agree_inputs(module, self.keep_fp32, under_autocast=self._autocasts)
        return module

    @abstractmethod
    def _prepare(self, module: nn.Module) -> None:
        """Store parameters and convert layers of a model as the mode requires."""

    @override
    def connect(self, *args: Any) -> Any:
        # between the steps hooks and callbacks evaluate models too, under an autocast of their own
        _RUNS.setdefault(self, ExitStack()).close()
        _RUNS[self].enter_context(layers_own_forwards())
        return super().connect(*args)

    @override
    def teardown(self) -> None:
        _RUNS.pop(self, ExitStack()).close()
        super().teardown()

    @override
    def convert_input(self, data: Any) -> Any:
        return as_dtype(data, torch.bfloat16) if self.precision == "bf16-true" else data

    @override
    def tensor_init_context(self) -> AbstractContextManager[Any]:
        return default_dtype(self.param_dtype)

    @override
    def module_init_context(self) -> AbstractContextManager[Any]:
        return self.tensor_init_context()

    @override
    @contextmanager
    def forward_context(self) -> Iterator[None]:  # type: ignore[override]
        """Compute in the compute dtype, with encoders off torch's fast path, and attention operands in one dtype.

        Contexts of several threads or asyncio tasks may overlap, and end in any order. Attention settings belong to the
        thread or task, and autocast to the thread. torch has one fast path switch and one default dtype (which
        ``"bf16-true"`` sets) per process: they apply to all threads until the last such context ends.
        """
        with self.recomputation_context(), self._autocast():
            yield

    @contextmanager
    def recomputation_context(self) -> Iterator[None]:
        """The same without autocast, for a forward inside backward: there, checkpointing restores autocast itself."""
        with layers_own_forwards(), self._attention.context():
            yield

    def backward_context(self) -> AbstractContextManager[None]:
        """Context of a backward."""
        return self.recomputation_context()

    def step_context(self) -> AbstractContextManager[None]:
        """Context of an optimizer step."""
        return nullcontext()

    @override
    def backward(self, *args: Any, **kwargs: Any) -> None:
        with self.backward_context():
            super().backward(*args, **kwargs)

    @override
    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        # once, however often the optimizer calls the closure
        with self.step_context():
            return super().optimizer_step(*args, **kwargs)

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

    @override
    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:  # type: ignore[override]
        # Lightning raises under FSDP: a process has the norm of its shards only
        (FSDPPrecision if self._is_under_fsdp else Precision).clip_grad_by_norm(self, optimizer, clip_val)

    def _autocast(self) -> AbstractContextManager[Any]:
        return _autocast(self._device_type(), self.compute_dtype) if self._autocasts else nullcontext()

    @property
    def _autocasts(self) -> bool:
        return self.compute_dtype == torch.bfloat16

    @property
    def _model(self) -> nn.Module | None:
        return self._attention.models[-1]() if self._attention.models else None

    @property
    def _trainer(self) -> pl.Trainer | None:
        return getattr(self._model, "_trainer", None)

    @property
    def _is_under_fsdp(self) -> bool:
        # no other strategy has this
        return hasattr(getattr(self._trainer, "strategy", None), "mixed_precision_config")

    def _device_type(self) -> str:
        # Read at each step, because plugins convert a model before the strategy moves it.
        module = self._model
        parameter = next(module.parameters(), None) if module is not None else None
        if parameter is not None and parameter.device.type != "meta":
            return parameter.device.type
        return "cuda" if torch.cuda.is_available() else "cpu"


def as_dtype(data: Any, dtype: torch.dtype) -> Any:
    """Cast the floating point tensors of a batch to ``dtype``, and leave everything else as it is."""
    return apply_to_collection(data, Tensor, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)


class _Autocast(NamedTuple):
    device_type: str
    enabled: bool
    dtype: torch.dtype
    cache_enabled: bool


_AUTOCAST: dict[str, Switch[_Autocast]] = {}


def _autocast(device_type: str, dtype: torch.dtype) -> AbstractContextManager[None]:
    """``torch.autocast`` without a cache, in this thread, until all overlapping tasks of the thread have ended.

    Raises:
        RuntimeError: by torch, where the device cannot compute in ``dtype``.
    """
    torch.autocast(device_type, dtype=dtype)
    if device_type not in _AUTOCAST:
        _AUTOCAST.setdefault(device_type, Switch(partial(_get_autocast, device_type), _set_autocast, per_thread=True))
    return _AUTOCAST[device_type].at(_Autocast(device_type, True, dtype, False))


def _get_autocast(device_type: str) -> _Autocast:
    enabled, dtype = torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)
    return _Autocast(device_type, enabled, dtype, torch.is_autocast_cache_enabled())


def _set_autocast(values: _Autocast) -> None:
    torch.set_autocast_enabled(values.device_type, values.enabled)
    torch.set_autocast_dtype(values.device_type, values.dtype)
    torch.set_autocast_cache_enabled(values.cache_enabled)
