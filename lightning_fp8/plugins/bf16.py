"""``"bf16-mixed"`` and ``"bf16-true"``: Lightning's own two precisions, with this package's additions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from lightning.fabric.utilities.rank_zero import rank_zero_info
from torch import nn
from typing_extensions import override

from lightning_fp8.conversion.convert import is_converted, unconvert
from lightning_fp8.dtypes.attention import DtypeMismatch
from lightning_fp8.dtypes.storage import store_parameters
from lightning_fp8.modules.paths import modules_inside
from lightning_fp8.modules.weight_copy import keep_copies
from lightning_fp8.plugins.arguments import arguments_of
from lightning_fp8.plugins.contexts import default_dtype
from lightning_fp8.plugins.core import PrecisionCore
from lightning_fp8.plugins.settings import as_torch_dtype


class Bf16MixedCore(PrecisionCore):
    """bf16 by autocast, parameters in their own dtypes.

    Args: see :class:`~lightning_fp8.Bf16MixedPrecision`.
    """

    precision = "bf16-mixed"

    @arguments_of("bf16-mixed")
    def __init__(
        self,
        *,
        param_dtype: torch.dtype | str | None = None,
        keep_fp32: Sequence[str] = (),
        dtype_mismatch: DtypeMismatch = "align",
        weight_copy: bool = False,
        reduce_dtype: torch.dtype | str = torch.float32,
    ) -> None:
        self._asked_param_dtype = None if param_dtype is None else as_torch_dtype("param_dtype", param_dtype)
        self.param_dtype = self._asked_param_dtype or torch.float32
        if weight_copy and self.param_dtype != torch.float32:
            raise ValueError(
                "`weight_copy=True` keeps bf16 copies of fp32 weights and needs fp32 parameters,"
                f" got `param_dtype={self.param_dtype}`."
            )
        self.weight_copy = weight_copy
        super().__init__(keep_fp32, dtype_mismatch, reduce_dtype)

    @property
    @override
    def settings(self) -> dict[str, Any]:
        return {**super().settings, "param_dtype": self._asked_param_dtype}

    @override
    def _prepare(self, module: nn.Module) -> None:
        _make_plain(module, self.precision)
        # parameters keep their dtypes, as with Lightning's plugin, unless another one was requested
        if self._asked_param_dtype or self.keep_fp32:
            store_parameters(module, self.param_dtype, self.keep_fp32)
        if self.weight_copy:
            keep_copies(module, leave_alone=modules_inside(module, self.keep_fp32))

    @override
    def tensor_init_context(self) -> AbstractContextManager[Any]:
        return super().tensor_init_context() if self._asked_param_dtype else nullcontext()


class Bf16TrueCore(PrecisionCore):
    """Everything in bf16, parameters included.

    Args: see :class:`~lightning_fp8.Bf16TruePrecision`.
    """

    precision = "bf16-true"
    param_dtype = torch.bfloat16
    _autocasts = False

    @arguments_of("bf16-true")
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
