"""A small GPT over bytes."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn

VOCABULARY = 256


class Block(nn.Module):
    """Pre-norm transformer block: ``x + attention(norm(x))``, then ``x + mlp(norm(x))``; x ``[batch, time, width]``."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm_mlp = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self._projected(x))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm_mlp(x))))

    def _projected(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.qkv(self.norm_attention(x)).chunk(3, dim=-1)


class ByteGPT(LightningModule):
    """A decoder-only transformer that predicts the next byte. The defaults make 0.9 million parameters.

    Args:
        layers: number of blocks.
        width: size of the residual stream, a multiple of ``heads``.
        heads: attention heads per block.
        context: longest input, in bytes.
        learning_rate: peak of AdamW's learning rate; linear warm-up, then cosine down to a tenth at the last step.
        warmup_steps: optimizer steps of warm-up.
    """

    def __init__(
        self,
        layers: int = 4,
        width: int = 128,
        heads: int = 4,
        context: int = 128,
        learning_rate: float = 1e-3,
        warmup_steps: int = 30,
    ) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"ByteGPT: `width` must be a multiple of `heads`, got width={width} and heads={heads}.")
        self.save_hyperparameters()
        self.context = context
        self.learning_rate = learning_rate
        self.warmup_steps = warmup_steps
        self.byte_embedding = nn.Embedding(VOCABULARY, width)
        self.position_embedding = nn.Embedding(context, width)
        blocks = [Block(width, heads) for _ in range(layers)]
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.apply(_initialize)
        for block in blocks:
            nn.init.normal_(block.out.weight, std=0.02 / math.sqrt(2 * layers))
            nn.init.normal_(block.down.weight, std=0.02 / math.sqrt(2 * layers))

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens ``[batch, time] int64`` -> logits ``[batch, time, 256]``."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.byte_embedding(tokens) + self.position_embedding(positions)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def loss(self, batch: Tensor) -> Tensor:
        """batch ``[batch, time + 1] uint8`` -> mean cross-entropy of the next byte, in nats."""
        tokens = batch.long()
        logits = self(tokens[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())

    def training_step(self, batch: Tensor, batch_index: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Tensor, batch_index: int) -> None:
        self.log("val_loss", self.loss(batch), prog_bar=True, batch_size=len(batch), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.learning_rate, betas=(0.9, 0.95))
        total = max(int(self.trainer.estimated_stepping_batches), self.warmup_steps + 1)

        def factor(step: int) -> float:
            if step < self.warmup_steps:
                return (step + 1) / self.warmup_steps
            progress = min(1.0, (step - self.warmup_steps) / (total - self.warmup_steps))
            return 0.1 + 0.45 * (1 + math.cos(math.pi * progress))

        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def _initialize(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
