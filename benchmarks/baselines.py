"""What the operators are compared with: the same work under ``torch.compile``, torchao's cast, and a plain copy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.iteration import Precision
from lightning_fp8.ops.activations import activate, activation_gradient
from lightning_fp8.ops.cuda import plain
from lightning_fp8.ops.formats import E4M3, FORMATS
from lightning_fp8.tools.timing import Variant, copies_for

# rounding error of E4M3: half the distance of neighbouring codes relative to their value, and half the smallest code
# relative to the largest
_E4M3_RELATIVE, _E4M3_ABSOLUTE = 2.0**-4, 2.0**-10 / 448


def compiled(function: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """The function under ``torch.compile``; see :func:`compiled_name`."""
    return torch.compile(function, backend=_backend(device), dynamic=False)


def compiled_name(device: torch.device) -> str:
    """``torch.compile`` with its default backend on a GPU; on the CPU without code generation, which takes minutes."""
    return "torch.compile" if device.type == "cuda" else f"torch.compile({_backend(device)})"


def _backend(device: torch.device) -> str:
    return "inductor" if device.type == "cuda" else "aot_eager"


def cast(format: str, activation: str) -> Callable[[Tensor, Tensor, Tensor], tuple[Tensor, ...]]:
    """A plain function of x, its scale and its recorded amax: both payloads, scale_inv and the new amax."""
    return lambda x, scale, amax: _cast(activate(x, activation), scale, amax, format)


def cast_gradient(
    format: str, activation: str
) -> Callable[[Tensor, Tensor | None, Tensor, Tensor], tuple[Tensor, ...]]:
    """A plain function of dy, h, scale and amax: what :func:`cast` gives, and the column sums last."""

    def gradient(dy: Tensor, h: Tensor | None, scale: Tensor, amax: Tensor) -> tuple[Tensor, ...]:
        values = dy if h is None else activation_gradient(h, dy, activation)
        return (*_cast(values, scale, amax, format), values.sum(dim=0, dtype=torch.float32))

    return gradient


def cast_weights(weights: Sequence[Tensor]) -> list[tuple[Tensor, ...]]:
    """What :func:`cast` gives for each weight, with a scale from its current amax."""
    amaxes = [weight.abs().amax().float() for weight in weights]
    return [_cast(weight, E4M3.max / amax, amax, "e4m3") for weight, amax in zip(weights, amaxes, strict=True)]


def update_scales(amax: Tensor, amax_history: Tensor, scale: Tensor, fp8_max: Tensor, nonfinite_steps: Tensor) -> None:
    """Update the scales in place with the default recipe; see the operator ``lightning_fp8::update_scales``."""
    plain.update_scales(amax, amax_history, scale, fp8_max, nonfinite_steps, False, 1.0)


def _cast(x: Tensor, scale: Tensor, amax: Tensor, format: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    current = torch.maximum(amax, x.abs().amax().float())
    limit, dtype = FORMATS[format].max, FORMATS[format].dtype
    payload = (x.float() * scale).clamp(-limit, limit).to(dtype)
    return payload, payload.t().contiguous(), scale.reciprocal(), current


def torchao_cast(x: Sequence[Tensor]) -> list[Variant]:
    """torchao's cast with its tensor-wise dynamic scaling, and a transposed copy; empty where it is not installed."""
    if find_spec("torchao") is None:
        return []
    device = x[0].device
    name = compiled_name(device).replace("torch.compile", "torchao")
    function = _once(lambda: compiled(_torchao_function(), device))
    return [Variant(name, lambda i: function()(x[i]), lambda: _torchao_difference(x[0], *function()(x[0])), len(x))]


def _once(make: Callable[[], Callable[..., Any]]) -> Callable[[], Callable[..., Any]]:
    # made at the first call, so that an exception counts as this variant's failure
    made: list[Callable[..., Any]] = []

    def get() -> Callable[..., Any]:
        if not made:
            made.append(make())
        return made[0]

    return get


def _torchao_function() -> Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]:
    to_float8 = import_module("torchao.float8.float8_scaling_utils").hp_tensor_to_float8_dynamic
    tensors = import_module("torchao.float8.float8_training_tensor")
    config, role = tensors.LinearMMConfig(), tensors.GemmInputRole.INPUT

    def cast_and_transpose(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        made = to_float8(x, torch.float8_e4m3fn, config, gemm_input_role=role)
        return made._data, made._data.t().contiguous(), made._scale

    return cast_and_transpose


def _torchao_difference(x: Tensor, payload: Tensor, payload_t: Tensor, scale: Tensor) -> str | None:
    """Its scale differs, so its bytes do too: the dequantized values must match the input to E4M3's rounding error."""
    values = x.float()
    limit = _E4M3_RELATIVE * values.abs() + _E4M3_ABSOLUTE * values.abs().amax()
    # with a margin of 0.1%, as the scale is a rounded quotient
    if not bool(((payload.float() / scale - values).abs() <= 1.001 * limit).all()):
        return "other values than its input's"
    if not torch.equal(payload_t.view(torch.uint8), payload.view(torch.uint8).t()):
        return "a transposed payload that is not the payload's transpose"
    return None


def copy(bytes: int, device: torch.device) -> Variant:
    """``copy_`` of a bf16 tensor that reads and writes ``bytes`` bytes in total."""
    pairs = []
    for _ in range(copies_for(bytes, device)):
        source = torch.ones(max(1, bytes // 4), dtype=torch.bfloat16, device=device)
        pairs.append((torch.zeros_like(source), source))

    def call(at: int) -> Tensor:
        target, source = pairs[at]
        return target.copy_(source)

    return Variant("copy", call, lambda: None if bool((call(0) == 1).all()) else "another copy", len(pairs))


def torchao_precisions(device: torch.device) -> dict[str, Precision]:
    """torchao's tensor-wise dynamic scaling, eager, and emulated on the CPU; empty where it is not installed."""
    if find_spec("torchao") is None:
        return {}
    emulate = device.type != "cuda"

    def make(block: nn.Module) -> nn.Module:
        float8 = import_module("torchao.float8")
        return float8.convert_to_float8_training(block, config=float8.Float8LinearConfig(emulate=emulate))

    return {"torchao(emulated)" if emulate else "torchao": Precision(make)}
