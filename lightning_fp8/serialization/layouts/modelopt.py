"""``quant_method: modelopt``, for reading only: ``<layer>.weight_scale`` and static ``<layer>.input_scale``.

Source: NVIDIA/Model-Optimizer, ``export/unified_export_hf.py``.
"""

from __future__ import annotations

from collections.abc import Collection

from lightning_fp8.serialization.layouts.base import Config, Layout, Scheme


def _read(config: Config, names: Collection[str]) -> Scheme:
    config.one_of("quant_algo", ("FP8",))
    return Scheme("modelopt", ("tensor",), static=True, has_cache=config.has_cache)


MODELOPT = Layout(name="modelopt", method="modelopt", read=_read, config_file="hf_quant_config.json")
