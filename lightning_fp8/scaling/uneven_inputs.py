"""Uneven inputs under DDP, which the reduction of amaxes does not allow."""

from __future__ import annotations

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def refuse_join() -> None:
    """RuntimeError inside ``ddp.join()``: a process without inputs would miss the reductions that others wait for."""
    ddp = DistributedDataParallel._get_active_ddp_module()  # type: ignore[no-untyped-call]
    if ddp is not None and ddp._join_config.enable and dist.get_world_size() > 1:
        raise RuntimeError(
            "Join: a model with FP8 layers cannot train with uneven inputs, because each update reduces amaxes over all"
            " processes. Give all processes as many batches (`drop_last=True`), or use a recipe that reduces nothing:"
            " `DelayedScaling(reduce_amax=False)`."
        )
