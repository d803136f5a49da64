"""The dtypes of buffers where parameters are stored in bf16."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake
from torch.nn.parameter import is_lazy
from torchmetrics import Metric

from lightning_fp8.modules.paths import modules_inside, named_modules
from lightning_fp8.runtime.warn_once import warn_once


def buffer_dtypes(module: nn.Module, dtype: torch.dtype, keep_fp32: Sequence[str] = ()) -> dict[int, torch.dtype]:
    """The dtype to store buffers in, by ``id``, where parameters are stored in ``dtype``.

    Where parameters are stored in fp32, all keep theirs. Where they are stored in bf16, floating point buffers are too,
    as bare products such as ``x @ self.table`` need one dtype. These do not follow:

    - what ``keep_fp32`` matches, the class weights of torch's losses, and modules that :func:`computes_in_fp32`: fp32;
    - metrics, running statistics without a weight, and buffers of one byte, as in FP8: their own.
    """
    kept = modules_inside(module, keep_fp32)
    named: dict[int, torch.dtype] = {}
    following: dict[int, torch.dtype] = {}
    in_fp32: dict[int, torch.dtype] = {}
    for layer in module.modules():
        ids = [id(buffer) for _, buffer in _floating_buffers(layer)]
        if layer in kept:
            named |= dict.fromkeys(ids, torch.float32)
        elif dtype.itemsize > 2 or _has_dtypes_of_its_own(layer):
            continue
        elif is_weighted_loss(layer) or computes_in_fp32(layer):
            in_fp32 |= dict.fromkeys(ids, torch.float32)
        else:
            following |= dict.fromkeys(ids, dtype)
    # a bare product may read a buffer that another module shares: only `keep_fp32` takes precedence over it
    return {**in_fp32, **following, **named}


def is_weighted_loss(layer: nn.Module) -> bool:
    """Whether it is one of torch's losses, with weights of classes."""
    return isinstance(layer, nn.modules.loss._Loss) and _has_only_buffers(layer)


def computes_in_fp32(layer: nn.Module) -> bool:
    """Whether bf16 would ruin a buffer of a module without parameters, as in rotary embeddings.

    Such a module can compute in fp32 as a whole. Beside parameters a buffer in fp32 would turn bf16 operands of bare
    products into fp32, one by one, and so would one of a module without a forward, which others read.
    """
    has_forward = type(layer).forward is not nn.Module.forward or "forward" in vars(layer)
    return has_forward and _has_only_buffers(layer) and any(_ruined_by_bf16(*item) for item in _floating_buffers(layer))


def is_in_fp32(layer: nn.Module) -> bool:
    """Whether all its floating point buffers are in fp32."""
    return all(buffer.dtype == torch.float32 for _, buffer in _floating_buffers(layer))


def warn_of_ruined_buffers(module: nn.Module, dtypes: dict[int, torch.dtype]) -> None:
    """Name the buffers that are about to lose what they are for."""
    names = [
        f"{path}.{name}".lstrip(".")
        for path, layer in named_modules(module)
        for name, buffer in _floating_buffers(layer)
        if dtypes.get(id(buffer)) == torch.bfloat16 and _ruined_by_bf16(name, buffer)
    ]
    if names:
        warn_once(
            f"Stored in bf16, as the parameters are, these buffers lose digits that they need: {', '.join(names)}. bf16"
            " rounds 257 to 256, and the frequencies of rotary embeddings to 3 digits. In a module of their own,"
            " without parameters, they stay in fp32; whole numbers can be integers; `keep_fp32` with the path of their"
            " module runs all of it in fp32."
        )


def _floating_buffers(layer: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, buffer in layer._buffers.items():
        if buffer is not None and not is_lazy(buffer) and buffer.is_floating_point() and buffer.dtype.itemsize >= 2:
            yield name, buffer


def _has_only_buffers(layer: nn.Module) -> bool:
    return next(layer.parameters(), None) is None and next(_floating_buffers(layer), None) is not None


def _has_dtypes_of_its_own(layer: nn.Module) -> bool:
    return isinstance(layer, Metric) or (isinstance(layer, nn.modules.batchnorm._NormBase) and layer.weight is None)


def _ruined_by_bf16(name: str, buffer: Tensor) -> bool:
    """Frequencies of rotary embeddings, and tables of whole numbers of which bf16 would make some equal."""
    if "inv_freq" in name:
        return True
    if buffer.dtype == torch.bfloat16 or buffer.is_meta or is_fake(buffer) or not buffer.numel():
        return False
    if not bool(((buffer == buffer.round()) & (buffer.abs() <= 2**53)).all() & (buffer.abs() > 256).any()):
        return False
    return len(buffer.bfloat16().unique()) < len(buffer.unique())
