"""A GPT over bytes, of any size."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from typing_extensions import override

from lightning_fp8.examples.optimization import adamw_with_cosine
from lightning_fp8.examples.transformer_block import Block, check_heads, initialize

VOCABULARY = 256


class ByteGPT(LightningModule):
    """A decoder-only transformer that predicts the next byte. The defaults give 0.9 million parameters.

    It has ``layers * (12 * width**2 + 13 * width) + (2 * 256 + context + 2) * width`` parameters: the blocks are
    GPT-2's, and the embedding of 256 byte values is small. ``head`` does not share the embedding's weight.

    Args:
        layers: number of blocks.
        width: size of the residual stream, a multiple of ``heads``.
        heads: attention heads per block.
        context: longest input, in bytes.
        learning_rate: peak of AdamW's learning rate; linear warm-up, then cosine down to a tenth at the last step.
        warmup_steps: optimizer steps of warm-up.
        checkpoint_activations: keep only the inputs of blocks for backward, which recomputes each block.
        create_on_device: create the parameters in ``configure_model``, on the Trainer's device and in its precision's
            dtype from the start, rather than in the constructor, on the CPU in fp32.

    Raises:
        ValueError: if ``width`` is not a multiple of ``heads``.
    """

    def __init__(
        self,
        layers: int = 4,
        width: int = 128,
        heads: int = 4,
        context: int = 128,
        learning_rate: float = 1e-3,
        warmup_steps: int = 30,
        checkpoint_activations: bool = False,
        create_on_device: bool = False,
    ) -> None:
        super().__init__()
        check_heads("ByteGPT", width, heads)
        self.save_hyperparameters()
        self.layers, self.width, self.heads, self.context = layers, width, heads, context
        self.learning_rate = learning_rate
        self.warmup_steps = warmup_steps
        self.checkpoint_activations = checkpoint_activations
        if not create_on_device:
            self._create()

    @override
    def configure_model(self) -> None:
        """Create the parameters, if the constructor has not; only once, however many runs follow."""
        if not hasattr(self, "blocks"):
            self._create()

    def _create(self) -> None:
        self.byte_embedding = nn.Embedding(VOCABULARY, self.width)
        self.position_embedding = nn.Embedding(self.context, self.width)
        self.blocks = nn.ModuleList([Block(self.width, self.heads) for _ in range(self.layers)])
        self.norm = nn.LayerNorm(self.width)
        self.head = nn.Linear(self.width, VOCABULARY, bias=False)
        initialize(self)

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens ``[batch, time] int64`` -> logits ``[batch, time, 256]``."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.byte_embedding(tokens) + self.position_embedding(positions)
        for block in self.blocks:
            if self.checkpoint_activations:
                # nothing in a block draws random numbers
                x = checkpoint(block, x, use_reentrant=False, preserve_rng_state=False)
            else:
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
        return adamw_with_cosine(self, self.learning_rate, self.warmup_steps)
