"""Weights that ``fully_shard`` gathers in FP8: half the bytes of bf16, and the same numbers.

Each process casts its shard before the gather, with the scale that the whole weight has for this step. Scales are
known in advance, so that takes no collective; only a weight that has no history yet takes one, for the amax of the
whole. A shard is brought to the policy's ``param_dtype`` first, as it would have been for a gather without FP8: so the
codes, and all that follows from them, are the same bit for bit.

FSDP2 asks a shard for this by two methods of its tensor (``fsdp_pre_all_gather`` and ``fsdp_post_all_gather``, see
``torch.distributed.fsdp``, "all-gather extensions").
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Replicate, Shard

from lightning_fp8 import ops
from lightning_fp8.modules.gathered_weight import GatheredWeight
from lightning_fp8.modules.gemm import Fp8Module, Fp8Rows
from lightning_fp8.ops.reference import max_abs, scale_of_current


class _Gathering:
    """The two methods of one shard."""

    def __init__(self, layer: nn.Module, rows: Fp8Rows, shard: Tensor) -> None:
        self.layer = layer
        self.rows = rows
        self.shard = shard

    def before(
        self,
        mesh: DeviceMesh,
        outer_size: torch.Size,
        outer_stride: tuple[int, ...],
        module: nn.Module,
        mp_policy: MixedPrecisionPolicy,
    ) -> tuple[tuple[Tensor], tuple[Tensor, Tensor, int]]:
        """The shard in FP8, padded to the size that all shards have, and what belongs to it."""
        state, fmt = self.rows.state, self.rows.state.recipe.format_of("weight")
        with torch.no_grad():
            x = self.shard.detach().to(mp_policy.param_dtype or self.shard.dtype)
            x = x.reshape(len(x), math.prod(outer_size[1:]))
            amax = max_abs(x)
            scale, history, index = state.scale, state.amax_history, self.rows.index["weight"]
            record = bool(self.layer.records)
            if not state.has_history(self.rows.weight_index):
                whole = amax.clone()
                # as integers: NaN is the largest
                dist.all_reduce(whole.view(torch.int32), dist.ReduceOp.MAX, group=mesh.get_group())
                scale, history = scale_of_current(whole, fmt)[None], torch.ones_like(whole)[None, None]
                index, record = torch.zeros_like(index), False
            payload, _, scale_inv = ops.cast(x, scale, history, index, fmt.name, "none", "rows", state.handle, record)
            padded: Tensor = payload.new_zeros(-(-outer_size[0] // mesh.size()), *outer_size[1:])
            padded[: len(payload)] = payload.view(-1, *outer_size[1:])
        return (padded,), (scale_inv, amax, outer_size[0])

    def after(
        self, outputs: tuple[Tensor, ...], metadata: Any, param_dtype: torch.dtype, *, out: Tensor | None = None
    ) -> tuple[GatheredWeight, tuple[Tensor, ...]] | None:
        """The weight of the gathered shards; with ``out`` it has been made before and takes them over."""
        scale_inv, amax, length = metadata
        held = (outputs[0][:length], scale_inv, amax, self.rows.state.recipe.format_of("weight"))
        if out is not None:
            cast(GatheredWeight, out).hold(*held)
            return None
        return GatheredWeight(*held, param_dtype), ()


def gather_in_fp8(model: nn.Module) -> list[str]:
    """Let FSDP2 gather the weights of converted layers in FP8 from the next forward on.

    After ``convert`` and ``fully_shard`` (in any order), and before the first forward.

    Returns:
        Names of the layers concerned. Not concerned are weights that other modules share, those of layers that fell
        back, and weights that are not sharded, along their first dimension, by ``fully_shard``.

    Raises:
        ValueError: if that leaves none, or if scales are not shared by all processes (``reduce_amax=False``).
    """
    slots = Counter(id(parameter) for layer in model.modules() for parameter in layer.parameters(recurse=False))
    names = []
    for layer in model.modules():
        for rows, weight in layer.gemms() if isinstance(layer, Fp8Module) else ():
            if not rows.switch.in_fp8 or slots[id(weight)] > 1 or not _is_sharded_by_rows(weight):
                continue
            if not rows.state.recipe.reduce_amax:
                raise ValueError("Weights are gathered in FP8 with one scale on all processes: set `reduce_amax=True`.")
            shard = cast(DTensor, weight)._local_tensor
            gathering = _Gathering(layer, rows, shard)
            shard.fsdp_pre_all_gather = gathering.before  # type: ignore[attr-defined]
            shard.fsdp_post_all_gather = gathering.after  # type: ignore[attr-defined]
            rows.switch.may_fall_back = False
            names.append(rows.name)
    if not names:
        raise ValueError(
            f"{type(model).__name__} has no FP8 layer whose weight FSDP2 shards along its first dimension: there is"
            " nothing to gather in FP8. Call `fully_shard` in `configure_model`, with ModelParallelStrategy."
        )
    return names


def note_sharded_weights(model: nn.Module) -> None:
    """See :meth:`Fp8Rows.note_sharding`: for layers that were sharded after their conversion."""
    for layer in model.modules():
        for rows, weight in layer.gemms() if isinstance(layer, Fp8Module) else ():
            rows.note_sharding(weight)


def _is_sharded_by_rows(weight: Tensor) -> bool:
    if not isinstance(weight, DTensor) or weight.device.type == "meta":
        return False
    # with hybrid sharding, replicated over the first dimension of the mesh
    *others, last = weight.placements
    return last == Shard(0) and all(placement == Replicate() for placement in others)
