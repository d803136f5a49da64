"""Where a step's time goes: forward and backward of each layer that multiplies matrices."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import nn
from typing_extensions import override

from lightning_fp8.callbacks.run_watcher import RunWatcher, log_to_all
from lightning_fp8.callbacks.stopwatch import NOTHING_RAN, Stopwatch, clock_for
from lightning_fp8.conversion.plan import conversion_plan
from lightning_fp8.runtime.every_n_steps import EveryNSteps


class LayerTimer(RunWatcher):
    """Times forward and backward of each layer that multiplies matrices, in one of every ``every_n_steps`` steps.

    It times the layers that :func:`lightning_fp8.describe` lists, converted or not, under every precision, so an FP8
    run can be compared with a bf16 run. For the first micro-batch of a timed step it logs:

    - ``timing/<module path>/forward_ms``: the layer's forward, summed over its calls, in milliseconds, including
      forwards that activation checkpointing recomputes. Not logged for a layer that was not called.
    - ``timing/<module path>/backward_ms``: the nodes that the layer's forward added to the autograd graph, summed over
      its calls, in milliseconds, without the accumulation into ``.grad`` and the communication that follows it. Not
      logged for a layer that had no backward.

    An attention's times include those of its ``out_proj``, which also has its own times where it is called as a layer,
    as in a converted attention. On a GPU the times are measured between two events of the stream, so they include the
    time that the GPU waits for the CPU; they are read after the batch, with one synchronisation. With several
    processes, the times are those of the slowest.

    Training is unaffected: no loss, gradient, scale or random number changes, and nothing is added to the graph. Steps
    that are not timed cost nothing. While a layer is watched, its feed-forward block does not run fused (see
    :func:`lightning_fp8.feed_forward`): the timed step shows its parts, and is slower there than other steps. Only
    for ``gelu_new`` of transformers does this change numbers, because its parts round more often. Layers inside
    ``torch.compile`` cannot be watched; if no layer can, it warns once. A ``QuantizationProbe`` that probes the same
    step runs its comparison of ``out_proj`` inside the attention's forward.

    Args:
        every_n_steps: optimizer steps between two timed ones.

    Attributes:
        forward_ms: by module path, of the newest timed step.
        backward_ms: likewise.

    Raises:
        ValueError: if ``every_n_steps`` is below 1.
    """

    def __init__(self, every_n_steps: int = 200) -> None:
        self.every_n_steps = every_n_steps
        self._when = EveryNSteps("LayerTimer", every_n_steps)
        self.forward_ms: dict[str, float] = {}
        self.backward_ms: dict[str, float] = {}
        self._layers: dict[str, nn.Module] = {}
        self._stopwatch: Stopwatch | None = None
        self._has_warned = False

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._has_warned = False
        self._when.start(trainer.global_step)
        layers = conversion_plan(pl_module).layers
        # compiled by torch.jit, a module takes no hooks
        self._layers = {one.path: one.layer for one in layers if not isinstance(one.layer, torch.jit.ScriptModule)}
        if not self._layers:
            self._warn("no layer of the model does matrix multiplications; nothing to time.")

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        # a batch that the model skipped has no `on_train_batch_end`
        self._stop()
        # the first micro-batch of a step: its times are logged with that step
        if self._layers and self._when.begins():
            self._stopwatch = Stopwatch(self._layers, clock_for(pl_module.device))

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        stopwatch = self._stopwatch
        self._when.ends(trainer.global_step)
        if stopwatch is None:
            return
        self._stop()
        # every layer, in order: processes may have run different layers
        own = torch.tensor(stopwatch.milliseconds(), device=pl_module.device)
        slowest = trainer.strategy.all_gather(own).reshape(-1, *own.shape).amax(dim=0).tolist()
        times = list(zip(self._layers, slowest, strict=True))
        self.forward_ms = {path: forward for path, (forward, _) in times if forward != NOTHING_RAN}
        self.backward_ms = {path: backward for path, (_, backward) in times if backward != NOTHING_RAN}
        if not self.forward_ms:
            self._warn("no layer was called. Layers inside `torch.compile` cannot be watched: time a run without it.")
            return
        self._log(trainer)

    def _log(self, trainer: Trainer) -> None:
        metrics = {
            "/".join(filter(None, ("timing", path, name))): milliseconds
            for name, numbers in (("forward_ms", self.forward_ms), ("backward_ms", self.backward_ms))
            for path, milliseconds in numbers.items()
        }
        log_to_all(trainer, metrics)

    def _warn(self, message: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            rank_zero_warn(f"LayerTimer: {message}")

    @override
    def _stop(self) -> None:
        if self._stopwatch is not None:
            self._stopwatch.remove_hooks()
        self._stopwatch = None
