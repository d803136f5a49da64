"""Autocast for forwards that overlap in threads and asyncio tasks."""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import partial
from typing import NamedTuple

import torch

from lightning_fp8.runtime.switch import Switch


class _Autocast(NamedTuple):
    device_type: str
    enabled: bool
    dtype: torch.dtype
    cache_enabled: bool


_AUTOCAST: dict[str, Switch[_Autocast]] = {}


def autocast(device_type: str, dtype: torch.dtype) -> AbstractContextManager[None]:
    """``torch.autocast`` without a cache, in this thread, until all overlapping tasks of the thread have ended.

    Raises:
        RuntimeError: by torch, where the device cannot compute in ``dtype``.
    """
    torch.autocast(device_type, dtype=dtype)
    if device_type not in _AUTOCAST:
        _AUTOCAST.setdefault(device_type, Switch(partial(_get_autocast, device_type), _set_autocast, per_thread=True))
    return _AUTOCAST[device_type].at(_Autocast(device_type, True, dtype, False))


def _get_autocast(device_type: str) -> _Autocast:
    enabled, dtype = torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)
    return _Autocast(device_type, enabled, dtype, torch.is_autocast_cache_enabled())


def _set_autocast(values: _Autocast) -> None:
    torch.set_autocast_enabled(values.device_type, values.enabled)
    torch.set_autocast_dtype(values.device_type, values.dtype)
    torch.set_autocast_cache_enabled(values.cache_enabled)
