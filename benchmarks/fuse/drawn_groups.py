"""Groups of operators, drawn from a captured training step: what the estimator learns from.

Half of them grow from a random operator along random edges, so that every legal shape of group occurs. The others are
the groups of random strategies, as a search meets them: greedy fusion under a random limit of size, then random moves.
Groups of one structure are drawn once.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from sennit.fuse.kernel_cost import Estimate
from sennit.fuse.kernel_torch import signature
from sennit.fuse.model import Channel, Class, StepModel
from sennit.fuse.moves import Limits, fused_greedily, has_detour, is_legal, random_move
from sennit.ir.dtype import TensorType
from sennit.ir.graph import Graph, Input, Output, OutputKind, Role, Value
from sennit.ir.strategy_check import Kernel

SIZES = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24)


class Free:
    """Costs nothing: drawing groups asks no times."""

    def estimate(self, kernel: Kernel, written: frozenset[str]) -> Estimate:
        return Estimate(0.0)


@dataclass(frozen=True)
class Drawn:
    """A kernel, the values of it that something outside reads, and the types of all that it touches."""

    key: str
    kernel: Kernel
    written: frozenset[str]
    types: dict[str, TensorType]

    def text(self) -> str:
        """As a graph: what the kernel reads are the inputs, what others read the results."""
        inputs = tuple(Input(Role.INPUT, Value(name, self.types[name]), name) for name in self.kernel.reads)
        outputs = tuple(Output(OutputKind.RESULT, name, name) for name in sorted(self.written))
        return str(Graph("group", inputs, self.kernel.body, outputs))


def drawn_groups(graph: Graph, seed: int) -> Iterator[Drawn | None]:
    """Endless; None for a draw that gave nothing new."""
    model = StepModel(graph, Free(), Channel(0.0, 0.0))
    types = graph.types()
    draw = random.Random(seed)
    seen: set[str] = set()
    while True:
        found = [_grown(model, draw)] if draw.random() < 0.9 else list(_of_a_strategy(model, draw))
        for places in found:
            written = _written(model, places)
            if not written or all(model.kind[place] is Class.VIEW for place in places):
                yield None
                continue
            kernel = Kernel(tuple(graph.ops[place] for place in sorted(places)))
            key = hashlib.sha256(signature(kernel, written, types).encode()).hexdigest()[:20]
            if key in seen:
                yield None
                continue
            seen.add(key)
            touched = {*kernel.reads, *(value.name for op in kernel.body for value in op.results)}
            yield Drawn(key, kernel, written, {name: types[name] for name in touched})


def _grown(model: StepModel, draw: random.Random) -> frozenset[int]:
    usable = [place for place, kind in enumerate(model.kind) if kind not in (Class.OTHER, Class.VIEW)]
    group = frozenset((draw.choice(usable),))
    for _ in range(draw.choice(SIZES)):
        member = draw.choice(sorted(group))
        around = [place for place in (*model.reads[member], *model.readers[member]) if place not in group]
        if not around:
            continue
        other = frozenset((draw.choice(around),))
        if is_legal(model, group | other, Limits()) and not has_detour(model, {}, group, other):
            group |= other
    return group


def _of_a_strategy(model: StepModel, draw: random.Random) -> Iterator[frozenset[int]]:
    limits = Limits(size=draw.choice((4, 8, 16, 48)))
    grouping = fused_greedily(model, limits)
    for _ in range(draw.choice((0, 20, 60))):
        grouping = random_move(model, grouping, draw, limits) or grouping
    groups = sorted(grouping.groups, key=min)
    yield from draw.sample(groups, min(9, len(groups)))


def _written(model: StepModel, places: frozenset[int]) -> frozenset[str]:
    return frozenset(
        value.name
        for place in places
        if place in model.outputs or any(reader not in places for reader in model.readers[place])
        for value in model.ops[place].results
    )


def in_turns(streams: dict[str, Iterator[Drawn | None]], patience: int = 300) -> Iterator[tuple[str, Any]]:
    """(name, group) from each stream in turn, until all have given nothing new `patience` times in a row; structures
    that two streams share come once.
    """
    seen: set[str] = set()
    while streams:
        for name, stream in list(streams.items()):
            for _ in range(patience):
                found = next(stream)
                if found is not None and found.key not in seen:
                    seen.add(found.key)
                    yield name, found
                    break
            else:
                del streams[name]
