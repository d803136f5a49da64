"""Train a tiny model and save a checkpoint together with the numbers that this version of the package gets from it.

``<version>.ckpt`` in this folder was made by ``python tests/golden/write.py OUT`` with that version on the path, and
``tests/scaling/test_golden.py`` compares with it. So this file uses only what every version since 0.1.0 has, and the
model and its data stay as they are: another model is another script. The commits were the last ones before work on the
next version began: 72b077c (0.1.0), 9006c9f (0.2.0), 9cc2ac0 (0.3.0), 7b5c3d3 (0.4.0) and 96a290a (0.5.0).

The file is a Lightning checkpoint with one more entry, ``golden``:

- ``next_batches``: ``[3, 4, 8] int64``, the tokens of the batches that follow; the first is the one evaluated;
- ``logits``: ``[4, 7, 16] float32``, the outputs in evaluation, by ``Trainer.validate(ckpt_path=...)``;
- ``scales``, ``histories``: those of inputs and gradients in the checkpoint, by tensor name;
- ``fallbacks``: names of the layers that have fallen back (since 0.4.0);
- ``next_losses``, ``next_histories``: losses of three more steps, by ``Trainer.fit(ckpt_path=...)``, and what the
  histories of inputs and gradients are then.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

import lightning_fp8
from lightning_fp8 import DelayedScaling, Fp8Precision, scaling_state

WIDTH = 16
VOCABULARY = 16
STEPS = 6
RECIPE = DelayedScaling(amax_history_len=4)
# falls back in the middle of the run, in versions that support it
FALLS_BACK = "again"


class Golden(pl.LightningModule):
    """Every kind of layer that some version has converted, with weights tied to an embedding and to another layer."""

    def __init__(self, recipe: DelayedScaling = RECIPE) -> None:
        super().__init__()
        # a recipe among the hyperparameters: checkpoints name its class
        self.save_hyperparameters()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 2, WIDTH, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        # keys and values narrower than queries: three projections instead of one
        narrow = WIDTH // 2
        self.attention = nn.MultiheadAttention(WIDTH, 2, bias=False, kdim=narrow, vdim=narrow, batch_first=True)
        self.conv1d = Conv1D(WIDTH, WIDTH)
        self.hidden = nn.Linear(WIDTH, WIDTH)
        self.again = nn.Linear(WIDTH, WIDTH)
        self.again.weight = self.hidden.weight
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        # Branches smaller than the tensors they are added to, as with GPT-2's initialization, keep FP8's noise small.
        block = self.encoder.layers[0]
        with torch.no_grad():
            for end in (self.embedding, block.self_attn.out_proj, block.linear2, self.attention.out_proj, self.again):
                end.weight.mul_(0.25)
        self.losses: list[Tensor] = []
        self.logits: list[Tensor] = []

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens ``[B, T] int64`` -> logits ``[B, T, 16]``."""
        x = self.encoder(self.embedding(tokens))
        context = x[..., : WIDTH // 2]
        x = x + self.attention(x, context, context, need_weights=False)[0]
        x = x + torch.tanh(self.conv1d(x))
        x = x + self.again(torch.relu(self.hidden(x)))
        return self.head(x)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if self.trainer.global_step == STEPS // 2:
            fall_back(self)
        return self.loss(batch)

    def loss(self, batch: Tensor) -> Tensor:
        """Mean over ``[4, 8] int64`` tokens of predicting the next token; kept in ``losses``."""
        logits = self(batch[:, :-1]).float()
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        self.losses.append(loss.detach().clone())
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.logits.append(self(batch[:, :-1]).float())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.02, momentum=0.9)


def fall_back(model: nn.Module) -> None:
    """A function of the package since 0.6.0, a method of the state since 0.4.0."""
    if hasattr(lightning_fp8, "fall_back"):
        lightning_fp8.fall_back(model, FALLS_BACK)
    elif hasattr(scaling_state(model), "fall_back"):
        scaling_state(model).fall_back(FALLS_BACK)


def fallbacks(model: nn.Module) -> list[str]:
    """Likewise."""
    if hasattr(lightning_fp8, "fallbacks"):
        return list(lightning_fp8.fallbacks(model))
    return list(getattr(scaling_state(model), "fallbacks", ()))


def trainer(folder: Path, epochs: int = 1, settings: Mapping[str, Any] | None = None, **kwargs: Any) -> pl.Trainer:
    return pl.Trainer(
        plugins=Fp8Precision(recipe=RECIPE, **(settings or {})),
        accelerator="cpu",
        devices=1,
        max_epochs=epochs,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        **kwargs,
    )


def batches(tokens: Tensor) -> torch.utils.data.DataLoader[Tensor]:
    """Returns each ``[4, 8]`` of ``[N, 4, 8] int64`` unchanged."""
    return torch.utils.data.DataLoader(list(tokens), batch_size=None)


def tokens(count: int) -> Tensor:
    """``[count, 4, 8] int64``: counting up from any number in steps of 1 to 3."""
    start, step = torch.randint(VOCABULARY, (count, 4, 1)), torch.randint(1, 4, (count, 4, 1))
    return (start + step * torch.arange(8)) % VOCABULARY


def of_inputs_and_gradients(model: nn.Module) -> dict[str, dict[str, Any]]:
    """``scales`` and ``histories`` by tensor name, as plain numbers."""
    state = scaling_state(model)
    rows = {name: row for row, name in enumerate(state.names) if not name.endswith("weight")}
    return {
        "scales": {name: state.scale[row].item() for name, row in rows.items()},
        "histories": {name: state.amax_history[:, row].tolist() for name, row in rows.items()},
    }


def write(folder: Path) -> Path:
    """Train, save, and add this version's results from the checkpoint."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    # since 0.4.0 the package does this
    torch.serialization.add_safe_globals([DelayedScaling])
    path = folder / f"{lightning_fp8.__version__}.ckpt"
    model, before, after = Golden(), tokens(STEPS), tokens(3)
    run = trainer(folder)
    run.fit(model, batches(before))
    run.save_checkpoint(path)
    golden = {"next_batches": after, **of_inputs_and_gradients(model)}
    golden["fallbacks"] = fallbacks(model)

    evaluated, resumed = Golden(), Golden()
    trainer(folder).validate(evaluated, batches(after[:1]), ckpt_path=path, verbose=False)
    golden["logits"] = evaluated.logits[0].clone()
    trainer(folder, epochs=2).fit(resumed, batches(after), ckpt_path=path)
    golden["next_losses"] = torch.stack(resumed.losses).tolist()
    golden["next_histories"] = of_inputs_and_gradients(resumed)["histories"]

    checkpoint = torch.load(path, weights_only=False)
    # so `{"model": ..., "scaling": ...}` of a loop without Lightning holds the same two dicts
    saved, by_hand = checkpoint["Fp8Precision"], scaling_state(model).state_dict()
    if any(not torch.equal(saved[name][key], by_hand[name][key]) for name in by_hand for key in by_hand[name]):
        raise RuntimeError("The plugin saves another scaling state than `scaling_state(model).state_dict()` gives.")
    torch.save({**checkpoint, "golden": golden}, path)
    return path


if __name__ == "__main__":
    print(write(Path(sys.argv[1])), "by", lightning_fp8.__file__)
