"""What one run of a comparison measures: times, losses, memory, and whether it saw the same batches as the others."""

from __future__ import annotations

import time
import zlib
from collections.abc import Iterable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.data import extract_batch_size
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from lightning_fp8.tools.tables import percentiles

# the final loss is the mean over this share of the steps
LAST_SHARE = 0.1
_LOSS_KEYS = ("train_loss", "loss")
# more than anyone accumulates
_BATCHES_WITHOUT_STEP = 10_000


class Measure(Callback):
    """Measures a run from the end of its warm-up to its last optimizer step, and ends training there.

    A step lasts from the end of one batch that updated the weights to the end of the next: loading data, all
    accumulated batches, the optimizer. On CUDA its time is that between two events on the stream, and the host waits
    for the device only at the end of the measured steps; elsewhere it is the host's time. Logs nothing.

    - Samples are what Lightning's ``extract_batch_size`` counts.
    - Tokens are the elements of a 2-D tensor of integers: the batch, the first item of a batch that is a tuple or list,
      or ``input_ids`` of a batch that is a mapping. Other batches have no tokens.
    - The loss of a step is the mean over its batches of what ``training_step`` returns, or, if it returns none, of what
      it logs as ``train_loss`` or ``loss``.
    - Peak memory on CUDA is that of torch's allocator until the last step; on the CPU it is the process's peak resident
      memory, less its resident memory when fitting started (0 where the system does not show them).

    Args:
        warmup: number of first steps that are excluded from times and rates, at least 1.
    """

    def __init__(self, warmup: int) -> None:
        self.warmup = warmup
        self.losses: list[Tensor] = []
        # at the end of each measured step, and of the one before; samples and tokens of each batch between them
        self._marks: list[Any] = []
        self._counts: list[tuple[int | None, int | None]] = []
        self._steps = self._batches_since_step = self._global_step = 0
        self._of_this_step: list[Tensor] = []
        self._digest = self._at_start = self._peak = 0
        self._bytes: dict[str, int] = {}

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._at_start = _resident("VmRSS")

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        # only during the warm-up, as it waits for the device
        if self._steps < self.warmup:
            self._digest = _digest(batch, self._digest)

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        if "gradient_bytes" not in self._bytes:
            self._bytes["gradient_bytes"] = _bytes_of(parameter.grad for parameter in pl_module.parameters())

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        loss = _loss(trainer, outputs)
        if loss is not None:
            self._of_this_step.append(loss)
        if self._marks:
            self._counts.append((_samples(batch), tokens_of(batch)))
        self._batches_since_step += 1
        if trainer.global_step > self._global_step:
            self._after_step(trainer, pl_module)
        elif self._batches_since_step >= _BATCHES_WITHOUT_STEP:
            raise RuntimeError(
                f"compare: no optimizer step in {_BATCHES_WITHOUT_STEP:,} batches. With manual optimization, step"
                " the optimizers that `self.optimizers()` returns: Lightning counts no others."
            )

    def _after_step(self, trainer: Trainer, model: LightningModule) -> None:
        self._global_step, self._batches_since_step = trainer.global_step, 0
        self._steps += 1
        if self._of_this_step:
            self.losses.append(torch.stack(self._of_this_step).mean())
            self._of_this_step = []
        on_cuda = model.device.type == "cuda"
        if self._steps >= self.warmup:
            self._marks.append(_event() if on_cuda else time.perf_counter_ns())
        if 0 < trainer.max_steps <= trainer.global_step:
            if on_cuda:
                torch.cuda.synchronize()
            self._peak = (
                torch.cuda.max_memory_allocated(model.device) if on_cuda else _resident("VmHWM") - self._at_start
            )
            self._bytes["parameter_bytes"] = _bytes_of(model.parameters())
            self._bytes["optimizer_bytes"] = _bytes_of(
                tree_leaves([list(optimizer.state.values()) for optimizer in trainer.optimizers])
            )
            # makes Lightning validate now, if there is validation data
            trainer.should_stop = True

    def results(self, trainer: Trainer) -> dict[str, Any]:
        """The numbers of the run, once it is over.

        Raises:
            RuntimeError: if no step was left to measure after the warm-up.
        """
        times = [_milliseconds(*pair) for pair in pairwise(self._marks)]
        if not times:
            raise RuntimeError(
                f"compare: the run ended after {self._steps} steps, and nothing is measured in the first {self.warmup}."
                " It needs more steps, or a smaller `--warmup`."
            )
        p20, p50, p80 = percentiles(times)
        losses = [float(loss) for loss in self.losses]
        last = losses[-max(1, round(LAST_SHARE * len(losses))) :]
        samples, tokens = (
            None if None in counts else 1e3 * sum(counts) * trainer.world_size / sum(times)
            for counts in zip(*self._counts)
        )
        return {
            "steps": self._steps,
            "warmup": self.warmup,
            "p20_ms": p20,
            "p50_ms": p50,
            "p80_ms": p80,
            "mean_ms": sum(times) / len(times),
            "samples_per_s": samples,
            "tokens_per_s": tokens,
            "peak_bytes": self._peak,
            **self._bytes,
            "state_bytes": sum(self._bytes.values()),
            "first_loss": losses[0] if losses else None,
            "loss": sum(last) / len(last) if last else None,
            "val_loss": _val_loss(trainer),
            "batches": f"{self._digest:08x}",
            "world_size": trainer.world_size,
            "losses": losses,
        }


def _event() -> torch.cuda.Event:
    """An event after the work that is queued on a GPU's stream."""
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _milliseconds(start: Any, end: Any) -> float:
    return (end - start) / 1e6 if isinstance(start, int) else float(start.elapsed_time(end))


def tokens_of(batch: Any) -> int | None:
    """How many tokens a batch has, by the rule of :class:`Measure`; None where it has none.

    >>> tokens_of((torch.zeros(4, 33, dtype=torch.long), torch.zeros(4)))
    132
    """
    if isinstance(batch, Mapping):
        batch = batch.get("input_ids")
    elif isinstance(batch, tuple | list) and batch:
        batch = batch[0]
    if not isinstance(batch, Tensor) or batch.ndim != 2 or batch.dtype == torch.bool:
        return None
    return None if batch.is_floating_point() or batch.is_complex() else batch.numel()


def _samples(batch: Any) -> int | None:
    try:
        return extract_batch_size(batch)
    except (MisconfigurationException, RecursionError):
        return None


def _loss(trainer: Trainer, outputs: Any) -> Tensor | None:
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
    if isinstance(loss, Tensor):
        # with automatic optimization, Lightning has divided it by the number of accumulated batches
        parts = trainer.accumulate_grad_batches if trainer.lightning_module.automatic_optimization else 1
        return loss.detach().float().mean() * parts
    logged = (trainer.callback_metrics[key] for key in _LOSS_KEYS if key in trainer.callback_metrics)
    return next((loss.detach().float().clone() for loss in logged), None)


def _val_loss(trainer: Trainer) -> float | None:
    losses = {key: value for key, value in trainer.callback_metrics.items() if "val" in key and "loss" in key}
    key = "val_loss" if "val_loss" in losses else min(losses, default=None)
    return None if key is None else float(losses[key])


def _digest(batch: Any, before: int) -> int:
    """A checksum of a batch and those before it; in bf16, as ``bf16-true`` rounds a batch before callbacks see it."""
    for leaf in tree_leaves(batch):
        if isinstance(leaf, Tensor):
            plain = leaf.detach().bfloat16() if leaf.is_floating_point() else leaf.detach()
            before = zlib.crc32(plain.cpu().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes(), before)
    return before


def _bytes_of(values: Iterable[Any]) -> int:
    """Bytes of all storages of tensors, each counted once; of a sharded tensor, only this process's shard."""
    local = [x.to_local() if hasattr(x, "to_local") else x for x in values if isinstance(x, Tensor)]
    storages = {(x.device, x.untyped_storage().data_ptr()): x.untyped_storage().nbytes() for x in local}
    return sum(storages.values())


def _resident(field: str) -> int:
    """Bytes of this process in memory: now (``VmRSS``) or at most so far (``VmHWM``)."""
    # not getrusage, whose peak a process inherits from its parent
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith(field)), 0)
