"""Calls a function after a module has been imported, without importing the module itself."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def after_import(name: str, action: Callable[[], None]) -> Callable[[], None]:
    """Call ``action`` as soon as the module ``name`` has been imported, or now if it has; returns a function to cancel.

    Python has no other way to observe an import: the module may be imported at any time, and importing it here would
    cost every user its time and memory.
    """
    if name in sys.modules:
        action()
        return lambda: None
    finder = _Finder(name, action)
    sys.meta_path.insert(0, finder)
    return finder.remove


class _Finder(MetaPathFinder):
    """Lets the other finders find the module, and makes its loader call the action, once."""

    def __init__(self, name: str, action: Callable[[], None]) -> None:
        self._name, self._action = name, action

    def remove(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        # those behind it, as another one for the same module, before it, is asking this one
        behind = sys.meta_path[sys.meta_path.index(self) + 1 :] if self in sys.meta_path else ()
        specs = (finder.find_spec(fullname, path, target) for finder in behind)
        spec = next((spec for spec in specs if spec is not None), None)
        # a namespace package has no loader that runs anything
        if spec is not None and hasattr(spec.loader, "exec_module"):
            self._call_after(spec.loader)
        return spec

    def _call_after(self, loader: Any) -> None:
        run = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            # the loader stays with the module, and may run it again
            loader.exec_module = run
            run(module)
            # the finder is gone if cancelled; a shared loader may run another module, having only found this one before
            if module.__name__ == self._name and self in sys.meta_path:
                self.remove()
                self._action()

        loader.exec_module = exec_module
