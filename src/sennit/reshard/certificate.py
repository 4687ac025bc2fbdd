"""What the steps of a redistribution cost, and what no redistribution can beat.

`step_cost.py` counts a step; this file adds up, and has the bounds.

**Least received.** A device of the target lacks |T(d) - S(d)| elements and must receive them. With sums pending over P
parts that the target wants resolved: to bring P parts of an element together takes P - 1 receptions, and each of the
other R - 1 devices that need it takes one after that. So P + R - 2 for each element (a valid bound, met by
reduce_scatter and by all_reduce on replicas that share the work), and one more where source and target have no device
in common. Sums that stay pending count as separate arrays whose parts stay at their coordinates.

`received` is the total over all devices, divided by the number of devices of the target.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from sennit.ir.exchange import Count, traffic
from sennit.ir.layout import Layout, Split
from sennit.reshard.redistribution import Candidate, Certificate, Step
from sennit.reshard.step_cost import held, stream_cost, streams
from sennit.reshard.timing import Timing

__all__ = ["certify", "least_received"]


def certify(
    candidate: Candidate,
    steps: Sequence[Step],
    bounds: tuple[float, int],
    *,
    devices: int,
    itemsize: int,
    timing: Timing,
    count: Count = traffic,
) -> Certificate:
    """The certificate of a sequence of steps.

    `bounds` are the least received, per device, and the bound of the peak.
    """
    together = streams(steps)
    costs = [stream_cost(parts, count) for parts in together]
    layouts = {layout for parts in together for layout in (parts[0].source, parts[0].result)}
    return Certificate(
        candidate=candidate,
        received=sum(cost.received for cost in costs) / devices,
        received_bound=bounds[0],
        peak=max((layout.local_elements() for layout in layouts), default=bounds[1]),
        peak_bound=bounds[1],
        staging=max((cost.staging for cost in costs), default=0),
        messages=sum(cost.messages for cost in costs),
        seconds=sum(timing.seconds(parts, cost, itemsize) for parts, cost in zip(together, costs, strict=True)),
    )


def least_received(source: Layout, target: Layout, count: Count = traffic) -> float:
    """The elements that devices must receive at least, in total over the number of devices of the target."""
    devices = len(target.mesh.devices)
    same = set(source.mesh.devices) & set(target.mesh.devices)
    kept = dict(source.pending) if source.mesh == target.mesh else {}
    kept = {axis: op for axis, op in kept.items() if dict(target.pending).get(axis) is op}
    resolved = [axis for axis, _ in source.pending if axis not in kept]
    if not resolved:
        staying = {name: entry for name, entry in target.entries if isinstance(entry, Split) or name in kept}
        return count(source, Layout.make(target.mesh, target.shape, staying)).received / devices
    parts = prod(source.mesh.size(axis) for axis in resolved)
    separate = prod(source.mesh.size(axis) for axis in kept)
    elements = prod(target.shape) * separate
    return (elements * (parts - 2 + (0 if same else 1)) + held(target)) / devices
