"""Losses of small models in bf16 and FP8: experts, linear layers of other classes, computed weights, pairs, graphs.

    python -m benchmarks.model_losses --out docs/results/model-losses-cpu.jsonl [--models GptOss ...] [--seeds 5]
                                      [--steps 200]

Each model of ``benchmarks.loss_models``, of a few layers of 64 features, learns from the same batches and weights in
bf16, the baseline, and in each recipe. The loss is the mean of the last tenth of the steps. At the end a table is
printed, with the share of the matrices in FP8, embeddings and biases apart. Networks on graphs need torch_geometric.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.harness import Row, append
from benchmarks.loss_models import TASKS
from benchmarks.recipes import BASELINE, by_seed, excess, interval, recipe_of
from lightning_fp8 import convert, scaling_state
from lightning_fp8.modules.base import Fp8Module
from lightning_fp8.modules.computed_weight import is_computed
from lightning_fp8.runtime.environment import environment
from lightning_fp8.tools.tables import markdown_table

RECIPES = ("fp8-delayed", "fp8-block")


def train(name: str, variant: str, seed: int, steps: int) -> dict[str, Any]:
    """One run: its loss, and the share of the matrices that layers in FP8 have."""
    torch.manual_seed(seed)
    task = TASKS[name]
    model, recipe = task.build(), recipe_of(variant)
    if recipe is not None:
        convert(model, recipe)
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=3e-3), []
    for step in range(steps):
        with torch.autocast("cpu", torch.bfloat16):
            loss = task.loss(model, seed, step)
        loss.backward()
        if recipe is not None:
            scaling_state(model).update()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return {"loss": mean(losses[-(steps // 10) :]), "share": share(model)}


def share(model: nn.Module) -> float:
    """The share of the elements of matrices that layers in FP8 have, without embeddings and biases."""
    embeddings = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    named = {parameter: name for name, parameter in model.named_parameters() if parameter.dim() >= 2}
    matrices = {parameter for parameter, name in named.items() if not name.endswith("bias")} - embeddings
    in_fp8 = {weight for layer in model.modules() if isinstance(layer, Fp8Module) for weight in weights_of(layer)}
    return sum(matrix.numel() for matrix in matrices & in_fp8) / sum(matrix.numel() for matrix in matrices)


def weights_of(layer: Fp8Module) -> Iterator[Tensor]:
    """The parameters that the layer's products multiply with, or that such a weight is computed from."""
    if is_computed(layer):
        yield from layer.parametrizations["weight"].parameters(recurse=False)  # type: ignore[index, operator, union-attr]
    else:
        yield from (weight for _, weight in layer.gemms())


def table(rows: Sequence[Row]) -> str:
    """A line for each model: means over seeds, and differences from bf16 in percent with their 95% intervals."""
    first = RECIPES[0]
    lines = [("model", "matrices in FP8", "bf16", first, "difference", *(f"{key}, difference" for key in RECIPES[1:]))]
    for name in dict.fromkeys(row["case"] for row in rows):
        losses = (f"{mean(by_seed(rows, name, variant, 'loss').values()):.4f}" for variant in (BASELINE, first))
        in_fp8 = f"{mean(by_seed(rows, name, first, 'share').values()):.1%}"
        excesses = (excess(rows, name, variant, "loss").values() for variant in RECIPES)
        apart = ("{:+.2f}% ± {:.2f}".format(*interval([*values])) if values else "-" for values in excesses)
        lines.append((name, in_fp8, *losses, *apart))
    return markdown_table(lines)


def main() -> None:
    """The command."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--out", type=Path, required=True)
    options.add_argument("--models", nargs="+", choices=TASKS, default=[*TASKS])
    options.add_argument("--seeds", type=int, default=5)
    options.add_argument("--steps", type=int, default=200)
    arguments, rows = options.parse_args(), []
    command = " ".join(["python -m benchmarks.model_losses", *sys.argv[1:]])
    about = {name: environment("transformers", *TASKS[name].packages, command=command) for name in arguments.models}
    for name in arguments.models:
        for seed in range(arguments.seeds):
            for variant in (BASELINE, *RECIPES):
                row = {"case": name, "variant": variant, "seed": seed, "steps": arguments.steps}
                row |= train(name, variant, seed, arguments.steps) | about[name]
                print(name, seed, variant, f"{row['loss']:.4f}", file=sys.stderr, flush=True)
                append([row], arguments.out)
                rows.append(row)
    print(table(rows))


if __name__ == "__main__":
    main()
