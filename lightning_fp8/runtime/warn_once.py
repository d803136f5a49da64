"""Warnings about the machine or a model: each is said once, however often its cause is met."""

from __future__ import annotations

import functools
import warnings


@functools.cache
def warn_once(message: str) -> None:
    """Warn, unless the same has been said in this process."""
    warnings.warn(message, stacklevel=2)
