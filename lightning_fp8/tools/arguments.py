"""Command-line arguments that the tools share, and reading of configurations."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml


def positive(text: str) -> int:
    """An argument that is an integer of at least 1.

    Raises:
        argparse.ArgumentTypeError: for anything else.
    """
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be an integer of at least 1, got {text!r}")
    return int(text)


def fit_arguments(
    paths: Sequence[Path], configs: Sequence[Mapping[str, Any]], arguments: Sequence[str]
) -> tuple[list[str], str | None]:
    """The command line of `fit` with its arguments in the order that `fit` needs, and the accelerator in it."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in ("--model", "--data", "--trainer.accelerator"):
        parser.add_argument(name)
    named, others = parser.parse_known_args(arguments)
    # If no configuration names a class, put it before them: their arguments are for this class. Otherwise put it after
    # them, because their class would override it.
    before: list[str] = []
    after = others
    for part in ("model", "data"):
        if kind := getattr(named, part):
            into = after if _names_class(configs, part) else before
            into.insert(0, f"--{part}={kind}")
    accelerator = getattr(named, "trainer.accelerator")
    after += [f"--trainer.accelerator={accelerator}"] if accelerator else []
    return ["fit", *before, *(f"--config={path}" for path in paths), *after], accelerator


def how_to_adapt(configs: Sequence[Mapping[str, Any]]) -> str:
    """What to add to the command line for configurations that name no class; empty if they do."""
    return "".join(
        f"`{part}` in the configuration names no class, as for a `LightningCLI` with a fixed class. Name it:"
        f" --{part} my_module.MyClass, from a module that is installed or in the current folder.\n"
        for part in ("model", "data")
        if any(config.get(part) for config in configs) and not _names_class(configs, part)
    )


def _names_class(configs: Sequence[Mapping[str, Any]], part: str) -> bool:
    values = [config[part] for config in configs if config.get(part)]
    return any(not isinstance(value, dict) or "class_path" in value for value in values)


def read(path: Path) -> dict[str, Any]:
    """A configuration, unchecked. Empty if it cannot be read; `fit` then reports the error."""
    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return config if isinstance(config, dict) else {}
