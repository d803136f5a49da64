"""Runs the scripts of ``examples/`` in this process, as a user would, and reads what they print."""

from __future__ import annotations

import argparse
import re
import runpy
import warnings
from pathlib import Path
from typing import NamedTuple

import pytest
from repository import ROOT

from lightning_fp8.plugins.settings import FP8_PRECISIONS

EXAMPLES = ROOT / "examples"


class Run(NamedTuple):
    loss: float
    fp8_layers: int
    printed: str


class Runner:
    """Runs scripts in a separate folder, on a short text and the CPU."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
        self.capsys, self.caplog = capsys, caplog
        self.text = folder / "text.txt"
        self.cut_text(30_000)

    def cut_text(self, length: int) -> None:
        self.text.write_bytes(Path(argparse.__file__).read_bytes()[:length])

    def __call__(self, script: str, *arguments: str) -> Run:
        data = () if script == "train_vit" else ("--text", str(self.text))
        device = ("--device", "cpu") if script == "torch_loop" else ("--accelerator", "cpu")
        self.capsys.readouterr()
        self.caplog.clear()
        with warnings.catch_warnings(record=True) as caught, self.caplog.at_level("INFO"):
            warnings.simplefilter("always")
            runpy.run_path(str(EXAMPLES / f"{script}.py"))["main"]([*data, *device, *arguments])
        assert [said for warning in caught if is_about_fp8(said := str(warning.message))] == []
        printed = self.capsys.readouterr().out
        return Run(loss_in(printed), fp8_layers_in(self.caplog.text + printed), printed)


def is_about_fp8(warning: str) -> bool:
    """Whether a warning tells the user to change something; saving the adapters warns about their base."""
    summaries = [f"Precision {precision} is not supported by the model summary" for precision in FP8_PRECISIONS]
    return "fp8" in warning.lower() and not warning.startswith(
        (*summaries, "state_dict: 15 frozen weights", "Fp8Monitor: the run made")
    )


def loss_in(printed: str) -> float:
    return float(re.findall(r"validation loss ([\d.]+)", printed)[-1])


def fp8_layers_in(text: str) -> int:
    """The number according to the plugin's message, or to the table of `describe`."""
    said = re.search(r"(\d+) of \d+ (linear )?layers run in FP8", text)
    return int(said[1]) if said else 0
