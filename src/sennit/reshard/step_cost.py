"""What one step moves, stages and copies, in elements.

On pieces of L elements before and M after, over a group of n devices:

| kind | received per device | messages | staging |
|---|---|---|---|
| slice, partial | 0 | 0 | 0 |
| all_to_all | L (1 - 1/n) | n - 1 | twice that: packed and not yet unpacked |
| all_gather | M - L | n - 1 | M - L |
| reduce_scatter | L (1 - 1/n) | n - 1 | L: packed |
| all_reduce | 2 L (1 - 1/n) | 2 (n - 1) | 0 |
| permute | L where the piece changes | 1 | 0 |
| exchange | counted from its transfers | counted | what the busiest device sends and receives |

The gather, scatter and reduce figures are those of the algorithms that move the least; libraries choose their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, prod

from sennit.ir.exchange import Count, traffic
from sennit.ir.layout import Layout, Split
from sennit.reshard.redistribution import Step, StepKind
from sennit.reshard.stream import staging

__all__ = ["StepCost", "held", "step_cost", "stream_cost", "streams"]


@dataclass(frozen=True, slots=True)
class StepCost:
    """`received` of all devices together; `busiest` what one device sends or receives at most; `copied` what one device
    packs and unpacks; elements.
    """

    received: float
    busiest: float
    messages: int
    staging: int
    copied: float


def held(layout: Layout) -> int:
    """The elements that all devices hold together: every element once for each coordinate of the axes that do not
    split.
    """
    split = prod(layout.mesh.size(name) for name, entry in layout.entries if isinstance(entry, Split))
    return prod(layout.shape) * (len(layout.mesh.devices) // split)


def step_cost(step: Step, count: Count = traffic) -> StepCost:
    if not step.kind.communicates:
        return StepCost(0, 0, 0, 0, step.result.local_elements())
    if step.kind in (StepKind.PERMUTE, StepKind.EXCHANGE):
        return _exchange_cost(step, count)
    group = prod(step.source.mesh.size(axis) for axis in step.axes)
    before, after = step.source.local_elements(), step.result.local_elements()
    away = (group - 1) / group
    total, share = held(step.source) * away, before * away
    match step.kind:
        case StepKind.ALL_TO_ALL:
            return StepCost(total, share, group - 1, ceil(2 * share), 2 * before)
        case StepKind.ALL_GATHER:
            grown = held(step.result) - held(step.source)
            return StepCost(grown, after - before, group - 1, after - before, after)
        case StepKind.REDUCE_SCATTER:
            return StepCost(total, share, group - 1, before, 2 * before)
        case StepKind.ALL_REDUCE:
            return StepCost(2 * total, 2 * share, 2 * (group - 1), 0, 2 * before)
        case _:
            raise AssertionError(f"no cost for {step.kind}")


def _exchange_cost(step: Step, count: Count) -> StepCost:
    moved = count(step.source, step.result)
    staged = moved.most_received + moved.most_sent
    buffers = 0 if step.kind is StepKind.PERMUTE else staged
    return StepCost(moved.received, max(moved.most_received, moved.most_sent), moved.messages, buffers, staged)


def stream_cost(parts: Sequence[Step], count: Count = traffic) -> StepCost:
    """Of steps that fill one result: together they move what the whole does.

    Parts of one shape are alike: one is counted.
    """
    whole = step_cost(parts[0], count)
    alike = {step.region.shape: step for step in parts if step.region is not None}
    most = max((staging(step) for step in alike.values()), default=whole.staging)
    return StepCost(whole.received, whole.busiest, whole.messages * len(parts), most, whole.copied)


def streams(steps: Sequence[Step]) -> tuple[tuple[Step, ...], ...]:
    """The steps in order, those together that fill one result."""
    groups: list[list[Step]] = []
    for step in steps:
        if groups and groups[-1][-1].continues_in(step):
            groups[-1].append(step)
        else:
            groups.append([step])
    return tuple(map(tuple, groups))
