"""The base classes of the precision plugins of all modes, for the Trainer and for Fabric."""

from __future__ import annotations

import weakref
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from lightning.fabric.plugins.precision.precision import Precision
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecision as FSDPMixedPrecision
from typing_extensions import Self, override

from lightning_fp8.dtypes.attention import DTYPE_MISMATCH, AttentionDtypes, DtypeMismatch
from lightning_fp8.dtypes.encoder import layers_own_forwards
from lightning_fp8.dtypes.storage import agree_inputs, release_inputs
from lightning_fp8.modules.paths import as_patterns, check_patterns_among, named_modules
from lightning_fp8.modules.weight_copy import drop_copies
from lightning_fp8.plugins.arguments import ARGUMENTS
from lightning_fp8.plugins.contexts import autocast, default_dtype
from lightning_fp8.plugins.settings import as_torch_dtype
from lightning_fp8.runtime.choice import check_choice


class PrecisionCore(Precision):
    """Contexts and dtypes that all modes share; a subclass is one mode and prepares models for it.

    Attributes:
        precision: the precision string of the mode.
        param_dtype: dtype in which parameters are stored.
        compute_dtype: dtype of everything that is not FP8.
    """

    precision: Any
    # all strings that select this class, if there are others than `precision`
    precisions: tuple[str, ...] = ()
    param_dtype: torch.dtype
    compute_dtype = torch.bfloat16
    # arguments that are patterns on module paths
    _patterns: tuple[str, ...] = ("keep_fp32",)

    def __init__(
        self, keep_fp32: Sequence[str], dtype_mismatch: DtypeMismatch, reduce_dtype: torch.dtype | str
    ) -> None:
        check_choice("`dtype_mismatch`", dtype_mismatch, DTYPE_MISMATCH)
        self.keep_fp32 = as_patterns(keep_fp32, "keep_fp32")
        self.dtype_mismatch = dtype_mismatch
        self.reduce_dtype = as_torch_dtype("reduce_dtype", reduce_dtype)
        self._attention = AttentionDtypes(self.compute_dtype, dtype_mismatch)
        self._init_lightning()

    def _init_lightning(self) -> None:
        """Call the ``__init__`` of the Lightning plugin that a class also derives from."""

    @property
    def settings(self) -> dict[str, Any]:
        """The constructor arguments, to make a plugin of the same mode for another front end or strategy."""
        return {name: getattr(self, name) for name in ARGUMENTS[self.precision]}

    @classmethod
    def of_string(cls, precision: str) -> Self:
        """A plugin with the defaults of a precision string."""
        plugin = cls()  # type: ignore[call-arg]
        plugin.precision = precision
        return plugin

    @override
    def convert_module(self, module: nn.Module) -> nn.Module:
        modules = list(named_modules(module))
        for argument in self._patterns:
            check_patterns_among(modules, getattr(self, argument), argument)
        others = [known for known in self._attention.models if known() not in (None, module)]
        self._attention.models = [*others, weakref.ref(module)]
        # left by an earlier run, under this precision or another
        drop_copies(module)
        release_inputs(module)
        self._prepare(module)
        agree_inputs(module, self.keep_fp32, under_autocast=self._autocasts)
        return module

    @abstractmethod
    def _prepare(self, module: nn.Module) -> None:
        """Store parameters and convert layers of a model as the mode requires."""

    @override
    def tensor_init_context(self) -> AbstractContextManager[Any]:
        return default_dtype(self.param_dtype)

    @override
    def module_init_context(self) -> AbstractContextManager[Any]:
        return self.tensor_init_context()

    @override
    @contextmanager
    def forward_context(self) -> Iterator[None]:  # type: ignore[override]
        """Computation in the compute dtype, encoders without torch's fast path, attention operands in one dtype.

        Contexts of several threads or asyncio tasks may overlap, and end in any order. Attention settings belong to the
        thread or task, and autocast to the thread. torch has one fast path switch and one default dtype (which
        ``"bf16-true"`` sets) per process: they apply to all threads until the last such context ends.
        """
        with self.recomputation_context(), self._autocast():
            yield

    @contextmanager
    def recomputation_context(self) -> Iterator[None]:
        """The same without autocast, for a forward inside backward: checkpointing itself restores autocast."""
        with layers_own_forwards(), self._attention.context():
            yield

    @override
    def backward(self, *args: Any, **kwargs: Any) -> None:
        with self.recomputation_context():
            super().backward(*args, **kwargs)

    def _autocast(self) -> AbstractContextManager[Any]:
        if not self._autocasts:
            return nullcontext()
        return autocast(self._device_type(), self.compute_dtype)

    @property
    def _autocasts(self) -> bool:
        return self.compute_dtype == torch.bfloat16

    def _device_type(self) -> str:
        # Read at each step, because plugins convert a model before the strategy moves it.
        module = self._attention.models[-1]() if self._attention.models else None
        parameter = next(module.parameters(), None) if module is not None else None
        if parameter is not None and parameter.device.type != "meta":
            return parameter.device.type
        return "cuda" if torch.cuda.is_available() else "cpu"


class FSDPCore(PrecisionCore):
    """A precision for ``FSDPStrategy``; a subclass names the Lightning plugin that its strategy requires."""

    _lightnings: type[Any]

    @override
    def _init_lightning(self) -> None:
        precision = self.precision
        # Lightning's plugin has no FP8; our contexts and dtypes replace all of its own
        self._lightnings.__init__(self, "bf16-true" if precision == "bf16-true" else "bf16-mixed")
        self.precision = precision

    @property
    def mixed_precision_config(self) -> FSDPMixedPrecision:
        """The dtypes in which parameters are gathered and gradients are summed over the ranks; buffers keep theirs."""
        return FSDPMixedPrecision(param_dtype=self.compute_dtype, reduce_dtype=self.reduce_dtype)


def as_dtype(data: Any, dtype: torch.dtype) -> Any:
    """Cast the floating point tensors of a batch to ``dtype``, and leave everything else as it is."""
    return apply_to_collection(data, Tensor, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)


def by_string(*plugins: type[PrecisionCore]) -> dict[str, type[Any]]:
    """Classes of plugins by each of their precision strings."""
    return {precision: plugin for plugin in plugins for precision in plugin.precisions or (plugin.precision,)}
