"""Packages built on Lightning, unmodified: a tiny model of each, trained, saved and loaded, in each precision.

    python -m benchmarks.packages FOLDER [--packages darts ...] [--precisions fp8-delayed ...] [--out FILE]

FOLDER gets a virtual environment with the packages. Each model takes the precision in the way its package takes
arguments of the Trainer; nothing else differs. The package's own methods save and load the model. It is loaded in
another process, where it must predict what the trained one did, bit for bit: otherwise the command fails.

Everything runs on the CPU with one thread. The loss is the mean over the last epoch of training for darts,
pytorch-forecasting, chemprop and scvi-tools, the mean length of the tours of the last validation for rl4co, and the
mean over the last ten steps of training for the others.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import subprocess
import sys
import tempfile
import venv
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader

from benchmarks.graph_networks import KINDS, graph, network
from benchmarks.harness import append
from lightning_fp8 import convert, describe
from lightning_fp8.runtime.environment import environment, package_version
from lightning_fp8.scalings.recipe import RECIPES
from lightning_fp8.tools.tables import markdown_table

ROOT = Path(__file__).parent.parent
PRECISIONS = ("32-true", "bf16-mixed", "fp8-delayed")
QUIET: dict[str, Any] = {"accelerator": "cpu", "devices": 1, "logger": False, "enable_progress_bar": False}
# the module, a function that gives its predictions, and the loss if it was trained here
Made = tuple[nn.Module, Callable[[], Any], Any]
# the arguments of the Trainer, the folder of the files, and whether they are there to be loaded
Package = Callable[[dict[str, Any], Path, bool], Made]


def waves(count: int = 8, steps: int = 200) -> np.ndarray[Any, Any]:
    """Noisy waves of several periods, [count, steps] fp32."""
    periods = np.linspace(6, 24, count)[:, None]
    noise = np.random.default_rng(0).normal(0, 0.1, (count, steps))
    return (np.sin(2 * np.pi * np.arange(steps) / periods) + noise).astype(np.float32)


def waves_as_table() -> Any:
    """The same, a row for each value."""
    import pandas as pd

    values = waves()
    names, times = np.indices(values.shape)
    return pd.DataFrame({"wave": names.ravel().astype(str), "time": times.ravel(), "y": values.ravel()})


def images(count: int = 64, size: int = 32) -> torch.Tensor:
    """Smooth random ones, each of its own colour, [count, 3, size, size] fp32 between 0 and 1."""
    random = torch.Generator().manual_seed(0)
    coarse = torch.randn(count, 3, 4, 4, generator=random) + 2 * torch.randn(count, 3, 1, 1, generator=random)
    return nn.functional.interpolate(coarse, size, mode="bicubic").sigmoid()


class LastLosses(pl.Callback):
    """The losses of the last ten steps."""

    def __init__(self) -> None:
        self.values: deque[float] = deque(maxlen=10)

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        """Note that of this step."""
        self.values.append(outputs["loss"].item())


def darts(trainer_arguments: dict[str, Any], folder: Path, is_saved: bool) -> Made:
    """TiDE; ``save`` and ``load``."""
    from darts import TimeSeries
    from darts.models import TiDEModel

    series = [TimeSeries.from_values(values) for values in waves()]
    if is_saved:
        model, loss = TiDEModel.load(f"{folder}/model.pt"), None
    else:
        model = TiDEModel(24, 16, hidden_size=64, n_epochs=5, random_state=0, pl_trainer_kwargs=trainer_arguments)
        model.fit(series)
        model.save(f"{folder}/model.pt")
        loss = model.trainer.callback_metrics["train_loss"]
    return model.model, lambda: np.stack([forecast.values() for forecast in model.predict(16, series=series)]), loss


def neuralforecast(trainer_arguments: dict[str, Any], folder: Path, is_saved: bool) -> Made:
    """N-HiTS; ``save`` and ``load`` of ``NeuralForecast``."""
    from neuralforecast import NeuralForecast
    from neuralforecast.models import NHITS

    if is_saved:
        forecast, loss = NeuralForecast.load(f"{folder}/model"), None
    else:
        mlp = 3 * [[64, 64]]
        model = NHITS(h=16, input_size=48, mlp_units=mlp, max_steps=100, random_seed=0, **trainer_arguments)
        forecast = NeuralForecast([model], freq=1)
        forecast.fit(waves_as_table(), id_col="wave", time_col="time", target_col="y")
        forecast.save(f"{folder}/model")
        loss = np.mean([loss for _, loss in forecast.models[0].train_trajectories[-10:]])
    return forecast.models[0], lambda: forecast.predict()["NHITS"].to_numpy(), loss


def pytorch_forecasting(trainer_arguments: dict[str, Any], folder: Path, is_saved: bool) -> Made:
    """A temporal fusion transformer; ``save_checkpoint`` and ``load_from_checkpoint``."""
    from pytorch_forecasting import TemporalFusionTransformer, TimeSeriesDataSet

    lengths = {"max_encoder_length": 24, "max_prediction_length": 8}
    kinds = {"static_categoricals": ["wave"], "time_varying_known_reals": ["time"], "time_varying_unknown_reals": ["y"]}
    data = TimeSeriesDataSet(waves_as_table(), "time", "y", ["wave"], **lengths, **kinds)
    if is_saved:
        model, loss = TemporalFusionTransformer.load_from_checkpoint(f"{folder}/model.ckpt"), None
    else:
        model = TemporalFusionTransformer.from_dataset(data, hidden_size=32, hidden_continuous_size=16, dropout=0.0)
        trainer = pl.Trainer(max_epochs=2, enable_checkpointing=False, **trainer_arguments)
        trainer.fit(model, data.to_dataloader(batch_size=64))
        trainer.save_checkpoint(f"{folder}/model.ckpt")
        loss = trainer.callback_metrics["train_loss_epoch"]
    batches = data.to_dataloader(train=False, batch_size=64)
    return model, lambda: model.predict(batches, trainer_kwargs=trainer_arguments), loss


def chemprop(trainer_arguments: dict[str, Any], folder: Path, is_saved: bool) -> Made:
    """A message-passing network that counts oxygen; ``save_checkpoint`` and ``load_from_checkpoint``."""
    from chemprop import data, models
    from chemprop import nn as layers

    groups = ("C", "O", "N", "CC", "C(C)C", "c1ccccc1", "C(=O)O")
    molecules = [f"{first}C{second}C{third}" for first in groups for second in groups for third in groups]
    points = [data.MoleculeDatapoint.from_smi(text, [float(text.count("O"))]) for text in molecules]
    dataset = data.MoleculeDataset(points)
    trainer: Any = pl.Trainer(max_epochs=20, enable_checkpointing=False, **trainer_arguments)
    if is_saved:
        model, loss = models.MPNN.load_from_checkpoint(f"{folder}/model.ckpt"), None
    else:
        passing, ffn = layers.BondMessagePassing(d_h=64), layers.RegressionFFN(input_dim=64, hidden_dim=64)
        model = models.MPNN(passing, layers.SumAggregation(), ffn)
        trainer.fit(model, data.build_dataloader(dataset, batch_size=32, seed=0))
        trainer.save_checkpoint(f"{folder}/model.ckpt")
        loss = trainer.callback_metrics["train_loss_epoch"]
    return model, lambda: torch.cat(trainer.predict(model, data.build_dataloader(dataset, shuffle=False))), loss


def scvi(trainer_arguments: dict[str, Any], folder: Path, is_saved: bool) -> Made:
    """SCVI, whose training wraps the module; ``save`` and ``load``."""
    from scvi import settings
    from scvi.data import synthetic_iid
    from scvi.model import SCVI

    settings.seed = 0
    cells = synthetic_iid()
    if is_saved:
        model, loss = SCVI.load(f"{folder}/model", cells), None
        # predicts without a Trainer, which would convert it
        if recipe := RECIPES.get(trainer_arguments["precision"]):
            convert(model.module, recipe())
    else:
        SCVI.setup_anndata(cells, batch_key="batch")
        model = SCVI(cells, n_hidden=64, n_layers=2, n_latent=16)
        model.train(max_epochs=10, **trainer_arguments)
        model.save(f"{folder}/model")
        loss = model.trainer.callback_metrics["train_loss"]
    return nn.ModuleDict({"module": model.module}), model.get_latent_representation, loss


def graphs(kind: str, trainer_arguments: dict[str, Any], folder: Path, is_saved: bool) -> Made:
    """A network of torch_geometric that classifies the nodes of a new random graph at each step; saves its weights."""

    class Nodes(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = network(kind)

        def training_step(self, _: torch.Tensor) -> torch.Tensor:
            x, edges, labels = graph(self.global_step)
            return nn.functional.cross_entropy(self.net(x, edges).float(), labels)

        def predict_step(self, _: torch.Tensor) -> torch.Tensor:
            return self.net(*graph(0)[:2])  # type: ignore[no-any-return]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), 3e-3)

    model, steps, once = Nodes(), *(DataLoader(range(number)) for number in (200, 1))  # type: ignore[var-annotated,arg-type]
    losses = LastLosses()
    trainer: Any = pl.Trainer(max_epochs=1, enable_checkpointing=False, callbacks=[losses], **trainer_arguments)
    if is_saved:
        model.load_state_dict(torch.load(folder / "weights.pt"))
    else:
        trainer.fit(model, steps)
        torch.save(model.state_dict(), folder / "weights.pt")
    return model, lambda: torch.cat(trainer.predict(model, once)), None if is_saved else np.mean(losses.values)


def torchgeo(trainer_arguments: dict[str, Any], folder: Path, is_saved: bool) -> Made:
    """SimCLR with a tiny ResNet of timm; ``save_checkpoint`` and ``load_from_checkpoint``."""
    from torchgeo.trainers import SimCLRTask

    class SimCLR(SimCLRTask):  # type: ignore[misc]
        def predict_step(self, batch: Any, *_: Any) -> torch.Tensor:
            return self(batch["image"])[0]  # type: ignore[no-any-return]

    data = [{"image": image} for image in images()]
    losses = LastLosses()
    trainer: Any = pl.Trainer(max_epochs=20, enable_checkpointing=False, callbacks=[losses], **trainer_arguments)
    if is_saved:
        model = SimCLR.load_from_checkpoint(f"{folder}/model.ckpt")
    else:
        model = SimCLR("test_byobnet", version=1, layers=2, lr=1.0, temperature=0.5, memory_bank_size=0, size=32)
        trainer.fit(model, DataLoader(data, batch_size=32, shuffle=True, drop_last=True))  # type: ignore[arg-type]
        trainer.save_checkpoint(f"{folder}/model.ckpt")
    batches = DataLoader(data, batch_size=32)  # type: ignore[arg-type,var-annotated]
    return model, lambda: torch.cat(trainer.predict(model, batches)), None if is_saved else np.mean(losses.values)


def torch_uncertainty(trainer_arguments: dict[str, Any], folder: Path, is_saved: bool) -> Made:
    """A classifier whose weights are averaged (SWA); ``save_checkpoint`` and ``load_from_checkpoint``."""
    from torch_uncertainty import TUTrainer
    from torch_uncertainty.methods import SWA
    from torch_uncertainty.routines import ClassificationRoutine

    def of_width(inputs: int) -> list[nn.Module]:
        return [nn.Linear(inputs, 64), nn.BatchNorm1d(64), nn.ReLU()]

    averaged = SWA(nn.Sequential(*of_width(32), *of_width(64), nn.Linear(64, 16)), cycle_start=2, cycle_length=1)
    x = torch.randn(256, 32, generator=torch.Generator().manual_seed(0))
    data = torch.utils.data.TensorDataset(x, x[:, :16].argmax(1))
    arguments = {"model": averaged, "num_classes": 16, "loss": nn.CrossEntropyLoss()}
    losses = LastLosses()
    trainer: Any = TUTrainer(max_epochs=10, enable_checkpointing=False, callbacks=[losses], **trainer_arguments)
    if is_saved:
        # makes the copy that the averages are in
        averaged.update_wrapper(averaged.cycle_start)
        model = ClassificationRoutine.load_from_checkpoint(f"{folder}/model.ckpt", **arguments)
    else:
        model = ClassificationRoutine(**arguments, optim_recipe=torch.optim.Adam(averaged.parameters(), 3e-3))
        trainer.fit(model, DataLoader(data, batch_size=32, shuffle=True), DataLoader(data, batch_size=64))
        trainer.save_checkpoint(f"{folder}/model.ckpt")
    batches = DataLoader(x, batch_size=64)  # type: ignore[arg-type,var-annotated]
    return model, lambda: torch.cat(trainer.predict(model, batches)), None if is_saved else np.mean(losses.values)


def rl4co(trainer_arguments: dict[str, Any], folder: Path, is_saved: bool) -> Made:
    """Tours by an attention model, with a rollout baseline; ``save_checkpoint`` and ``load_from_checkpoint``."""
    from rl4co.envs import TSPEnv
    from rl4co.models import AttentionModel
    from rl4co.utils import RL4COTrainer

    class Tours(AttentionModel):  # type: ignore[misc]
        def predict_step(self, batch: Any, *_: Any) -> torch.Tensor:
            return self(self.env.reset(batch), phase="test")["log_likelihood"]  # type: ignore[no-any-return]

    env = TSPEnv(generator_params={"num_loc": 10})
    trainer: Any = RL4COTrainer(max_epochs=5, enable_checkpointing=False, **trainer_arguments)
    if is_saved:
        model, loss = Tours.load_from_checkpoint(f"{folder}/model.ckpt", env=env, weights_only=False), None
    else:
        policy = {"embed_dim": 64, "num_encoder_layers": 2, "num_heads": 4, "feedforward_hidden": 128}
        sizes = {"batch_size": 32, "train_data_size": 256, "val_data_size": 64, "test_data_size": 64}
        model = Tours(env, baseline="rollout", policy_kwargs=policy, optimizer_kwargs={"lr": 1e-3}, **sizes)
        trainer.fit(model)
        trainer.save_checkpoint(f"{folder}/model.ckpt")
        loss = -trainer.callback_metrics["val/reward"]
    torch.manual_seed(0)
    cities = env.dataset(64)
    batches = DataLoader(cities, batch_size=64, collate_fn=cities.collate_fn)
    return model, lambda: torch.cat(trainer.predict(model, batches)), loss


def lightly(trainer_arguments: dict[str, Any], folder: Path, is_saved: bool) -> Made:
    """BYOL as in the package's example, where copies follow the student; saves its weights."""
    from lightly.loss import NegativeCosineSimilarity
    from lightly.models import ResNetGenerator
    from lightly.models.modules import BYOLPredictionHead, BYOLProjectionHead
    from lightly.models.utils import deactivate_requires_grad, update_momentum

    class BYOL(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            blocks = [*ResNetGenerator("resnet-9", width=0.25).children()][:-1]
            self.backbone = nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten())
            self.projection_head = BYOLProjectionHead(128, 256, 64)
            self.prediction_head = BYOLPredictionHead(64, 256, 64)
            self.backbone_momentum = copy.deepcopy(self.backbone)
            self.projection_head_momentum = copy.deepcopy(self.projection_head)
            deactivate_requires_grad(self.backbone_momentum)
            deactivate_requires_grad(self.projection_head_momentum)
            self.criterion = NegativeCosineSimilarity()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.prediction_head(self.projection_head(self.backbone(x)))  # type: ignore[no-any-return]

        def forward_momentum(self, x: torch.Tensor) -> torch.Tensor:
            return self.projection_head_momentum(self.backbone_momentum(x)).detach()  # type: ignore[no-any-return]

        def training_step(self, x: torch.Tensor) -> torch.Tensor:
            update_momentum(self.backbone, self.backbone_momentum, m=0.99)
            update_momentum(self.projection_head, self.projection_head_momentum, m=0.99)
            views = [x + 0.3 * torch.randn_like(x) for _ in range(2)]
            (p0, p1), (z0, z1) = map(self, views), map(self.forward_momentum, views)
            return (self.criterion(p0, z1) + self.criterion(p1, z0)) / 2  # type: ignore[no-any-return]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.06)

    model, losses, data = BYOL(), LastLosses(), images(size=16)
    trainer: Any = pl.Trainer(max_epochs=20, enable_checkpointing=False, callbacks=[losses], **trainer_arguments)
    if is_saved:
        model.load_state_dict(torch.load(folder / "weights.pt"))
    else:
        trainer.fit(model, DataLoader(data, batch_size=32, shuffle=True))  # type: ignore[arg-type]
        torch.save(model.state_dict(), folder / "weights.pt")
    batches = DataLoader(data, batch_size=32)  # type: ignore[arg-type,var-annotated]
    return model, lambda: torch.cat(trainer.predict(model, batches)), None if is_saved else np.mean(losses.values)


# by the name that pip installs it under, and a kind of model
PACKAGES: dict[str, Package] = {
    "darts": darts,
    "neuralforecast": neuralforecast,
    "pytorch-forecasting": pytorch_forecasting,
    "chemprop": chemprop,
    "scvi-tools": scvi,
    **{f"torch_geometric/{kind}": partial(graphs, kind) for kind in KINDS},
    "torchgeo/SimCLR": torchgeo,
    "torch-uncertainty/SWA": torch_uncertainty,
    "rl4co/AttentionModel": rl4co,
    "lightly/BYOL": lightly,
}


def run(package: str, precision: str, folder: Path) -> dict[str, Any]:
    """In a process of its own: train and save, or where that is done, load and compare."""
    torch.manual_seed(0)
    np.random.seed(0)
    predictions = folder / "predictions.pt"
    is_saved = predictions.exists()
    module, predict, loss = PACKAGES[package]({**QUIET, "precision": precision}, folder, is_saved)
    output = torch.as_tensor(predict())
    if not is_saved:
        torch.save(output, predictions)
        about = {
            "case": package,
            "version": package_version(package.partition("/")[0]),
            "variant": precision,
            "coverage": coverage(module),
        }
        return {**about, "loss": float(loss), **environment("lightning", "numpy")}
    before = torch.load(predictions)
    return {"difference": 0.0 if torch.equal(output, before) else (output - before).abs().max().item()}


def coverage(module: nn.Module) -> float:
    """The share of the parameters of two or more dimensions that layers in FP8 have."""
    layers = [module.get_submodule(row.path) for row in describe(module) if row.converted]
    in_fp8 = {parameter for layer in layers for parameter in layer.parameters()}
    sizes = {parameter: parameter.numel() for parameter in module.parameters() if parameter.dim() > 1}
    return sum(sizes[parameter] for parameter in in_fp8 & sizes.keys()) / sum(sizes.values())


def table(rows: list[dict[str, Any]]) -> str:
    """A line of Markdown for each package: losses by precision, and what is particular to the last precision."""
    precisions = [*dict.fromkeys(row["variant"] for row in rows)]
    of_last = ["share of matrices in FP8", "difference after loading"]
    lines = [["package", "version", *precisions, *of_last]]
    for package in dict.fromkeys(row["case"] for row in rows):
        of_package = {row["variant"]: row for row in rows if row["case"] == package}
        last = of_package[precisions[-1]]
        losses = [f"{of_package[precision]['loss']:.4g}" for precision in precisions]
        lines.append([package, last["version"], *losses, f"{last['coverage']:.0%}", f"{last['difference']:.1g}"])
    return markdown_table(lines)


def installed(folder: Path, packages: Sequence[str]) -> Path:
    """The interpreter of an environment with the packages, and with the versions that the tests run with."""
    python = folder.absolute() / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True)
    pip = (python, "-m", "pip", "install", "--quiet", "--constraint", ROOT / "constraints.txt")
    subprocess.run(
        [*pip, "lightning", "torchmetrics", *{package.partition("/")[0] for package in packages}], check=True
    )
    return python


def in_a_process(python: Path, folder: str, package: str, precision: str) -> dict[str, Any]:
    """What :func:`run` gives."""
    arguments = (folder, "--packages", package, "--precisions", precision, "--run")
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}
    # nothing of ours may warn, of scales least of all
    command = (str(python), "-W", "error:lightning_fp8", "-m", "benchmarks.packages", *arguments)
    child = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, env=one_thread)
    if child.returncode:
        sys.exit(f"{package}, {precision} failed:\n{child.stderr}")
    return json.loads(child.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def main() -> None:
    """Install, run each package in each precision, append rows to ``--out``, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="of the virtual environment")
    parser.add_argument("--packages", nargs="+", choices=PACKAGES, default=list(PACKAGES))
    parser.add_argument("--precisions", nargs="+", default=PRECISIONS)
    parser.add_argument("--out", type=Path, metavar="FILE", help="append the rows as lines of JSON")
    parser.add_argument("--run", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        print(json.dumps(run(options.packages[0], options.precisions[0], options.folder)))
        return
    python = installed(options.folder, options.packages)
    command, rows = " ".join(["python -m benchmarks.packages", *sys.argv[1:]]), []
    for package in options.packages:
        for precision in options.precisions:
            print(f"{package}, {precision}", file=sys.stderr, flush=True)
            with tempfile.TemporaryDirectory() as folder:
                results = [in_a_process(python, folder, package, precision) for _ in ("train", "load")]
            rows.append({**results[0], **results[1], "command": command})
            append(rows[-1:], options.out)
    print(table(rows))
    # not equal, and so also named where it is nan
    if different := [f"{row['case']} in {row['variant']}" for row in rows if row["difference"] != 0]:
        sys.exit(f"loaded models predict something else: {', '.join(different)}")


if __name__ == "__main__":
    main()
