"""A custom loop with Accelerate."""

from __future__ import annotations

import accelerate
import torch
from lit import LONG_WINDOW, dataset, seeded
from torch import nn
from torch.utils.data import DataLoader

from lightning_fp8 import convert, scaling_state


class Run:
    """A model, and everything in a checkpoint of Accelerate."""

    def __init__(self, precision: str = "bf16", accumulate: int = 1, scale: float = 1.0) -> None:
        self.runner = accelerate.Accelerator(
            cpu=True, mixed_precision=precision, gradient_accumulation_steps=accumulate
        )
        self.plain = seeded().net
        with torch.no_grad():
            self.plain[0].weight.mul_(scale)
        optimizer = torch.optim.AdamW(convert(self.plain, LONG_WINDOW).parameters(), lr=1e-2)
        data = DataLoader(dataset(), batch_size=8)
        self.model, self.optimizer, self.data = self.runner.prepare(self.plain, optimizer, data)
        self.runner.register_for_checkpointing(scaling_state(self.model))

    def train(self) -> None:
        for x, y in self.data:
            with self.runner.accumulate(self.model):
                self.runner.backward(nn.functional.mse_loss(self.model(x), y))
                if self.runner.sync_gradients:
                    scaling_state(self.model).update()
                self.optimizer.step()
                self.optimizer.zero_grad()
