"""Where the repository is that the tests belong to."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]
