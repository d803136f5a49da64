"""One run of a comparison, in a separate process: ``python -m <this module> VARIANT FOLDER STEPS WARMUP fit ...``."""

from __future__ import annotations

import sys
import warnings
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from jsonargparse import Namespace
from lightning.fabric.plugins.precision import Precision
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch import callbacks as lightnings
from lightning.pytorch.loggers import CSVLogger

from lightning_fp8.callbacks import Fp8Monitor, RunRecord
from lightning_fp8.cli import Fp8CLI, ProgressLines
from lightning_fp8.runtime.environment import gpu_environment
from lightning_fp8.runtime.run_files import write_json
from lightning_fp8.tools.compare.measure import Measure
from lightning_fp8.tools.compare.variants import MEASURED_FILE, VARIANTS, plugin_settings

# callbacks that end runs early, write checkpoints, take time, or choose different settings for each precision
_LEFT_OUT = (
    *(lightnings.BatchSizeFinder, lightnings.LearningRateFinder, lightnings.Checkpoint, lightnings.EarlyStopping),
    *(lightnings.DeviceStatsMonitor, lightnings.ThroughputMonitor, lightnings.ModelSummary, lightnings.ProgressBar),
    lightnings.Timer,
)
_NEVER = 10**9
# number of lines that a run logs on a GPU, where reading a metric makes the host wait for the device
_LOGGED_ON_GPU = 20
# lines about steps that a run prints, and checks of an `Fp8Monitor`, at least
_LINES = 10
_CHECKS = 6
# in place of the configuration's
_TRAINER = {
    # only the number of steps ends the run
    "max_epochs": -1,
    "min_steps": None,
    "min_epochs": None,
    "max_time": None,
    "fast_dev_run": False,
    "barebones": False,
    # validation once, when `Measure` ends the run
    "num_sanity_val_steps": 0,
    "val_check_interval": _NEVER,
    "check_val_every_n_epoch": None,
    "log_every_n_steps": 1,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "profiler": None,
    # a plugin, not a precision string, which may create Lightning's own plugin
    "precision": None,
}


class CompareCLI(Fp8CLI):
    """:class:`~lightning_fp8.cli.Fp8CLI` that runs a configuration under one variant and measures it.

    Args:
        variant: an argument of ``--precisions``.
        folder: for the logs and the measured numbers.
        steps: optimizer steps.
        warmup: how many of them are not timed.
        args: of the command line: ``fit`` and its arguments.
    """

    def __init__(self, variant: str, folder: Path, steps: int, warmup: int, args: list[str]) -> None:
        self.variant, self.folder, self.steps = variant, folder, steps
        self.measure = Measure(warmup)
        self.left_out: list[str] = []
        super().__init__(seed_everything_default=0, save_config_callback=None, args=args)

    def before_instantiate_classes(self) -> None:
        """Change the configuration to what is compared."""
        config = self.config.fit
        # `true` would choose a different seed in each process
        self.seed = config.seed_everything = 0 if isinstance(config.seed_everything, bool) else config.seed_everything
        seed_everything(self.seed, workers=True)
        config.ckpt_path = None
        trainer = config.trainer
        for name, value in {**_TRAINER, "max_steps": self.steps, "default_root_dir": str(self.folder)}.items():
            trainer[name] = value
        if trainer.accelerator in ("auto", "gpu", "cuda") and torch.cuda.is_available():
            trainer.log_every_n_steps = max(1, self.steps // _LOGGED_ON_GPU)
        plugins = _as_list(trainer.plugins)
        own: dict[str, Any] = {}
        for plugin in plugins:
            if issubclass(_class_of(plugin), Precision) and _is_ours(plugin) and "init_args" in plugin:
                # not `items()`, which flattens a recipe's fields to dotted names
                own = dict(vars(plugin.init_args))
        class_path, _ = VARIANTS[self.variant.partition(",")[0]]
        factory: Any = Namespace  # its constructor has no annotations
        precision = factory(class_path=class_path, init_args=factory(**plugin_settings(self.variant, own)))
        trainer.plugins = [*(plugin for plugin in plugins if not issubclass(_class_of(plugin), Precision)), precision]
        callbacks, trainer.callbacks = _as_list(trainer.callbacks), []
        for callback in callbacks:
            if issubclass(_class_of(callback), Fp8Monitor):
                if class_path == VARIANTS["fp8-delayed"][0]:
                    often = min(callback.init_args.every_n_steps, max(1, self.steps // _CHECKS))
                    # it measures what is compared, and changes nothing of it
                    own = {**vars(callback.init_args), "every_n_steps": often, "action": "warn", "cooldown": None}
                    trainer.callbacks.append(factory(class_path=callback.class_path, init_args=factory(**own)))
            elif issubclass(_class_of(callback), _LEFT_OUT) or _is_ours(callback):
                self.left_out.append(_class_of(callback).__name__)
            else:
                trainer.callbacks.append(callback)

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """The configuration's Trainer, with our logger and callbacks."""
        trainer = super().instantiate_trainer(logger=CSVLogger(self.folder.parent, self.folder.name, ""), **kwargs)
        # last, so that the work of the user's callbacks after a batch is part of its step
        lines = ProgressLines(max(1, self.steps // _LINES), write=partial(print, flush=True))
        trainer.callbacks += [RunRecord(), self.measure, lines]  # type: ignore[attr-defined]
        return trainer

    def after_fit(self) -> None:
        """Write down what was measured."""
        super().after_fit()
        device = self.trainer.strategy.root_device
        results = self.measure.results(self.trainer)
        for monitor in self.trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(monitor, Fp8Monitor) and monitor.verdict().steps >= monitor.every_n_steps:
                results["verdict"] = str(monitor.verdict()).partition("\n")[0]
        about = {"device": device.type, **gpu_environment(device), "seed": self.seed, "left_out": self.left_out}
        if self.trainer.is_global_zero:
            write_json(self.folder / MEASURED_FILE, {**results, **about})


def main(variant: str, folder: str, steps: str, warmup: str, *args: str) -> None:
    """Run; a run that fails writes the reason to ``MEASURED_FILE`` and prints its traceback."""
    warnings.filterwarnings("ignore", message="LightningCLI's args parameter")
    measured = Path(folder, MEASURED_FILE)
    try:
        CompareCLI(variant, Path(folder), int(steps), int(warmup), [*args])
    except Exception as error:
        if not measured.exists():
            said = next(filter(None, map(str.strip, str(error).splitlines())), "")
            write_json(measured, {"error": f"{type(error).__name__}: {said}".removesuffix(": ")})
        raise


def _as_list(value: Any) -> list[Any]:
    return [] if value is None else list(value) if isinstance(value, list | tuple) else [value]


def _is_ours(part: Any) -> bool:
    return _class_of(part).__module__.startswith(("lightning_fp8.callbacks.", "lightning_fp8.plugins."))


def _class_of(part: Any) -> type:
    """The class of a part of a configuration; ``object`` for a function, which may return anything."""
    module, _, name = part.class_path.rpartition(".")
    attribute = getattr(import_module(module), name)
    return attribute if isinstance(attribute, type) else object


if __name__ == "__main__":
    main(*sys.argv[1:])
