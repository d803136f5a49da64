"""Fine-tune a model that is published in FP8, with LoRA: its weights stay in FP8 as they are, one byte per parameter.

Without --checkpoint, the script writes a small random one itself, in the layout of DeepSeek-V3 and Qwen3.

python examples/fp8_checkpoint.py
python examples/fp8_checkpoint.py --precision bf16-mixed
python examples/fp8_checkpoint.py --checkpoint Qwen3-8B-FP8 --text corpus.txt --learning-rate 2e-4
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
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, FineGrainedFP8Config, LlamaConfig

from lightning_fp8 import BlockScaling, Fp8Precision, convert, export, load_exported, scaling_state


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
        # only the adapters
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=self.learning_rate)


def write_checkpoint(folder: str) -> None:
    """A Llama over bytes with random weights, in 128 x 128 blocks."""
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,
        # larger than usual, because LoRA does not train the embeddings and the head
        initializer_range=0.1,
    )
    model = convert(AutoModelForCausalLM.from_config(config), BlockScaling())
    export(model, folder, layout="hf-fp8", dtype=torch.bfloat16, overwrite=True)


def load(folder: str, precision: str) -> Any:
    """The model with its weights as they are in the files; to compare, with values in bf16 instead."""
    if not precision.startswith("fp8"):
        quantization = FineGrainedFP8Config(dequantize=True)
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, quantization_config=quantization)
    # it takes no memory before it is read
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16)
    return load_exported(model, folder, frozen=True)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--precision", choices=["fp8", "bf16-mixed", "32-true"], default="fp8")
    parser.add_argument("--accelerator", default="auto")
    parser.add_argument("--checkpoint", help="a folder with a published model and its tokenizer")
    parser.add_argument("--text", default=argparse.__file__, help="a file; by default the source of argparse")
    parser.add_argument("--context", type=int, default=64, help="tokens")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--out", default="runs/fp8_adapters", help="a folder for the adapters")
    arguments = parser.parse_args(argv)

    pl.seed_everything(0)
    text, folder = Path(arguments.text).read_text(encoding="utf-8"), arguments.checkpoint
    if folder is None:
        folder = "runs/fp8_checkpoint"
        write_checkpoint(folder)
        tokens = torch.tensor(list(text.encode()))
    else:
        tokens = AutoTokenizer.from_pretrained(folder)(text, return_tensors="pt").input_ids[0]
    if len(tokens) < 10 * arguments.context:
        parser.error(f"{arguments.text} has {len(tokens)} tokens: too few for ten windows of --context")
    windows: Any = tokens.unfold(0, arguments.context, arguments.context)
    held_out = len(windows) // 10

    model = load(folder, arguments.precision)
    precision: dict[str, Any] = {"precision": arguments.precision}
    if arguments.precision == "fp8":
        # the recipe that fits the files: here, scales for blocks of 1 x 128 of the inputs
        precision = {"plugins": Fp8Precision(scaling_state(model).recipe, param_dtype="bfloat16")}
    # a loaded model is in evaluation mode, and a Trainer does not change that
    model = get_peft_model(model, LoraConfig(r=8, lora_alpha=16, target_modules="all-linear")).train()
    trainer = pl.Trainer(
        **precision,
        accelerator=arguments.accelerator,
        devices=1,
        max_epochs=arguments.epochs,
        log_every_n_steps=10,
        gradient_clip_val=1.0,
        enable_checkpointing=False,
        default_root_dir="runs/fp8_checkpoint",
    )
    trainer.fit(
        FineTuning(model, arguments.learning_rate),
        DataLoader(windows[held_out:], arguments.batch_size, shuffle=True),
        DataLoader(windows[:held_out], arguments.batch_size),
    )
    model.save_pretrained(arguments.out)
    print(f"saved: {arguments.out}")
    print(f"{arguments.precision}: validation loss {trainer.callback_metrics['val_loss']:.3f}")


if __name__ == "__main__":
    main()
