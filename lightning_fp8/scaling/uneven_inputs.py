"""Uneven inputs under DDP: a scaling state takes part in ``torch.distributed.algorithms.Join``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.join import Joinable, JoinHook, _JoinConfig
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from lightning_fp8.scaling.model import Fp8Model
from lightning_fp8.scaling.recipe import Recipe


class _Updates(JoinHook):
    """A process without inputs takes part in each update of the others, with no amaxes of its own."""

    def __init__(self, state: JoinableState) -> None:
        self._state = state

    @override
    def main_hook(self) -> None:
        self._state.update()

    @override
    def post_hook(self, is_last_joiner: bool) -> None:
        # DDP has broadcast the weights to the processes that had no inputs
        self._state.model.take_as_known()


class JoinableState(Joinable):
    """Makes ``Join([ddp, scaling_state(model)])`` possible: one update of the scales for each forward of ``ddp``."""

    amax: Tensor
    update: Callable[[], None]
    model: Fp8Model
    # until it is among the joinables of a context
    _join_config = _JoinConfig.construct_disabled_join_config()

    def __init__(self) -> None:
        """Nothing: the class attribute stands for what the base class sets."""

    @property
    def recipe(self) -> Recipe:
        """See the subclass."""
        raise NotImplementedError

    @override
    def join_hook(self, **kwargs: Any) -> JoinHook:
        return _Updates(self)

    @property
    @override
    def join_device(self) -> torch.device:
        return self.amax.device

    @property
    @override
    def join_process_group(self) -> Any:
        return dist.group.WORLD

    def check_join(self) -> None:
        """RuntimeError if processes that run out of inputs would not take part in the updates of the others."""
        ddp = DistributedDataParallel._get_active_ddp_module()  # type: ignore[no-untyped-call]
        mine = self._join_config
        follows = mine.enable and not mine.is_first_joinable
        joins = ddp is not None and ddp._join_config.enable and dist.get_world_size() > 1
        if joins and self.recipe.reduce_amax and not follows:
            raise RuntimeError(
                "Join: a model with FP8 layers trains with uneven inputs, but its scaling state is not among the"
                " joinables, or is the first of them: processes without inputs would miss the reduction of its amaxes,"
                " and the others would wait for them. Use `Join([ddp, lightning_fp8.scaling_state(model)])`, in this"
                " order, in place of `ddp.join()`, or give all processes as many batches (`drop_last=True`); with"
                " `DelayedScaling(reduce_amax=False)` nothing is reduced."
            )
