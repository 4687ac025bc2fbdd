"""The learned estimate of a fused group's time: a small graph network that knows how sure it is.

Nodes and edges are those of `features.py`. With h the node states, each layer lets a node attend to its producers, its readers and itself (GATv2, three kinds of edge):

    score(i, j) = a . leaky_relu(W_l h_i + W_r h_j + e_kind(i, j))          softmax over the j that i is joined to
    h_i        <- h_i + MLP(norm(sum_j score(i, j) W_v h_j))

The states are pooled by sum and by maximum, joined with the features of the whole group, and give the mean and the logarithm of the variance of

    log(seconds / seconds by parts)

trained by the absolute error, and the likelihood of a Laplace distribution for its scale. Several networks, trained from other seeds, give their mean, and their disagreement adds to the variance: a group unlike all that was seen gets a wide
interval, and the search can have it measured instead.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from sennit.errors import RunError
from sennit.fuse.features import GLOBAL_WIDTH, NODE_WIDTH, GroupFeatures, features_of
from sennit.fuse.kernel_cost import Estimate, Staged
from sennit.ir.strategy_check import Kernel

__all__ = ["Batch", "GraphNetwork", "LearnedCost", "NetworkConfig", "collate", "save_networks"]

_TOGETHER = 64


@dataclass(frozen=True, slots=True)
class NetworkConfig:
    width: int = 64
    heads: int = 4
    layers: int = 4
    dropout: float = 0.1


@dataclass(frozen=True, slots=True)
class Batch:
    """Padded groups: `nodes` [b, n, f], `present` [b, n], `joined` [b, n, n] (0 none, 1 producer, 2 reader, 3 itself), `whole` [b, g]."""

    nodes: Tensor
    present: Tensor
    joined: Tensor
    whole: Tensor

    def to(self, device: torch.device | str) -> Batch:
        return Batch(*(part.to(device) for part in (self.nodes, self.present, self.joined, self.whole)))


def collate(groups: Sequence[GroupFeatures]) -> Batch:
    most = max(len(group.nodes) for group in groups)
    nodes = torch.zeros(len(groups), most, NODE_WIDTH)
    present = torch.zeros(len(groups), most, dtype=torch.bool)
    joined = torch.zeros(len(groups), most, most, dtype=torch.long)
    for place, group in enumerate(groups):
        count = len(group.nodes)
        nodes[place, :count] = torch.from_numpy(group.nodes)
        present[place, :count] = True
        edges = torch.from_numpy(group.edges)
        if len(edges):
            joined[place, edges[:, 1], edges[:, 0]] = 1
            joined[place, edges[:, 0], edges[:, 1]] = 2
        joined[place, range(count), range(count)] = 3
    return Batch(nodes, present, joined, torch.stack([torch.from_numpy(group.whole) for group in groups]))


class _Layer(nn.Module):
    def __init__(self, config: NetworkConfig) -> None:
        super().__init__()
        width, self.heads = config.width, config.heads
        self.norm = nn.LayerNorm(width)
        self.left, self.right, self.value = nn.Linear(width, width), nn.Linear(width, width), nn.Linear(width, width)
        self.edge = nn.Embedding(4, width)
        self.attention = nn.Parameter(torch.randn(config.heads, width // config.heads) / math.sqrt(width))
        self.after = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, h: Tensor, joined: Tensor) -> Tensor:
        b, n, width = h.shape
        x = self.norm(h)
        pairs = self.left(x)[:, :, None] + self.right(x)[:, None] + self.edge(joined)
        pairs = F.leaky_relu(pairs, 0.2).view(b, n, n, self.heads, width // self.heads)
        scores = (pairs * self.attention).sum(-1).masked_fill((joined == 0)[..., None], -1e4)
        weights = scores.softmax(dim=2) * (joined != 0)[..., None]
        values = self.value(x).view(b, n, self.heads, width // self.heads)
        mixed = torch.einsum("bijh,bjhd->bihd", weights, values).reshape(b, n, width)
        out: Tensor = h + mixed
        change: Tensor = self.after(out)
        return out + change


class GraphNetwork(nn.Module):
    """Mean and log variance of log(seconds / seconds by parts)."""

    def __init__(self, config: NetworkConfig | None = None) -> None:
        super().__init__()
        self.config = config or NetworkConfig()
        width = self.config.width
        self.enter = nn.Linear(NODE_WIDTH, width)
        self.layers = nn.ModuleList(_Layer(self.config) for _ in range(self.config.layers))
        self.level = nn.BatchNorm1d(GLOBAL_WIDTH, affine=False)
        self.leave = nn.Sequential(
            nn.Linear(2 * width + GLOBAL_WIDTH, 2 * width),
            nn.GELU(),
            nn.Dropout(self.config.dropout),
            nn.Linear(2 * width, width),
            nn.GELU(),
            nn.Linear(width, 2),
        )

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        h = self.enter(batch.nodes)
        for layer in self.layers:
            h = layer(h, batch.joined)
        mask = batch.present[..., None]
        total = (h * mask).sum(1) / math.sqrt(8.0)
        most = h.masked_fill(~mask, -1e4).amax(1)
        mean, spread = self.leave(torch.cat([total, most, self.level(batch.whole)], dim=-1)).unbind(-1)
        return mean, spread.clamp(-8.0, 3.0)


class LearnedCost:
    """Kernels of a graph by trained networks; `KernelCost` for the search."""

    def __init__(self, staged: Staged, networks: Sequence[GraphNetwork]) -> None:
        self.staged, self.networks = staged, tuple(network.eval() for network in networks)

    @classmethod
    def load(cls, path: Path, staged: Staged) -> LearnedCost:
        """From the file that `save_networks` wrote."""
        found = torch.load(path, weights_only=True)
        config = NetworkConfig(**json.loads(found["config"]))
        if found["node_width"] != NODE_WIDTH or found["global_width"] != GLOBAL_WIDTH:
            raise RunError(
                f"{path} was trained on {found['node_width']} and {found['global_width']} features, not {NODE_WIDTH} and {GLOBAL_WIDTH}",
                fix="train the estimator again with benchmarks/fuse/train_estimator.py",
            )
        networks = []
        for weights in found["networks"]:
            network = GraphNetwork(config)
            network.load_state_dict(weights)
            networks.append(network)
        return cls(staged, networks)

    def estimate(self, kernel: Kernel, written: frozenset[str]) -> Estimate:
        return self.estimate_all([(kernel, written)])[0]

    def estimate_all(self, questions: Sequence[tuple[Kernel, frozenset[str]]]) -> list[Estimate]:
        """Kernels of like size go through the networks together."""
        groups = [features_of(kernel, written, self.staged) for kernel, written in questions]
        answers = [Estimate(0.0)] * len(groups)
        busy = sorted(
            (place for place, item in enumerate(groups) if item.compiled > 0.0), key=lambda p: len(groups[p].nodes)
        )
        for start in range(0, len(busy), _TOGETHER):
            places = busy[start : start + _TOGETHER]
            batch = collate([groups[place] for place in places])
            with torch.no_grad():
                found = [network(batch) for network in self.networks]
            means = torch.stack([mean for mean, _ in found])
            noise = torch.stack([spread.exp() for _, spread in found]).mean(0) + means.var(0, unbiased=False)
            for place, mean, variance in zip(places, means.mean(0).tolist(), noise.tolist(), strict=True):
                answers[place] = Estimate(groups[place].compiled * math.exp(mean), math.sqrt(variance))
        return answers


def save_networks(networks: Sequence[GraphNetwork], path: Path) -> None:
    """Weights in half precision: an estimate's error is far above their rounding."""
    torch.save(
        {
            "config": json.dumps(asdict(networks[0].config)),
            "node_width": NODE_WIDTH,
            "global_width": GLOBAL_WIDTH,
            "networks": [{name: value.half().cpu() for name, value in net.state_dict().items()} for net in networks],
        },
        path,
    )
