"""``Fp8Linear``: ``nn.Linear`` with its three GEMMs in FP8."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from lightning_fp8 import ops
from lightning_fp8.device import check_device
from lightning_fp8.formats import CASTABLE_DTYPES, ROLES, Role
from lightning_fp8.modules.weight_cache import WeightCache
from lightning_fp8.scaling import ScalingState


class Fp8Rows:
    """One module's place in the model's scaling state.

    Attributes:
        state: the scaling state shared by all converted modules of the model.
        row: position of the module's first tensor; input, weight and grad_output follow each other.
        index: per role the same as ``[1] int64`` on the device of the state. A tensor, not an int, so that
            ``torch.compile`` makes one graph for all layers of a kind.
        weight_cache: the FP8 copy of the module's weight.
    """

    def __init__(self, state: ScalingState, row: int) -> None:
        self.state = state
        self.row = row
        self.weight_cache = WeightCache()
        self._place_index()

    def _place_index(self) -> None:
        with torch.inference_mode(False):
            rows = range(self.row, self.row + len(ROLES))
            self.index: dict[Role, Tensor] = {
                role: torch.tensor([row], dtype=torch.int64, device=self.state.device)
                for role, row in zip(ROLES, rows, strict=True)
            }

    def to(self, device: torch.device) -> None:
        """Move the state (the first module of a model to ask does it for all) and the module's own index."""
        if self.state.device != device:
            check_device(device)
            self.state.to(device)
        if self.index["input"].device != device:
            self._place_index()

    @property
    def module_name(self) -> str:
        """Path of the module in the model that was converted."""
        return self.state.module_names[self.row // len(ROLES)]


class Fp8Linear(nn.Linear):
    """``y = x @ weight^T + bias`` with FP8 operands, delayed scaling and fp32 accumulation.

    Never constructed: :func:`lightning_fp8.convert` turns an ``nn.Linear`` into it by class, on the same object, so
    parameters, hooks, ties and ``state_dict`` keys stay what they are.

    Shape:
        x ``[*, in_features]`` fp32, bf16 or fp16, any strides, any number of leading dimensions, empty ones too;
        y ``[*, out_features]``, in autocast's dtype where autocast is on, else in the dtype of ``x``.

    A forward records amaxes exactly when the module is in training mode and gradients are enabled; its backward records
    exactly when its forward did. Backward keeps the FP8 input, one byte an element. Gradients come in the dtypes of
    ``x``, ``weight`` and ``bias``.

    Raises:
        TypeError: for an input that is not fp32, bf16 or fp16.
        ValueError: for an input whose last dimension is not ``in_features``.
    """

    fp8: Fp8Rows

    def forward(self, x: Tensor) -> Tensor:
        """x ``[*, in_features]`` -> y ``[*, out_features]``; see the class."""
        self._check_input(x)
        fp8, state = self.fp8, self.fp8.state
        record_to = state.handle if self.training and torch.is_grad_enabled() else 0
        x_2d = x.reshape(x.numel() // self.in_features, self.in_features)
        recipe = state.recipe
        x_fp8, x_scale_inv = ops.cast(
            x_2d.detach(),
            state.scale,
            state.amax_history,
            fp8.index["input"],
            recipe.format_of("input").name,
            record_to,
        )
        w_fp8, w_scale_inv = self._cast_weight(record_to)
        y = ops.linear(
            x_2d,
            self.weight,
            self.bias,
            x_fp8,
            x_scale_inv,
            w_fp8,
            w_scale_inv,
            state.scale,
            state.amax_history,
            fp8.index["grad_output"],
            recipe.format_of("grad_output").name,
            record_to,
            _output_dtype(x),
        )
        return y.view(*x.shape[:-1], self.out_features)

    def _cast_weight(self, record_to: int) -> tuple[Tensor, Tensor]:
        fp8, state = self.fp8, self.fp8.state
        # Only a recording forward uses the cache: in evaluation weights are swapped (EMA, averaging) in ways that leave
        # no trace. A compiled graph casts at each call, as nothing in it can see whether a copy is stale.
        use_cache = record_to != 0 and not torch.compiler.is_compiling()
        if use_cache:
            cached = fp8.weight_cache.get(self.weight, state.version)
            if cached is not None:
                return cached
        weight_format = state.recipe.format_of("weight").name
        cast: tuple[Tensor, Tensor] = ops.cast(
            self.weight.detach(), state.scale, state.amax_history, fp8.index["weight"], weight_format, record_to
        )
        if use_cache:
            fp8.weight_cache.put(self.weight, state.version, cast)
        return cast

    def _check_input(self, x: Tensor) -> None:
        if x.dtype not in CASTABLE_DTYPES:
            raise TypeError(
                f"{self._described()}: the input must be float32, bfloat16 or float16, got {x.dtype}. Convert it before"
                " this layer, or leave the layer unconverted with `ignore_modules`."
            )
        if x.dim() == 0 or x.shape[-1] != self.in_features:
            raise ValueError(
                f"{self._described()}: the last dimension of the input must be in_features={self.in_features}, got an"
                f" input of shape {tuple(x.shape)}."
            )

    def _described(self) -> str:
        return f"Fp8Linear {self.fp8.module_name!r}"

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        # `.to()`, `.cuda()`, `.to_empty()` and friends: scales follow the weight to its device and keep their dtype.
        module = super()._apply(fn, recurse)
        if self.weight.device.type != "meta":
            self.fp8.to(self.weight.device)
        return module

    def extra_repr(self) -> str:
        """The sizes, as of ``nn.Linear``, and the recipe."""
        return f"{super().extra_repr()}, fp8={self.fp8.state.recipe}"


def _output_dtype(x: Tensor) -> torch.dtype:
    if torch.is_autocast_enabled(x.device.type):
        return torch.get_autocast_dtype(x.device.type)
    return x.dtype
