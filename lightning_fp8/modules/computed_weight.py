"""Weights that torch's parametrizations compute, such as weight and spectral normalisation.

Each read of such a weight runs the parametrization. This may cost products, and spectral normalisation also changes
buffers. The weight is therefore read only once, in the layer's forward, and cast there; no cast of it is kept. It has
its own scale like any weight. Its gradient goes, without FP8, to the parameters that it is computed from.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def is_computed(layer: Any) -> bool:
    """Whether a parametrization computes the layer's weight."""
    # read the dictionary: `getattr` is slow for attributes that a module lacks
    return "weight" in layer._modules.get("parametrizations", ())


def held_weight(layer: Any) -> Tensor:
    """A layer's weight; for a computed weight, a tensor of the same size, dtype and device without its values. This is
    not a parameter, so nothing keeps a cast of it, or shards, freezes or replaces it."""
    if not is_computed(layer):
        return layer.weight  # type: ignore[no-any-return]
    source = next(layer.parametrizations["weight"].parameters(recurse=False))
    return torch.empty((), dtype=source.dtype, device=source.device).expand(layer.out_features, layer.in_features)


def computed_by(layer: nn.Module) -> str | None:
    """What computes the weight, for messages; None if the layer holds it."""
    if not is_computed(layer):
        return None
    kinds: Any = layer.parametrizations["weight"]  # type: ignore[index]
    return "its weight is computed by " + " and ".join(type(kind).__name__.lstrip("_") for kind in kinds)
