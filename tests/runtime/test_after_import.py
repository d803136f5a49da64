"""Functions registered for an import are called after that import, and only then."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lightning_fp8.runtime.after_import import after_import

NAME = "imported_for_this_test"


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The file of a module that can be imported but has not been."""
    monkeypatch.syspath_prepend(tmp_path)
    finders = list(sys.meta_path)
    yield tmp_path / f"{NAME}.py"
    sys.modules.pop(NAME, None)
    assert sys.meta_path == finders


def test_called_once_when_the_module_is_complete(module: Path) -> None:
    module.write_text("first = 1\nlast = 2\n")
    seen: list[list[str]] = []
    cancel = after_import(NAME, lambda: seen.append([*vars(sys.modules[NAME])][-2:]))
    # finding a module does not import it
    assert importlib.util.find_spec(NAME) is not None
    assert seen == []
    imported = importlib.import_module(NAME)
    assert seen == [["first", "last"]]
    importlib.reload(imported)
    assert len(seen) == 1
    cancel()


def test_called_at_once_for_a_module_that_is_there_and_not_once_cancelled(module: Path) -> None:
    module.write_text("")
    called: list[str] = []
    after_import(NAME, lambda: called.append("cancelled"))()
    importlib.import_module(NAME)
    after_import(NAME, lambda: called.append("at once"))()
    assert called == ["at once"]


def test_two_functions_for_one_module(module: Path) -> None:
    module.write_text("")
    called: list[str] = []
    after_import(NAME, lambda: called.append("first"))
    after_import(NAME, lambda: called.append("second"))
    cancel = after_import(NAME, lambda: called.append("cancelled"))
    cancel()
    importlib.import_module(NAME)
    assert called == ["first", "second"]


def test_an_import_that_fails_may_be_repeated(module: Path) -> None:
    module.write_text("1 / 0")
    called: list[int] = []
    after_import(NAME, lambda: called.append(1))
    with pytest.raises(ZeroDivisionError):
        importlib.import_module(NAME)
    assert called == []
    module.write_text("fine = True")
    importlib.invalidate_caches()
    importlib.import_module(NAME)
    assert called == [1]
