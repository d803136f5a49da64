"""``python -m lightning_fp8``: Lightning's own command line with this package's precisions registered."""

from __future__ import annotations

import re
import sys
from functools import partial
from typing import Any, NoReturn

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_fp8.callbacks.progress_lines import ProgressLines
from lightning_fp8.conversion.convert import is_converted, scaling_state
from lightning_fp8.plugins.arguments import PLUGIN_OF
from lightning_fp8.plugins.settings import suggestion
from lightning_fp8.runtime.program import program
from lightning_fp8.scaling.statistics import scales_in_words


class Fp8CLI(LightningCLI):
    """A ``LightningCLI`` for any model and data, which reports progress, and after a run metrics, scales and logs."""

    def init_parser(self, **kwargs: Any) -> LightningArgumentParser:
        """A parser with the program's name, which says more about what it refuses."""
        parser = super().init_parser(**{"prog": program(), **kwargs})
        parser.error = partial(_error, parser.error)  # type: ignore[method-assign]
        return parser

    def _instantiate_trainer(self, config: Any, callbacks: list[Callback]) -> Trainer:
        # the bar of rich draws nothing until the end where there is no terminal
        if not sys.stdout.isatty() and config.get("enable_progress_bar") is not False:
            callbacks = [*callbacks, ProgressLines(write=partial(print, flush=True))]
        return super()._instantiate_trainer(config, callbacks)

    def after_fit(self) -> None:
        """Print the last metrics, some scales and where each logger wrote."""
        trainer = self.trainer
        lines = [f"precision: {trainer.precision}, optimizer steps: {trainer.global_step}"]
        lines += [f"{name}: {value.item():.4f}" for name, value in sorted(trainer.callback_metrics.items())]
        lines += scales_in_words(scaling_state(self.model)) if is_converted(self.model) else []
        lines += [f"logs: {logger.log_dir}" for logger in trainer.loggers if getattr(logger, "log_dir", None)]
        rank_zero_info("\n".join(["", *lines]))


def _error(original: Any, message: str, *args: Any, **kwargs: Any) -> NoReturn:
    if "class_path 'lightning_fp8." in message and "Option 'precision' is not accepted" in message:
        asked = [precision for precision in PLUGIN_OF if repr(precision) in message] or PLUGIN_OF
        instead = ", ".join(f"for {precision!r} use `lightning_fp8.{PLUGIN_OF[precision]}`" for precision in asked)
        message += f"\nThe argument `precision` of the plugins is gone: {instead}, without `precision`."
    asked_for = re.search(r'"trainer\.precision".*Given value: ([^\n]*)', message, re.DOTALL)
    if asked_for:
        message += f"\n{suggestion(asked_for[1]).strip()}".rstrip()
    if "to a subclass of Lightning" in message and "pytorch_lightning" in sys.modules:
        message += (
            "\nThe models and data of this command line derive from the classes of `lightning.pytorch`: import it"
            " in place of `pytorch_lightning`."
        )
    original(message, *args, **kwargs)
    raise AssertionError("ArgumentParser.error returned")


def main(args: list[str] | None = None) -> Any:
    """Run a subcommand (``fit``, ``validate``, ``test``, ``predict``) on ``args``, by default those of the process."""
    # any model, and any data or the model's own
    return Fp8CLI(seed_everything_default=0, args=args)
