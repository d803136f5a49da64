"""The model, the data and the runs behind ``tests/golden``, and what is recorded of them.

Files of a version are written once, with that version, by ``python tests/support/golden.py``, and never changed:
later versions read them.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_fp8
from lightning_fp8 import (
    BlockScaling,
    CurrentScaling,
    DelayedScaling,
    Fp8Precision,
    MXScaling,
    convert,
    export,
    scaling_state,
)
from lightning_fp8.scalings.recipe import Recipe

GOLDEN = Path(__file__).parents[1] / "golden"
RECIPES: dict[str, Recipe] = {
    "fp8-delayed": DelayedScaling(amax_history_len=4, margin=1),
    "fp8-current": CurrentScaling(wgrad="bf16"),
    "fp8-block": BlockScaling(),
    "fp8-mx": MXScaling(),
}
# the layout of an export, the recipe and the width of its model
EXPORTS: dict[str, tuple[str | None, Recipe, int]] = {
    "vllm": (None, DelayedScaling(amax_history_len=4), 64),
    "hf-fp8": ("hf-fp8", BlockScaling(), 128),
    "compressed-tensors": ("compressed-tensors", CurrentScaling(), 64),
    "compressed-tensors-blocks": ("compressed-tensors", BlockScaling(), 64),
    "compressed-tensors-mx": ("compressed-tensors", MXScaling(), 64),
}
STEPS = 3
Numbers = dict[str, Any]


class Tiny(pl.LightningModule):
    """Two layers, with a recipe among the hyperparameters."""

    def __init__(self, recipe: Recipe, width: int = 32) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 16))
        self.losses: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        loss = (self(batch[0]).float() - batch[1]).square().mean()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def numbers(seed: int, *shape: int) -> Tensor:
    """Numbers that are the same with every torch, unlike random ones."""
    index = torch.arange(float(torch.Size(shape).numel()), dtype=torch.float64)
    return (torch.sin(index * 12.9898 + seed * 78.233) * 43758.5453).frac().mul(2).float().view(shape)


def tiny(recipe: Recipe) -> Tiny:
    model = Tiny(recipe)
    with torch.no_grad():
        for seed, parameter in enumerate(model.parameters()):
            parameter.copy_(numbers(seed, *parameter.shape) / 6)
    return model


def run(model: Tiny, folder: Path, steps: int, checkpoint: Path | None = None) -> pl.Trainer:
    """Train up to a step, from the checkpoint if one is given."""
    trainer = pl.Trainer(
        plugins=Fp8Precision(RECIPES[model.hparams["recipe"].precision]), max_steps=steps, default_root_dir=folder,
        accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    batches = DataLoader(TensorDataset(numbers(20, 64, 32), numbers(21, 64, 16)), batch_size=8)
    trainer.fit(model, batches, ckpt_path=checkpoint)
    return trainer


def predictions(model: nn.Module) -> Tensor:
    """``[4, 16]``: of fixed inputs, in evaluation."""
    model.eval()
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        return model(numbers(22, 4, 32)).float()


def state_numbers(model: nn.Module) -> Numbers:
    """The histories by tensor, where the recipe has them."""
    return {
        name: {field: value.tolist() for field, value in entry.items()}
        for name, entry in scaling_state(model).state_dict().items()
    }


def exported_model(name: str) -> nn.Sequential:
    """A layer that is exported in FP8, and one that is not."""
    width = EXPORTS[name][2]
    return nn.Sequential(nn.Linear(width, width, bias=False), nn.Tanh(), nn.Linear(width, 4))


def exported_predictions(model: nn.Module) -> Tensor:
    """``[4, 4]``: of fixed inputs."""
    model.eval()
    with torch.no_grad():
        return model(numbers(23, 4, model[0].in_features)).float()


def write(folder: Path) -> None:
    """Write the files of this version, and ``numbers.json`` with what they give."""
    folder.mkdir(parents=True)
    recorded: Numbers = {"version": lightning_fp8.__version__, "checkpoints": {}, "exports": {}}
    for precision, recipe in RECIPES.items():
        model = tiny(recipe)
        run(model, folder, STEPS).save_checkpoint(folder / f"{precision}.ckpt")
        if precision == "fp8-delayed":
            torch.save(scaling_state(model).state_dict(), folder / "scaling_state.pt")
        found = {"recipe": repr(recipe), "state": state_numbers(model)}
        again = tiny(recipe)
        run(again, folder, STEPS + 1, folder / f"{precision}.ckpt")
        recorded["checkpoints"][precision] = {
            **found, "predictions": predictions(model).tolist(), "next_loss": again.losses[0],
        }  # fmt: skip
    for name, (layout, recipe, width) in EXPORTS.items():
        plain = exported_model(name)
        with torch.no_grad():
            for seed, parameter in enumerate(plain.parameters()):
                parameter.copy_(numbers(30 + seed, *parameter.shape) / 10)
        model = convert(plain, recipe, ignore_modules=["2"])
        model(numbers(24, 8, width)).square().mean().backward()
        scaling_state(model).update()
        export(model, folder / name, layout=layout, dtype=torch.bfloat16)
        recorded["exports"][name] = {"predictions": exported_predictions(model).tolist()}
    (folder / "numbers.json").write_text(json.dumps(recorded, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]) if sys.argv[1:] else GOLDEN / lightning_fp8.__version__.rpartition(".")[0])
