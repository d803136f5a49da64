"""What the user is told, once: evaluation without scales, scales that nobody updates, the first inf or NaN."""

from __future__ import annotations
