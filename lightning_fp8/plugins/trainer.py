"""Makes plugins from precision strings, and their policies for ``fully_shard``."""

from __future__ import annotations

from typing import Any

from torch.distributed.fsdp import MixedPrecisionPolicy

from lightning_fp8.plugins.bf16 import Bf16MixedPrecision, Bf16TruePrecision
from lightning_fp8.plugins.core import PrecisionCore
from lightning_fp8.plugins.fp8 import Fp8Precision
from lightning_fp8.plugins.settings import FP8_PRECISIONS, suggestion

PLUGINS: dict[str, type[Any]] = {
    **dict.fromkeys(FP8_PRECISIONS, Fp8Precision),
    "bf16-mixed": Bf16MixedPrecision,
    "bf16-true": Bf16TruePrecision,
}


def plugin_of(precision: str) -> PrecisionCore:
    """A plugin with the defaults of a precision string.

    >>> plugin_of("fp8-current").precision
    'fp8-current'
    """
    plugin: PrecisionCore = PLUGINS[precision]()
    # without a recipe, a model that was converted before keeps its own
    plugin.precision = precision
    return plugin


def fsdp2_policy(precision: str | PrecisionCore = "fp8-delayed") -> MixedPrecisionPolicy:
    """The ``mp_policy`` of a precision, for ``torch.distributed.fsdp.fully_shard``.

    Parameters are gathered in the precision's compute dtype (bf16), gradients are reduced in its ``reduce_dtype``
    (fp32); shards and optimizer state keep the dtype in which parameters are stored.

    Args:
        precision: one of the strings, or a plugin with its own settings.

    Raises:
        ValueError: for another string.

    >>> fsdp2_policy("bf16-mixed").reduce_dtype
    torch.float32
    """
    if isinstance(precision, PrecisionCore):
        plugin = precision
    elif precision in PLUGINS:
        plugin = plugin_of(precision)
    else:
        names = ", ".join(map(repr, PLUGINS))
        raise ValueError(f"`precision` must be a plugin or one of {names}, got {precision!r}.{suggestion(precision)}")
    return MixedPrecisionPolicy(param_dtype=plugin.compute_dtype, reduce_dtype=plugin.reduce_dtype)
