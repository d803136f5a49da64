"""What our operators are compared with: the same work under ``torch.compile``, and a plain copy of as many bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.timing import Variant, copies_for
from lightning_fp8.ops import amaxes
from lightning_fp8.ops.activations import activate, activation_gradient
from lightning_fp8.ops.formats import E4M3, FORMATS

COMPILED = "torch.compile"


def compiled(function: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """The function under ``torch.compile``; on the CPU without code generation, which takes minutes."""
    return torch.compile(function, backend="inductor" if device.type == "cuda" else "aot_eager", dynamic=False)


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
    amaxes.update_scales(amax, amax_history, scale, fp8_max, nonfinite_steps, False, 1.0)


def _cast(x: Tensor, scale: Tensor, amax: Tensor, format: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    current = torch.maximum(amax, x.abs().amax().float())
    limit, dtype = FORMATS[format].max, FORMATS[format].dtype
    payload = (x.float() * scale).clamp(-limit, limit).to(dtype)
    return payload, payload.t().contiguous(), scale.reciprocal(), current


def copy(bytes: int, device: torch.device) -> Variant:
    """``copy_`` of a bf16 tensor that reads and writes ``bytes`` bytes in total: the ceiling of what does so, too."""
    pairs = []
    for _ in range(copies_for(bytes, device)):
        source = torch.ones(max(1, bytes // 4), dtype=torch.bfloat16, device=device)
        pairs.append((torch.zeros_like(source), source))

    def call(at: int) -> Tensor:
        target, source = pairs[at]
        return target.copy_(source)

    return Variant("copy", call, lambda: None if bool((call(0) == 1).all()) else "another copy", len(pairs))
