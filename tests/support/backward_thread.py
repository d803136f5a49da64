"""A thread like those that autograd uses for a GPU: it has the caller's thread-local state of torch, but not of Python.

Without ``from __future__ import annotations``, which TorchScript cannot read.
"""

import threading
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

_calls: list[Callable[[], None]] = []


def in_a_backward_thread(function: Callable[[], Any]) -> Any:
    """The function's result or exception in that thread."""
    results: list[Any] = []
    caller = threading.get_ident()

    def call() -> None:
        assert threading.get_ident() != caller
        try:
            results.append(function())
        except Exception as error:
            results.append(error)

    _calls.append(call)
    _forked()(torch.zeros(1))
    if isinstance(results[0], Exception):
        raise results[0]
    return results[0]


@torch.jit.ignore
def _call(x: Tensor) -> Tensor:
    _calls.pop()()
    return x


def _body(x: Tensor) -> Tensor:
    return _call(x)


def _fork(x: Tensor) -> Tensor:
    return torch.jit.wait(torch.jit.fork(_body, x))


@cache
def _forked() -> Callable[[Tensor], Tensor]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.script(_fork)
