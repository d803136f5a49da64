"""Public names of a package that are imported when they are first used (PEP 562)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any


def lazy_names(package: str, homes: Mapping[str, Sequence[str]], packages: Sequence[str] = ()) -> Callable[[str], Any]:
    """The ``__getattr__`` of a package.

    Args:
        package: its ``__name__``.
        homes: the names by the module that defines them, written from the package on.
        packages: packages in it that need no import of their own either.
    """
    home_of = {name: home for home, names in homes.items() for name in names}

    def __getattr__(name: str) -> Any:  # noqa: N807
        if name in packages:
            # the import sets the attribute
            return import_module(f"{package}.{name}")
        module = sys.modules[package]
        if name not in home_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}", name=name, obj=module)
        value = getattr(import_module(f"{package}.{home_of[name]}"), name)
        setattr(module, name, value)
        return value

    return __getattr__
