"""The page of errors and warnings quotes the package's messages."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from documented import text_of
from repository import ROOT


def messages() -> Iterator[str]:
    """All message texts of the package, with ``...`` for formatted values."""
    for file in (*(ROOT / "lightning_fp8").rglob("*.py"), *(ROOT / "kernels_cuda").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                yield "".join(part.value if isinstance(part, ast.Constant) else "..." for part in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


def test_messages_on_the_page_are_those_of_the_package() -> None:
    said = list(messages())
    rows = [row for _, row in re.findall(r"^\| (`+) ?(.*?) ?\1 \|", text_of("docs/errors.md"), re.MULTILINE)]
    assert len(rows) > 40
    assert [row for row in rows if not any(occurs(row, message) for message in said)] == []


def occurs(row: str, message: str) -> bool:
    """Whether a message contains all parts of a row (separated by ``...``) in this order."""
    at = 0
    for part in (part.strip() for part in row.split("...")):
        at = message.find(part, at)
        if at < 0:
            return False
        at += len(part)
    return True
