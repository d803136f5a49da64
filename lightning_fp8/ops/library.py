"""The library of ``torch.ops.lightning_fp8.*``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._python_dispatch import _len_torch_dispatch_stack

LIBRARY = torch.library.Library("lightning_fp8", "DEF")
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order)
# where FP8 GEMMs take K-major operands only, so that a transpose has to be a tensor of its own
K_MAJOR_DEVICES = {"cuda"}


def define(schema: str) -> str:
    """Define an operator; returns its qualified name."""
    name = LIBRARY.define(schema, tags=_TAGS)
    return f"lightning_fp8::{name.split('::')[-1].split('(')[0]}"


class Operator:
    """Calls the device's function itself, or torch's operator where somebody watches operators or makes a graph.

    torch's dispatcher takes several times as long as what a function does on the host.

    Attributes:
        op: torch's operator.
    """

    def __init__(self, op: Any, cpu: Callable[..., Any], cuda: Callable[..., Any]) -> None:
        self.op = op
        self._cpu, self._cuda = cpu, cuda

    def __call__(self, x: Tensor, *arguments: Any) -> Any:
        """What ``op(x, *arguments)`` gives."""
        return self.op(x, *arguments) if is_watched(x) else self.run(x, *arguments)

    def run(self, x: Tensor, *arguments: Any) -> Any:
        """The device's function: inside another operator, of which nobody sees the inside."""
        return (self._cuda if x.device.type in K_MAJOR_DEVICES else self._cpu)(x, *arguments)


def is_watched(x: Tensor) -> bool:
    """Whether operators on x have to be torch's: under a compiler, a dispatch mode (of selective checkpointing or a
    counter of FLOPs), a transform of ``torch.func`` or ``torch.jit.trace``; for subclasses, and where there is no data.
    """
    return (
        torch.compiler.is_compiling()
        or type(x) not in (Tensor, Parameter)
        or x.is_meta
        or _len_torch_dispatch_stack() > 0
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._get_tracing_state() is not None
    )


def implement(name: str, cpu: Callable[..., Any], cuda: Callable[..., Any]) -> Operator:
    """Register both devices' implementations of an operator; returns what to call it by."""
    LIBRARY.impl(name, cpu, "CPU")
    LIBRARY.impl(name, cuda, "CUDA")
    return Operator(getattr(torch.ops.lightning_fp8, name).default, cpu, cuda)


def differentiable(
    name: str,
    inputs: int,
    forward: Callable[..., Any],
    save: Callable[..., None],
    backward: Callable[..., Sequence[Tensor | None]],
) -> Operator:
    """The same for an operator with gradients, on any device.

    Args:
        name: of the operator, already defined.
        inputs: how many of its arguments, the first ones, have gradients.
        forward: what it computes.
        save: ``(ctx, arguments, output)``, what it keeps for backward.
        backward: ``(ctx, *gradients of the output)``, the gradients of its inputs.
    """

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *arguments: Any) -> Any:
            arguments = (*arguments[:-1], *arguments[-1])
            output = forward(*arguments)
            save(ctx, arguments, output)
            return output

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            return *backward(ctx, *gradients), None

    Function.__name__ = Function.__qualname__ = f"Fp8{name.title()}"
    # that of the class itself looks at each argument for what is left of a transform, and there is none
    apply = super(torch.autograd.Function, Function).apply

    def run(*arguments: Any) -> Any:
        # the rest as one: autograd looks at each argument
        return apply(*arguments[:inputs], arguments[inputs:])

    def all_gradients(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        return *backward(ctx, *gradients), *(None,) * (len(op._schema.arguments) - inputs)

    op = getattr(torch.ops.lightning_fp8, name).default
    LIBRARY.impl(name, forward, "CompositeExplicitAutograd")
    torch.library.register_autograd(f"lightning_fp8::{name}", all_gradients, setup_context=save, lib=LIBRARY)
    return Operator(op, run, run)
