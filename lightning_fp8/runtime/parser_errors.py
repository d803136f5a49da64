"""The long messages of jsonargparse about a wrong configuration, each as one sentence."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from importlib import import_module
from inspect import signature

from lightning_fp8.runtime.did_you_mean import did_you_mean

_CLASS = r"Problem with given class_path '([^']+)':\n\s+"


def sentence(message: str, trainer_arguments: Iterable[str]) -> str:
    """What is wrong, what was given, and what is allowed; the message itself if it is of an unknown kind.

    jsonargparse lists why a value is none of the types of a union, ten lines for each, and again for each list that the
    value is in.

    Args:
        message: that of jsonargparse.
        trainer_arguments: the names of the arguments of a Trainer.
    """
    keys = re.findall(r'Parser key "([^"]+)":', message)
    at = f"`{keys[-1]}`: " if keys else ""
    if found := re.search(r"Not of type RecipeOfConfiguration: (.*)", message):
        return found[1]
    if found := re.search(rf"{_CLASS}Option '([^']+)' is not accepted", message):
        return _unknown_argument(*found.groups())
    if found := re.search(r"(?:does not accept option '|arguments: --)trainer\.(\w+)", message):
        return f"{message.rstrip('.')}.{did_you_mean(found[1], trainer_arguments)}"
    if found := re.search(r"module '([^']+)' has no attribute '([^']+)'", message):
        module, name = found.groups()
        return f"{at}the module {module!r} has no class {name!r}.{did_you_mean(name, _public_names(module))}"
    if found := re.search(rf"{_CLASS}No module named '([^']+)'", message):
        return f"{at}there is no module {found[2]!r} for the class {found[1]!r}."
    return _wrong_value(keys[-1], message.rpartition("Parser key")[2]) or message if keys else message


def _unknown_argument(path: str, name: str) -> str:
    module, _, kind = path.rpartition(".")
    arguments = [*signature(getattr(import_module(module), kind)).parameters]
    return (
        f"`{path}` has no argument `{name}`: its arguments are {', '.join(arguments)}.{did_you_mean(name, arguments)}"
    )


def _public_names(module: str) -> list[str]:
    return [name for name in dir(sys.modules.get(module)) if not name.startswith("_")]


def _wrong_value(key: str, message: str) -> str:
    """The sentence for a value of the wrong type, or that is none of some literals; empty for another message."""
    given = re.search(r"(?:Given value|Got value): ([^\n]*)", message)
    if given is None or "Not a valid subclass" in message:
        return ""
    # what follows is about the values that this one is in
    message = message[: given.end()]
    if found := re.search(r"Import path (?:(\S+) )?does not correspond to a subclass of (\w+)", message):
        return f"`{key}` must be a subclass of {found[2]}, got {found[1] or given[1]}."
    literals = re.findall(r"'([^']*)'", "".join(re.findall(r"Expected a typing\.Literal\[(.*)\]", message)))
    types = re.findall(r"Expected a <class '(\w+)'>", message)
    allowed = [*map(repr, literals), *("null" if kind == "NoneType" else kind for kind in types)]
    if not allowed:
        return ""
    rule = f"{', '.join(allowed[:-1])} or {allowed[-1]}" if allowed[1:] else allowed[0]
    return f"`{key}` must be {rule}, got {given[1]!r}.{did_you_mean(given[1], literals)}"
