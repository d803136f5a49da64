"""Casts weights once, before compiled code runs, which cannot detect stale copies and would cast in each forward.

Compiled code reads the casts of prepared layers as inputs, from tensors that stay the same objects, at the same
addresses, as long as shapes and device stay the same. A flag of each layer, which compiled code has a guard on, says
whether they are the casts of the current weights; where it is not set, compiled code casts the weight itself. An
optimizer step, a load and a move clear it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from lightning_fp8 import ops
from lightning_fp8.modules.base import Fp8Module, Fp8Rows
from lightning_fp8.modules.weight_group import cast_together, is_plain
from lightning_fp8.ops.operand import Fp8Operand
from lightning_fp8.runtime.warn_once import warn_once

_LOCK = threading.Lock()


def compiled_rows(model: nn.Module) -> list[Fp8Rows]:
    """The rows of layers in modules that ``torch.compile``, ``nn.Module.compile`` or ``generate`` has compiled."""
    found: dict[int, Fp8Rows] = {}
    for module in model.modules():
        # `_compiler_ctx` is Lightning's; `generate` of transformers keeps what it has compiled in `_compiled_call`
        kept = (getattr(module, name, None) for name in ("_compiled_call_impl", "_compiler_ctx", "_compiled_call"))
        if "_orig_mod" in module._modules or any(one is not None for one in kept):
            layers = (layer for layer in module.modules() if isinstance(layer, Fp8Module))
            found.update((id(rows), rows) for layer in layers for rows in layer.fp8.values())
    return list(found.values())


@contextmanager
def prepared(rows: Sequence[Fp8Rows], record: bool, in_backward: bool = False) -> Iterator[None]:
    """Cast the weights that have changed, and let compiled code in this context, in any thread, use the casts.

    Args:
        rows: the rows of layers; left out are layers whose weight is sharded, computed or not cast, and in training
            those whose weight is frozen, as it may belong to a target network that changes within the step.
        record: whether this is a training step.
        in_backward: whether this is a backward. Its recomputation reads the same casts as the forward: nothing is cast
            again, as that would overwrite what backward has kept.
    """
    ready = [(one, weight) for one in rows if (weight := _weight_to_prepare(one, record)) is not None]
    if in_backward:
        ready = [entry for entry in ready if _is_held(*entry)]
    with _LOCK:
        for group in () if in_backward else {id(one.group): one.group for one, _ in ready}.values():
            _refresh([(one, weight) for one, weight in ready if one.group is group], record)
        for one, _ in ready:
            one.is_prepared, one.preparers = True, one.preparers + 1
    try:
        yield
    finally:
        with _LOCK:
            for one, _ in ready:
                _check(one)
                one.preparers -= 1
                one.is_prepared &= one.preparers > 0


def _is_held(rows: Fp8Rows, weight: Tensor) -> bool:
    return rows.prepared is not None and rows.weight_cache.get(weight) is rows.prepared


def _weight_to_prepare(rows: Fp8Rows, record: bool) -> Tensor | None:
    weight = rows.weight
    if weight is None or not (rows.keeps_cast and rows.may_prepare and rows.switch.casts("weight")):
        return None
    if not is_plain(weight, rows.state.device) or weight.dim() != 2 or not weight.numel():
        return None
    return weight if weight.requires_grad or not record else None


def _refresh(layers: list[tuple[Fp8Rows, Tensor]], record: bool) -> None:
    """Write the casts of those weights of a model that have changed."""
    stale = [entry for entry in layers if not _is_held(*entry)]
    if not stale:
        return
    with torch.inference_mode(False), torch.no_grad():
        for (one, weight), made in zip(stale, _cast(stale, record), strict=True):
            one.prepared = made
            one.weight_cache.put(weight, made)


def _cast(stale: list[tuple[Fp8Rows, Tensor]], record: bool) -> list[Fp8Operand]:
    former = [_fitting(one, weight) for one, weight in stale]
    (first, weight), *_ = stale
    if ops.casts_weights_together(weight, first.weight_scaling):
        new = cast_together(stale, former)
    else:
        new = [
            ops.cast_weight_operand(one.n_by_k(weight.detach()), one.weight_slot(record), keep=True)
            for one, weight in stale
        ]
    pairs = [(kept, cast) for kept, cast in zip(former, new, strict=True) if kept is not None]
    targets = [kept.scale_inv for kept, _ in pairs]
    sources = [cast.scale_inv for _, cast in pairs]
    for kept, cast in pairs:
        if cast.rows is kept.rows:
            # written by a kernel: a backward that waits for the former payload must fail, not use this one
            torch.autograd.graph.increment_version((kept.rows, kept.columns))
        else:
            targets.append(kept.rows)
            sources.append(cast.rows)
            if not kept.columns._is_view():
                targets.append(kept.columns)
                sources.append(cast.columns)
    if targets:
        torch._foreach_copy_(targets, sources)
    return [cast if kept is None else kept for kept, cast in zip(former, new, strict=True)]


def _fitting(rows: Fp8Rows, weight: Tensor) -> Fp8Operand | None:
    """The tensors that an earlier cast was written to, if this one fits them."""
    kept = rows.prepared
    if kept is None or kept.rows.device != weight.device or kept.rows.shape != rows.n_by_k(weight).shape:
        return None
    return kept


def _check(rows: Fp8Rows) -> None:
    """Leave a layer out for good if its weight was changed within a context, by means that do not clear its flag."""
    weight = rows.weight
    if not rows.is_prepared or weight is None or _is_held(rows, weight):
        return
    rows.is_prepared = rows.may_prepare = False
    warn_once(
        f"The weight of {rows.name!r} was changed within a step, and compiled code that ran after the change used the"
        " former value. From now on compiled code casts this weight in each forward. Change weights between steps, or"
        " by an optimizer or `load_state_dict`."
    )
