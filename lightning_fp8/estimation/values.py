"""What models do with tensors besides computing: they read lengths and masks, and copy tensors."""

from __future__ import annotations

from math import isinf
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakIdKeyDictionary

# larger tensors take time and memory, and rarely decide anything
_MOST_ELEMENTS = 2**20


class FollowedValues(TorchDispatchMode):
    """Also computes operators on integers and booleans with real values, so that a model can read the results.

    Tests for inf and NaN find none.

    Args:
        mode: the mode that makes the fake tensors.
    """

    def __init__(self, mode: FakeTensorMode) -> None:
        super().__init__()
        self._mode = mode
        self._real: Any = WeakIdKeyDictionary()

    def follow(self, fake: torch.Tensor, real: torch.Tensor) -> None:
        """Remember ``real`` as the value of ``fake``, unless it has no values, is large or has fractions."""
        if not real.is_meta and not real.is_floating_point() and real.numel() <= _MOST_ELEMENTS:
            with unset_fake_temporarily():
                self._real[fake] = real.detach().cpu().clone()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        try:
            result = function(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException):
            if not self._knows(args, kwargs):
                raise
            return tree_map(self._as_fake, self._run(function, args, kwargs))
        of_result = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        if "empty" in function.__name__ or torch.Tag.nondeterministic_seeded in function.tags:
            return result
        is_finite = _if_all_are_finite(function, args)
        if is_finite is not None and _is_followed(result):
            with unset_fake_temporarily():
                self._real[result] = torch.full(result.shape, is_finite)
        elif of_result and all(map(_is_followed, of_result)) and self._knows(args, kwargs):
            with_values = tree_leaves(self._run(function, args, kwargs))
            for fake, real in zip(tree_leaves(result), with_values):
                if isinstance(real, torch.Tensor):
                    self._real[fake] = real
        return result

    def _knows(self, *arguments: Any) -> bool:
        tensors = (leaf for leaf in tree_leaves(arguments) if isinstance(leaf, torch.Tensor))
        return all(tensor in self._real or not isinstance(tensor, FakeTensor) for tensor in tensors)

    def _run(self, function: Any, args: Any, kwargs: Any) -> Any:
        args, kwargs = tree_map(lambda leaf: self._real[leaf] if isinstance(leaf, FakeTensor) else leaf, (args, kwargs))
        with unset_fake_temporarily():
            return function(*args, **kwargs)

    def _as_fake(self, real: Any) -> Any:
        if not isinstance(real, torch.Tensor):
            return real
        fake = self._mode.from_tensor(real)
        self._real[fake] = real
        return fake


class CopiedInDepth(TorchFunctionMode):
    """Copies fake tensors in ``copy.deepcopy``, which would otherwise access their memory."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is not torch.Tensor.__deepcopy__:
            return function(*args, **(kwargs or {}))
        tensor, memo = args
        if id(tensor) not in memo:
            memo[id(tensor)] = tensor.detach().clone().requires_grad_(tensor.requires_grad)
        return memo[id(tensor)]


def _if_all_are_finite(function: Any, args: Any) -> bool | None:
    """What a test for inf or NaN gives if there is none; None for other operators."""
    packet = function._overloadpacket
    if packet in (torch.ops.aten.isnan, torch.ops.aten.isinf):
        return False
    if packet not in (torch.ops.aten.eq, torch.ops.aten.ne) or not args[0].is_floating_point():
        return None
    # a number is equal to itself, and not to inf
    if args[1] is args[0]:
        return bool(packet is torch.ops.aten.eq)
    if isinstance(args[1], float) and isinf(args[1]):
        return bool(packet is torch.ops.aten.ne)
    return None


def _is_followed(tensor: torch.Tensor) -> bool:
    return not tensor.is_floating_point() and tensor.numel() <= _MOST_ELEMENTS
