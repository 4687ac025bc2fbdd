"""Which ranks a multicast switch joins, and the wires of each to it.

A link of `cluster/` with a `multicast` rate leads to a switch that adds up what it reads from several devices and
writes one thing to many (NVLink SHARP). The rate is what a wire carries then, below its rate for plain transfers. Such
a switch joins the devices of one node.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from sennit.cluster import Topology
from sennit.errors import CollectiveError
from sennit.ir.mesh import print_ranges
from sennit.ir.one_sided import Multicast, OneSided, SwitchReduce

__all__ = ["SwitchWires", "has_switch", "require_switch", "switch_wires"]


@dataclass(frozen=True, slots=True)
class SwitchWires:
    """A device's wires to the switch and back."""

    up: int
    down: int


def switch_wires(topology: Topology, ranks: Iterable[int]) -> dict[int, SwitchWires] | None:
    """By rank: its wires to the switch that joins all of them; None where there is none."""
    members = sorted(set(ranks))
    if len(members) < 2 or topology.cluster.node_of(members[0]) != topology.cluster.node_of(members[-1]):
        return None
    found: dict[int, SwitchWires] = {}
    for place, rank in enumerate(members):
        other = members[place - 1]
        out, back = topology.route(rank, other), topology.route(other, rank)
        found[rank] = SwitchWires(out[0], back[-1])
        wires = [topology.wires[number] for number in (*out, *back)]
        if len(out) != 2 or len(back) != 2 or any(wire.multicast is None for wire in wires):
            return None
    return found


def has_switch(topology: Topology) -> bool:
    """Whether the devices of a node hang on a multicast switch."""
    return switch_wires(topology, range(topology.cluster.device.per_node)) is not None


def require_switch(program: OneSided, topology: Topology) -> None:
    """Raise `CollectiveError` where a multicast or reduction names ranks that no switch of the cluster joins."""
    known: set[tuple[int, ...]] = set()
    for ranked in program.ranks:
        for block, steps in enumerate(ranked.blocks):
            for number, step in enumerate(steps):
                if not isinstance(step, Multicast | SwitchReduce):
                    continue
                ranks = tuple(sorted({*step.ranks, ranked.rank}))
                if ranks not in known and switch_wires(topology, ranks) is None:
                    raise CollectiveError(
                        f"{topology.cluster.name} has no multicast switch that joins ranks {print_ranges(ranks)}",
                        where=f"program {program.name!r}, rank {ranked.rank}, block {block}, step {number}: {step}",
                        fix="use an algorithm without multicast, compile with switch=False, or a cluster whose link states a "
                        "multicast rate",
                    )
                known.add(ranks)
