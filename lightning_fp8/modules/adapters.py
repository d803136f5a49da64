"""Layers that PEFT has wrapped, and the small matrices that it adds to them. Nothing here imports ``peft``."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import cast

from torch import nn

# if a model has adapters, these modules are already imported
_TUNERS = ("peft.tuners.tuners_utils", "BaseTunerLayer")
_LORA = ("peft.tuners.lora.layer", "LoraLayer")


def adapter_modules(modules: Iterable[nn.Module]) -> set[nn.Module]:
    """The modules that belong to adapters: everything inside PEFT's tuner layers except their base layers.

    Args:
        modules: the model and everything inside it.
    """
    kind = _loaded(*_TUNERS)
    tuners = [module for module in modules if kind is not None and isinstance(module, kind)]
    parts = (part for tuner in tuners for name, part in tuner.named_children() if name != "base_layer")
    return {module for part in parts for module in part.modules()}


def adapted_layer(module: nn.Module) -> nn.Module:
    """The layer inside a module that LoRA or one of its variants has wrapped, else the module itself.

    Such a wrapper passes its own input on to the layer; other adapters, such as IA3 and OFT, may change the input.
    """
    kind = _loaded(*_LORA)
    while kind is not None and isinstance(module, kind):
        module = cast(nn.Module, module.base_layer)
    return module


def _loaded(module: str, name: str) -> type | None:
    return getattr(sys.modules.get(module), name, None)
