"""Settings of torch, per process or per thread, that overlapping contexts share."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Generic, TypeVar

import torch
from torch.utils._python_dispatch import _disable_current_modes

T = TypeVar("T")


class Switch(Generic[T]):
    """A setting that overlapping contexts share: the first one in saves it, the last one out restores it.

    Contexts may end in any order, in any thread or task. While several are open, the value is that of the one entered
    last, also in code outside them. What the user sets meanwhile holds until the next context begins or ends: the
    last one out restores what was before the first one.

    Args:
        get: reads the setting.
        set: writes it.
        per_thread: whether each thread has its own; its tasks share it.
    """

    def __init__(self, get: Callable[[], T], set: Callable[[T], None], per_thread: bool = False) -> None:
        # `torch.compile` would trace them on their own, where a compiled function enters a context
        self._get = torch.compiler.disable(get, recursive=False)
        self._set = torch.compiler.disable(set, recursive=False)
        # reentrant, as the garbage collector may close a generator, and so a context, while this thread holds the lock
        self._lock = threading.RLock()
        self._scope: _Thread[T] | _Process[T] = _Thread() if per_thread else _Process()

    @contextmanager
    def at(self, value: T) -> Iterator[None]:
        """Inside, the setting is ``value``."""
        contexts, key = self._scope.contexts, object()
        with self._lock:
            if not contexts.switched:
                contexts.before, contexts.switched = self._get(), True
            contexts.open[key] = value
            self._set(value)
        try:
            yield
        finally:
            with self._lock:
                del contexts.open[key]
                # what belongs to another thread is restored when its next context ends
                if contexts is self._scope.contexts:
                    self._set(next(reversed(contexts.open.values()), contexts.before))
                    contexts.switched = bool(contexts.open)


class _Contexts(Generic[T]):
    """The values of the open contexts, in the order in which they were entered, and what was before the first."""

    before: T

    def __init__(self) -> None:
        self.open: dict[object, T] = {}
        self.switched = False


class _Process(Generic[T]):
    def __init__(self) -> None:
        self.contexts: _Contexts[T] = _Contexts()


class _Thread(threading.local, Generic[T]):
    def __init__(self) -> None:
        self.contexts: _Contexts[T] = _Contexts()


_DEFAULT_DTYPE = Switch(torch.get_default_dtype, torch.set_default_dtype)


def default_dtype(dtype: torch.dtype) -> AbstractContextManager[None]:
    """Give new floating point tensors this dtype, in all threads: torch has one default per process."""
    return _DEFAULT_DTYPE.at(dtype)


def _deterministic() -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


def _set_deterministic(value: tuple[bool, bool]) -> None:
    torch.use_deterministic_algorithms(value[0], warn_only=value[1])


_DETERMINISTIC = Switch(_deterministic, _set_deterministic)


@contextmanager
def as_torch_starts() -> Iterator[None]:
    """Run code in torch's own defaults, unseen by any mode, whatever it is called from.

    For checks of kernels, which a FLOP counter or selective checkpointing would take for the model's own products, and
    for reading and writing files.
    """
    on_cpu, full = torch.device("cpu"), torch.autocast("cpu", enabled=False)
    # with deterministic algorithms, a product on a GPU may be refused
    fast = _DETERMINISTIC.at((False, False))
    with _disable_current_modes(), default_dtype(torch.float32), on_cpu, full, fast:
        yield
