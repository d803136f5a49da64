"""Casts the weights of a model together, once per optimizer step; in one launch if the device has a kernel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from torch import Tensor, nn

from lightning_fp8.core.casts import cast_weights
from lightning_fp8.modules.gemm import Gemm
from lightning_fp8.modules.phase import Phase
from lightning_fp8.ops.formats import CASTABLE_DTYPES
from lightning_fp8.scalings.operand import Cast, Want


def cast_stale(first: Gemm, weight: Tensor) -> Cast | None:
    """Cast ``weight``, the weight of ``first``, together with every other stale weight whose last cast was used.

    Returns the cast for ``first``. Returns None, and casts nothing, if ``weight`` is not a plain parameter with its own
    storage: the values of a shard, or of a view of a flat buffer, may not be gathered yet, or may belong to another
    layer by now.
    """
    device = first.state.device
    if not is_plain(weight, device):
        return None
    due = [(first, weight)]
    for gemm in cast(list[Gemm], list(first.model.gemms.values())):
        other = gemm.weight if gemm is not first and _trains(gemm) else None
        if other is None or not is_plain(other, device):
            continue
        # experts run one after the other: the first to run casts all slices of its parameter
        if not (gemm.weight_cast.was_used(other) or (other is weight and gemm.weight_cast.part is not None)):
            continue
        if gemm.weight_cast.get(other) is None:
            due.append((gemm, other))
    for gemm, _ in due:
        # drop the old casts first, so that the new ones can use their memory
        gemm.weight_cast.drop()
    operands = cast_together(due, [None] * len(due), Phase.TRAINING)
    for (gemm, tensor), operand in zip(due, operands, strict=True):
        gemm.weight_cast.put(tensor, operand, used=gemm is first)
    return operands[0]


def cast_together(
    weights: Sequence[tuple[Gemm, Tensor]], out: Sequence[Cast | None], phase: Phase, keep: bool = True
) -> list[Cast]:
    """The casts of weights of one model by :func:`lightning_fp8.core.casts.cast_weights`: for fprop and dgrad, or
    without ``keep`` for fprop only. Casts have both layouts even if a layer has products in bf16."""
    tensors = [gemm.n_by_k(gemm.matrix(weight.detach())) for gemm, weight in weights]
    return cast_weights(tensors, [gemm.weight_slot(phase) for gemm, _ in weights], out, Want(True, keep))


def _trains(gemm: Gemm) -> bool:
    layer = gemm.layer
    return layer is not None and layer.phase is Phase.TRAINING and gemm.precision.casts("weight")


def is_plain(weight: Tensor, device: object) -> bool:
    """Whether a weight is a parameter with its own storage, on this device, and not empty."""
    # subclasses of Parameter are sharded or computed
    if type(weight) is not nn.Parameter or weight.dtype not in CASTABLE_DTYPES or weight.device != device:
        return False
    owns_storage = weight.untyped_storage().nbytes() == weight.numel() * weight.element_size()
    return owns_storage and weight.is_contiguous() and weight.numel() > 0 and not weight.is_inference()
