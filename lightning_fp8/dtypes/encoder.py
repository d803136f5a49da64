"""Lets ``nn.TransformerEncoder`` evaluate through its layers' own ``forward``, as in training.

In ``eval()`` without gradients torch takes a fast path that reads the weights of the layers directly. Under autocast on
the CPU it fails on their dtypes, and it bypasses every converted layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from lightning_fp8.runtime.switch import Switch

_HANDLE = "_own_forward_handle"
_USED_NESTED_TENSOR = "_used_nested_tensor"
_FAST_PATH = Switch(torch.backends.mha.get_fastpath_enabled, torch.backends.mha.set_fastpath_enabled)


def layers_own_forwards() -> AbstractContextManager[None]:
    """Disable the fast path, in all threads. The last context to end restores what was set before the first."""
    return _FAST_PATH.at(False)


def keep_own_forwards(layers: Sequence[nn.Module], converted: type[nn.Module]) -> None:
    """Keep encoders with a ``converted`` layer off the fast path permanently, even outside our contexts.

    torch runs a layer's own forward if the layer has a hook; an encoder that makes no nested tensors passes its layers
    inputs that they accept.
    """
    restore_fast_path(layers)
    for layer in layers:
        if not isinstance(layer, nn.TransformerEncoderLayer | nn.TransformerEncoder):
            continue
        if not any(isinstance(part, converted) for part in layer.modules()):
            continue
        if isinstance(layer, nn.TransformerEncoderLayer):
            vars(layer)[_HANDLE] = layer.register_forward_pre_hook(_take_own_forward)
        elif getattr(layer, "use_nested_tensor", False):
            vars(layer)[_USED_NESTED_TENSOR] = True
            vars(layer)["use_nested_tensor"] = False


def restore_fast_path(layers: Sequence[nn.Module]) -> None:
    """Undo :func:`keep_own_forwards`."""
    for layer in layers:
        handle = vars(layer).pop(_HANDLE, None)
        if handle is not None:
            handle.remove()
        if vars(layer).pop(_USED_NESTED_TENSOR, False):
            vars(layer)["use_nested_tensor"] = True


def _take_own_forward(layer: nn.Module, inputs: Any) -> None:
    """Do nothing: the presence of a hook disables the fast path."""
