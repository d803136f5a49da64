"""The optimizer and the schedule of all example models."""

from __future__ import annotations

import math
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import nn


def adamw(module: nn.Module, learning_rate: float, device: torch.device) -> torch.optim.AdamW:
    """AdamW over all parameters, which are on this device."""
    # on a GPU, one fused kernel updates many parameters
    fused = device.type == "cuda" or None
    return torch.optim.AdamW(module.parameters(), lr=learning_rate, betas=(0.9, 0.95), fused=fused)


def adamw_with_cosine(module: LightningModule, learning_rate: float, warmup_steps: int) -> dict[str, Any]:
    """What ``configure_optimizers`` returns: AdamW, linear warm-up, then a cosine down to a tenth at the last step.

    Args:
        module: whose parameters are trained; its Trainer knows the number of steps.
        learning_rate: peak.
        warmup_steps: optimizer steps of warm-up.
    """
    optimizer = adamw(module, learning_rate, module.device)
    total = max(int(module.trainer.estimated_stepping_batches), warmup_steps + 1)

    def factor(step: int) -> float:
        if step < warmup_steps:
            return (step + 1) / warmup_steps
        progress = min(1.0, (step - warmup_steps) / (total - warmup_steps))
        return 0.1 + 0.45 * (1 + math.cos(math.pi * progress))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}
