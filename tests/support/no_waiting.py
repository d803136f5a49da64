"""Finds where the host waits for the device in a step, without a device: CPU tensors stand for CUDA ones.

A tensor is on the host if the package or a test made it without a device or on ``"cpu"``, or computed it from such
tensors alone. All others are on the device. These wait for the device:

- operators that give the host a value or a shape, such as ``item``, ``bool``, ``nonzero``, ``torch.equal``, an index
  by a mask;
- copies to the host, as by ``tolist``, and to the device, as of the list in ``torch.tensor([1], device=...)`` and in
  ``x[[0, 1]]``; but not those that are ``non_blocking``, from or to a tensor made with ``pin_memory``;
- ``synchronize``.

A wait belongs to the innermost function outside of torch and Python's library. If that is another package's, such as
Lightning's loop, the wait is left out.
"""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from repository import ROOT
from torch import Tensor, nn
from torch._C import DispatchKey
from torch._subclasses import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves

from lightning_fp8.scaling import notices
from lightning_fp8.scalings import emulation

_FROM_VALUES = ("tensor", "as_tensor", "new_tensor", "from_numpy", "frombuffer")
_TO_THE_HOST = ("cpu", "numpy", "tolist", "__array__")
_COPIES = (*_FROM_VALUES, *_TO_THE_HOST, "to", "cuda")
_INDEXING = ("index", "index_put", "index_put_", "_index_put_impl_")
_NEEDS_VALUES = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_SKIPPED = (f"{Path(torch.__file__).parent}/", f"{sysconfig.get_path('stdlib')}/", "<frozen", "<string>", __file__)
_OTHERS = f"{sysconfig.get_path('purelib')}/"


class NoWaiting(TorchFunctionMode):
    """Follows which tensors are on the host while it is entered, and finds the waits between start and stop.

    Enter it before the model is converted. See :meth:`compiled` for graphs.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.is_paused = False
        self._found: list[str] = []
        self._operators = _Operators(self)
        # by address; kept, as another storage could take the address
        self._host: dict[int, torch.UntypedStorage] = {}
        self._pinned: set[int] = set()
        _stand_in_for_cuda(self, monkeypatch)

    def start(self) -> None:
        """A step begins."""
        self._found.clear()
        self._operators.__enter__()

    def stop(self) -> list[str]:
        """The step has ended. Returns each wait in it: ``<file> <function>: <what waits>``."""
        if self._operators in _get_current_dispatch_mode_stack():
            self._operators.__exit__(None, None, None)
        return list(self._found)

    def of(self, step: Callable[[], object]) -> list[str]:
        """Each wait in a step."""
        self.start()
        try:
            step()
        finally:
            waits = self.stop()
        return waits

    def compiled(self, forward: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        """``torch.compile(forward)``, which would trace this mode. The operators of its graphs are watched."""
        graph = torch.compile(forward, **options)

        def call(*args: Any, **kwargs: Any) -> Any:
            self.__exit__(None, None, None)
            try:
                return graph(*args, **kwargs)
            finally:
                self.__enter__()

        return call

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leaves out what waits inside."""
        before, self.is_paused = self.is_paused, True
        try:
            yield
        finally:
            self.is_paused = before

    def note(self, wait: str) -> None:
        """The host waits now."""
        place = None if self.is_paused else _innermost()
        if place is not None:
            self._found.append(f"{place}: {wait}")

    def is_on_host(self, tensor: Tensor) -> bool:
        """Whether its memory is the host's."""
        return _has_memory(tensor) and tensor.untyped_storage()._cdata in self._host

    def is_pinned(self, *tensors: Tensor) -> bool:
        """Whether one of them was made to be pinned where there is a GPU."""
        return any(tensor.untyped_storage()._cdata in self._pinned for tensor in tensors if _has_memory(tensor))

    def put_on_host(self, values: Any, pinned: bool = False) -> None:
        """The memory of all tensors in ``values`` is the host's."""
        for tensor in filter(_has_memory, tree_leaves(values)):
            storage = tensor.untyped_storage()
            self._host[storage._cdata] = storage
            self._pinned.update([storage._cdata] if pinned else [])

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = dict(kwargs or {}), func.__name__
        if name in ("__get__", "__set__"):
            return func(*args, **kwargs)
        if func is Tensor.backward:
            # the functions of a backward run in the modes of its caller
            with self:
                return torch.autograd.backward(args[0], kwargs.pop("gradient"), **kwargs)
        tensors = _tensors(args, kwargs)
        all_on_host = all(map(self.is_on_host, tensors))
        from_host, to_host = all_on_host or name == "new_tensor", _named_place(name, args, kwargs)
        if to_host is None:
            to_host = all_on_host and (bool(tensors) or _is_ours(sys._getframe(1).f_code.co_filename))
        asks_to_pin = "pin_memory" in kwargs
        if asks_to_pin:
            kwargs["pin_memory"] = False
        with self.paused() if from_host else nullcontext():
            result = func(*args, **kwargs)
        if name in _COPIES and from_host is not to_host:
            if not (kwargs.get("non_blocking") and self.is_pinned(*tensors)):
                self.note(name)
            # on a CPU it may be the same memory
            result = result.clone() if isinstance(result, Tensor) else result
        if to_host:
            self.put_on_host(result, pinned=asks_to_pin)
        return result


class _Operators(TorchDispatchMode):
    """Notes the operators that wait, also those that the package's own operators call."""

    supports_higher_order_operators = True

    def __init__(self, calls: NoWaiting) -> None:
        super().__init__()
        self._calls = calls

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """A graph stays the one that was compiled without this mode."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, calls = kwargs or {}, self._calls
        if FakeTensor in types or not isinstance(func, torch._ops.OpOverload):
            return func(*args, **kwargs)
        if types and not {*types} <= {Tensor, nn.Parameter}:
            # such as a DTensor, which calls operators on what it consists of
            return NotImplemented
        if func.namespace == "lightning_fp8":
            keys = (DispatchKey.CPU, DispatchKey.CompositeExplicitAutograd)
            with self, torch._C.DisableTorchFunction():
                return func._op_dk(next(filter(func.has_kernel_for_dispatch_key, keys)), *args, **kwargs)
        if func.has_kernel_for_dispatch_key(DispatchKey.CompositeImplicitAutograd):
            with self:
                return func.decompose(*args, **kwargs)
        result, name = func(*args, **kwargs), func._schema.name.removeprefix("aten::")
        if name == "lift_fresh" and not calls.is_paused:
            # numbers that Python gave
            calls.put_on_host(result)
        elif self._waits(func, name, args, kwargs):
            calls.note(name)
        return result

    def _waits(self, func: Any, name: str, args: Any, kwargs: Any) -> bool:
        on_host, tensors = self._calls.is_on_host, _tensors(args, kwargs)
        if name == "copy_":
            target, source, *rest = args
            return on_host(target) is not on_host(source) and not (any(rest) and self._calls.is_pinned(target, source))
        if tensors and all(map(on_host, tensors)):
            return False
        if name in _INDEXING:
            # a number is filled in where a mask says, without a list of the places
            fills = name != "index" and on_host(args[2]) and not args[2].dim()
            masks = () if fills else (torch.bool, torch.uint8)
            return any(index is not None and (index.dtype in masks or on_host(index)) for index in args[1])
        # a launch may take the value of a tensor without dimensions from the host
        is_mixed = any(on_host(tensor) and tensor.dim() for tensor in tensors)
        return is_mixed or not _NEEDS_VALUES.isdisjoint(func.tags)


def _stand_in_for_cuda(calls: NoWaiting, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let CPU tensors take the branches for CUDA ones, and note calls that wait for a device."""

    def synchronize() -> Callable[..., None]:
        # a function of its own each time, as a compiler has a table of them
        return lambda *_, **__: calls.note("synchronize")

    def other_modes() -> int:
        return sum(not isinstance(mode, _Operators) for mode in _get_current_dispatch_mode_stack())

    def look_at_device(self: Any, state: Any) -> Any:
        fields = {name: getattr(state, name) for name in ("amax", "nonfinite_steps", "updates")}
        return look(self, SimpleNamespace(device=torch.device("cuda"), **fields))

    def product(*arguments: Any) -> Tensor:
        with calls.paused():
            return product_in_blocks(*arguments)

    def event() -> SimpleNamespace:
        return SimpleNamespace(record=lambda stream: None, query=lambda: True, synchronize=synchronize())

    look, product_in_blocks = notices._Nonfinite.look, emulation.product_of_blocks
    # under other modes layers keep no copies, and call torch's operators
    monkeypatch.setattr("lightning_fp8.ops.library._len_torch_dispatch_stack", other_modes)
    monkeypatch.setattr("lightning_fp8.scaling.notices._Nonfinite.look", look_at_device)
    # in place of cuBLASLt's
    monkeypatch.setattr("lightning_fp8.scalings.emulation.product_of_blocks", product)
    monkeypatch.setattr("torch.cuda.Event", event)
    monkeypatch.setattr("torch.cuda.current_stream", lambda device=None: SimpleNamespace(synchronize=synchronize()))
    for module in ("cuda", "accelerator"):
        monkeypatch.setattr(f"torch.{module}.synchronize", synchronize())


def _tensors(args: Any, kwargs: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]


def _named_place(name: str, args: Any, kwargs: Any) -> bool | None:
    """Whether a call names the host for its result; None if it names no place."""
    if name in _TO_THE_HOST:
        return True
    named = [kwargs.get("device"), *(args[1:] if name == "to" else ())]
    named = [value for value in named if isinstance(value, (str, torch.device, Tensor))]
    # a device that is not written out is that of a tensor
    return named[0] == "cpu" if named else False if name == "cuda" else None


def _has_memory(tensor: object) -> bool:
    return type(tensor) in (Tensor, nn.Parameter) and not tensor.is_meta  # type: ignore[attr-defined]


def _innermost() -> str | None:
    """The innermost function outside of torch and Python's library; None if it is another package's."""
    frame = sys._getframe()
    while frame.f_code.co_filename.startswith(_SKIPPED):
        if frame.f_back is None:
            return None
        frame = frame.f_back
    path = frame.f_code.co_filename
    if _is_ours(path):
        return f"{Path(path).relative_to(ROOT)} {frame.f_code.co_name}"
    return None if path.startswith(_OTHERS) else "a graph"


def _is_ours(path: str) -> bool:
    return path.startswith(f"{ROOT}/") and not path.startswith(_OTHERS)
