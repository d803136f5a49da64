"""The limits of the layout, as CONTRIBUTING.md gives them."""

from __future__ import annotations

import re

from repository import ROOT

_ROW = re.compile(r"^\| [^|]+ \| ([\d,]+)%? \| `pytest (?:-s )?(\S+?)(?: -k (\w+))?` \|$", re.MULTILINE)


def limit(path: str, name: str = "") -> int:
    """The limit in the row whose command is ``pytest <path> -k <name>``."""
    rows = _ROW.findall((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"))
    (digits,) = [number for number, *command in rows if command == [path, name]]
    return int(digits.replace(",", ""))
