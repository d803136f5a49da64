"""A model, the specification of its scales in plain floats, and an observer that compares its products with that."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import numpy as np
import torch
from scales_in_numpy import ModelScales, ScaledLayer
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH = 16
LAYERS = ("a", "b", "c", "d")


class Chain(nn.Module):
    """Linear layers in sequence; a forward may skip some, and recompute each or all of them."""

    def __init__(self) -> None:
        super().__init__()
        for name in LAYERS[:3]:
            self.add_module(name, nn.Linear(WIDTH, WIDTH, bias=False))

    def forward(self, x: Tensor, skipped: frozenset[str] = frozenset(), recompute: str = "no") -> Tensor:
        scope, _, kind = recompute.partition(" ")
        around = partial(checkpoint, use_reentrant=kind == "reentrant")
        run = [layer for name, layer in self.named_children() if name not in skipped]
        if scope == "all":
            return around(nn.Sequential(*run), x)
        for layer in run:
            x = around(layer, x) if scope == "each" else layer(x)
        return x


class Subject:
    """A converted model, its optimizer, and the specified state of its scales."""

    def __init__(self, net: Chain, scales: ModelScales) -> None:
        self.net, self.scales = net, scales
        self.frozen: frozenset[str] = frozenset()
        self.new_optimizer()

    def new_optimizer(self) -> None:
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)
        self.scales.steps = 0

    def copy(self) -> Subject:
        other = Subject(copy.deepcopy(self.net), self.scales.copy())
        other.frozen = self.frozen
        return other

    def set_training(self, training: bool) -> None:
        for name, layer in self.net.named_children():
            if layer.training != (training and name not in self.frozen):
                layer.train(not layer.training)
                self.scales.switch(name)
        self.net.training = training


class Observer:
    """Observes inputs and gradients of every layer with hooks, and checks the products computed from them."""

    def __init__(self, subject: Subject) -> None:
        self.net, self.scales = subject.net, subject.scales
        self.operands: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        self.handles: list[Any] = []
        for name, layer in subject.net.named_children():
            self.handles.append(layer.register_forward_pre_hook(partial(self.on_input, name)))
            self.handles.append(layer.register_forward_hook(partial(self.on_output, name)))

    def on_input(self, name: str, layer: nn.Linear, args: tuple[Tensor]) -> None:
        x, weight = args[0].detach().numpy(), layer.weight.detach().numpy()
        layers = dict(self.net.named_children())
        scaled = self.scales.in_fp8(name)
        if scaled is not None:
            record = layer.training and torch.is_grad_enabled()
            records = [name for name, child in layers.items() if child.training] if torch.is_grad_enabled() else []
            self.scales.recorded |= record
            x = scaled.input.cast(x, record, in_training=layer.training)
            weights = {name: child.weight.detach().numpy() for name, child in layers.items()}
            weight = self.scales.cast_weight(name, weights, records)
        self.operands[name] = x, weight

    def on_output(self, name: str, layer: nn.Linear, args: tuple[Tensor], y: Tensor) -> None:
        x, weight = self.operands.pop(name)
        check_product(y.detach().numpy(), x, weight)
        if y.requires_grad:
            dy: list[np.ndarray] = []
            y.register_hook(partial(self.on_gradient, dy, self.scales.in_fp8(name), layer.training))
            if args[0].requires_grad:
                # the recomputation of a non-reentrant checkpoint gives no gradient for y
                args[0].register_hook(lambda dx: check_product(dx.numpy(), dy.pop(), weight.T) if dy else None)

    def on_gradient(self, dy: list[np.ndarray], scaled: ScaledLayer | None, record: bool, gradient: Tensor) -> None:
        dy.append(gradient.detach().numpy())
        if scaled is not None:
            self.scales.recorded |= record
            # a gradient that is not recorded belongs to another loss
            dy[0] = scaled.grad_output.cast(dy[0], record, in_training=record)

    def close(self) -> None:
        for handle in self.handles:
            handle.remove()


def check_product(actual: np.ndarray, a: np.ndarray, b: np.ndarray) -> None:
    """``a @ b^T`` within the rounding of fp32 sums."""
    a, b = a.astype(np.float64), b.astype(np.float64)
    if not (np.isinf(a).any() or np.isinf(b).any()):
        expected, bound = a @ b.T, 1e-6 * (np.abs(a) @ np.abs(b).T) + 1e-36
        assert np.array_equal(np.isnan(actual), np.isnan(expected))
        assert not (np.abs(actual - expected) > bound).any()
