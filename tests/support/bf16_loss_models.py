"""Small models that train under Lightning's own bf16 plugins: with weighted losses, and with metrics."""

from __future__ import annotations

import torch
from bf16_models import Model, classes, labels, mlp
from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics import Accuracy, MeanMetric
from torchmetrics.classification import MultilabelAUROC

# Losses with weights

SHARES = torch.tensor([0.3, 1.7, 0.9, 3.3])


class WeightedCrossEntropy(Model):
    data = staticmethod(classes)

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()
        self.loss_module: nn.Module = nn.CrossEntropyLoss(SHARES.clone())

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def loss(self, output: Tensor, y: Tensor) -> Tensor:
        return self.loss_module(output, y)


class WeightedFunctionalCrossEntropy(WeightedCrossEntropy):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shares", SHARES.clone())

    def loss(self, output: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(output, y, weight=self.shares)


class WeightedBcePositives(WeightedCrossEntropy):
    data = staticmethod(labels)

    def __init__(self) -> None:
        super().__init__()
        self.loss_module = nn.BCEWithLogitsLoss(pos_weight=SHARES.clone())


class FocalLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("alpha", SHARES.clone())
        self.register_buffer("gamma", torch.tensor(2.0))

    def forward(self, output: Tensor, y: Tensor) -> Tensor:
        log_p = F.log_softmax(output, -1)
        nll = F.nll_loss(log_p, y, weight=self.alpha, reduction="none")
        return ((1 - log_p.gather(1, y[:, None])[:, 0].exp()) ** self.gamma * nll).mean()


class WeightedFocal(WeightedCrossEntropy):
    def __init__(self) -> None:
        super().__init__()
        self.loss_module = FocalLoss()


class WeightedByWeightOfLoss(WeightedCrossEntropy):
    """The weight belongs to a loss of torch, and a function takes it."""

    def loss(self, output: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(output, y, weight=self.loss_module.weight)


class WeightedBySharedBuffer(WeightedCrossEntropy):
    """A loss of torch and a bare product of the model take one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shares", self.loss_module.weight)
        self.mix = nn.Parameter(torch.eye(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) * self.shares @ self.mix


# Metrics


class AccuracyInside(Model):
    data = staticmethod(classes)

    def __init__(self) -> None:
        super().__init__()
        self.net, self.metric = mlp(), Accuracy("multiclass", num_classes=4)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def loss(self, output: Tensor, y: Tensor) -> Tensor:
        self.metric.update(output, y)
        return super().loss(output, y) + 0 * self.metric.compute()


class MeanMetricInside(AccuracyInside):
    def __init__(self) -> None:
        super().__init__()
        self.metric = MeanMetric()

    def loss(self, output: Tensor, y: Tensor) -> Tensor:
        loss = Model.loss(self, output, y)
        self.metric.update(loss.detach())
        return loss / self.metric.compute()


class BinnedMetricInside(AccuracyInside):
    """Thresholds are a buffer of the metric."""

    data = staticmethod(labels)

    def __init__(self) -> None:
        super().__init__()
        self.metric = MultilabelAUROC(4, thresholds=20)

    def loss(self, output: Tensor, y: Tensor) -> Tensor:
        self.metric.update(output.detach(), y.int())
        return F.binary_cross_entropy_with_logits(output, y) * (2 - self.metric.compute())
