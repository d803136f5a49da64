"""Which layers lose most precision in FP8, compared with themselves in bf16 on the live batch, and their outliers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from lightning_fp8.callbacks.input_statistics import NOT_SEEN, InputStatistics
from lightning_fp8.callbacks.run_watcher import RunWatcher, log_to_all
from lightning_fp8.conversion.plan import converted
from lightning_fp8.metrics.sqnr import signal_and_noise
from lightning_fp8.modules.base import Fp8Module


class QuantizationProbe(RunWatcher):
    """Compares each converted layer's output with that of the same layer in bf16, in training, on the live batch, and
    measures the outliers of its input.

    For each converted layer that runs in the probed step:

    - ``fp8/<module path>/sqnr_db``: signal to quantization noise, ``10 log10(sum(y^2) / sum((y_fp8 - y)^2))`` where
      y is the layer's output in bf16, in dB. About 28 for normally distributed operands; 6 dB less is one bit of
      precision less.
    - ``fp8/<module path>/kurtosis``: of its input, ``mean((x - mean(x))^4) / mean((x - mean(x))^2)^2`` over all its
      numbers; 3 if they are normally distributed. It grows with outliers long before the loss shows them (arXiv
      2505.20524). No unit.
    - ``fp8/<module path>/outlier_share``: for the last layer of a SwiGLU block of a known class, the share of the
      numbers of its input with ``|x| > 10 sqrt(mean(x^2))``, 0 to 1. SwiGLU amplifies outliers in long runs (arXiv
      2409.12517).

    The layers with the lowest ratios are the first candidates for ``ignore_modules``; :meth:`suggest_ignore_modules`
    prints the setting. Training is unaffected: no scale, gradient or random number changes. A probed step costs about
    one extra forward of its first micro-batch and one device-to-host copy; other steps cost nothing. With several
    processes, the sums are over all of them. Under another precision it warns once and does nothing.

    Args:
        every_n_steps: optimizer steps between two probes.

    Attributes:
        sqnr_db: by module path, of the newest probe of the last fit.
        outliers: ``kurtosis`` and ``outlier_share``, each by module path, of the newest probe.

    Raises:
        ValueError: unless ``every_n_steps`` is an integer of at least 1.
    """

    def __init__(self, every_n_steps: int = 200) -> None:
        super().__init__(every_n_steps)
        self.sqnr_db: dict[str, float] = {}
        self.outliers: dict[str, dict[str, float]] = {}
        self._layers: dict[str, Fp8Module] = {}
        self._inputs: InputStatistics | None = None
        self._hooks: list[RemovableHandle] = []
        self._sums: dict[str, Tensor] = {}
        self._is_comparing = False

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.sqnr_db, self.outliers = {}, {}
        if self._starts(trainer, pl_module, "compare"):
            self._layers = dict(converted(pl_module))
            self._inputs = InputStatistics(self._layers, pl_module)

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        # the first micro-batch of a step: its numbers are logged with that step
        if self._inputs is None or not self._when.begins():
            return
        self._sums = {}
        self._inputs.start()
        for path, layer in self._layers.items():
            if not any(gemm.precision.fprop_in_fp8 for gemm in layer.fp8.values()):
                continue
            self._hooks.append(layer.register_forward_hook(self._comparison(path), with_kwargs=True))

    def _comparison(self, path: str) -> Callable[..., None]:
        def compare(layer: Fp8Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            # not for calls that a comparison makes, nor for recomputation in backward, which repeats a forward
            if self._is_comparing or torch._C._current_graph_task_id() != -1:
                return
            self._is_comparing = True
            try:
                sums = _signal_and_noise(layer, args, kwargs, output)
            finally:
                self._is_comparing = False
            self._sums[path] = sums + self._sums[path] if path in self._sums else sums

        return compare

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        inputs = self._inputs
        if inputs is None:
            return
        self._when.ends(trainer.global_step)
        if not inputs.is_watching:
            return
        inputs.stop()
        self._remove_hooks()
        sums, self._sums = self._sums, {}
        if not inputs.has_seen:
            rank_zero_warn(f"QuantizationProbe: {NOT_SEEN}: probe a run without it.")
        # zeros for a layer that this process has not run; where no process has, the ratio is NaN and is left out
        empty = torch.zeros(2, dtype=torch.float64, device=pl_module.device)
        together = torch.stack([sums.get(path, empty) for path in self._layers])
        reduce = partial(trainer.strategy.reduce, reduce_op="sum")
        signal, noise = reduce(together).unbind(dim=1)
        values = {"sqnr_db": 10 * torch.log10(signal / noise), **inputs.values(reduce, pl_module.device)}
        # the one copy to the host
        rows = torch.stack([*values.values()]).tolist()
        by_path = {
            name: {path: value for path, value in zip(self._layers, row, strict=True) if value == value}
            for name, row in zip(values, rows, strict=True)
        }
        log_to_all(
            trainer,
            {
                f"fp8/{path}/{name}" if path else f"fp8/{name}": value
                for name, entries in by_path.items()
                for path, value in entries.items()
            },
        )
        self.sqnr_db, self.outliers = by_path.pop("sqnr_db"), by_path

    def suggest_ignore_modules(self, below_db: float = 20.0) -> list[str]:
        """Print the settings that exclude the layers below ``below_db`` in the newest probe, worst first.

        Returns:
            The paths of these layers; empty if there are none, and then a message says so.

        Raises:
            RuntimeError: if nothing has been probed yet.
        """
        if not self.sqnr_db:
            raise RuntimeError(
                "QuantizationProbe: nothing has been probed yet. Train for at least"
                f" `every_n_steps`={self.every_n_steps} steps in `fp8-delayed` first."
            )
        worst = sorted((ratio, path) for path, ratio in self.sqnr_db.items() if ratio < below_db)
        lines = [f'        - "{path}"  # {ratio:.1f} dB' for ratio, path in worst]
        head = ["trainer:", "  plugins:", "    class_path: lightning_fp8.Fp8Precision", "    init_args:"]
        if worst:
            rank_zero_info("\n".join([*head, "      ignore_modules:", *lines]))
        else:
            lowest = min(self.sqnr_db.values())
            rank_zero_info(f"No layer is below {below_db:.1f} dB; the lowest has {lowest:.1f} dB.")
        return [path for _, path in worst]

    @override
    def _stop(self) -> None:
        if self._inputs is not None:
            self._inputs.stop()
        self._layers, self._inputs = {}, None
        self._remove_hooks()

    def _remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()


@torch.no_grad()
def _signal_and_noise(layer: Fp8Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Tensor:
    """``sum(y^2)`` and ``sum((y_fp8 - y)^2)`` of one call of a layer, ``[2] float64``."""
    with torch.autocast(_first(output).device.type, torch.bfloat16), _without_dropout(layer) as had_dropout:
        if had_dropout:
            output = type(layer).forward(layer, *args, **kwargs)
        exact = _first(layer.plain_class.forward(layer, *args, **kwargs))
    return torch.stack(signal_and_noise(_first(output), exact))


def _first(output: Any) -> Tensor:
    """The output of a linear layer, or of an attention without its attention weights."""
    first: Tensor = output[0] if isinstance(output, tuple) else output
    return first


@contextlib.contextmanager
def _without_dropout(layer: nn.Module) -> Iterator[bool]:
    """Without dropout both runs compute the same and draw no random number. Yields whether there was any."""
    before = getattr(layer, "dropout", 0.0)
    if not before:
        yield False
        return
    layer.dropout = 0.0  # type: ignore[assignment]
    try:
        yield True
    finally:
        layer.dropout = before  # type: ignore[assignment]
