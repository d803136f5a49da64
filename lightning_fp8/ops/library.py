"""What watches operators now: compilers, tracers, transforms, modes; and whether CUDA functions run on a tensor."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._C import _get_tracing_state
from torch._C._functorch import (
    TransformType,
    get_interpreter_stack,
    is_legacy_batchedtensor,
    peek_interpreter_stack,
)
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling
from torch.nn import Parameter
from torch.utils._python_dispatch import _len_torch_dispatch_stack

from lightning_fp8.runtime.device import is_capturing

_PLAIN_TENSORS = frozenset((Tensor, Parameter))
NO_TRANSFORMS = (
    "lightning_fp8: FP8 layers run neither in forward-mode differentiation (`torch.func.jvp`, `jacfwd`,"
    " `torch.autograd.forward_ad`) nor in the gradients of `torch.func` (`grad`, `vjp`, `jacrev`). Use"
    " `torch.autograd.grad`, call `lightning_fp8.unconvert(model)` first, or leave the layers in bf16 with"
    " `ignore_modules`."
)
# whether the CUDA functions also run on CPU tensors: for tests, and to measure host time
cuda_on_cpu = False


# dynamo calls this instead of tracing it: in torch 2.11 it would take torch's function to be True wherever it compiles
@torch.compiler.assume_constant_result
def is_exporting() -> bool:
    """Whether a program is being made by ``torch.export``."""
    return torch.compiler.is_exporting()


# dynamo calls this instead of tracing it; its guards include the transforms and the level of forward mode
@torch.compiler.assume_constant_result
def refuse_transforms() -> None:
    """Raise a RuntimeError in forward-mode differentiation and in the gradients of ``torch.func``.

    In forward mode, operators would return zero tangents. ``torch.func`` does not reach the gradients of an operator,
    and kept copies of weights would be wrappers of a transform that has ended.
    """
    in_grad = any(interpreter.key() == TransformType.Grad for interpreter in get_interpreter_stack() or ())
    if in_grad or forward_ad._current_level >= 0:
        raise RuntimeError(NO_TRANSFORMS)


def on_gpu(x: Tensor) -> bool:
    """Whether the CUDA functions run on x."""
    return x.is_cuda or cuda_on_cpu


def is_watched(x: Tensor) -> bool:
    """Whether calls on x must go through torch's operators: under a compiler, a dispatch mode (selective checkpointing,
    a FLOP counter), a transform of ``torch.func`` or ``torch.jit.trace``; for subclasses and meta tensors.
    """
    return (
        # other tracers use tensor subclasses
        is_dynamo_compiling()
        or type(x) not in _PLAIN_TENSORS
        or x.is_meta
        or _len_torch_dispatch_stack() > 0
        or peek_interpreter_stack() is not None
        # of `torch.autograd.grad(is_grads_batched=True)`, which is no transform of `torch.func`
        or is_legacy_batchedtensor(x)
        or _get_tracing_state() is not None
    )


def backward_may_follow() -> bool:
    """Whether to prepare for a backward pass.

    ``torch.jit.trace`` always does: it traces again without gradients, and raises if the two programs differ.
    """
    return torch.is_grad_enabled() or _get_tracing_state() is not None


def in_transform() -> bool:
    """Whether a ``torch.func`` transform is running. Its tensors have no address, so changes cannot be detected."""
    return peek_interpreter_stack() is not None


def may_get_gradient(weight: Tensor) -> bool:
    """Whether the weight is trained; a tensor inside ``vmap`` does not say, outside of a compiler."""
    return weight.requires_grad or (not is_dynamo_compiling() and in_transform())


def can_keep_copies(weight: Tensor) -> bool:
    """Whether the current context can detect a stale copy, and may run different operators when there is a copy.

    Nothing in a compiled, traced or captured graph, or in a transform of ``torch.func``, can see whether a copy is
    stale. A dispatch mode, such as that of selective checkpointing, must see the same operators when a forward is
    recomputed.
    """
    return not (
        is_dynamo_compiling()
        or _get_tracing_state() is not None
        or _len_torch_dispatch_stack()
        or peek_interpreter_stack() is not None
        or is_capturing(weight.is_cuda)
    )
