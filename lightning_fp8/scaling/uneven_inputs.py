"""Uneven inputs under DDP: a scaling state takes part in ``torch.distributed.algorithms.Join``."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.algorithms.join import JoinHook, _JoinConfig
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from lightning_fp8.scaling.scales import Scales


class Updates(JoinHook):
    """A process without inputs takes part in each update of the others, with no amaxes of its own."""

    def __init__(self, state: Scales) -> None:
        self._state = state

    @override
    def main_hook(self) -> None:
        self._state.update()


def check_joined(state: _JoinConfig) -> None:
    """RuntimeError if processes that run out of inputs would not take part in the updates of the others."""
    ddp = DistributedDataParallel._get_active_ddp_module()  # type: ignore[no-untyped-call]
    joins = ddp is not None and ddp._join_config.enable and dist.get_world_size() > 1
    if joins and (not state.enable or state.is_first_joinable):
        raise RuntimeError(
            "Join: a model with FP8 layers trains with uneven inputs, but its scaling state is not among the"
            " joinables, or is the first of them: processes without inputs would miss the reduction of its amaxes,"
            " and the others would wait for them. Use `Join([ddp, lightning_fp8.scaling_state(model)])`, in this"
            " order, in place of `ddp.join()`, or give all processes as many batches (`drop_last=True`); with"
            " `DelayedScaling(reduce_amax=False)` nothing is reduced."
        )
