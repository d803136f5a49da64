"""Networks of torch_geometric, and random graphs whose nodes they classify; only :func:`network` needs the package."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

KINDS = ("GCN", "GAT", "GraphSAGE", "PNA", "GPS")
NODES, CLASSES, FEATURES, HIDDEN = 512, 16, 32, 64


def graph(number: int) -> tuple[Tensor, Tensor, Tensor]:
    """Features, edges and labels: which of 16 features is largest at a node and its neighbours, with noise."""
    random = torch.Generator().manual_seed(number)
    edges = torch.randint(NODES, (2, 4 * NODES), generator=random)
    x, noise = torch.randn(NODES, FEATURES, generator=random), torch.randn(NODES, CLASSES, generator=random)
    around = x + torch.zeros_like(x).index_add(0, edges[1], x[edges[0]]) / 2
    return x, edges, (around[:, :CLASSES] + noise).argmax(1)


def communities(number: int) -> tuple[Tensor, Tensor, Tensor]:
    """Features, edges and labels, where most neighbours have a node's own class: their average tells it, too."""
    random, size = torch.Generator().manual_seed(number), NODES // CLASSES
    labels = torch.arange(NODES) // size
    x = torch.randn(NODES, FEATURES, generator=random) + nn.functional.one_hot(labels, FEATURES)
    edges = torch.randint(NODES, (2, 4 * NODES), generator=random)
    within = torch.randint(size, (4 * NODES,), generator=random) + size * labels[edges[0]]
    edges[1] = torch.where(torch.rand(4 * NODES, generator=random) < 0.75, within, edges[1])
    return x, edges, labels


def network(kind: str) -> nn.Module:
    """It gives, of a graph's features and edges, a value for each node and class."""
    import torch_geometric.nn as geometric
    from torch_geometric.utils import degree

    class Transformer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            parts = [geometric.MLP([HIDDEN, HIDDEN, HIDDEN], norm=None) for _ in range(2)]
            self.enter, self.leave = geometric.Linear(FEATURES, HIDDEN), geometric.Linear(HIDDEN, CLASSES)
            self.layers = nn.ModuleList(geometric.GPSConv(HIDDEN, geometric.GINConv(part), heads=4) for part in parts)

        def forward(self, x: Tensor, edges: Tensor) -> Tensor:
            x = self.enter(x)
            for layer in self.layers:
                x = layer(x, edges)
            return self.leave(x)

    if kind == "GPS":
        return Transformer()
    settings: dict[str, Any] = {"num_layers": 3, "out_channels": CLASSES}
    if kind == "PNA":
        degrees = degree(graph(0)[1][1], NODES, dtype=torch.long).bincount()
        settings |= {"aggregators": ["mean", "max", "std"], "scalers": ["identity", "amplification"], "deg": degrees}
    model: nn.Module = getattr(geometric, kind)(FEATURES, HIDDEN, **settings)
    return model
