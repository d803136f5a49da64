"""``"bf16-mixed"`` and ``"bf16-true"``: Lightning's own two precisions, with this package's additions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from lightning.fabric.utilities.rank_zero import rank_zero_info
from lightning.pytorch.plugins.precision import HalfPrecision, MixedPrecision, Precision
from lightning.pytorch.utilities import GradClipAlgorithmType
from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_fp8.conversion.convert import is_converted, unconvert
from lightning_fp8.dtypes.attention import DtypeMismatch
from lightning_fp8.dtypes.storage import store_parameters
from lightning_fp8.plugins.core import PrecisionCore
from lightning_fp8.plugins.settings import arguments_of, as_torch_dtype
from lightning_fp8.runtime.switch import default_dtype


class Bf16MixedPrecision(PrecisionCore, MixedPrecision):  # type: ignore[misc]
    """``"bf16-mixed"``: Lightning's ``MixedPrecision``, with the same numerics, without its dtype errors.

    ``Trainer(precision="bf16-mixed")`` makes one with the defaults, unless Lightning's own was kept
    (:func:`lightning_fp8.plugins.register`). Operations run in bf16 by autocast, parameters keep their dtypes.

    Args:
        param_dtype: dtype in which parameters are stored, ``torch.float32`` or ``torch.bfloat16``; by default they
            keep their dtypes.
        keep_fp32: see :class:`Fp8Precision`.
        dtype_mismatch: see :class:`Fp8Precision`.
        reduce_dtype: dtype in which FSDP sums gradients over the ranks.

    Raises:
        ValueError: for an unsupported value; at set-up for a pattern that matches no module.
        TypeError: for a string in place of a sequence of patterns, or an argument of another plugin.
    """

    precision = "bf16-mixed"

    @arguments_of("Bf16MixedPrecision", "bf16-mixed")
    def __init__(
        self,
        *,
        param_dtype: torch.dtype | str | None = None,
        keep_fp32: Sequence[str] = (),
        dtype_mismatch: DtypeMismatch = "align",
        reduce_dtype: torch.dtype | str = torch.float32,
    ) -> None:
        self._stores = param_dtype is not None
        self.param_dtype = torch.float32 if param_dtype is None else as_torch_dtype("param_dtype", param_dtype)
        super().__init__(keep_fp32, dtype_mismatch, reduce_dtype)
        MixedPrecision.__init__(self, "bf16-mixed", device=self._device_type())

    @override
    def _argument(self, name: str) -> Any:
        return None if name == "param_dtype" and not self._stores else super()._argument(name)

    @override
    def _prepare(self, module: nn.Module) -> None:
        _make_plain(module, self.precision)
        # parameters keep their dtypes, as with Lightning's plugin, unless another one was requested
        if self._stores or self.keep_fp32:
            store_parameters(module, self.param_dtype, self.keep_fp32)

    @override
    def tensor_init_context(self) -> AbstractContextManager[Any]:
        return super().tensor_init_context() if self._stores else nullcontext()

    @override
    def clip_gradients(
        self,
        optimizer: Optimizer,
        clip_val: int | float = 0.0,
        gradient_clip_algorithm: GradClipAlgorithmType = GradClipAlgorithmType.NORM,
    ) -> None:
        # Lightning's method rejects fused optimizers, which unscale gradients themselves: in bf16 none are scaled
        Precision.clip_gradients(self, optimizer, clip_val, gradient_clip_algorithm)


class Bf16TruePrecision(PrecisionCore, HalfPrecision):  # type: ignore[misc]
    """``"bf16-true"``: Lightning's ``HalfPrecision`` in bf16, with the same numerics, without its dtype errors.

    ``Trainer(precision="bf16-true")`` makes one with the defaults, unless Lightning's own was kept
    (:func:`lightning_fp8.plugins.register`). Parameters are stored in bf16, and everything computes in it.

    Args:
        keep_fp32: see :class:`Fp8Precision`.
        dtype_mismatch: see :class:`Fp8Precision`.
        reduce_dtype: dtype in which FSDP sums gradients over the ranks.

    Raises:
        ValueError: for an unsupported value; at set-up for a pattern that matches no module.
        TypeError: for a string in place of a sequence of patterns, or an argument of another plugin.
    """

    precision = "bf16-true"
    param_dtype = torch.bfloat16
    _autocasts = False

    @arguments_of("Bf16TruePrecision", "bf16-true")
    def __init__(
        self,
        *,
        keep_fp32: Sequence[str] = (),
        dtype_mismatch: DtypeMismatch = "align",
        reduce_dtype: torch.dtype | str = torch.float32,
    ) -> None:
        super().__init__(keep_fp32, dtype_mismatch, reduce_dtype)

    @override
    def _prepare(self, module: nn.Module) -> None:
        _make_plain(module, self.precision)
        store_parameters(module, self.param_dtype, self.keep_fp32)

    @override
    @contextmanager
    def recomputation_context(self) -> Iterator[None]:
        with super().recomputation_context(), default_dtype(torch.bfloat16):
            yield


def _make_plain(module: nn.Module, precision: str) -> None:
    if is_converted(module):
        rank_zero_info(f"The model was converted to FP8 before; under {precision!r} its layers become plain again.")
        unconvert(module)
