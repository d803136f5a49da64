"""Which classes of tensors FP8 products may replace."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.nn.parameter import UninitializedParameter

from lightning_fp8.modules.fp8_parameter import Fp8Parameter
from lightning_fp8.ops.formats import dtype_name

_OF_DISTRIBUTED = (DTensor, AsyncCollectiveTensor)
_OF_TRACERS = (FakeTensor, FunctionalTensor)
_KNOWN = (Fp8Parameter, UninitializedParameter, *_OF_DISTRIBUTED, *_OF_TRACERS)


# dynamo calls this instead of tracing it; its guards include the classes of tensors
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def has_own_operators(kind: type[Tensor]) -> bool:
    """Whether a class of tensors changes what operators do, like the quantized weights of other libraries.

    An FP8 product would use the values but skip what the class does. A class that only marks its tensors changes
    nothing.
    """
    own = [base for base in kind.__mro__ if base not in nn.Parameter.__mro__]
    handlers = "__torch_function__", "__torch_dispatch__"
    return not issubclass(kind, _KNOWN) and any(name in vars(base) for base in own for name in handlers)


def kind_of(tensor: Tensor) -> str:
    """Dtype and class, for messages."""
    return f"{dtype_name(tensor.dtype)} ({type(tensor).__name__})"
