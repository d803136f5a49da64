"""Whether the dtypes of a run are those that its precision promises."""

from __future__ import annotations

from typing import Any, Literal

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_fp8.audit import DtypeReport, DtypeRow, audit, buffer_dtypes_of
from lightning_fp8.plugins.core import PrecisionCore


class DtypeAudit(Callback):
    """Checks parameters, gradients, buffers and optimizer state against the precision's promise, and prints a table.

    After set-up: parameters and buffers. After the first optimizer step: these again, the gradients that the step was
    made with, and the optimizers' state; then the table is printed, once per run. See :func:`lightning_fp8.audit` for
    what is promised. Under a precision of Lightning's own nothing is promised, and the table only lists.

    Logs nothing to loggers. The last report is kept in ``report``.

    Args:
        on_violation: ``"warn"``, or ``"raise"`` for a ``RuntimeError``, in both cases with the table.

    Raises:
        ValueError: for another word.
    """

    def __init__(self, on_violation: Literal["warn", "raise"] = "warn") -> None:
        if on_violation not in ("warn", "raise"):
            raise ValueError(f"DtypeAudit: `on_violation` must be 'warn' or 'raise', got {on_violation!r}.")
        self.on_violation = on_violation
        self.report: DtypeReport | None = None
        self._buffer_dtypes: dict[str, Any] = {}
        self._gradients: dict[str, DtypeRow] = {}
        self._first_step: int | None = None

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            self._buffer_dtypes = buffer_dtypes_of(pl_module)

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._gradients = {}
        self._first_step = trainer.global_step
        self._check(trainer, pl_module, "after set-up", optimizers=[])

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        if self._first_step is not None:
            rows = self._audit(trainer, pl_module, []).rows
            # by name: where several optimizers take turns, each is seen with the gradients of its own step
            self._gradients.update({row.name: row for row in rows if row.kind == "gradient"})

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._first_step is None or trainer.global_step == self._first_step:
            return
        self._first_step = None
        report = self._check(trainer, pl_module, "after the first optimizer step", trainer.optimizers)
        rank_zero_info(f"Dtypes under {trainer.precision}, after the first optimizer step:\n{report}")

    def _audit(self, trainer: Trainer, pl_module: LightningModule, optimizers: list[Optimizer]) -> DtypeReport:
        plugin = trainer.precision_plugin
        promise: dict[str, Any] = {}
        if isinstance(plugin, PrecisionCore):
            promise = {"param_dtype": plugin.param_dtype, "keep_fp32": plugin.keep_fp32}
        return audit(pl_module, **promise, optimizers=optimizers, buffer_dtypes=self._buffer_dtypes)

    def _check(
        self, trainer: Trainer, pl_module: LightningModule, when: str, optimizers: list[Optimizer]
    ) -> DtypeReport:
        found = self._audit(trainer, pl_module, optimizers)
        rows = [row for row in found.rows if row.kind != "gradient"]
        self.report = report = DtypeReport((*rows, *self._gradients.values()))
        if report.violations:
            message = f"DtypeAudit: {trainer.precision} does not keep what it promises, {when}.\n{report}"
            if self.on_violation == "raise":
                raise RuntimeError(message)
            rank_zero_warn(message)
        return report
