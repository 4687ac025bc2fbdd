"""What the steps of a redistribution cost, and what no redistribution can beat.

Per step, on pieces of L elements before and M after, over a group of n devices:

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

**Least received.** A device of the target lacks |T(d) - S(d)| elements and must receive them. With sums pending over P parts
that the target wants resolved: to bring P parts of an element together takes P - 1 receptions, and each of the other R - 1
devices that need it takes one after that. So P + R - 2 for each element (a valid bound, met by reduce_scatter and by
all_reduce on replicas that share the work), and one more where source and target have no device in common. Sums that stay
pending count as separate arrays whose parts stay at their coordinates.

`received` is the total over all devices, divided by the number of devices of the target.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, prod

from sennit.ir.layout import Layout
from sennit.reshard.exchange import traffic
from sennit.reshard.link_cost import LinkCost
from sennit.reshard.redistribution import Candidate, Certificate, Step, StepKind
from sennit.reshard.stream import staging

__all__ = ["StepCost", "certify", "least_received", "step_cost"]


@dataclass(frozen=True, slots=True)
class StepCost:
    """`received` of all devices together; `busiest` what one device sends or receives at most; elements."""

    received: float
    busiest: float
    messages: int
    staging: int
    copied: float


def certify(
    candidate: Candidate,
    steps: Sequence[Step],
    bounds: tuple[float, int],
    *,
    devices: int,
    itemsize: int,
    link: LinkCost,
) -> Certificate:
    """The certificate of a sequence of steps. `bounds` are the least received, per device, and the bound of the peak."""
    costs = [_part_costs(parts) if parts[0].region is not None else step_cost(parts[0]) for parts in _streams(steps)]
    pieces = [layout.local_elements() for step in steps for layout in (step.source, step.result)]
    seconds = [link.seconds(c.messages, c.busiest * itemsize, c.copied * itemsize) for c in costs]
    return Certificate(
        candidate=candidate,
        received=sum(cost.received for cost in costs) / devices,
        received_bound=bounds[0],
        peak=max(pieces, default=bounds[1]),
        peak_bound=bounds[1],
        staging=max((cost.staging for cost in costs), default=0),
        messages=sum(cost.messages for cost in costs),
        seconds=sum(seconds),
    )


def step_cost(step: Step) -> StepCost:
    devices = len(step.source.mesh.devices)
    group = prod(step.source.mesh.size(axis) for axis in step.axes)
    if not step.kind.communicates:
        return StepCost(0, 0, 0, 0, step.result.local_elements())
    if step.kind in (StepKind.PERMUTE, StepKind.EXCHANGE):
        return _exchange_cost(step)
    before, after = step.source.local_elements(), step.result.local_elements()
    share = before * (group - 1) / group
    match step.kind:
        case StepKind.ALL_TO_ALL:
            return StepCost(share * devices, share, group - 1, ceil(2 * share), 2 * before)
        case StepKind.ALL_GATHER:
            return StepCost((after - before) * devices, after - before, group - 1, after - before, after)
        case StepKind.REDUCE_SCATTER:
            return StepCost(share * devices, share, group - 1, before, 2 * before)
        case StepKind.ALL_REDUCE:
            return StepCost(2 * share * devices, 2 * share, 2 * (group - 1), 0, 2 * before)
        case _:
            raise AssertionError(f"no cost for {step.kind}")


def _exchange_cost(step: Step) -> StepCost:
    moved = traffic(step.source, step.result)
    staged = moved.most_received + moved.most_sent
    buffers = 0 if step.kind is StepKind.PERMUTE else staged
    return StepCost(moved.received, max(moved.most_received, moved.most_sent), moved.messages, buffers, staged)


def _part_costs(parts: Sequence[Step]) -> StepCost:
    """Of an exchange in parts: together they move what the whole does. Parts of one shape are alike, so one is counted."""
    whole = _exchange_cost(parts[0])
    alike = {step.region.shape: step for step in parts if step.region is not None}
    most = max(staging(step) for step in alike.values())
    return StepCost(whole.received, whole.busiest, whole.messages * len(parts), most, whole.copied)


def _streams(steps: Sequence[Step]) -> list[list[Step]]:
    """The steps, those together that fill one result."""
    streams: list[list[Step]] = []
    for step in steps:
        if streams and streams[-1][-1].continues_in(step):
            streams[-1].append(step)
        else:
            streams.append([step])
    return streams


def least_received(source: Layout, target: Layout) -> float:
    """The elements that devices must receive at least, in total over the number of devices of the target."""
    devices = len(target.mesh.devices)
    same = set(source.mesh.devices) & set(target.mesh.devices)
    kept = dict(source.pending) if source.mesh == target.mesh else {}
    kept = {axis: op for axis, op in kept.items() if dict(target.pending).get(axis) is op}
    resolved = [axis for axis, _ in source.pending if axis not in kept]
    if not resolved:
        entries = {name: entry for name, entry in source.entries if name in kept}
        plain = Layout.make(
            target.mesh, target.shape, {n: e for n, e in target.entries if n not in dict(target.pending)}
        )
        for name, entry in entries.items():
            plain = plain.with_entry(name, entry)
        return traffic(source, plain).received / devices
    parts = prod(source.mesh.size(axis) for axis in resolved)
    separate = prod(source.mesh.size(axis) for axis in kept)
    held = sum(prod(target.local_shape(point)) for point in target.mesh.points())
    elements = prod(target.shape) * separate
    return (elements * (parts - 2 + (0 if same else 1)) + held) / devices
