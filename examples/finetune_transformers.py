"""Fine-tune a causal language model of transformers in a Trainer: all weights, or LoRA adapters on a base in FP8.

Without --model, the model is a small random Llama over bytes, and nothing is downloaded.

python examples/finetune_transformers.py
python examples/finetune_transformers.py --lora
python examples/finetune_transformers.py --lora --model Qwen/Qwen3-0.6B --text corpus.txt --learning-rate 2e-4
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from lightning_fp8 import Fp8Precision


class FineTuning(pl.LightningModule):
    """Batches are token ids ``[batch, time] int64``."""

    def __init__(self, model: Any, learning_rate: float) -> None:
        super().__init__()
        self.model = model
        self.learning_rate = learning_rate

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.model(input_ids=batch, labels=batch).loss
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.model(input_ids=batch, labels=batch).loss, prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        # with LoRA, only the adapters
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=self.learning_rate)


def load(name: str | None, text: str) -> tuple[Any, Tensor]:
    """The model, and the text as its tokens ``[tokens] int64``."""
    if name is None:
        config = LlamaConfig(
            vocab_size=256,
            hidden_size=64,
            intermediate_size=192,
            num_hidden_layers=2,
            num_attention_heads=2,
            # larger than usual, because LoRA does not train the embeddings and the head
            initializer_range=0.1,
        )
        return LlamaForCausalLM(config), torch.tensor(list(text.encode()))
    tokens = AutoTokenizer.from_pretrained(name)(text, return_tensors="pt").input_ids[0]
    # loaded models are in evaluation mode, and a Trainer does not change that: no scales would be recorded
    return AutoModelForCausalLM.from_pretrained(name).train(), tokens


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--precision", default="fp8-delayed", help="or bf16-mixed, to compare")
    parser.add_argument("--accelerator", default="auto")
    parser.add_argument("--model", help="a name on the Hugging Face hub, or a folder")
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--text", default=argparse.__file__, help="a file; by default the source of argparse")
    parser.add_argument("--context", type=int, default=64, help="tokens")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--out", help="a folder for the model or the adapters; by default in runs/")
    arguments = parser.parse_args(argv)

    pl.seed_everything(0)
    model, tokens = load(arguments.model, Path(arguments.text).read_text(encoding="utf-8"))
    if len(tokens) < 10 * arguments.context:
        parser.error(f"{arguments.text} has {len(tokens)} tokens: too few for ten windows of --context")
    windows: Any = tokens.unfold(0, arguments.context, arguments.context)
    held_out = len(windows) // 10
    precision: dict[str, Any] = {"precision": arguments.precision}
    if arguments.lora:
        model = get_peft_model(model, LoraConfig(r=8, lora_alpha=16, target_modules="all-linear"))
        if arguments.precision == "fp8-delayed":
            # the frozen weights take one byte per parameter
            precision = {"plugins": Fp8Precision(frozen_weights="fp8")}
    trainer = pl.Trainer(
        **precision,
        accelerator=arguments.accelerator,
        devices=1,
        max_epochs=arguments.epochs,
        log_every_n_steps=10,
        gradient_clip_val=1.0,
        enable_checkpointing=False,
        default_root_dir="runs/finetune_transformers",
    )
    trainer.fit(
        FineTuning(model, arguments.learning_rate),
        DataLoader(windows[held_out:], arguments.batch_size, shuffle=True),
        DataLoader(windows[:held_out], arguments.batch_size),
    )
    out = arguments.out or ("runs/adapters" if arguments.lora else "runs/finetuned")
    model.save_pretrained(out)
    print(f"saved: {out}")
    print(f"{arguments.precision}: validation loss {trainer.callback_metrics['val_loss']:.3f}")


if __name__ == "__main__":
    main()
