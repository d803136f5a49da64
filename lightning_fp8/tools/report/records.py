"""The files next to a run's logs, checked: errors name the file, the field, its rule and its value."""

from __future__ import annotations

import json
import re
import reprlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import yaml

from lightning_fp8.runtime.run_files import DTYPES_FILE, HEALTH_FILE, RUN_FILE

# what Lightning's loggers write
HPARAMS_FILE = "hparams.yaml"
# of the values of a file as text: far beyond any record, and exceeded by aliases of aliases
_MOST_CHARACTERS = 1_000_000
LEFT_OUT = "(left out: may be a secret)"
_PASSWORD = re.compile("passw|passphrase|pwd|secret|credential", re.IGNORECASE)
_KEY = re.compile("key(?!word)|token(?!i[sz])|auth(?!or(s|$|_))|bearer|cookie", re.IGNORECASE)
_WORDS = {
    str: "text",
    bool: "true or false",
    int: "a whole number of at least 0",
    list: "a list",
    dict: "an object",
    torch.dtype: "the name of a dtype of torch",
}
# what a file holds: a type, one of several texts, a list of items of one kind, or an object with at least these fields
_LAYER = {"path": str, "kind": str, "converted": bool, "reason": str}
_TENSOR = {"kind": str, "name": str, "actual": torch.dtype, "expected": str, "elements": int}
_RECORD = {
    **{"precision": str, "parameters": int, "environment": {}, "recipe": {}, "modules": [str], "layers": [_LAYER]},
    "schedule": [str],
}
_FINDING = {
    **dict.fromkeys(("condition", "what", "meaning", "remedy", "status"), str),
    **{"where": [str], "since": int, "last": int, "holds": bool},
}
_HEALTH = {
    "status": ("healthy", "look at", "unhealthy", "not FP8"),
    **{"run": ("running", "ended", "failed"), "text": str, "layers": int, "steps": int, "findings": [_FINDING]},
}
# may be null or missing
_OPTIONAL = {*_RECORD, "expected"}


class ReadError(Exception):
    """Logs that cannot be read; the message names the file, what is wrong and what to do."""


class _PlainLoader(yaml.SafeLoader):  # type: ignore[misc]
    """YAML with tags in place of Python objects, and without merges, which multiply values as aliases do."""

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Do not merge ``<<``, which is then refused as an unknown tag."""


_PlainLoader.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, tag, node: f"({tag})")

# how each file is parsed, and what it holds: from our callbacks and Lightning's loggers
_FILES: dict[str, tuple[Callable[[str], Any], dict[str, Any]]] = {
    RUN_FILE: (json.loads, _RECORD),
    DTYPES_FILE: (json.loads, {"rows": [_TENSOR], "violations": [_TENSOR]}),
    HEALTH_FILE: (json.loads, _HEALTH),
    HPARAMS_FILE: (lambda text: yaml.load(text, _PlainLoader) or {}, {}),
}


def read_record(path: Path) -> dict[str, Any]:
    """The content of one of the files, secrets left out, as pages are passed on; empty if there is no file.

    Raises:
        ReadError: if the file is not valid, or too large for a page, as aliases of aliases can be.
    """
    if not path.is_file():
        return {}
    parse, fields = _FILES[path.name]
    try:
        content = parse(path.read_text(encoding="utf-8"))
        _check_text(content)
        _check(content, fields, "content")
        return _without_secrets(content)  # type: ignore[no-any-return]
    # the exceptions of the YAML reader for a damaged file are not documented: IndexError, KeyError, RecursionError, ...
    except Exception as error:
        why = error if isinstance(error, ReadError) else f"{type(error).__name__}: {error}"
        raise ReadError(f"{path} cannot be read: {why}. Remove it to make the report without it.") from error


def _check_text(content: Any) -> None:
    """Refuse what is no text, or too long a text. A value that is referenced more than once counts each time."""
    length = 0
    for part in json.JSONEncoder(ensure_ascii=False, default=str).iterencode(content):
        # fails for half of a surrogate pair
        length += len(part.encode())
        if length > _MOST_CHARACTERS:
            raise ReadError(f"it has more than {_MOST_CHARACTERS:,} characters")


def _check(value: Any, shape: Any, name: str) -> None:
    kind = type(shape) if isinstance(shape, list | dict) else shape
    words = f"one of {', '.join(kind)}" if isinstance(kind, tuple) else _WORDS[kind]
    if isinstance(kind, tuple):
        fits = value in kind
    elif kind is torch.dtype:
        fits = isinstance(getattr(torch, str(value), None), torch.dtype)
    elif kind is int:
        fits = type(value) is int and 0 <= value < 2**63
    else:
        fits = isinstance(value, kind)
    if not fits:
        raise ReadError(f"`{name}` must be {words}, got {reprlib.repr(value)}")
    if isinstance(shape, list):
        for position, item in enumerate(value):
            _check(item, shape[0], f"{name}[{position}]")
    elif isinstance(shape, dict):
        for field, inner in shape.items():
            if field not in _OPTIONAL or value.get(field) is not None:
                _check(value.get(field), inner, f"{name}.{field}")


def _without_secrets(value: Any) -> Any:
    """The value, with a note in place of every value in it whose name is that of a secret."""
    if isinstance(value, dict):
        return {
            name: LEFT_OUT if _is_secret(str(name), inner) else _without_secrets(inner) for name, inner in value.items()
        }
    return [_without_secrets(inner) for inner in value] if isinstance(value, list) else value


def _is_secret(name: str, value: Any) -> bool:
    # a number is no key or token (`max_tokens`, `key_dim`), but it may be a password
    is_number = isinstance(value, int | float)
    return value is not None and bool(_PASSWORD.search(name) or (_KEY.search(name) and not is_number))
