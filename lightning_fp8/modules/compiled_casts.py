"""Casts weights once, before compiled code runs, which cannot detect stale copies and would cast in each forward.

Compiled code reads the casts of such layers as inputs, from tensors that stay the same objects, at the same
addresses, as long as shapes and device stay the same. A flag of each layer, which compiled code has a guard on, says
whether they are the casts of the current weights; where it is not set, compiled code casts the weight itself. An
optimizer step, a load and a move clear it.
"""

from __future__ import annotations

import threading
import typing
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from lightning_fp8.modules.gemm import Gemm
from lightning_fp8.modules.phase import Phase
from lightning_fp8.modules.weight_cast import normal_tensors
from lightning_fp8.modules.weights_together import cast_together, is_plain
from lightning_fp8.runtime.warn_once import warn_once
from lightning_fp8.scalings.operand import Cast, Operand

_LOCK = threading.Lock()


@contextmanager
def keep_compiled_casts(gemms: Sequence[Gemm], record: bool, in_backward: bool = False) -> Iterator[None]:
    """Cast the weights that have changed, and let compiled code in this context, in any thread, use the casts.

    Args:
        gemms: left out are those of layers whose weight is sharded, computed or not cast, and in training
            those whose weight is frozen, as it may belong to a target network that changes within the step.
        record: whether this is a training step.
        in_backward: whether this is a backward. Its recomputation reads the same casts as the forward: nothing is cast
            again, as that would overwrite what backward has kept.
    """
    ready = [(gemm, weight) for gemm in gemms if (weight := _weight_to_cast(gemm, record)) is not None]
    if in_backward:
        ready = [entry for entry in ready if _is_held(*entry)]
    with _LOCK:
        for model in () if in_backward else {id(gemm.model): gemm.model for gemm, _ in ready}.values():
            _refresh([(gemm, weight) for gemm, weight in ready if gemm.model is model], record)
        for gemm, _ in ready:
            gemm.weight_cast.compiled_cast_is_current = True
            gemm.weight_cast.compiled_cast_users += 1
    try:
        yield
    finally:
        with _LOCK:
            for gemm, _ in ready:
                _check(gemm)
                gemm.weight_cast.compiled_cast_users -= 1
                gemm.weight_cast.compiled_cast_is_current &= gemm.weight_cast.compiled_cast_users > 0


def _is_held(gemm: Gemm, weight: Tensor) -> bool:
    return gemm.weight_cast.compiled_cast is not None and gemm.weight_cast.get(weight) is gemm.weight_cast.compiled_cast


def _weight_to_cast(gemm: Gemm, record: bool) -> Tensor | None:
    weight = gemm.weight
    cast = gemm.weight_cast
    if weight is None or not (cast.is_kept and cast.may_have_compiled_cast and gemm.precision.casts("weight")):
        return None
    if not is_plain(weight, gemm.state.device) or weight.dim() != 2:
        return None
    return weight if weight.requires_grad or not record else None


def _refresh(layers: list[tuple[Gemm, Tensor]], record: bool) -> None:
    """Write the casts of those weights of a model that have changed."""
    stale = [entry for entry in layers if not _is_held(*entry)]
    if not stale:
        return
    with normal_tensors():
        for (gemm, weight), operand in zip(stale, _cast(stale, record), strict=True):
            gemm.weight_cast.compiled_cast, gemm.weight_cast.compiled_from = operand, weight
            gemm.weight_cast.put(weight, operand)


def _cast(stale: list[tuple[Gemm, Tensor]], record: bool) -> list[Cast]:
    former = [_fitting(gemm, weight) for gemm, weight in stale]
    new = cast_together(stale, former, Phase.TRAINING if record else Phase.EVALUATION)
    targets, sources = [], []
    for former_cast, cast in zip(former, new, strict=True):
        if former_cast is None:
            continue
        kept, made = _tensors(former_cast), _tensors(cast)
        if made[0] is kept[0]:
            # written by a kernel: a backward that waits for the former codes must fail, not use these
            torch.autograd.graph.increment_version(kept[:2])
        current = set()
        for target, source in zip(kept, made, strict=True):
            # not what a kernel has written, nor a view of another part
            memory = target.untyped_storage().data_ptr()
            if target is not source and memory not in current:
                targets.append(target)
                sources.append(source)
            current.add(memory)
    if targets:
        torch._foreach_copy_(targets, sources)
    return [cast if former_cast is None else former_cast for former_cast, cast in zip(former, new, strict=True)]


def _tensors(cast: Cast) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The codes and the scales of both layouts."""
    # `cast_together` makes both
    rows, columns = (typing.cast(Operand, operand) for operand in cast[:2])
    return rows.codes, columns.codes, rows.scale_inv, columns.scale_inv


def _fitting(gemm: Gemm, weight: Tensor) -> Cast | None:
    """The tensors that an earlier cast was written to, if this one fits them."""
    former = gemm.weight_cast.compiled_cast
    codes = None if former is None or former.rows is None else former.rows.codes
    if codes is None or codes.device != weight.device or codes.shape != gemm.n_by_k(weight).shape:
        return None
    return former


def _check(gemm: Gemm) -> None:
    """Leave a layer out for good if its weight was changed within a context, by means that do not clear its flag."""
    weight = gemm.weight
    if not gemm.weight_cast.compiled_cast_is_current or weight is None or _is_held(gemm, weight):
        return
    gemm.weight_cast.compiled_cast_is_current = gemm.weight_cast.may_have_compiled_cast = False
    warn_once(
        f"The weight of {gemm.name!r} was changed within a step, and compiled code that ran after the change used the"
        " former value. From now on compiled code casts this weight in each forward. Change weights between steps, or"
        " by an optimizer or `load_state_dict`."
    )
