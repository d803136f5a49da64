"""``python -m lightning_fp8``: Lightning's own command line with this package's precisions registered."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.utilities.rank_zero import rank_zero_info


class Fp8CLI(LightningCLI):
    """A ``LightningCLI`` over any model and data, which says after a run what came out and where the logs are."""

    def after_fit(self) -> None:
        """Print the last metrics and where each logger wrote."""
        trainer = self.trainer
        lines = [f"precision: {trainer.precision}, optimizer steps: {trainer.global_step}"]
        lines += [f"{name}: {value.item():.4f}" for name, value in sorted(trainer.callback_metrics.items())]
        lines += [f"logs: {logger.log_dir}" for logger in trainer.loggers if getattr(logger, "log_dir", None)]
        rank_zero_info("\n".join(["", *lines]))


def main(args: list[str] | None = None) -> Any:
    """Run a subcommand (``fit``, ``validate``, ``test``, ``predict``) on ``args``, by default those of the process."""
    return Fp8CLI(
        LightningModule,
        LightningDataModule,
        subclass_mode_model=True,
        subclass_mode_data=True,
        seed_everything_default=0,
        args=args,
    )
