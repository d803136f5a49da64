"""The settings and the environment of a run, recorded next to its logs."""

from __future__ import annotations

import os
import platform
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.version import cuda
from typing_extensions import override

from lightning_fp8.callbacks.precision_schedule import PrecisionSchedule
from lightning_fp8.callbacks.run_watcher import run_folder
from lightning_fp8.conversion.plan import conversion_plan
from lightning_fp8.runtime.environment import environment, gpu_environment, package_version
from lightning_fp8.runtime.run_files import RUN_FILE, write_json


class RunRecord(Callback):
    """Records settings and environment of a run, under any precision, for ``python -m lightning_fp8 report``.

    Logs nothing to loggers; writes ``fp8_run.json`` when fitting starts, on rank 0, into the ``log_dir`` of the first
    logger that has one; else, as with Weights & Biases and MLflow, into ``<save_dir>/<name>/<version>``, where
    Lightning keeps the checkpoints of the run:

    - ``precision``, ``strategy``, ``accelerator``, ``world_size``; ``parameters``: their number on rank 0.
    - ``environment``: GPU, driver, CPU, versions, commit of this package if it runs from its repository,
      ``LIGHTNING_FP8_BACKEND``.
    - ``recipe``: its fields; null if no layer runs in FP8, as are the next two.
    - ``modules``: module paths that have scales, in the order of the model.
    - ``layers``: the rows of :func:`~lightning_fp8.describe`.
    - ``schedule``: the values of a :class:`~lightning_fp8.PrecisionSchedule`, with steps or shares; null without one.

    Without a logger that has a folder it warns once and does nothing.
    """

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        folder = run_folder(trainer)
        if folder is None:
            rank_zero_warn("RunRecord: no logger of the Trainer has a local folder; nothing is written.")
        else:
            write_json(folder / RUN_FILE, _record(trainer, pl_module))


def _record(trainer: Trainer, model: LightningModule) -> dict[str, Any]:
    plan = conversion_plan(model)
    state = plan.state if plan.converted else None
    return {
        "precision": str(trainer.precision),
        "strategy": type(trainer.strategy).__name__,
        "accelerator": type(trainer.accelerator).__name__,
        "world_size": trainer.world_size,
        "parameters": plan.size,
        "environment": _environment(trainer),
        "recipe": state.recipe.as_dict() if state else None,
        "modules": list(state.module_names) if state else None,
        "layers": [row._asdict() for row in plan.rows()] if state else None,
        "schedule": next((_schedule(cb) for cb in trainer.callbacks if isinstance(cb, PrecisionSchedule)), None),  # type: ignore[attr-defined]
    }


def _schedule(callback: PrecisionSchedule) -> list[str]:
    return [f"{value} from {key}" for key, value in callback.schedule.items()]


def _environment(trainer: Trainer) -> dict[str, Any]:
    facts = {
        **gpu_environment(trainer.strategy.root_device),
        **environment("lightning-fp8", "lightning", "torchmetrics"),
        "python": platform.python_version(),
        "torch's CUDA": cuda,
        "platform": platform.platform(),
        "LIGHTNING_FP8_BACKEND": os.environ.get("LIGHTNING_FP8_BACKEND"),
    }
    # some install Lightning under its older package name
    facts["lightning"] = facts["lightning"] or package_version("pytorch-lightning")
    # a report may be passed on, and a command line may hold secrets
    del facts["command"]
    return facts
