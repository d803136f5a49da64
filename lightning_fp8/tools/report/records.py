"""Reads and checks the files next to a run's logs; errors name the file and what is wrong."""

from __future__ import annotations

import json
import re
import reprlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import yaml

# limits for one file: characters of text plus other values, and depth of nesting
_MOST_VALUES, _DEEPEST = 1_000_000, 50
# limit for an integer: far beyond a count or a seed, and short enough to print
_MOST_BITS = 1024
# in place of a secret
LEFT_OUT = "(left out: may be a secret)"
_PASSWORD = re.compile("passw|passphrase|pwd|secret|credential", re.IGNORECASE)
_KEY = re.compile("key(?!word)|token(?!i[sz])|auth(?!or(s|$|_))|bearer|cookie", re.IGNORECASE)
Check = Callable[[Any], bool]
# by field: the rule for its value, in words and as a check
Rules = Mapping[str, tuple[str, Check]]


class ReadError(Exception):
    """Logs that cannot be read; the message names the file, what is wrong and what to do."""


def read_record(path: Path) -> dict[str, Any]:
    """What ``RunRecord`` wrote; empty if there is no file.

    Raises:
        ReadError: if the file is not valid.
    """
    return _read(path, json.loads, _RECORD)


def read_dtypes(path: Path) -> dict[str, Any]:
    """What ``DtypeAudit`` wrote; empty if there is no file.

    Raises:
        ReadError: if the file is not valid.
    """
    return _read(path, json.loads, _DTYPES, required=_DTYPES)


def read_hparams(path: Path) -> dict[str, Any]:
    """The hyperparameters that Lightning saved, secrets left out, as pages are passed on; empty where there are none.

    Raises:
        ReadError: if the file is not a mapping, or too large for a page, as aliases of aliases can be.
    """
    found = _read(path, lambda text: {} if (content := yaml.load(text, _PlainLoader)) is None else content, {})
    without: dict[str, Any] = _without_secrets(found)
    return without


def _without_secrets(value: Any) -> Any:
    """The value, with a note in place of every value in it whose name is that of a secret."""
    if isinstance(value, dict):
        return {
            name: LEFT_OUT if _is_secret(str(name), inner) else _without_secrets(inner) for name, inner in value.items()
        }
    return [_without_secrets(inner) for inner in value] if isinstance(value, list) else value


def _is_secret(name: str, value: Any) -> bool:
    # a number is no key or token (`max_tokens`, `key_dim`), but it may be a password
    return value is not None and bool(
        _PASSWORD.search(name) or (_KEY.search(name) and not isinstance(value, int | float))
    )


def _read(path: Path, parse: Callable[[str], Any], rules: Rules, required: Iterable[str] = ()) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = parse(path.read_text(encoding="utf-8"))
    # the exceptions of the YAML reader for a damaged file are not documented: IndexError, KeyError, RecursionError, ...
    except Exception as error:
        raise _error(path, f"{type(error).__name__}: {error}") from error
    wrong = _why_too_much(content)
    if wrong is None and not isinstance(content, dict):
        wrong = f"it holds {reprlib.repr(content)}, not an object"
    if wrong is None:
        missing = [name for name in required if name not in content]
        wrong = f"it has no list {missing[0]!r}" if missing else _wrong_field(content, rules)
    if wrong is not None:
        raise _error(path, wrong)
    return content  # type: ignore[no-any-return]


def _error(path: Path, why: str) -> ReadError:
    return ReadError(f"{path} cannot be read: {why}. Remove it to make the report without it.")


class _PlainLoader(yaml.SafeLoader):  # type: ignore[misc]
    """YAML with tags in place of Python objects, and without merges, which multiply values as aliases do."""

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Do not merge ``<<``, which is then refused as an unknown tag."""


_PlainLoader.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, tag, node: f"({tag})")


def _why_too_much(content: Any) -> str | None:
    """Why the content cannot be shown; None where it can. A value referenced more than once counts each time."""
    waiting, values = [(content, 0)], 1
    while waiting:
        node, depth = waiting.pop()
        if depth > _DEEPEST:
            return f"its values lie more than {_DEEPEST} deep"
        if isinstance(node, str | bytes):
            values += len(node)
            if isinstance(node, str) and any("\ud800" <= letter <= "\udfff" for letter in node):
                return f"{reprlib.repr(node)} is no text: it has half of a surrogate pair"
        elif isinstance(node, int) and node.bit_length() > _MOST_BITS:
            return f"it has a number of {node.bit_length()} bits"
        elif isinstance(node, dict | list | tuple | set):
            values += len(node)
            parts = [part for pair in node.items() for part in pair] if isinstance(node, dict) else node
            if values <= _MOST_VALUES:
                waiting += [(part, depth + 1) for part in parts]
        if values > _MOST_VALUES:
            return f"it has more than {_MOST_VALUES:,} values and letters"
    return None


def _wrong_field(content: Mapping[str, Any], rules: Rules) -> str | None:
    """The first field that breaks its rule, with its value."""
    for name, (rule, is_right) in rules.items():
        if name in content and not is_right(content[name]):
            got = content[name]
            if isinstance(got, list) and is_right([]):
                # the wrong item of the list
                got = next((row for row in got if not is_right([row])), got)
            return f"{name!r} must be {rule}, got {reprlib.repr(got)}"
    return None


def _is(*types: type) -> Check:
    return lambda value: isinstance(value, types)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _is_dtype(value: Any) -> bool:
    return isinstance(value, str) and isinstance(getattr(torch, value, None), torch.dtype)


def _are_objects(**fields: Check) -> Check:
    """A list of objects that have at least these fields."""

    def check(value: Any) -> bool:
        return isinstance(value, list) and all(
            isinstance(row, dict) and all(name in row and is_right(row[name]) for name, is_right in fields.items())
            for row in value
        )

    return check


_none, _text = type(None), _is(str)
_are_layers = _are_objects(path=_text, kind=_text, reason=_text, converted=_is(bool))
_are_tensors = _are_objects(kind=_text, name=_text, actual=_is_dtype, expected=_is(str, _none), elements=_is_count)
_TENSORS = ("a list of `kind`, `name`, `actual`, `expected` and `elements` of tensors", _are_tensors)
_RECORD: Rules = {
    **dict.fromkeys(("precision", "strategy", "accelerator"), ("text", _is(str, _none))),
    **dict.fromkeys(("world_size", "parameters"), ("a whole number of at least 0", _is_count)),
    **dict.fromkeys(("environment", "recipe"), ("an object or null", _is(dict, _none))),
    "modules": (
        "a list of module paths or null",
        lambda value: value is None or (isinstance(value, list) and all(map(_text, value))),
    ),
    "layers": (
        "a list of `path`, `kind`, `converted` and `reason` of layers or null",
        lambda value: value is None or _are_layers(value),
    ),
}
_DTYPES: Rules = {"rows": _TENSORS, "violations": _TENSORS}
