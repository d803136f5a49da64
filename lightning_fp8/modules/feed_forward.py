"""Linear - activation - linear, fused: the activation's output and its gradient are cast to FP8 directly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules import module as torch_module

from lightning_fp8.core.feed_forward import gated_mlp, mlp
from lightning_fp8.core.operators import Layer
from lightning_fp8.modules.base import Fp8Module
from lightning_fp8.modules.fp8_parameter import is_frozen
from lightning_fp8.modules.functional import (
    cast_input,
    cast_weight,
    check_input,
    let_go_of_input,
    output_dtype,
    rounded_bias,
)
from lightning_fp8.modules.gemm import Gemm
from lightning_fp8.modules.linear import LinearForward
from lightning_fp8.modules.phase import Phase
from lightning_fp8.ops.activations import ACTIVATIONS
from lightning_fp8.ops.library import backward_may_follow, may_get_gradient
from lightning_fp8.scalings.operand import Cast, Operand

# modules of transformers that only call another activation
_HOLD_A_FUNCTION = ("GELUActivation", "GELUTanh")

SHARDED = "its weights are sharded"


class FeedForward(NamedTuple):
    """The parts of a feed-forward block, ``second(activation(first(x)))``.

    Attributes:
        first: one linear layer; or two, gate and up, for ``activation(gate(x)) * up(x)``.
        activation: function or module.
        second: linear layer.
        dropouts: the dropouts between activation and second layer.
        around: modules that call these parts; they are not called if the block runs fused.
        packed: whether the first layer's output is ``[gate | up]``.
    """

    first: tuple[nn.Module, ...]
    activation: Callable[[Tensor], Tensor]
    second: nn.Module
    dropouts: tuple[nn.Module, ...] = ()
    around: tuple[nn.Module, ...] = ()
    packed: bool = False


def feed_forward(
    first: nn.Module | tuple[nn.Module, nn.Module],
    activation: Callable[[Tensor], Tensor],
    second: nn.Module,
    x: Tensor,
) -> Tensor:
    """``second(activation(first(x)))``, or ``second(activation(gate(x)) * up(x))``: x ``[*, K]`` -> ``[*, K']``.

    Use it in the forward of your own feed-forward block, converted or not. Once :func:`lightning_fp8.convert` has
    converted its linear layers, a single pass over memory remains between the GEMMs: it computes the activation and
    casts its output to FP8, with the same numbers. The same holds in backward. If that is not possible, the parts are
    called one by one: for plain layers, subclasses and adapters, layers that fell back, other activations, parts with
    hooks, and sharded weights.

    Args:
        first: linear layer ``[K -> N]``, or a pair (gate, up) of such layers.
        activation: function or module. Blocks with relu, gelu (exact, or approximated with tanh) and silu, of torch or
            of transformers, run fused; with a pair, only silu does, and only if conversion has found that gate and up
            share their input.
        second: linear layer ``[N -> K']``.
        x: fp32, bf16 or fp16.

    Raises:
        ValueError: if ``first`` is a tuple of other than two layers.

    >>> up, activation, down = nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)
    >>> feed_forward(up, activation, down, torch.randn(2, 5, 16)).shape
    torch.Size([2, 5, 16])
    """
    layers: tuple[nn.Module, ...] = first if isinstance(first, tuple) else (first,)
    if isinstance(first, tuple) and len(first) != 2:
        raise ValueError(f"`first` must be a linear layer or a pair (gate, up), got a tuple of {len(first)}.")
    return run_block(FeedForward(layers, activation, second), x)


def run_block(block: FeedForward, x: Tensor) -> Tensor:
    """The output of the block: fused if possible, else part by part."""
    first, activation, second = block.first, block.activation, block.second
    if reason_against_fusing(block) is None:
        if len(first) == 2:
            return fp8_gated_feed_forward(*first, second, x)
        return fp8_feed_forward(first[0], _operator(block), second, x)  # type: ignore[arg-type]
    if len(first) == 2:
        a = activation(first[0](x)) * first[1](x)
    elif block.packed:
        gate, up = first[0](x).chunk(2, dim=-1)
        a = up * activation(gate)
    else:
        a = activation(first[0](x))
    for dropout in block.dropouts:
        a = dropout(a)
    return cast(Tensor, second(a))


def fp8_feed_forward(first: nn.Module, activation: str, second: nn.Module, x: Tensor) -> Tensor:
    """``second(activation(first(x)))`` of converted layers of one model: x ``[*, K]`` -> ``[*, K']``.

    Between the two GEMMs, the only pass over memory is the cast. In backward, the only pass casts the gradient and sums
    it for the bias. Backward keeps both inputs in FP8 and the activation's input.

    Args:
        first: converted linear layer.
        activation: one of ``lightning_fp8.ops.activations.ACTIVATIONS``; ``swiglu`` halves the width.
        second: converted linear layer.
        x: fp32, bf16 or fp16.
    """
    return _run_fused(mlp, (first, second), x, activation)


def fp8_gated_feed_forward(gate: nn.Module, up: nn.Module, down: nn.Module, x: Tensor) -> Tensor:
    """``down(silu(gate(x)) * up(x))`` of converted layers of one model, which share x: x ``[*, K]`` -> ``[*, K']``.

    One kernel computes and casts ``silu(gate) * up``; another computes and casts both gradients. Backward keeps both
    layers' inputs in FP8, and the outputs of gate and up.
    """
    return _run_fused(gated_mlp, (gate, up, down), x)


def _run_fused(
    operator: Callable[..., tuple[Tensor, ...]], layers: tuple[nn.Module, ...], x: Tensor, *activation: str
) -> Tensor:
    """The output of a block: its last layer takes the activation of the other layers' outputs."""
    parts = [cast(Fp8Module, layer) for layer in layers]
    for part in parts[:-1]:
        check_input(part, "input", x, _weight(part))
    gemms, phase, dtype = [part.fp8[""] for part in parts], parts[0].phase, output_dtype(x)
    *first, last = [_as_layer(part, phase, dtype) for part in parts]
    with_gradients = backward_may_follow()
    keep = with_gradients and any(may_get_gradient(layer.weight) for layer in first)
    x8 = cast_input(gemms[0], x, phase, keep, dtype)
    for gemm in gemms[1:-1]:
        # it takes the same cast
        let_go_of_input(gemm)
    y, *_ = operator(
        x,
        *first,
        last,
        *x8[:2],
        gemms[-1].slots["input", phase],
        *(gemm.slots["grad_output", phase] for gemm in gemms),
        *activation,
        with_gradients and may_get_gradient(last.weight),
        with_gradients,
        dtype,
    )
    return y


def _as_layer(layer: Fp8Module, phase: Phase, dtype: torch.dtype) -> Layer:
    """The layer's weight, its cast, and its bias for outputs of this dtype."""
    gemm, bias = layer.fp8[""], cast("Tensor | None", layer.bias)
    weight, made, is_kept = cast_weight(gemm, _weight(layer), phase)
    bias_value = None if bias is None else rounded_bias(gemm, bias, dtype, is_kept, weight.shape[0])
    # all products are in FP8
    rows, columns, _ = cast(Cast, made)
    return Layer(weight, bias, bias_value, cast(Operand, rows), columns)


def _weight(layer: nn.Module) -> Tensor:
    return cast(Tensor, layer.weight)


def reason_against_fusing(block: FeedForward) -> str | None:
    """Why the block has to run part by part now; None if it runs fused."""
    layers = [*block.first, block.second]
    if any(type(layer) not in LinearForward.family for layer in layers):
        return "a linear layer is not converted, has an adapter, or is sharded by itself"
    gemms = [cast(Fp8Module, layer).fp8[""] for layer in layers]
    if not all(gemm.precision.in_fp8 and not gemm.precision.in_bf16 for gemm in gemms):
        return "a layer has products in bf16" if all(gemm.precision.in_fp8 for gemm in gemms) else "a layer fell back"
    if _operator(block) is None:
        of_gate = " for a gate" if len(block.first) == 2 or block.packed else ""
        return f"{_named(block.activation)} is not supported{of_gate}"
    if any(dropout.training and cast(nn.Dropout, dropout).p > 0 for dropout in block.dropouts):
        return "dropout between its layers"
    # hooks and replaced forwards of the parts must see their calls
    parts = [*layers, block.activation, *block.dropouts, *block.around]
    if any(isinstance(part, nn.Module) and _is_watched(part) for part in parts) or torch_module._has_any_global_hook():
        return "a part has hooks, or a `forward` of its own"
    if any(gemm.state is not gemms[0].state for gemm in gemms):
        return "its layers were not converted together"
    if any(layer.training != layers[0].training for layer in layers):
        return "its layers differ in training mode"
    if len(block.first) == 2 and (gemms[0].shared_input is None or gemms[0].shared_input is not gemms[1].shared_input):
        return "gate and up do not share their input"
    return _misfit([_weight(layer) for layer in layers], gemms, block.packed)


def _misfit(weights: list[Tensor], gemms: list[Gemm], packed: bool) -> str | None:
    """Why these weights do not fit together in a block; the last one is the second layer's."""
    if any(isinstance(weight, DTensor) for weight in weights):
        return SHARDED
    if any(is_frozen(weight) and not weight.content.has_both_orders for weight in weights):
        return "dgrad takes the values of a weight, whose scales are for its rows"
    # weights may have been replaced since: run part by part, the layer whose input does not fit raises the error
    if any(weight.dim() != 2 for weight in weights):
        return "its weights do not fit together"
    shapes = [weight.shape[::-1] if gemm.k_by_n else weight.shape for weight, gemm in zip(weights, gemms, strict=True)]
    (outputs, inputs), *others, (_, hidden) = shapes
    fits = outputs == (2 * hidden if packed else hidden) and all(other == (outputs, inputs) for other in others)
    return None if fits else "its weights do not fit together"


def _is_watched(part: nn.Module) -> bool:
    hooks = (part._forward_hooks, part._forward_pre_hooks, part._backward_hooks, part._backward_pre_hooks)
    return any(hooks) or "forward" in vars(part)


def _operator(block: FeedForward) -> str | None:
    """The operators' name for the activation; None if they do not support it in such a block."""
    name = activation_name(block.activation)
    if len(block.first) == 2 or block.packed:
        return "swiglu" if name == "silu" else None
    return name


def activation_name(activation: Any) -> str | None:
    """The operators' name for an activation function or module; None for one that they do not support."""
    kind = type(activation)
    if kind.__module__ == "transformers.activations" and kind.__name__ in _HOLD_A_FUNCTION:
        return activation_name(activation.act)
    return next((name for name, known in ACTIVATIONS.items() if known.is_it(activation)), None)


def _named(activation: Any) -> str:
    return type(activation).__name__ if isinstance(activation, nn.Module) else getattr(activation, "__name__", "it")
