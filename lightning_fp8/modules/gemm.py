"""What converted modules have in common: their rows in the scaling state, and one linear layer's GEMMs in FP8."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from lightning_fp8 import ops
from lightning_fp8.device import check_device
from lightning_fp8.formats import CASTABLE_DTYPES, ROLES, Role
from lightning_fp8.modules.weight_cache import WeightCache
from lightning_fp8.scaling import ScalingState


class Fp8Rows:
    """The place of one linear layer's tensors in the model's scaling state.

    Attributes:
        state: the scaling state shared by all converted modules of the model.
        row: position of the layer's first tensor; input, weight and grad_output follow each other.
        index: per role the same as ``[1] int64`` on the device of the state. A tensor, not an int, so that
            ``torch.compile`` makes one graph for all layers of a kind.
        weight_cache: the FP8 copy of the weight.
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
        """Move the state (the first layer of a model to ask does it for all) and the layer's own index."""
        if self.state.device != device:
            check_device(device)
            self.state.to(device)
        if self.index["input"].device != device:
            self._place_index()

    @property
    def name(self) -> str:
        """How the state calls the layer: its path in the model that was converted."""
        return self.state.module_names[self.row // len(ROLES)]


class Fp8Module(nn.Module):
    """A module whose linear layers compute in FP8. Never constructed: conversion gives an object another class.

    Attributes:
        fp8: the rows of each of its own GEMM weights, by name; the name is ``""`` where there is just one.
        plain_class: the class it had before, and gets back.
    """

    fp8: dict[str, Fp8Rows]
    plain_class: type[nn.Module]

    @staticmethod
    def gemm_weights(layer: nn.Module) -> dict[str, Tensor]:
        """The GEMM weights that a layer holds itself, converted or plain, by name."""
        return {"": cast(Tensor, layer.weight)}

    @property
    def scaling_state(self) -> ScalingState:
        """The state of the whole model."""
        return next(iter(self.fp8.values())).state

    def recording_handle(self) -> int:
        """Where this forward, and its backward, record amaxes: in training with gradients, nowhere (0) otherwise."""
        return self.scaling_state.handle if self.training and torch.is_grad_enabled() else 0

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        # `.to()`, `.cuda()`, `.to_empty()` and friends: scales follow the weight to its device and keep their dtype.
        module = super()._apply(fn, recurse)
        device = next(iter(self.gemm_weights(self).values())).device
        if device.type != "meta":
            for rows in self.fp8.values():
                rows.to(device)
        return module

    def extra_repr(self) -> str:
        """As of the plain class, and the recipe."""
        plain = super().extra_repr()
        return f"{plain}{', ' if plain else ''}fp8={self.scaling_state.recipe}"


class Fp8Weight(NamedTuple):
    """A weight ``[N, K]`` for autograd, and its FP8 cast for the GEMMs."""

    weight: Tensor
    payload: Tensor
    scale_inv: Tensor

    def rows(self, rows: slice) -> Fp8Weight:
        """Some of the N rows; the scale is that of the whole weight."""
        return Fp8Weight(take_rows(self.weight, rows), take_rows(self.payload, rows), self.scale_inv)


def take_rows(tensor: Tensor, rows: slice) -> Tensor:
    """Some of the first dimension; the tensor itself, and no node in the graph, where that is all of it."""
    return tensor if rows.start == 0 and rows.stop == len(tensor) else tensor[rows]


def cast_weight(rows: Fp8Rows, parameter: Tensor, record_to: int, transposed: bool = False) -> Fp8Weight:
    """The FP8 cast of a weight ``[N, K]``, or of one kept as ``[K, N]`` if ``transposed``."""
    state = rows.state
    weight = parameter.t() if transposed else parameter
    # Only a recording forward uses the cache: in evaluation weights are swapped (EMA, averaging) in ways that leave no
    # trace. A compiled graph casts at each call, as nothing in it can see whether a copy is stale.
    use_cache = record_to != 0 and not torch.compiler.is_compiling()
    cached = rows.weight_cache.get(parameter, state.version) if use_cache else None
    if cached is None:
        fmt = state.recipe.format_of("weight").name
        cached = ops.cast(weight.detach(), state.scale, state.amax_history, rows.index["weight"], fmt, record_to)
        if use_cache:
            rows.weight_cache.put(parameter, state.version, cached)
    return Fp8Weight(weight, *cached)


def fp8_linear(rows: Fp8Rows, x: Tensor, weight: Fp8Weight, bias: Tensor | None, record_to: int) -> Tensor:
    """``x @ weight^T + bias`` in FP8: x ``[*, K]`` -> ``[*, N]`` in autocast's dtype, else in that of ``x``."""
    state, recipe = rows.state, rows.state.recipe
    n, k = weight.payload.shape
    x_2d = x.reshape(x.numel() // k, k)
    x_fp8, x_scale_inv = ops.cast(
        x_2d.detach(), state.scale, state.amax_history, rows.index["input"], recipe.format_of("input").name, record_to
    )
    y = ops.linear(
        x_2d,
        weight.weight,
        bias,
        x_fp8,
        x_scale_inv,
        weight.payload,
        weight.scale_inv,
        state.scale,
        state.amax_history,
        rows.index["grad_output"],
        recipe.format_of("grad_output").name,
        record_to,
        _output_dtype(x),
    )
    return y.view(*x.shape[:-1], n)


def check_input(module: Fp8Module, what: str, x: Tensor, features: int, features_name: str) -> None:
    """Refuse an input that an FP8 layer cannot take.

    Raises:
        TypeError: if it is not fp32, bf16 or fp16.
        ValueError: if its last dimension is another one.
    """
    if x.dtype not in CASTABLE_DTYPES:
        raise TypeError(
            f"{_called(module)}: the {what} must be float32, bfloat16 or float16, got {x.dtype}."
            " Convert it before this layer, or leave the layer unconverted with `ignore_modules`."
        )
    if x.dim() == 0 or x.shape[-1] != features:
        raise ValueError(
            f"{_called(module)}: the last dimension of the {what} must be"
            f" {features_name}={features}, got the shape {tuple(x.shape)}."
        )


def _called(module: Fp8Module) -> str:
    # asked for in errors only: a compiled graph that knew its layer's name would serve no other layer
    return f"{type(module).__name__} {next(iter(module.fp8.values())).name!r}"


def _output_dtype(x: Tensor) -> torch.dtype:
    if torch.is_autocast_enabled(x.device.type):
        return torch.get_autocast_dtype(x.device.type)
    return x.dtype
