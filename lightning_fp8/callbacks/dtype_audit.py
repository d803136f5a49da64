"""Checks whether the dtypes of a run are those that its precision requires."""

from __future__ import annotations

from typing import Any, Literal

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_fp8.callbacks.run_watcher import run_folder
from lightning_fp8.dtypes.report import DtypeReport, DtypeRow, audit, buffer_dtypes_of
from lightning_fp8.ops.formats import dtype_name
from lightning_fp8.plugins.core import PrecisionCore
from lightning_fp8.runtime.run_files import DTYPES_FILE, write_json


class DtypeAudit(Callback):
    """Checks that parameters, gradients, buffers and optimizer state have the expected dtypes, and prints a table.

    After set-up it checks parameters and buffers. After the first optimizer step it checks these again, the gradients
    that the step used, and the optimizers' state; then it prints the table, once per run.
    :func:`lightning_fp8.dtypes.audit` says which dtypes are expected. Under one of Lightning's own precisions no dtype
    is expected: the table only lists.

    Logs nothing to loggers; writes ``fp8_dtypes.json`` into the folder of :class:`RunRecord` after the first optimizer
    step, on rank 0, for ``python -m lightning_fp8 report``: ``rows`` with ``kind``, ``name``, ``actual``, ``expected``
    (null where any dtype is allowed) and ``elements`` of each tensor, and ``violations``, the rows whose dtypes differ.
    The attribute ``report`` holds the last report.

    Args:
        on_violation: ``"warn"``, or ``"raise"`` for a ``RuntimeError``, in both cases with the table.

    Raises:
        ValueError: for any other ``on_violation``.
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
        self._check(trainer, pl_module, optimizers=[])
        self._report_violations(trainer, "after set-up")

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        if self._first_step is not None:
            rows = self._audit(trainer, pl_module, []).rows
            # by name: if several optimizers take turns, each is checked with the gradients of its own step
            self._gradients.update({row.name: row for row in rows if row.kind == "gradient"})

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._first_step is None or trainer.global_step == self._first_step:
            return
        self._first_step = None
        report = self._check(trainer, pl_module, trainer.optimizers)
        folder = run_folder(trainer)
        # before an error may be raised: the file is most useful then
        if folder is not None:
            write_json(folder / DTYPES_FILE, _as_json(report))
        self._report_violations(trainer, "after the first optimizer step")
        rank_zero_info(f"Dtypes under {trainer.precision}, after the first optimizer step:\n{report}")

    def _audit(self, trainer: Trainer, pl_module: LightningModule, optimizers: list[Optimizer]) -> DtypeReport:
        plugin = trainer.precision_plugin
        expected: dict[str, Any] = {}
        if isinstance(plugin, PrecisionCore):
            expected = {"param_dtype": plugin.param_dtype, "keep_fp32": plugin.keep_fp32}
        return audit(pl_module, **expected, optimizers=optimizers, buffer_dtypes=self._buffer_dtypes)

    def _check(self, trainer: Trainer, pl_module: LightningModule, optimizers: list[Optimizer]) -> DtypeReport:
        report = self._audit(trainer, pl_module, optimizers)
        rows = [row for row in report.rows if row.kind != "gradient"]
        self.report = DtypeReport((*rows, *self._gradients.values()))
        return self.report

    def _report_violations(self, trainer: Trainer, when: str) -> None:
        if self.report and self.report.violations:
            message = f"DtypeAudit: dtypes under {trainer.precision} differ from those expected, {when}.\n{self.report}"
            if self.on_violation == "raise":
                raise RuntimeError(message)
            rank_zero_warn(message)


def _as_json(report: DtypeReport) -> dict[str, list[dict[str, Any]]]:
    def plain(row: DtypeRow) -> dict[str, Any]:
        expected = dtype_name(row.expected) if row.expected else None
        return {**row._asdict(), "actual": dtype_name(row.actual), "expected": expected}

    return {"rows": list(map(plain, report.rows)), "violations": list(map(plain, report.violations))}
