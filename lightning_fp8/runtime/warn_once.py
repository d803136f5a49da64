"""Warnings about the machine or a model, each given once, however often its cause occurs."""

from __future__ import annotations

import functools
import warnings


@functools.cache
def warn_once(message: str) -> None:
    """Warn, unless this process has given the same warning before."""
    warnings.warn(message, stacklevel=2)
