"""Argument types shared by the command lines of the tools."""

from __future__ import annotations

import argparse


def positive(text: str) -> int:
    """An argument that is an integer of at least 1.

    Raises:
        argparse.ArgumentTypeError: for anything else.
    """
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be an integer of at least 1, got {text!r}")
    return int(text)
