"""Short runs of ``transformers.Trainer`` with a tiny Llama."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import Trainer, TrainingArguments

Batch = dict[str, Tensor]


def llama(seed: int = 7) -> Any:
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=16,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def texts(rows: int = 24) -> list[Batch]:
    tokens = torch.randint(64, (rows, 8), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": row} for row in tokens]


def trainer(path: Path, model: Any, *callbacks: Any, data: list[Batch] | None = None, **kwargs: Any) -> Trainer:
    its_own = {name: kwargs.pop(name) for name in ("model_init", "data_collator", "optimizers") if name in kwargs}
    arguments: dict[str, Any] = {
        "output_dir": str(path),
        "use_cpu": True,
        "bf16": True,
        "report_to": "none",
        "disable_tqdm": True,
        "max_steps": 6,
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 8,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
        "logging_steps": 1,
        "save_strategy": "no",
        "dataloader_pin_memory": False,
    }
    batches = data if data is not None else texts()
    args = TrainingArguments(**{**arguments, **kwargs})
    return Trainer(model, args, train_dataset=batches, eval_dataset=batches[:16], callbacks=list(callbacks), **its_own)  # type: ignore[arg-type]
