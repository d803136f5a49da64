"""Estimate whether FP8 pays for the model of a configuration, on a GPU that need not be here.

Nothing is trained or measured. The first batch of the training data is read; the model takes no memory. Further
arguments, such as --model.init_args.width=1024, go to the command line of `fit`.
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.cli import LightningArgumentParser
from typing_extensions import override

from lightning_fp8.cli import Fp8CLI
from lightning_fp8.estimation.counting import idle_trainer, quietly
from lightning_fp8.estimation.devices import GPUS, gpu_named
from lightning_fp8.estimation.estimate import STRATEGIES, Estimate, Estimator
from lightning_fp8.plugins.fp8 import Fp8Precision
from lightning_fp8.runtime.program import program
from lightning_fp8.scalings.recipe import RECIPES, Recipe
from lightning_fp8.tools.arguments import fit_arguments, positive, read
from lightning_fp8.tools.tables import aligned


class _Configuration(Fp8CLI):
    """The objects of a configuration, of which the model is on the meta device; nothing runs."""

    @override
    def init_parser(self, **kwargs: Any) -> LightningArgumentParser:
        parser = super().init_parser(**kwargs)
        parser.add_instantiator(_without_memory, LightningModule, prepend=True)
        return parser

    @override
    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        return idle_trainer()

    @override
    def _run_subcommand(self, subcommand: str) -> None:
        pass

    def batch(self) -> Any:
        """The first batch of the training data."""
        source: Any = self.datamodule or self.model
        if self.datamodule is not None:
            self.datamodule.trainer = self.trainer
        source.prepare_data()
        source.setup("fit")
        return next(iter(source.train_dataloader()))

    def precision(self) -> tuple[Recipe | str | None, dict[str, Any]]:
        """The recipe that the configuration selects, and the settings of the conversion."""
        trainer = self._get(self.config_init, "trainer")
        plugins = trainer.plugins if isinstance(trainer.plugins, list) else [trainer.plugins]
        for plugin in plugins:
            if isinstance(plugin, Fp8Precision):
                settings = {name: getattr(plugin, name) for name in ("min_features", "overrides", "keep_fp32")}
                return plugin.recipe or plugin.precision, {**settings, "ignore_modules": plugin.ignore_modules}
        return (trainer.precision if trainer.precision in RECIPES else None), {}


def _without_memory(kind: type, *args: Any, **kwargs: Any) -> Any:
    try:
        with torch.device("meta"):
            return kind(*args, **kwargs)
    # it reads values while it is made
    except (RuntimeError, NotImplementedError):
        return kind(*args, **kwargs)


def main(arguments: Sequence[str]) -> None:
    """Print an estimate, or without ``--gpu`` a table of all devices; exits with 2 for what is refused."""
    parser = _parser()
    options, others = parser.parse_known_args(arguments)
    try:
        for path in options.config:
            if not path.is_file():
                raise ValueError(f"--config: there is no file {path}")
        names = [options.gpu] if options.gpu else list(GPUS)
        gpu_named(names[0])
        fit, _ = fit_arguments(options.config, [read(path) for path in options.config], others)
        with quietly(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*LightningCLI's args parameter")
            configuration = _Configuration(seed_everything_default=0, args=fit)
        found, settings = configuration.precision()
        recipe = options.recipe or found or "fp8-delayed"
        estimator = Estimator(configuration.model, configuration.batch(), **settings)
        results: dict[str, Estimate | ValueError] = {}
        for name in names:
            how = (recipe, options.compiled, options.strategy, options.gpus)
            try:
                results[name] = estimator.estimate(name, *how)
            except ValueError as error:
                if options.gpu:
                    raise
                results[name] = error
    except (ValueError, RuntimeError) as error:
        parser.exit(2, f"{parser.prog}: error: {error}\n")
    if options.json:
        values = {name: _values(result) for name, result in results.items()}
        print(json.dumps(values[options.gpu] if options.gpu else values))
    else:
        print(results[options.gpu] if options.gpu else _table(results))


def _values(result: Estimate | ValueError) -> dict[str, Any]:
    return {"error": str(result)} if isinstance(result, ValueError) else result.as_dict()


def _table(results: dict[str, Estimate | ValueError]) -> str:
    """A line for each device, and below why some have no estimate."""
    lines: list[tuple[str, ...]] = [("--gpu", "estimate", "range", "bf16", "FP8")]
    notes = []
    for name, result in results.items():
        if isinstance(result, ValueError):
            lines.append((name, "-", "-", "-", "-"))
            notes.append(str(result))
        else:
            seconds = (f"{of.total * 1e3:.3g} ms" for of in (result.bf16, result.fp8))
            lines.append((name, f"{result.speedup:.2f}x", f"{result.low:.2f} to {result.high:.2f}", *seconds))
    return "\n".join(["Estimate: a step in FP8 beside bf16-mixed", *map("  ".join, aligned(lines, words=1)), *notes])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"{program()} estimate", description=__doc__, allow_abbrev=False)
    files = "as for `fit`; later files override earlier ones"
    parser.add_argument(
        "-c", "--config", nargs="+", action="extend", required=True, type=Path, metavar="FILE", help=files
    )
    parser.add_argument("--gpu", help=f"one of {', '.join(GPUS)}; without it, a table of all")
    recipes = "by default that of the configuration, else fp8-delayed"
    parser.add_argument("--recipe", choices=RECIPES, help=recipes)
    parser.add_argument("--compiled", action="store_true", help="for a model compiled by torch.compile")
    parser.add_argument("--strategy", choices=STRATEGIES, help="for training on several devices; roughly")
    parser.add_argument("--gpus", type=positive, default=8, metavar="N", help="how many, with --strategy (%(default)s)")
    parser.add_argument("--json", action="store_true", help="everything as JSON")
    return parser
