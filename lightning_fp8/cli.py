"""``python -m lightning_fp8``: Lightning's own command line with this package's precisions registered."""

from __future__ import annotations

import shutil
import sys
import textwrap
import time
import traceback
from collections.abc import Callable
from functools import partial
from inspect import signature
from linecache import getline
from typing import Any, NoReturn

from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from typing_extensions import override

from lightning_fp8.conversion.convert import is_converted, scaling_state
from lightning_fp8.plugins.core import PrecisionCore
from lightning_fp8.runtime.every_n_steps import EveryNSteps
from lightning_fp8.runtime.parser_errors import sentence
from lightning_fp8.runtime.program import program
from lightning_fp8.scaling.statistics import scales_in_words

# an error is refused in one sentence where only code of these runs; the first two know what is wrong
_PACKAGES = ("lightning", "lightning_fp8", "jsonargparse", "torch")


class Fp8CLI(LightningCLI):
    """A ``LightningCLI`` for any model and data. It reports progress, and after a run metrics, scales and logs."""

    def init_parser(self, **kwargs: Any) -> LightningArgumentParser:
        """A parser with the program's name, a short usage and more helpful errors."""
        parser = super().init_parser(**{"prog": program(), **kwargs})
        parser.error = partial(_error, parser.error)  # type: ignore[method-assign]
        parser.format_usage = partial(_usage, parser)  # type: ignore[method-assign]
        parser.format_help = partial(_help, parser, parser.format_help)  # type: ignore[method-assign]
        # not of models and data: Lightning's own instantiators keep what a checkpoint of them needs to be resumed
        for kind in (PrecisionCore, Callback):
            parser.add_instantiator(partial(_instance, parser), kind)
        return parser

    def _instantiate_trainer(self, config: Any, callbacks: list[Callback]) -> Trainer:
        # without a terminal, the bar of rich draws nothing until the end
        if not sys.stdout.isatty() and config.get("enable_progress_bar") is not False:
            callbacks = [*callbacks, ProgressLines(write=partial(print, flush=True))]
        return super()._instantiate_trainer(config, callbacks)

    def before_fit(self) -> None:
        """Seed again, as ``compare`` does, so that the order of the data depends only on the seed, not on the model."""
        seed = self.config.fit.seed_everything
        if seed is not False:
            seed_everything(seed, workers=True, verbose=False)

    def after_fit(self) -> None:
        """Print the last metrics, some scales and where each logger wrote."""
        trainer = self.trainer
        lines = [f"precision: {trainer.precision}, optimizer steps: {trainer.global_step}"]
        lines += [f"{name}: {value.item():.4f}" for name, value in sorted(trainer.callback_metrics.items())]
        lines += scales_in_words(scaling_state(self.model)) if is_converted(self.model) else []
        lines += [f"logs: {logger.log_dir}" for logger in trainer.loggers if getattr(logger, "log_dir", None)]
        rank_zero_info("\n".join(["", *lines]))


class ProgressLines(Callback):
    """A line every few optimizer steps with the loss and the speed, and one after each validation.

    Args:
        every_n_steps: optimizer steps between two lines.
        write: takes each line, in the first process.

    Raises:
        ValueError: unless ``every_n_steps`` is an integer of at least 1.
    """

    def __init__(self, every_n_steps: int = 10, write: Callable[[str], None] = print) -> None:
        self._due = EveryNSteps("ProgressLines", every_n_steps)
        self._write = write
        self._last_line = (0, 0.0)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._due.start(trainer.global_step)
        self._last_line = (trainer.global_step, time.monotonic())

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._due.ends(trainer.global_step) and trainer.is_global_zero:
            steps, began = self._last_line
            loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
            self._last_line = (trainer.global_step, time.monotonic())
            speed = (self._last_line[0] - steps) / max(self._last_line[1] - began, 1e-9)
            of_all = f"/{trainer.max_steps}" if trainer.max_steps > 0 else ""
            # Lightning divides the loss of a micro-batch by the number of micro-batches
            parts = trainer.accumulate_grad_batches if pl_module.automatic_optimization else 1
            said = "" if loss is None else f" loss {float(loss) * parts:.4f},"
            self._write(f"step {trainer.global_step}{of_all}:{said} {speed:.2g} steps/s")

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero and not trainer.sanity_checking:
            metrics = [f"{name} {float(value):.4f}" for name, value in sorted(trainer.callback_metrics.items())]
            self._write(f"validation after step {trainer.global_step}: {', '.join(metrics)}")
        # the time of a validation is not that of steps
        self._last_line = (trainer.global_step, time.monotonic())


def _instance(parser: LightningArgumentParser, kind: type, *args: Any, **kwargs: Any) -> Any:
    """An object. What our classes refuse is refused like what the parser itself knows to be wrong."""
    try:
        return kind(*args, **kwargs)
    except (TypeError, ValueError) as error:
        if not kind.__module__.startswith("lightning_fp8."):
            raise
        parser.error(str(error))


def _usage(parser: LightningArgumentParser) -> str:
    # the list of options takes 80 lines, and help describes each
    return f"usage: {parser.prog.replace(' [options]', '')} ...\n"


def _help(parser: LightningArgumentParser, original: Callable[[], str]) -> str:
    """Lightning's help with our usage, without the markup of docstrings, and no wider than the terminal."""
    width = shutil.get_terminal_size().columns
    lines = original().partition("\n\n")[2].replace("``", "`").splitlines()
    wrapped = [textwrap.fill(line, width) if len(line) > width else line for line in lines]
    return "\n".join([parser.format_usage(), *wrapped, ""])


def _error(original: Any, message: str, *args: Any, **kwargs: Any) -> NoReturn:
    said = sentence(message, signature(Trainer).parameters)
    if "a subclass of Lightning" in said and "pytorch_lightning" in sys.modules:
        said += (
            " The models and data of this command line derive from the classes of `lightning.pytorch`: import it"
            " in place of `pytorch_lightning`."
        )
    original(said, *args, **kwargs)
    raise AssertionError("ArgumentParser.error returned")


def _is_refusal(error: BaseException) -> bool:
    """Whether Lightning or this package raised an error on purpose, while none of the user's code was running."""
    frames = list(traceback.walk_tb(error.__traceback__))
    packages = [str(frame.f_globals.get("__name__")).partition(".")[0] for frame, _ in frames]
    frame, line = frames[-1]
    is_raised = getline(frame.f_code.co_filename, line).lstrip().startswith("raise ")
    return is_raised and packages[-1] in _PACKAGES[:2] and set(packages) <= {*_PACKAGES, *sys.stdlib_module_names}


def _first(error: BaseException) -> BaseException:
    """The error that others have wrapped, as the parser does with what a model raises."""
    while (wrapped := error.__cause__ or error.__context__) is not None:
        error = wrapped
    return error


def main(args: list[str] | None = None) -> Any:
    """Run a subcommand (``fit``, ``validate``, ``test``, ``predict``) on ``args``, by default those of the process."""
    try:
        # accepts any model, with any data module or its own data
        return Fp8CLI(seed_everything_default=0, args=args)
    except (ValueError, TypeError, RuntimeError, MisconfigurationException) as error:
        reason = _first(error)
        if not _is_refusal(reason):
            raise
        sys.stderr.write(f"error: {reason}\n")
        sys.exit(2)
