"""Run a redistribution on local gloo ranks and check it: what `sennit reshard --run` does.

Each rank makes its own piece of the source from the indices that it holds, runs the plan, and compares its piece of the
target with what the indices there say; no process ever holds the whole array. Element i of part k of a pending value is
a small integer that depends on both, so that a piece out of place, a part that is missing and a part that counts twice
all show.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import reduce
from itertools import product

import numpy as np
import torch
import torch.distributed as dist

from sennit.cluster.ranks_torch import GlooRanks
from sennit.ir.dtype import DType
from sennit.ir.layout import Layout, Pending, Reduction
from sennit.ir.layout_numpy import Array, identity_of, reduce_arrays
from sennit.ir.mesh import Point
from sennit.reshard.execute_torch import Executor
from sennit.reshard.redistribution import Redistribution
from sennit.reshard.shared import SharedMaker

__all__ = ["RankRun", "run_on_ranks"]


@dataclass(frozen=True, slots=True)
class RankRun:
    """The seconds of each repetition, the slowest rank's; and the ranks whose piece of the target was wrong."""

    ranks: int
    seconds: tuple[float, ...]
    wrong: tuple[int, ...]

    @property
    def median(self) -> float:
        return sorted(self.seconds)[len(self.seconds) // 2]


def run_on_ranks(
    redistribution: Redistribution,
    dtype: DType,
    *,
    repeats: int = 5,
    timeout: float = 120.0,
    shared: SharedMaker | None = None,
) -> RankRun:
    """Run a plan on as many gloo processes as its devices need; device d is rank d. `shared` as in `Executor`."""
    count = 1 + max(redistribution.source.mesh.devices + redistribution.target.mesh.devices)
    with GlooRanks(count, timeout=timeout, preload=[__name__]) as ranks:
        answers = ranks.call(_run, str(redistribution), dtype, repeats, shared)
    seconds = tuple(max(times) for times in zip(*(times for times, _ in answers), strict=True))
    return RankRun(count, seconds, tuple(rank for rank, (_, right) in enumerate(answers) if not right))


def _run(rank: int, text: str, dtype: DType, repeats: int, shared: SharedMaker | None) -> tuple[list[float], bool]:
    """What each rank does: the seconds of each repetition, and whether its piece is right."""
    redistribution = Redistribution.parse(text)
    kind = getattr(torch, dtype.torch_name)
    source, target = redistribution.source, redistribution.target
    given = torch.empty(0, dtype=kind)
    if rank in source.mesh.devices:
        given = torch.from_numpy(_given(source, source.mesh.coordinate(rank))).to(kind)
    executor = Executor(shared=shared)
    found = executor.run(redistribution, given)  # the first run plans and agrees
    seconds: list[float] = []
    for _ in range(repeats):
        dist.barrier()
        begin = time.perf_counter()
        found = executor.run(redistribution, given)
        seconds.append(time.perf_counter() - begin)
    if rank not in target.mesh.devices:
        return seconds, True
    wanted = torch.from_numpy(_wanted(source, target, target.mesh.coordinate(rank), dtype)).to(kind)
    return seconds, found.shape == wanted.shape and bool(torch.equal(found, wanted))


# ---- values ----------------------------------------------------------------------------------------------------------


def _values(layout: Layout, point: Point, part: int) -> Array:
    """What one part of the array holds at the indices of a piece: 0 and 1, or -1 and 1 where they are multiplied."""
    flat = np.zeros((1,) * len(layout.shape), dtype=np.int64)
    for dim in range(len(layout.shape)):
        indices = layout.indices(dim, point).reshape([-1 if other == dim else 1 for other in range(len(layout.shape))])
        flat = flat * layout.shape[dim] + indices
    mixed = (flat + 1) * 2654435761 + (part + 1) * 40503 * (flat + 7)
    return np.asarray((mixed >> 7) % 2)


def _given(source: Layout, point: Point) -> Array:
    values = _values(source, point, _part(source, point))
    return _for_product(values) if any(op is Reduction.PROD for _, op in source.pending) else values


def _part(layout: Layout, point: Point) -> int:
    part = 0
    for name, _ in layout.pending:
        part = part * layout.mesh.size(name) + point[layout.mesh.index(name)]
    return part


def _wanted(source: Layout, target: Layout, point: Point, dtype: DType) -> Array:
    """The piece of the target: parts reduced over the axes that are resolved, the own part of those that stay pending."""
    stay = {
        name for name, entry in source.pending if source.mesh == target.mesh and target.entry(name) == Pending(entry)
    }
    choices = [
        [point[target.mesh.index(name)]] if name in stay else list(range(source.mesh.size(name)))
        for name, _ in source.pending
    ]
    sizes = [source.mesh.size(name) for name, _ in source.pending]
    parts = [
        reduce(lambda part, pair: part * pair[0] + pair[1], zip(sizes, c, strict=True), 0) for c in product(*choices)
    ]
    ops = [op for _, op in source.pending]
    arrays = [_values(target, point, part) for part in parts]
    if Reduction.PROD in ops:
        arrays = [_for_product(array) for array in arrays]
    whole = reduce(lambda left, right: reduce_arrays(ops[0], left, right), arrays)
    for name, op in target.pending:
        if name not in stay and point[target.mesh.index(name)] != 0:
            kind = np.dtype(np.float64) if dtype.is_float else np.dtype(np.int64)
            whole = np.full(whole.shape, identity_of(op, kind), dtype=kind)
    return whole


def _for_product(values: Array) -> Array:
    return np.asarray(1 - 2 * values)
