"""A linear layer whose weight ``parallelize_module`` has split over processes: each computes its part in FP8."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from lightning_fp8.modules.functional import cast_weight, fp8_linear
from lightning_fp8.modules.gemm import Gemm
from lightning_fp8.modules.phase import Phase


def parallel_linear(gemm: Gemm, x: Tensor, weight: DTensor, bias: Tensor | None, phase: Phase) -> Tensor:
    """``x @ weight^T + bias`` of distributed tensors: x ``[*, K]`` -> ``[*, N]``, distributed as follows.

    - ``ColwiseParallel``: weight split by rows, x whole on each process; y is split along its last dimension.
    - ``RowwiseParallel``: weight split by columns, x along its last dimension; y is a partial sum.

    Inputs and gradients have the scale of the whole tensor: the update of histories takes the maximum over all
    processes; a cast by own values takes it over the group. Each process scales its part of the weight by the amax of
    that part.

    Raises:
        TypeError: if x is not a distributed tensor: the layer was not called through the hooks of its plan.
        NotImplementedError: for placements other than these two.
    """
    if not isinstance(x, DTensor):
        raise TypeError(
            f"The weight of {gemm.name!r} is distributed over processes, but its input is a plain tensor. Call the"
            " layer as a module, so that the hooks of `parallelize_module` or `fully_shard` run."
        )
    mesh = weight.device_mesh
    by_columns = (Replicate(),), (Shard(0),)
    by_rows = (Shard(x.dim() - 1),), (Shard(1),)
    if (tuple(x.placements), tuple(weight.placements)) == by_columns:
        gemm.split({"grad_output": mesh.get_group().group_name})
        part = _local_linear(gemm, x.to_local(grad_placements=[Partial()]), weight, _local(bias, None), phase)
        return DTensor.from_local(part, mesh, [Shard(part.dim() - 1)], run_check=False)
    if (tuple(x.placements), tuple(weight.placements)) == by_rows:
        gemm.split({"input": mesh.get_group().group_name})
        part = _local_linear(gemm, x.to_local(), weight, None, phase)
        whole_bias = _local(bias, Partial())
        if whole_bias is not None:
            # one rank adds the bias to its partial sum; the gradients of the other ranks are zero, also partial sums
            part = part + whole_bias * float(mesh.get_local_rank() == 0)
        return DTensor.from_local(part, mesh, [Partial()], run_check=False)
    raise NotImplementedError(
        f"{gemm.name!r} runs in FP8 with the plans ColwiseParallel and RowwiseParallel on one dimension, got a weight"
        f" with the placements {weight.placements} and an input with {x.placements}. Leave the layer out with"
        " `ignore_modules`."
    )


def _local_linear(gemm: Gemm, x: Tensor, weight: DTensor, bias: Tensor | None, phase: Phase) -> Tensor:
    return fp8_linear(gemm, x, cast_weight(gemm, weight.to_local(), phase), bias, phase)


def _local(tensor: Tensor | None, gradient: Placement | None) -> Tensor | None:
    if not isinstance(tensor, DTensor):
        return tensor
    return tensor.to_local(grad_placements=None if gradient is None else [gradient])
