"""``python -m lightning_fp8``: Lightning's own command line with this package's precisions registered."""

from __future__ import annotations

from functools import partial
from typing import Any, NoReturn

from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_fp8.plugins.arguments import PLUGIN_OF


class Fp8CLI(LightningCLI):
    """A ``LightningCLI`` for any model and data, which reports the last metrics and the log folders after a run."""

    def init_parser(self, **kwargs: Any) -> LightningArgumentParser:
        """A parser that says what replaces ``precision`` in the configuration of a plugin."""
        parser = super().init_parser(**kwargs)
        parser.error = partial(_error, parser.error)  # type: ignore[method-assign]
        return parser

    def after_fit(self) -> None:
        """Print the last metrics and where each logger wrote."""
        trainer = self.trainer
        lines = [f"precision: {trainer.precision}, optimizer steps: {trainer.global_step}"]
        lines += [f"{name}: {value.item():.4f}" for name, value in sorted(trainer.callback_metrics.items())]
        lines += [f"logs: {logger.log_dir}" for logger in trainer.loggers if getattr(logger, "log_dir", None)]
        rank_zero_info("\n".join(["", *lines]))


def _error(original: Any, message: str, *args: Any, **kwargs: Any) -> NoReturn:
    if "class_path 'lightning_fp8." in message and "Option 'precision' is not accepted" in message:
        asked = [precision for precision in PLUGIN_OF if repr(precision) in message] or PLUGIN_OF
        instead = ", ".join(f"for {precision!r} use `lightning_fp8.{PLUGIN_OF[precision]}`" for precision in asked)
        message += f"\nThe argument `precision` of the plugins is gone: {instead}, without `precision`."
    original(message, *args, **kwargs)
    raise AssertionError("ArgumentParser.error returned")


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
