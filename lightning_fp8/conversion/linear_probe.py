"""Whether a layer's own ``forward`` computes ``F.linear(x, weight, bias)``: tried on a small copy of the layer."""

from __future__ import annotations

import copy
import copyreg
import inspect
import io
import math
import pickle
import random
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from types import BuiltinFunctionType, FunctionType
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_fp8.modules.class_swap import own_class
from lightning_fp8.modules.linear import SETTINGS
from lightning_fp8.ops.formats import dtype_name

_OWN_TENSORS = ("weight", "bias")
# the copies of larger layers have fewer features
_MOST_ELEMENTS, _FEATURES = 1 << 18, 64
# what rounding may change: as many times the last bit of the sum of the absolute values of all terms
_ROUNDINGS = 8
_OF_MODULES = vars(nn.Module()).keys()
# what layers of a class may differ in and still need only one try
_HASHABLE = (*SETTINGS, type, FunctionType, BuiltinFunctionType)
_CHANGES = "it changes its attributes or its arguments"
_verdicts: dict[Any, str | None] = {}


class _Case(NamedTuple):
    weights: torch.dtype
    inputs: torch.dtype
    autocast: bool = False

    def __str__(self) -> str:
        under = ", under autocast to bfloat16," if self.autocast else ""
        return f"for {dtype_name(self.inputs)} inputs{under}"


_CASES = (
    *(_Case(dtype, dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16)),
    *(_Case(torch.float32, dtype, True) for dtype in (torch.float32, torch.bfloat16)),
)


class _OtherError(Exception):
    """The layer computes something else, or more."""


def difference_from_linear(layer: nn.Module) -> str | None:
    """How a layer's forward differs from ``F.linear(x, weight, bias)``; None if it does not.

    A copy of the layer with random weights, without hooks, runs on the CPU in training and in evaluation, for several
    shapes, dtypes and autocast. Its outputs and all gradients are those of ``F.linear`` but for rounding; it changes no
    attribute and no argument, not even through ``.data``, draws no random number and calls no other process. What it
    changes elsewhere, such as a global variable, is not seen. The copy of a weight with more than 2^18 elements has at
    most 64 features. Layers that differ in nothing but their values are tried once.
    """
    if reason := _reason_not_to_try(layer):
        return reason
    settings = _settings(layer)
    if layer._modules or not all(isinstance(value, _HASHABLE) for value in settings.values()):
        return _tried(layer)
    by_name = tuple((name, type(value), value) for name, value in sorted(settings.items()))
    key = own_class(layer), _shape(layer), layer.bias is None, by_name
    if key not in _verdicts:
        _verdicts[key] = _tried(layer)
    return _verdicts[key]


def _reason_not_to_try(layer: nn.Module) -> str | None:
    named = (*layer.named_parameters(), *layer.named_buffers(), *_settings(layer).items())
    extra = [name for name, value in named if isinstance(value, Tensor) and name not in _OWN_TENSORS]
    if extra:
        return f"it also has {', '.join(extra[:3])}"
    weight = getattr(layer, "weight", None)
    if not isinstance(weight, nn.Parameter) or not hasattr(layer, "bias"):
        return "it has no parameter `weight`, or no `bias`, which may be None"
    if weight.dim() != 2 or not weight.is_floating_point():
        return f"its weight is {dtype_name(weight.dtype)} {list(weight.shape)}"
    arguments = list(inspect.signature(own_class(layer).forward).parameters.values())[1:]
    kinds = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    return None if len(arguments) == 1 and arguments[0].kind in kinds else "it does not take exactly one argument"


def _settings(layer: nn.Module) -> dict[str, Any]:
    # `fully_shard` keeps its state under names that begin with two underscores
    return {name: var for name, var in vars(layer).items() if name not in _OF_MODULES and not name.startswith("__")}


def _shape(layer: nn.Module) -> tuple[int, int]:
    outputs, inputs = cast(Tensor, layer.weight).shape
    return outputs, inputs


def _tried(layer: nn.Module) -> str | None:
    generator = torch.Generator().manual_seed(0)
    try:
        with _undisturbed():
            for training, case in product((True, False), _CASES):
                _compare(_small_copy(layer, case, training, generator), case, generator)
    except _OtherError as error:
        return str(error)
    except Exception as error:
        # the layer's own code may raise anything
        return f"tried on a small copy, it raises {type(error).__name__}, {str(error)[:100]!r}"
    return None


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Keep the state of the process as it is, and find out if it would have changed."""
    numpy = cast(Any, sys.modules.get("numpy"))
    of_python, of_numpy = random.getstate(), numpy and numpy.random.get_state()
    with (
        warnings.catch_warnings(),
        torch.random.fork_rng(devices=[]),
        torch.device("cpu"),
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast("cpu", enabled=False),
    ):
        warnings.simplefilter("ignore")
        of_torch = torch.get_rng_state()
        try:
            yield
            is_same = torch.equal(torch.get_rng_state(), of_torch) and random.getstate() == of_python
            if not is_same or str(of_numpy) != str(numpy and numpy.random.get_state()):
                raise _OtherError("it draws random numbers")
        finally:
            random.setstate(of_python)
            if numpy:
                numpy.random.set_state(of_numpy)


class _Operators(TorchDispatchMode):
    """Refuses collectives and writes into these tensors, also those through ``.data``, which change no version."""

    def __init__(self, tensors: list[Tensor]) -> None:
        super().__init__()
        self._memory = {tensor.untyped_storage().data_ptr() for tensor in tensors if tensor.numel()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "c10d" in func.namespace:
            raise _OtherError(f"it communicates with other processes, by {func}")
        values = {**dict(zip((arg.name for arg in func._schema.arguments), args, strict=False)), **(kwargs or {})}
        for arg in func._schema.arguments:
            if arg.alias_info is not None and arg.alias_info.is_write:
                written = tree_leaves(values.get(arg.name))
                if any(isinstance(to, Tensor) and to.untyped_storage().data_ptr() in self._memory for to in written):
                    raise _OtherError(_CHANGES)
        return func(*args, **(kwargs or {}))


def _small_copy(layer: nn.Module, case: _Case, training: bool, generator: torch.Generator) -> nn.Module:
    """A layer of the same class and settings, with random weights on the CPU, without hooks."""
    kind, (outputs, inputs) = own_class(layer), _shape(layer)
    is_large = outputs * inputs > _MOST_ELEMENTS
    sizes = {size: min(size, _FEATURES) if is_large else size for size in (outputs, inputs)}
    small = kind.__new__(kind)
    nn.Module.__init__(small)
    memo: dict[int, Any] = {id(layer): small}
    for name, value in _settings(layer).items():
        is_size = type(value) is int and value in sizes
        small.__dict__[name] = sizes[value] if is_size else copy.deepcopy(value, memo)
    small._modules = copy.deepcopy(layer._modules, memo)
    for part in small.modules():
        part.training = training
        for name in _OF_MODULES:
            if name.endswith("_hooks"):
                vars(part)[name].clear()
    n, k = sizes[outputs], sizes[inputs]
    weight, bias = torch.randn(n, k, generator=generator) / k**0.5, torch.randn(n, generator=generator)
    small._parameters["weight"] = nn.Parameter(weight.to(case.weights))
    small._parameters["bias"] = None if layer.bias is None else nn.Parameter(bias.to(case.weights))
    return small


def _compare(layer: nn.Module, case: _Case, generator: torch.Generator) -> None:
    weight, bias = cast(Tensor, layer.weight), cast("Tensor | None", layer.bias)
    n, k = weight.shape
    for rows in ((), (7,), (2, 3), (2, 0)):
        # values of all sizes: a bound would show
        sizes = (10 ** torch.linspace(-3, 3, math.prod(rows))).view(*rows, 1)
        x = (torch.randn(*rows, k, generator=generator) * sizes).to(case.inputs).requires_grad_()
        dy = torch.randn(*rows, n, generator=generator)
        tensors = [tensor for tensor in (x, weight, bias) if tensor is not None]
        before = _state(layer, tensors)
        with torch.autocast("cpu", torch.bfloat16, enabled=case.autocast):
            with _Operators(tensors):
                y = own_class(layer).forward(layer, x)
            expected = F.linear(x, weight, bias)
        is_same = isinstance(y, Tensor) and (y.dtype, y.shape) == (expected.dtype, expected.shape)
        if not is_same and not (case.autocast and _is_promoted(y, x, weight, bias)):
            actual = f"{dtype_name(y.dtype)} {list(y.shape)}" if isinstance(y, Tensor) else type(y).__name__
            raise _OtherError(f"{case} it gives {actual}, not {dtype_name(expected.dtype)} {list(expected.shape)}")
        if _state(layer, tensors) != before:
            raise _OtherError(_CHANGES)
        dy = dy.to(y.dtype)
        with _Operators(tensors):
            gradients = torch.autograd.grad(y, tensors, dy, allow_unused=True)
        # hooks of tensors run in backward
        if _state(layer, tensors) != before:
            raise _OtherError(_CHANGES)
        terms = [tensor.detach().abs().float().requires_grad_() for tensor in tensors]
        bound, allowed = F.linear(*terms), _ROUNDINGS * torch.finfo(expected.dtype).eps
        comparisons = zip(
            ("output", "gradient of the input", "gradient of the weight", "gradient of the bias"),
            (y, *gradients),
            (expected, *torch.autograd.grad(expected, tensors, dy)),
            (bound, *torch.autograd.grad(bound, terms, dy.abs().float())),
            strict=False,
        )
        for name, result, reference, most in comparisons:
            if result is None or not ((result.float() - reference.float()).abs() <= allowed * most).all():
                raise _OtherError(f"{case} its {name} is another")


def _is_promoted(y: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether a result is a product in autocast's dtype to which an fp32 bias was added.

    A layer that computes in fp32 under autocast does that for a reason, and its values are better than such a sum.
    """
    if y.dtype != torch.float32 or bias is None:
        return False
    exact, bound = (F.linear(f(x).float(), f(weight), f(bias)) for f in (torch.detach, torch.abs))
    return not y.numel() or bool(((y - exact).abs() > _ROUNDINGS * torch.finfo(y.dtype).eps * bound).any())


def _state(layer: nn.Module, tensors: list[Tensor]) -> Any:
    """What a call may not change. Attributes that cannot be pickled are compared by identity."""
    attributes = [{name: _content(name, value) for name, value in vars(part).items()} for part in layer.modules()]
    of_class = {name: value for name, value in vars(own_class(layer)).items() if isinstance(value, SETTINGS)}
    hooks = [tuple(leaf._backward_hooks or ()) for leaf in tensors]
    return attributes, of_class, hooks, [(leaf.data_ptr(), leaf.requires_grad, leaf.grad is None) for leaf in tensors]


def _content(name: str, value: Any) -> Any:
    if isinstance(value, SETTINGS):
        return value
    if name in _OF_MODULES and isinstance(value, dict):
        return [(key, id(entry)) for key, entry in value.items()]
    content = io.BytesIO()
    pickler = pickle.Pickler(content)
    # torch pickles a generator with the address of a copy of its state
    pickler.dispatch_table = {**copyreg.dispatch_table, torch.Generator: _state_of_generator}
    try:
        pickler.dump(value)
    except Exception:
        # an object of the layer's own may raise anything
        return id(value)
    return content.getvalue()


def _state_of_generator(generator: torch.Generator) -> Any:
    return bytes, (generator.get_state().tolist(),)
