"""The dtypes for ``fully_shard``."""

from __future__ import annotations

from torch.distributed.fsdp import MixedPrecisionPolicy

from lightning_fp8.plugins.core import PrecisionCore
from lightning_fp8.plugins.settings import PrecisionString
from lightning_fp8.plugins.trainer import PLUGINS


def fsdp2_policy(precision: PrecisionString | PrecisionCore = "fp8-delayed") -> MixedPrecisionPolicy:
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
        plugin = PLUGINS[precision].of_string(precision)
    else:
        known = ", ".join(map(repr, PLUGINS))
        raise ValueError(f"`precision` must be a plugin or one of {known}, got {precision!r}.")
    return MixedPrecisionPolicy(param_dtype=plugin.compute_dtype, reduce_dtype=plugin.reduce_dtype)
