"""A progress bar on stderr."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec


@contextmanager
def progress(total: int) -> Iterator[Callable[[str], None]]:
    """A function that advances a bar; call it ``total`` times, with the name of what is measured next.

    It does nothing where stderr is not a terminal or rich is not installed.
    """
    if find_spec("rich") is None or not sys.stderr.isatty():
        yield lambda name: None
        return
    rich, console = import_module("rich.progress"), import_module("rich.console").Console(stderr=True)
    columns = (
        rich.MofNCompleteColumn(),
        rich.BarColumn(30),
        rich.TimeElapsedColumn(),
        rich.TextColumn("{task.description}"),
    )
    # no refresh thread, which would disturb the measured host times; output to a file is not redirected
    bar = rich.Progress(
        *columns, console=console, auto_refresh=False, transient=True, redirect_stdout=sys.stdout.isatty()
    )
    with bar:
        task = bar.add_task("", total=total)
        begun = 0

        def begin(name: str) -> None:
            nonlocal begun
            bar.update(task, completed=begun, description=import_module("rich.markup").escape(name), refresh=True)
            begun += 1

        yield begin
