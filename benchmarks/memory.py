"""Bytes of tensors by purpose, exact: each storage counts once."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lightning_fp8.conversion.convert import is_converted, scaling_state
from lightning_fp8.modules.base import Fp8Module
from lightning_fp8.modules.weight_cast import KeptCast
from lightning_fp8.modules.weights_unchanged import casts_of


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Bytes of all storages, each counted once."""
    storages = {(x.device, x.untyped_storage().data_ptr()): x.untyped_storage().nbytes() for x in tensors}
    return sum(storages.values())


def weight_copies(model: nn.Module) -> list[Tensor]:
    """Copies of weights in FP8, with scales, that layers keep until the next optimizer step."""
    casts: list[KeptCast[Any]] = []
    for module in model.modules():
        if isinstance(module, Fp8Module):
            casts += casts_of(module.fp8.values())
    leaves = tree_leaves([cast._cast for cast in casts])
    return [tensor for tensor in leaves if isinstance(tensor, Tensor)]


def saved_bytes(model: nn.Module, forward: Callable[[], Any]) -> int:
    """Bytes that a forward saves for backward, without parameters, kept copies of weights and the FP8 state."""
    saved: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        forward()
    state = vars(scaling_state(model)).values() if is_converted(model) else ()
    there = [*model.parameters(), *weight_copies(model), *(x for x in state if isinstance(x, Tensor))]
    return bytes_of([*saved, *there]) - bytes_of(there)
