"""The operators of one training step: a forward and a backward under fake tensors, which have shapes and no memory."""

from __future__ import annotations

import logging
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import flop_registry

from lightning_fp8.estimation.values import CopiedInDepth, FollowedValues
from lightning_fp8.ops.formats import Product

aten = torch.ops.aten
# each with the position of its first matrix
_MATRIX_PRODUCTS = {aten.mm: 0, aten.addmm: 1, aten.bmm: 0, aten.baddbmm: 1}
_NO_KERNEL = {aten.detach, aten.alias, aten.lift_fresh, aten._unsafe_view, aten.empty, aten.empty_like}
_NO_KERNEL |= {aten.empty_strided, aten.new_empty, aten.new_empty_strided, aten.set_}


@dataclass(frozen=True)
class MatrixProduct:
    """``batch`` products of a matrix (M, K) and one (K, N).

    Attributes:
        weight: name of the parameter in the product; None for a product of activations.
        product: which of the weight's three products it is.
    """

    m: int
    n: int
    k: int
    batch: int = 1
    weight: str | None = None
    product: Product = "fprop"

    @property
    def flops(self) -> float:
        """Multiplications and additions."""
        return 2.0 * self.batch * self.m * self.n * self.k


@dataclass(frozen=True)
class Attention:
    """Scaled dot product attention in one kernel, which keeps no matrix of scores."""

    flops: float


@dataclass(frozen=True)
class Elementwise:
    """Any other operator. Its time is that of its memory traffic, or of its FLOPs if it has any (convolutions).

    Attributes:
        copies_for: if it copies a parameter, or an input for its product, into bf16: the name of this parameter.
    """

    name: str
    bytes: int
    flops: float = 0
    copies_for: str | None = None


Operator = MatrixProduct | Attention | Elementwise

_HOW_CALLED = (
    "The batch of a LightningModule is what its dataloader gives, such as `(x, y)`. Another module gets a mapping as"
    " keyword arguments, a tuple or list as arguments, and anything else as its only argument."
)


@dataclass(frozen=True)
class Input:
    """A tensor that one or more weights are multiplied by.

    Attributes:
        elements: its number of elements.
        weights: the names of these weights.
        is_kept: whether it is kept until backward for these products only.
    """

    elements: int
    weights: tuple[str, ...]
    is_kept: bool


@dataclass
class Step:
    """One step of training on one device.

    Attributes:
        operators: the operators, and how often each runs.
        inputs: the inputs of all weights, each as often as it is computed.
        sizes: number of elements of each parameter.
        trained: number of elements of trained parameters.
        trained_bytes: their size in bytes.
    """

    operators: Counter[Operator] = field(default_factory=Counter)
    inputs: list[Input] = field(default_factory=list)
    sizes: dict[str, int] = field(default_factory=dict)
    trained: int = 0
    trained_bytes: int = 0

    @property
    def parameters(self) -> int:
        """Number of elements of all parameters."""
        return sum(self.sizes.values())


class NothingToTrainError(ValueError):
    """A model returns nothing that can be differentiated."""


class _Recorder(TorchDispatchMode):
    """Records each operator. Identifies tensors by their storage, which views share, and keeps storages alive."""

    def __init__(self, parameters: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self.operators: Counter[Operator] = Counter()
        self.in_backward = False
        self.last = "no operator"
        self._alive: dict[int, Any] = {}
        self._weights = {self._key(tensor): name for name, tensor in parameters.items()}
        # for a copy in another dtype: the original, and the operator that made it
        self._copies: dict[int, tuple[int, Elementwise]] = {}
        self._inputs: dict[int, tuple[int, list[str]]] = {}
        self._gradients: dict[int, str] = {}
        self._unknown: dict[int, MatrixProduct] = {}
        self._kept: Counter[int] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.last = str(function)
        taken = args
        if function._overloadpacket is aten._grouped_mm:
            # autocast does so on a GPU only, and the operator takes nothing else
            taken = tuple(matrix.bfloat16() for matrix in args[:2]) + tuple(args[2:])
        result = function(*taken, **(kwargs or {}))
        self._record(function, args, kwargs or {}, result)
        return result

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        """Note that autograd keeps a tensor."""
        self._kept[self._original(tensor)] += 1
        return tensor

    def inputs(self) -> Iterator[Input]:
        for key, (elements, weights) in self._inputs.items():
            yield Input(elements, tuple(weights), 0 < self._kept[key] <= len(weights))

    def _key(self, tensor: torch.Tensor) -> int:
        storage = tensor.untyped_storage()
        return id(self._alive.setdefault(storage._cdata, storage))

    def _record(self, function: Any, args: Any, kwargs: Any, result: Any) -> None:
        packet = function._overloadpacket
        tensors = [leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, torch.Tensor)]
        if function.is_view or packet in _NO_KERNEL or function.namespace == "prim" or not tensors:
            return
        operator: Operator
        if packet in _MATRIX_PRODUCTS:
            operator = self._product(*args[_MATRIX_PRODUCTS[packet] :][:2])
        elif packet is aten._grouped_mm:
            operator = self._grouped_product(args[0], args[1], result)
        elif "attention" in function.__name__:
            query, key = args[1:3] if "backward" in function.__name__ else args[:2]
            operator = _attention(query, key, "backward" in function.__name__)
        else:
            flops = flop_registry[packet](*args, **kwargs, out_val=result) if packet in flop_registry else 0
            moved = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
            operator = Elementwise(function.__name__.partition(".")[0], moved, flops)
            if packet is aten._to_copy:
                self._copies[self._key(result)] = self._original(args[0]), operator
        self.operators[operator] += 1

    def _original(self, tensor: torch.Tensor) -> int:
        key = self._key(tensor)
        return self._copies[key][0] if key in self._copies else key

    def _grouped_product(self, left: torch.Tensor, right: torch.Tensor, result: torch.Tensor) -> MatrixProduct:
        """Products of groups of rows, assuming equally many rows for each expert."""
        experts = next(tensor.shape[0] for tensor in (left, right, result) if tensor.dim() == 3)
        m, k, n = left.shape[-2], left.shape[-1], right.shape[-1]
        if right.dim() == 3:
            m //= experts
        else:
            k //= experts
        return replace(self._product(left, right), m=m, k=k, n=n, batch=experts)

    def _product(self, left: torch.Tensor, right: torch.Tensor) -> MatrixProduct:
        m, k, n, batch = *left.shape[-2:], right.shape[-1], prod(left.shape[:-2])
        for weight, other in ((right, left), (left, right)):
            name, of_other = self._weights.get(self._original(weight)), self._original(other)
            # a forward that is recomputed runs in backward, with gradients enabled
            if name and self.in_backward and not torch.is_grad_enabled():
                self._gradients[of_other] = name
                if of_other in self._unknown:
                    product = self._unknown.pop(of_other)
                    self._instead(product, replace(product, weight=name, product="wgrad"))
                return MatrixProduct(m, n, k, batch, name, "dgrad")
            if name:
                self._inputs.setdefault(of_other, (other.numel(), []))[1].append(name)
                for tensor in (weight, other):
                    self._note_copy(tensor, name)
                return MatrixProduct(m, n, k, batch, name, "fprop")
        for gradient, other in ((left, right), (right, left)):
            names = self._inputs[self._original(other)][1] if self._original(other) in self._inputs else []
            of_gradient = self._gradients.get(self._original(gradient))
            if self.in_backward and (names or of_gradient):
                name = of_gradient if of_gradient in names or not names else names[0]
                return MatrixProduct(m, n, k, batch, name, "wgrad")
        unknown = MatrixProduct(m, n, k, batch)
        # perhaps of an input that checkpointing has not recomputed: the product for the input's gradient, which may
        # come after it, tells
        self._unknown.update({self._original(tensor): unknown for tensor in (left, right) if self.in_backward})
        return unknown

    def _instead(self, known: Operator, better: Operator) -> None:
        self.operators[known] -= 1
        self.operators[better] += 1

    def _note_copy(self, tensor: torch.Tensor, name: str) -> None:
        key = self._key(tensor)
        if key in self._copies and not self._copies[key][1].copies_for:
            original, operator = self._copies[key]
            noted = replace(operator, copies_for=name)
            self._instead(operator, noted)
            self._copies[key] = original, noted


class _Attention(torch.autograd.Function):
    """Attention as one operator forward and one backward."""

    @staticmethod
    def forward(ctx: Any, recorder: _Recorder, causal: bool, *tensors: torch.Tensor) -> torch.Tensor:
        query, key, value = tensors
        ctx.save_for_backward(*tensors)
        ctx.recorder, ctx.causal = recorder, causal
        recorder.operators[_attention(query, key, False, causal)] += 1
        shape = *query.shape[:-1], value.shape[-1]
        is_cast = torch.is_autocast_enabled("cpu")
        return query.new_empty(shape, dtype=torch.get_autocast_dtype("cpu") if is_cast else query.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        query, key, value = ctx.saved_tensors
        ctx.recorder.operators[_attention(query, key, True, ctx.causal)] += 1
        return None, None, torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _attention(query: torch.Tensor, key: torch.Tensor, backward: bool, causal: bool = False) -> Attention:
    # two products of (queries, head) and (keys, head) in forward, five in backward
    flops = 4.0 * query.numel() * key.shape[-2] * (2.5 if backward else 1) * (0.5 if causal else 1)
    return Attention(flops)


class _Training(nn.Module):
    """One step of training of a model, as Lightning or a loop would do it."""

    def __init__(self, model: nn.Module, recorder: _Recorder) -> None:
        super().__init__()
        self.model = model
        self.recorder = recorder

    def forward(self, batch: Any) -> None:
        keeping = torch.autograd.graph.saved_tensors_hooks(self.recorder.keep, lambda tensor: tensor)
        with self.recorder, torch.autocast("cpu", torch.bfloat16), keeping:
            loss = self._loss_of(batch)
        self.recorder.in_backward = True
        with self.recorder:
            loss.backward()

    def _loss_of(self, batch: Any) -> torch.Tensor:
        if isinstance(self.model, LightningModule):
            output = self.model.training_step(batch, 0)
        elif isinstance(batch, Mapping):
            output = self.model(**batch)
        elif isinstance(batch, tuple | list):
            output = self.model(*batch)
        else:
            output = self.model(batch)
        return _loss(output)


def _loss(output: Any) -> torch.Tensor:
    """The loss in what a model returns. If there is none, the sum of everything that can be differentiated."""
    if isinstance(output, Mapping) and isinstance(output.get("loss"), torch.Tensor):
        return output["loss"]
    leaves = tree_leaves(dict(output) if isinstance(output, Mapping) else output)
    found = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    if not found:
        raise NothingToTrainError("Nothing that the model returns depends on a trained parameter: it needs a loss.")
    return found[0] if found[0].dim() == 0 else sum((leaf.sum() for leaf in found[1:]), found[0].sum())


def count(model: nn.Module, batch: Any) -> Step:
    """The operators of a forward and a backward of ``model`` on ``batch``, in bf16 by autocast.

    Changes neither, and allocates no memory for tensors. Both may be on the meta device.

    Args:
        model: a module. For a ``LightningModule``, ``training_step(batch, 0)`` is counted.
        batch: the model's input: a mapping of keyword arguments, a tuple or list of arguments, or one argument.

    Raises:
        RuntimeError: for a model that does not run without values; it names the operator at which it stopped.
        NothingToTrainError: for a model that returns no loss.
    """
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        values = FollowedValues(mode)

        def fake(value: Any) -> Any:
            made = _fake(value)
            if isinstance(value, torch.Tensor):
                values.follow(made, value)
            return made

        parameters = {name: _fake(tensor) for name, tensor in model.named_parameters()}
        buffers = {name: fake(tensor) for name, tensor in model.named_buffers()}
        recorder = _Recorder(parameters)
        training, batch = _Training(model, recorder), tree_map(fake, batch)
        tensors = {f"model.{name}": tensor for name, tensor in {**parameters, **buffers}.items()}
        with _attention_as_one(recorder), _with_trainer(model), values, CopiedInDepth():
            try:
                torch.func.functional_call(training, tensors, (batch,))
            except NothingToTrainError:
                raise
            except (DataDependentOutputException, DynamicOutputShapeException) as error:
                raise RuntimeError(
                    f"{type(model).__name__} asks tensors for values, which they do not have in an estimate: it stopped"
                    f" at {error.func}. Integers of the batch, such as lengths and masks, have their values unless the"
                    " batch is on the meta device. Else leave out what depends on values, or pass the part of the model"
                    " that repeats."
                ) from error
            except Exception as error:
                called = "training_step(batch, 0)" if isinstance(model, LightningModule) else "forward"
                raise RuntimeError(
                    f"{type(model).__name__}.{called} failed in the estimate, after {recorder.last}, with"
                    f" {type(error).__name__}: {error}\n{_HOW_CALLED}"
                ) from error
    trained = [tensor for tensor in parameters.values() if tensor.requires_grad]
    return Step(
        +recorder.operators,
        list(recorder.inputs()),
        {name: tensor.numel() for name, tensor in parameters.items()},
        sum(tensor.numel() for tensor in trained),
        sum(tensor.numel() * tensor.element_size() for tensor in trained),
    )


@contextmanager
def _with_trainer(model: nn.Module) -> Iterator[None]:
    """Give a ``LightningModule`` what its training step needs: a Trainer, and a place to log to."""
    if not isinstance(model, LightningModule):
        yield
        return
    trainer, own = model._trainer, vars(model).keys() & {"log", "log_dict"}
    if trainer is None:
        with quietly():
            model.trainer = idle_trainer()
            model.trainer.training = True
    for name in {"log", "log_dict"} - own:
        vars(model)[name] = lambda *_, **__: None
    try:
        yield
    finally:
        for name in {"log", "log_dict"} - own:
            del vars(model)[name]
        model._trainer = trainer


def idle_trainer() -> Trainer:
    """A Trainer for modules that ask for theirs. It runs nothing and writes nothing."""
    return Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)


@contextmanager
def quietly() -> Iterator[None]:
    """Suppress Lightning's messages about seeds and devices, as nothing will run."""
    logging.disable(logging.INFO)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


def _fake(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    fake = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cpu")
    return nn.Parameter(fake, value.requires_grad) if isinstance(value, nn.Parameter) else fake


@contextmanager
def _attention_as_one(recorder: _Recorder) -> Iterator[None]:
    """Count attention as one operator. On a CPU, torch would split some forms of it into products and a softmax."""

    def attention(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **_: Any,
    ) -> torch.Tensor:
        return _Attention.apply(recorder, is_causal, query, key, value)

    original = nn.functional.scaled_dot_product_attention
    nn.functional.scaled_dot_product_attention = attention  # type: ignore[assignment]
    try:
        yield
    finally:
        nn.functional.scaled_dot_product_attention = original
