"""An exchange in parts, so that what is packed and unpacked at one time stays within a budget.

A dim is made of units in which neither layout changes hands (`labels.py`). Taking the same part of every unit, every
transfer shrinks in proportion: all devices stay busy in every part, and the staging of a part that is 1/k of the units
is 1/k of the whole. So the parts are chosen without looking at transfers: the first dim whose units are long enough is
cut; where none is, the longest units are cut to single indices and the next dim is tried. Only where single indices of
all units together are too much are the units taken in several groups, each group counted.

The least possible staging is that of one element: what the busiest device sends and receives of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from sennit.errors import LayoutError
from sennit.ir.exchange import traffic, transfers
from sennit.ir.labels import digits_of, dim_pairs
from sennit.ir.region import Interval, Region
from sennit.reshard.redistribution import Step, StepKind

__all__ = ["staging", "stream"]


def stream(step: Step, budget: int, itemsize: int) -> tuple[Step, ...]:
    """An exchange as exchanges of parts, each with at most `budget` bytes staged on any device."""
    limit = budget // itemsize
    counted = traffic(step.source, step.result)
    whole = counted.most_received + counted.most_sent
    if whole <= limit:
        return (step,)
    shape = step.source.shape
    units = [
        dim_pairs(size, digits_of(step.source, dim), digits_of(step.result, dim)).unit for dim, size in enumerate(shape)
    ]
    widths = _widths(units, whole, limit)
    # a short last unit, or single indices of every unit: the proportion is no bound, so the parts are counted
    exact = widths == [1] * len(shape) or any(size % unit for size, unit in zip(shape, units, strict=True))
    parts = (Region(dims) for dims in product(*map(_parts_of_dim, shape, units, widths)))
    streamed: list[Step] = []
    for part in parts:
        piece = Step(StepKind.EXCHANGE, step.axes, step.source, step.result, part)
        streamed += _within_budget(piece, budget, itemsize) if exact else (piece,)
    return tuple(streamed)


def staging(step: Step) -> int:
    """The most elements that one device sends and receives in an exchange of a part."""
    load: dict[int, int] = {}
    for transfer in transfers(step.source, step.result, step.region):
        if transfer.sender != transfer.receiver:
            for device in (transfer.sender, transfer.receiver):
                load[device] = load.get(device, 0) + transfer.region.size
    return max(load.values(), default=0)


def _widths(units: list[int], whole: int, budget: int) -> list[int]:
    """How much of each unit a part takes, so that the staging is at most the budget, or 1 in every dim."""
    widths = list(units)
    left = whole
    long_enough = [dim for dim, unit in enumerate(units) if unit * budget >= whole]
    for dim in long_enough or sorted(range(len(units)), key=lambda dim: -units[dim]):
        if left <= budget:
            break
        widths[dim] = max(1, units[dim] * budget // left)
        left = -(-left * widths[dim] // units[dim])
    return widths


def _parts_of_dim(size: int, unit: int, width: int) -> list[tuple[Interval, ...]]:
    """The parts of a dim: each takes the same `width` indices of every unit."""
    if width >= unit:
        return [((0, size),)] if size else [()]
    parts = []
    for low in range(0, unit, width):
        starts = range(low, size, unit)
        parts.append(tuple((start, min(start + min(width, unit - low), size)) for start in starts))
    return parts


def _within_budget(step: Step, budget: int, itemsize: int) -> Iterator[Step]:
    """The exchange of a part, or where it is too much of its halves; halving ends at one element."""
    assert step.region is not None
    need = staging(step) * itemsize
    if need <= budget:
        yield step
        return
    lengths = step.region.shape
    if max(lengths, default=1) == 1:
        raise LayoutError(
            f"the budget is {budget} bytes, and the busiest device stages {need} bytes for one element alone",
            where=f"from {step.source} to {step.result}, elements of {itemsize} bytes",
            fix=f"allow {need} bytes, the least possible, or more",
        )
    dim = lengths.index(max(lengths))
    indices = step.region.indices()
    for half in (indices[dim][: lengths[dim] // 2], indices[dim][lengths[dim] // 2 :]):
        part = Region.of_indices([*indices[:dim], half, *indices[dim + 1 :]])
        yield from _within_budget(Step(step.kind, step.axes, step.source, step.result, part), budget, itemsize)
