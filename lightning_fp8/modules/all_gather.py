"""Weights that ``fully_shard`` gathers in FP8: half the bytes of bf16, and the same numbers.

Each process casts its shard before the gather, with the scale of the whole weight. For this scale, the amaxes of all
shards are measured together and reduced over the processes: one collective of one vector for all weights, once per
optimizer step. A shard is first cast to the policy's ``param_dtype``, as for a gather without FP8, so the codes, and
all results computed from them, are the same bit for bit.

FSDP2 calls two methods of the shard's tensor for this (``fsdp_pre_all_gather`` and ``fsdp_post_all_gather``, see
``torch.distributed.fsdp``, "all-gather extensions").
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Replicate, Shard

from lightning_fp8.modules.base import Fp8Module
from lightning_fp8.modules.fp8_parameter import Content, Fp8Parameter
from lightning_fp8.modules.gemm import Gemm
from lightning_fp8.modules.phase import Phase
from lightning_fp8.modules.weight_cast import Stamped, stamp
from lightning_fp8.scaling import optimizer_steps
from lightning_fp8.scaling.state import ScalingState
from lightning_fp8.scalings.launches import measure_weights
from lightning_fp8.scalings.per_tensor import PerTensor


class _Scales:
    """The scales of all weights that are gathered over the same processes.

    They are valid until an optimizer steps or a weight changes. In evaluation, where weights may be swapped (EMA,
    averaging) without a trace, they are valid for one forward only: until a weight is gathered again. All processes
    must join the reduction. With these rules they do so at the same time, because a change of a sharded parameter
    leaves a trace on each process.
    """

    def __init__(self, state: ScalingState) -> None:
        self.state = state
        self.weights: list[DTensor] = []
        self.gemms: list[Gemm] = []
        self._in_training: bool | None = None
        self._gathered: set[int] = set()
        self._scales: dict[torch.dtype, Tensor] = {}
        # the results of the last measurement
        self._made_of: list[Stamped]
        self._steps: int
        self._amax: Tensor

    def join(self, gemm: Gemm, weight: DTensor) -> int:
        """Add a weight; returns its position."""
        self.weights.append(weight)
        self.gemms.append(gemm)
        return len(self.weights) - 1

    def scale(self, place: int, dtype: torch.dtype, group: dist.ProcessGroup, training: bool) -> Tensor:
        """The scale of the whole weight in this dtype, ``[] float32``."""
        if self._in_training is not training or self._is_stale(place):
            self._measure(group)
        self._in_training = training
        self._gathered.add(place)
        if dtype not in self._scales:
            # rounding is monotonic, so the amax of the rounded weight is the rounded amax
            self._scales[dtype] = self.state.recipe.scaling("weight").scale(self._amax.to(dtype).float())
            self._note(self._amax.to(dtype).float(), self._scales[dtype])
        return self._scales[dtype][place]

    def _is_stale(self, place: int) -> bool:
        is_again = not self._in_training and place in self._gathered
        return (
            is_again or self._steps != optimizer_steps.count or self._made_of[place].key != stamp(self.weights[place])
        )

    def _measure(self, group: dist.ProcessGroup) -> None:
        self._steps, self._made_of = optimizer_steps.count, [Stamped(weight) for weight in self.weights]
        self._gathered.clear()
        self._amax = measure_weights([weight._local_tensor.detach().flatten(1) for weight in self.weights])
        # as integers, NaN is the largest
        dist.all_reduce(self._amax.view(torch.int32), dist.ReduceOp.MAX, group=group)
        self._scales.clear()

    def _note(self, amax: Tensor, scale: Tensor) -> None:
        # a tensor made from a list would wait for the device
        rows = torch.cat([gemm.slots["weight", Phase.TRAINING].index for gemm in self.gemms])
        # through `.data`, as a compiled graph may hold these for its backward
        self.state.amax.data.index_copy_(0, rows, amax)
        self.state.scale.data.index_copy_(0, rows, scale)


class _Gathering:
    """The two extension methods of one shard."""

    def __init__(self, layer: nn.Module, gemm: Gemm, weight: DTensor, scales: _Scales) -> None:
        self.layer = layer
        self.shard = weight._local_tensor
        self.scales = scales
        self.place = scales.join(gemm, weight)
        self.k_by_n, self.scaling = gemm.k_by_n, cast(PerTensor, gemm.weight_scaling)

    def before(
        self,
        mesh: DeviceMesh,
        outer_size: torch.Size,
        outer_stride: tuple[int, ...],
        module: nn.Module,
        mp_policy: MixedPrecisionPolicy,
    ) -> tuple[tuple[Tensor], tuple[Tensor, int]]:
        """The shard in FP8, padded to the size that all shards have; and its scale_inv, with the unpadded length."""
        dtype = mp_policy.param_dtype or self.shard.dtype
        with torch.no_grad():
            scale = self.scales.scale(self.place, dtype, mesh.get_group(), self.layer.training)
            x = self.shard.detach().to(dtype)
            x = x.reshape(len(x), math.prod(outer_size[1:]))
            payload, scale_inv, _ = self.scaling.with_scale(x, scale)
            padded: Tensor = payload.new_zeros(-(-outer_size[0] // mesh.size()), *outer_size[1:])
            padded[: len(payload)] = payload.view(-1, *outer_size[1:])
        return (padded,), (scale_inv, outer_size[0])

    def after(
        self, outputs: tuple[Tensor, ...], metadata: Any, param_dtype: torch.dtype, *, out: Tensor | None = None
    ) -> tuple[Fp8Parameter, tuple[Tensor, ...]] | None:
        """Make the weight from the gathered shards, or let the existing weight ``out`` take them over."""
        scale_inv, length = metadata
        payload = outputs[0][:length]
        payload = payload.t() if self.k_by_n else payload
        content = Content(param_dtype, self.k_by_n, self.scaling, payload, scale_inv)
        if out is not None:
            cast(Fp8Parameter, out).content = content
            return None
        return Fp8Parameter(content), ()


def gather_in_fp8(model: nn.Module) -> list[str]:
    """Let FSDP2 gather the weights of converted layers in FP8 from the next forward on.

    Call it after ``convert`` and ``fully_shard`` (in any order), and before the first forward.

    Returns:
        Names of these layers. The following weights are still gathered without FP8: weights that several modules share,
        weights of experts, of layers that fell back and of layers with fprop or dgrad in bf16, and weights that
        ``fully_shard`` has not sharded along their first dimension.

    Raises:
        ValueError: if no layer qualifies, processes do not share their scales (``reduce_amax=False``), or weights are
            scaled in blocks.
    """
    slots = Counter(id(parameter) for layer in model.modules() for parameter in layer.parameters(recurse=False))
    names: list[str] = []
    scales: dict[Hashable, _Scales] = {}
    for layer in model.modules():
        for gemm, weight in layer.gemms() if isinstance(layer, Fp8Module) else ():
            is_own = slots[id(weight)] == 1 and gemm.weight_cast.part is None
            if not (is_own and _is_sharded_by_rows(weight)) or gemm.precision.needs_weight:
                continue
            gemm.state.recipe.check_gather()
            sharded = cast(DTensor, weight)
            together = scales.setdefault((gemm.model.handle, sharded.device_mesh), _Scales(gemm.state))
            gathering = _Gathering(layer, gemm, sharded, together)
            shard = sharded._local_tensor
            shard.fsdp_pre_all_gather = gathering.before  # type: ignore[attr-defined]
            shard.fsdp_post_all_gather = gathering.after  # type: ignore[attr-defined]
            gemm.precision.may_fall_back = False
            names.append(gemm.name)
    if not names:
        raise ValueError(
            f"{type(model).__name__} has no FP8 layer whose weight FSDP2 shards along its first dimension: there is"
            " nothing to gather in FP8. Call `fully_shard` in `configure_model`, with ModelParallelStrategy."
        )
    return names


def _is_sharded_by_rows(weight: Tensor) -> bool:
    if not isinstance(weight, DTensor) or weight.device.type == "meta":
        return False
    # hybrid sharding replicates over the first dimension of the mesh
    *others, last = weight.placements
    return last == Shard(0) and all(placement == Replicate() for placement in others)
