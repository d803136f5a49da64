"""Weights that torch's parametrizations compute, such as weight and spectral normalisation.

Each read of one runs the parametrization, which may cost products, and with spectral normalisation changes buffers. So
it is read in the layer's forward alone, once, and cast there; no cast of it is kept. It has its own scale like any
weight, and its gradient goes to the parameters that it is computed from, without FP8.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def is_computed(layer: Any) -> bool:
    """Whether a parametrization computes the layer's weight."""
    # of a dictionary, as `getattr` of what a module does not have takes long
    return "weight" in layer._modules.get("parametrizations", ())


def held_weight(layer: Any) -> Tensor:
    """A layer's weight; for a computed one a tensor of its size, dtype and device, without its values: no parameter, so
    nothing keeps a cast of it, or shards, freezes or replaces it."""
    if not is_computed(layer):
        return layer.weight  # type: ignore[no-any-return]
    source = next(layer.parametrizations["weight"].parameters(recurse=False))
    return torch.empty((), dtype=source.dtype, device=source.device).expand(layer.out_features, layer.in_features)


def computed_by(layer: nn.Module) -> str | None:
    """What computes the weight, for people; None if the layer holds it."""
    if not is_computed(layer):
        return None
    kinds: Any = layer.parametrizations["weight"]  # type: ignore[index]
    return "its weight is computed by " + " and ".join(type(kind).__name__.lstrip("_") for kind in kinds)
