"""The learned estimate of a fused group's time: a small graph network that knows how sure it is.

Nodes and edges are those of `features.py`. With h the node states, each layer lets a node attend to its producers, its
readers and itself (GATv2, three kinds of edge):

    score(i, j) = a . leaky_relu(W_l h_i + W_r h_j + e_kind(i, j))          softmax over the j that i is joined to
    h_i        <- h_i + MLP(norm(sum_j score(i, j) W_v h_j))

The states are pooled by sum and by maximum, joined with the features of the whole group, and give the mean and the
logarithm of the variance of

    log(seconds / seconds by parts)

trained by the absolute error, and the likelihood of a Laplace distribution for its scale. Boosted trees on the group's
features (`boosted_trees.py`), the mean of three forests of other seeds, predict the same. Networks and trees err on
other groups; forests and networks count alike, so that the networks' mean has a quarter of the answer. The variance is
the product of two scales, the networks' and one that trees learned from errors of others on models which those had not
seen, and the square of half the disagreement: a group unlike all that was seen gets a wide interval, and the search can
have it measured instead.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from sennit.errors import RunError
from sennit.fuse.boosted_trees import BoostedTrees, Forests
from sennit.fuse.features import GLOBAL_WIDTH, NODE_WIDTH, GroupFeatures, features_of
from sennit.fuse.kernel_cost import Estimate, Staged
from sennit.fuse.operator_class import is_attention
from sennit.ir.strategy_check import Kernel

__all__ = ["NETWORKS_SHARE", "Batch", "GraphNetwork", "LearnedCost", "NetworkConfig", "collate", "save_networks"]

_TOGETHER = 256
_UNSEEN = 0.3  # deviation of what the training data has nothing like
_FAR = 4.0  # deviations
NETWORKS_SHARE = 0.25  # of the logarithm; trees have the rest


@dataclass(frozen=True, slots=True)
class NetworkConfig:
    width: int = 64
    heads: int = 4
    layers: int = 4
    dropout: float = 0.1


@dataclass(frozen=True, slots=True)
class Batch:
    """Groups side by side:

    `nodes` [n, f], the group of each `owner` [n]; edges `into` a node, `out_of` another, of a `sort` (0 producer, 1
    reader, 2 itself), all [e]; `whole` [groups, g].
    """

    nodes: Tensor
    owner: Tensor
    into: Tensor
    out_of: Tensor
    sort: Tensor
    whole: Tensor

    def to(self, device: torch.device | str) -> Batch:
        parts = (self.nodes, self.owner, self.into, self.out_of, self.sort, self.whole)
        return Batch(*(part.to(device) for part in parts))


def collate(groups: Sequence[GroupFeatures]) -> Batch:
    counts = [len(group.nodes) for group in groups]
    starts = np.cumsum([0, *counts[:-1]])
    edges = np.concatenate([group.edges + start for group, start in zip(groups, starts, strict=True)])
    every = np.arange(sum(counts))
    into = np.concatenate([edges[:, 1], edges[:, 0], every])
    out_of = np.concatenate([edges[:, 0], edges[:, 1], every])
    return Batch(
        torch.from_numpy(np.concatenate([group.nodes for group in groups])),
        torch.from_numpy(np.repeat(np.arange(len(groups)), counts)),
        torch.from_numpy(into),
        torch.from_numpy(out_of),
        torch.from_numpy(np.repeat(np.arange(3), [len(edges), len(edges), len(every)])),
        torch.from_numpy(np.stack([group.whole for group in groups])),
    )


def _sum_by(values: Tensor, place: Tensor, count: int) -> Tensor:
    return values.new_zeros(count, *values.shape[1:]).index_add(0, place, values)


def _most_by(values: Tensor, place: Tensor, count: int) -> Tensor:
    index = place.view(-1, *[1] * (values.dim() - 1)).expand_as(values)
    empty = values.new_zeros(count, *values.shape[1:])
    return empty.scatter_reduce(0, index, values, "amax", include_self=False)


class _Layer(nn.Module):
    def __init__(self, config: NetworkConfig) -> None:
        super().__init__()
        width, self.heads = config.width, config.heads
        self.norm = nn.LayerNorm(width)
        self.left, self.right, self.value = nn.Linear(width, width), nn.Linear(width, width), nn.Linear(width, width)
        self.edge = nn.Embedding(3, width)
        self.attention = nn.Parameter(torch.randn(config.heads, width // config.heads) / math.sqrt(width))
        self.after = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, h: Tensor, batch: Batch) -> Tensor:
        n, width = h.shape
        x = self.norm(h)
        pairs = self.left(x)[batch.into] + self.right(x)[batch.out_of] + self.edge(batch.sort)
        pairs = F.leaky_relu(pairs, 0.2).view(-1, self.heads, width // self.heads)
        scores = (pairs * self.attention).sum(-1)
        scores = (scores - _most_by(scores.detach(), batch.into, n)[batch.into]).exp()
        weights = scores / _sum_by(scores, batch.into, n)[batch.into]
        values = self.value(x)[batch.out_of].view(-1, self.heads, width // self.heads)
        mixed = _sum_by((weights[..., None] * values).view(-1, width), batch.into, n)
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
        )
        self.say = nn.Linear(width, 2)
        nn.init.zeros_(self.say.weight)  # an untrained network says what the parts say
        nn.init.zeros_(self.say.bias)

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        h = self.enter(batch.nodes)
        for layer in self.layers:
            h = layer(h, batch)
        count = len(batch.whole)
        total = _sum_by(h, batch.owner, count) / math.sqrt(8.0)
        most = _most_by(h, batch.owner, count)
        # what training hardly had (a convolution behind something pointwise) is many deviations off, and may not carry
        # the answer away
        level = self.level(batch.whole).clamp(-_FAR, _FAR)
        found = self.leave(torch.cat([total, most, level], dim=-1))
        mean, spread = self.say(found).unbind(-1)
        return mean, spread.clamp(-8.0, 3.0)


class LearnedCost:
    """Kernels of a graph by trained networks; `KernelCost` for the search."""

    def __init__(self, staged: Staged, networks: Sequence[GraphNetwork], trees: Forests | None = None) -> None:
        self.staged, self.networks, self.trees = staged, tuple(network.eval() for network in networks), trees

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
        parts = found.get("trees")
        trees = None if parts is None else Forests(*(_read_trees(parts[name]) for name in _FORESTS))
        return cls(staged, networks, trees)

    def estimate(self, kernel: Kernel, written: frozenset[str]) -> Estimate:
        return self.estimate_all([(kernel, written)])[0]

    def estimate_all(self, questions: Sequence[tuple[Kernel, frozenset[str]]]) -> list[Estimate]:
        groups = [features_of(kernel, written, self.staged) for kernel, written in questions]
        answers = [Estimate(0.0)] * len(groups)
        busy = [place for place, item in enumerate(groups) if item.compiled > 0.0]
        # attention kernels are a library's, always alone, and no group that was learned from has one
        for place in [place for place in busy if is_attention(questions[place][0].body[-1])]:
            answers[place] = Estimate(self.staged.alone(questions[place][0].body[-1]), _UNSEEN)
            busy.remove(place)
        for start in range(0, len(busy), _TOGETHER):
            places = busy[start : start + _TOGETHER]
            batch = collate([groups[place] for place in places])
            with torch.no_grad():
                found = [network(batch) for network in self.networks]
            means = torch.stack([mean for mean, _ in found])
            noise = torch.stack([spread.exp() for _, spread in found]).mean(0) + means.var(0, unbiased=False)
            mean = means.mean(0)
            if self.trees is not None:
                mine = [groups[place] for place in places]
                other = torch.from_numpy(self.trees.predict(mine)).float()
                doubt = torch.from_numpy(self.trees.spread(mine)).float()
                noise = noise.sqrt() * doubt + (0.5 * (mean - other)) ** 2
                mean = NETWORKS_SHARE * mean + (1.0 - NETWORKS_SHARE) * other
            for place, middle, variance in zip(places, mean.tolist(), noise.tolist(), strict=True):
                answers[place] = Estimate(groups[place].compiled * math.exp(middle), math.sqrt(variance))
        return answers


def save_networks(networks: Sequence[GraphNetwork], path: Path, trees: Forests | None = None) -> None:
    """Weights in half precision, and the trees' numbers in what they need: an estimate's error is far above their
    rounding.
    """
    torch.save(
        {
            "config": json.dumps(asdict(networks[0].config)),
            "node_width": NODE_WIDTH,
            "global_width": GLOBAL_WIDTH,
            "networks": [{name: value.half().cpu() for name, value in net.state_dict().items()} for net in networks],
            "trees": None if trees is None else {name: _write_trees(getattr(trees, name)) for name in _FORESTS},
        },
        path,
    )


_FORESTS = ("measured", "guessed", "measured_spread", "guessed_spread")
_TREES = {
    "roots": torch.int32,
    "feature": torch.int16,
    "threshold": torch.float32,
    "left": torch.int32,
    "right": torch.int32,
    "value": torch.float32,
}


def _write_trees(trees: BoostedTrees) -> dict[str, Tensor | float]:
    arrays = {name: torch.from_numpy(getattr(trees, name)).to(kind) for name, kind in _TREES.items()}
    return {"constant": trees.constant, **arrays}


def _read_trees(parts: Mapping[str, Any]) -> BoostedTrees:
    arrays = {
        name: (parts[name].double() if kind.is_floating_point else parts[name].long()).numpy()
        for name, kind in _TREES.items()
    }
    return BoostedTrees(parts["constant"], **arrays)
