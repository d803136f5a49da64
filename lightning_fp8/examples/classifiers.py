"""Two transformers that classify images: torch's own encoder, and a vision transformer."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy

from lightning_fp8.examples.optimization import adamw_with_cosine
from lightning_fp8.examples.transformer_block import Block, check_heads, initialize


class Classifier(LightningModule):
    """Base class for training a model of images ``[batch, height, width]`` -> logits ``[batch, classes]``.

    Logs ``train_loss``, ``val_loss`` (cross-entropy, nats) and ``val_accuracy`` (share of images).
    """

    def __init__(self, classes: int, learning_rate: float, warmup_steps: int) -> None:
        super().__init__()
        self.learning_rate = learning_rate
        self.warmup_steps = warmup_steps
        self.val_accuracy = MulticlassAccuracy(classes, average="micro")

    def training_step(self, batch: tuple[Tensor, Tensor], batch_index: int) -> Tensor:
        images, labels = batch
        loss = F.cross_entropy(self(images).float(), labels)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_index: int) -> None:
        images, labels = batch
        logits = self(images).float()
        self.val_accuracy(logits, labels)
        self.log("val_loss", F.cross_entropy(logits, labels), prog_bar=True, batch_size=len(images), sync_dist=True)
        self.log("val_accuracy", self.val_accuracy, prog_bar=True, batch_size=len(images))

    def configure_optimizers(self) -> Any:
        return adamw_with_cosine(self, self.learning_rate, self.warmup_steps)


class EncoderClassifier(Classifier):
    """``nn.TransformerEncoder`` over an image's rows, one token each; the head classifies the mean of its outputs.

    The defaults give 0.1 million parameters.

    Args:
        size: edge of an image in pixels.
        classes: number of classes.
        layers: encoder layers.
        width: size of the residual stream, a multiple of ``heads``.
        heads: attention heads per layer.
        dropout: share of activations that is dropped in training.
        learning_rate: peak of AdamW's learning rate; linear warm-up, then cosine down to a tenth at the last step.
        warmup_steps: optimizer steps of warm-up.

    Raises:
        ValueError: if ``width`` is not a multiple of ``heads``.
    """

    def __init__(
        self,
        size: int = 8,
        classes: int = 10,
        layers: int = 2,
        width: int = 64,
        heads: int = 4,
        dropout: float = 0.0,
        learning_rate: float = 2e-3,
        warmup_steps: int = 30,
    ) -> None:
        super().__init__(classes, learning_rate, warmup_steps)
        check_heads("EncoderClassifier", width, heads)
        self.save_hyperparameters()
        self.embedding = nn.Linear(size, width)
        # about as large as an embedded row, as the meaning of a row depends on its position
        self.positions = nn.Parameter(0.5 * torch.randn(size, width))
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout, "gelu", batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers)
        self.head = nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        """images ``[batch, size, size]`` -> logits ``[batch, classes]``."""
        rows = self.encoder(self.embedding(images) + self.positions)
        return self.head(rows.mean(1))


class VisionTransformer(Classifier):
    """A transformer over square patches of a one-channel image, embedded by a linear layer, with a class token.

    The defaults give 0.8 million parameters.

    Args:
        size: edge of an image in pixels, a multiple of ``patch``.
        patch: edge of a patch in pixels.
        classes: number of classes.
        layers: number of blocks.
        width: size of the residual stream, a multiple of ``heads``.
        heads: attention heads per block.
        learning_rate: peak of AdamW's learning rate; linear warm-up, then cosine down to a tenth at the last step.
        warmup_steps: optimizer steps of warm-up.

    Raises:
        ValueError: if ``width`` is not a multiple of ``heads``, or ``size`` not a multiple of ``patch``.
    """

    def __init__(
        self,
        size: int = 32,
        patch: int = 8,
        classes: int = 10,
        layers: int = 4,
        width: int = 128,
        heads: int = 4,
        learning_rate: float = 1e-3,
        warmup_steps: int = 30,
    ) -> None:
        super().__init__(classes, learning_rate, warmup_steps)
        check_heads("VisionTransformer", width, heads)
        if size % patch:
            raise ValueError(
                f"VisionTransformer: `size` must be a multiple of `patch`, got size={size} and patch={patch}."
            )
        self.save_hyperparameters()
        self.patch = patch
        self.embedding = nn.Linear(patch * patch, width)
        self.class_token = nn.Parameter(torch.zeros(width))
        self.positions = nn.Parameter(0.02 * torch.randn(1 + (size // patch) ** 2, width))
        self.blocks = nn.ModuleList([Block(width, heads, causal=False) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)
        initialize(self)

    def forward(self, images: Tensor) -> Tensor:
        """images ``[batch, size, size]`` -> logits ``[batch, classes]``."""
        patches = images.unfold(1, self.patch, self.patch).unfold(2, self.patch, self.patch)
        # [batch, rows, columns, patch, patch] -> [batch, tokens, patch * patch]
        tokens = self.embedding(patches.flatten(3).flatten(1, 2))
        x = torch.cat([self.class_token.expand(len(tokens), 1, -1), tokens], dim=1) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x[:, 0]))
