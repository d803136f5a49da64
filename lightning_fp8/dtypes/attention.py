"""Casts query, key, value and mask of ``scaled_dot_product_attention`` to one dtype, however it was imported.

The function is a builtin that any module may hold under any name, so it is intercepted in torch's dispatcher.
Inside our contexts, the dispatch key of a backend that no longer exists is enabled for the current thread; only this
operator has a kernel for that key, and every other operator falls through at no cost. ``torch.compile`` traces
through it.

The settings belong to the running thread or asyncio task, and are held in a context variable. torch's backward threads
have no context variables; from the thread that called backward they inherit the dispatch key and ``_STASH``.
"""

from __future__ import annotations

import ctypes
import re
import sys
import threading
import traceback
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import FrameType
from typing import Any, Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.fx import GraphModule

from lightning_fp8.modules.paths import plain_path
from lightning_fp8.ops.formats import dtype_name
from lightning_fp8.runtime.switch import Switch

DtypeMismatch = Literal["align", "warn", "error"]
DTYPE_MISMATCH: tuple[DtypeMismatch, ...] = get_args(DtypeMismatch)

# how the tracer begins the path of a module that it finds in a local variable
_TRACED_ROOT = re.compile(r"^L\['\w+'\]\.?")
_KEY = torch._C.DispatchKey.AutocastIPU  # type: ignore[attr-defined]
_KEY_SET = torch._C.DispatchKeySet(_KEY)
_STASH = "lightning_fp8.dtypes.attention"


class AttentionDtypes:
    """What happens to floating point operands of different dtypes inside :meth:`context`.

    Args:
        compute_dtype: the dtype that query, key and value are cast to where they differ. A floating point mask
            always follows them.
        mismatch: ``"align"`` is silent; ``"warn"`` reports the dtypes once per place; ``"error"`` raises.

    Attributes:
        models: searched for the path of a module; without them no path is named.
        said: what has been reported about these models.

    Raises:
        TypeError: from the attention call, with ``mismatch="error"``.
    """

    def __init__(self, compute_dtype: torch.dtype, mismatch: DtypeMismatch = "align") -> None:
        self.compute_dtype = compute_dtype
        self.mismatch = mismatch
        self.models: list[weakref.ref[nn.Module]] = []
        self.said: set[str] = set()
        self._paths: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()

    def __reduce__(self) -> tuple[Any, ...]:
        return AttentionDtypes, (self.compute_dtype, self.mismatch)  # weak references cannot be pickled

    @contextmanager
    def context(self) -> Iterator[None]:
        """Apply to this thread or task and to the backward that it calls. Contexts may end in any order."""
        entry = _Entry(self, _innermost(_entered.get()))
        _entered.set(entry)
        with _DISPATCH.at(_Dispatch(True, False, entry)):
            try:
                yield
            finally:
                # not by the variable's token: a generator may be closed in another task or thread
                entry.is_open = False
                _entered.set(_innermost(_entered.get()))

    def report(self, operands: dict[str, Tensor], dtype: torch.dtype) -> None:
        """Warn or raise, because these operands have different dtypes."""
        if self.mismatch == "align":
            return
        place = self._place(next(iter(operands.values())))
        if place is None:
            return
        came = ", ".join(f"{name} {dtype_name(tensor.dtype)}" for name, tensor in operands.items())
        message = f"scaled_dot_product_attention in {place} got {came}"
        if self.mismatch == "error":
            raise TypeError(f"{message}. Cast them to one dtype, or use `dtype_mismatch='align'`.")
        if message not in self.said:
            self.said.add(message)
            warnings.warn(f"{message}: cast to {dtype_name(dtype)}.", stacklevel=3)

    def _place(self, operand: Tensor) -> str | None:
        """The module whose forward is running, by its path in the model; None where it has been named before."""
        running = _running_module()
        if isinstance(running, str):
            return running
        if isinstance(operand, FakeTensor | FunctionalTensor) or isinstance(running, GraphModule):
            return None  # a graph inside the compiler, which was reported while it was traced
        if running is None:
            return f"a function ({_call_site()})"
        if running not in self._paths:
            models = (model for reference in self.models if (model := reference()) is not None)
            layers = (pair for model in models for pair in model.named_modules())
            self._paths[running] = next((plain_path(path) for path, layer in layers if layer is running), "")
        return f"{self._paths[running] or '(root)'} ({type(running).__name__})"


class _Entry:
    """One context of one thread or task, possibly inside another one."""

    def __init__(self, settings: AttentionDtypes, outer: _Entry | None) -> None:
        self.settings = settings
        self.outer = outer
        self.thread = threading.get_ident()
        self.is_open = True


_entered: ContextVar[_Entry | None] = ContextVar("lightning_fp8_attention_dtypes", default=None)


def _innermost(entry: _Entry | None) -> _Entry | None:
    while entry is not None and not entry.is_open:
        entry = entry.outer
    return entry


def _running() -> AttentionDtypes | None:
    """The settings of the running thread or task; None outside all contexts."""
    inherited = _stashed()
    own = inherited is None or inherited.thread == threading.get_ident()
    entry = _innermost(_entered.get() if own else inherited)
    return None if entry is None else entry.settings


class _Dispatch(NamedTuple):
    """State that torch keeps for a thread and passes on to the threads of its backward."""

    included: bool
    excluded: bool
    entry: _Entry | None


def _stashed() -> _Entry | None:
    return torch._C._get_obj_in_tls(_STASH) if torch._C._is_key_in_tls(_STASH) else None


# torch 2.11 releases a reference to the stashed object without having taken one
_STASH_TAKES_OVER = torch.__version__ < "2.12"


def _dispatch() -> _Dispatch:
    included = torch._C._dispatch_tls_is_dispatch_key_included(_KEY)
    return _Dispatch(included, torch._C._dispatch_tls_is_dispatch_key_excluded(_KEY), _stashed())


def _set_dispatch(dispatch: _Dispatch) -> None:
    torch._C._dispatch_tls_set_dispatch_key_included(_KEY, dispatch.included)
    torch._C._dispatch_tls_set_dispatch_key_excluded(_KEY, dispatch.excluded)
    remove = getattr(torch._C, "_remove_obj_from_tls", None)  # since torch 2.13; before, a None stays
    if dispatch.entry is None and remove is not None:
        remove(_STASH)
    else:
        if _STASH_TAKES_OVER:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(dispatch.entry))
        torch._C._stash_obj_in_tls(_STASH, dispatch.entry)


_DISPATCH = Switch(_dispatch, _set_dispatch, per_thread=True)


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    with torch._C._ExcludeDispatchKeyGuard(_KEY_SET):
        running = _running()
        if running is not None:
            query, key, value, attn_mask = _agreed(running, query, key, value, attn_mask)
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )


def _agreed(
    running: AttentionDtypes, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    floating_mask = mask if mask is not None and mask.is_floating_point() else None
    same = query.dtype == key.dtype == value.dtype
    if same and (floating_mask is None or floating_mask.dtype == query.dtype):
        return query, key, value, mask
    dtype = query.dtype if same else running.compute_dtype
    operands = {"query": query, "key": key, "value": value}
    if floating_mask is not None:
        operands["attn_mask"] = floating_mask
        mask = floating_mask.to(dtype)
    running.report(operands, dtype)
    return query.to(dtype), key.to(dtype), value.to(dtype), mask


def _running_module() -> nn.Module | str | None:
    """The innermost module on the Python stack; under ``torch.compile`` its path, as the tracer knows it."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        candidate = frame.f_locals.get("self")
        if isinstance(candidate, nn.Module):
            return candidate
        stack = getattr(candidate, "nn_module_stack", None)
        if stack and frame.f_code.co_filename.endswith("symbolic_convert.py"):
            path, kind = list(stack.values())[-1]
            return f"{plain_path(_TRACED_ROOT.sub('', path)) or '(root)'} ({kind.__name__})"
        frame = frame.f_back
    return None


def _call_site() -> str:
    """The innermost line that is not in this module."""
    entry = next(entry for entry in reversed(traceback.extract_stack()) if entry.filename != __file__)
    return f"{entry.filename}:{entry.lineno}"


_FALLTHROUGH = torch.library.Library("_", "IMPL")
_FALLTHROUGH.fallback(torch.library.fallthrough_kernel, "AutocastIPU")
_ATEN = torch.library.Library("aten", "IMPL")
_ATEN.impl("scaled_dot_product_attention", _attention, "AutocastIPU")
