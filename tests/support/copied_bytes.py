"""Bytes that torch's operators copy, pad or fill."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

# what `contiguous`, `to`, `F.pad`, `torch.stack` and the like are below autograd, too
COPYING = frozenset(
    ("clone", "copy_", "_to_copy", "constant_pad_nd", "cat", "stack", "index_select", "repeat", "_foreach_copy_")
)
FILLING = frozenset(
    ("fill_", "zero_", "_foreach_zero_", "zeros", "new_zeros", "zeros_like", "ones", "new_ones", "ones_like", "full")
)


class _Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in COPYING or name in FILLING:
            written = out if isinstance(out, Tensor) else args[0]
            self.bytes[name] += sum(tensor.nbytes for tensor in ([written] if isinstance(written, Tensor) else written))
        return out


@contextmanager
def copied_bytes() -> Iterator[Counter[str]]:
    """Counts the bytes that each of torch's copying and filling operators writes."""
    with pytest.MonkeyPatch.context() as patch:
        # as outside of any mode, the package's operators call their functions directly: in torch's, no mode sees them
        patch.setattr("lightning_fp8.ops.library._len_torch_dispatch_stack", lambda: 0)
        with _Counting() as counting:
            yield counting.bytes
