"""The quotient by symmetry: what it finds are symmetries, and the trees made with them are as fast as those made
without.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sennit.cluster import Topology, load
from sennit.collective.compile import compile_algorithm
from sennit.collective.synthesis import Forest, spanning_forest, synthesize
from sennit.collective.synthesis_bound import cut_bound
from sennit.collective.synthesis_network import Network, network_of
from sennit.collective.synthesis_symmetry import symmetries
from sennit.collective.verify import verify_algorithm, verify_schedule
from sennit.ir.collective import CollectiveName

CHECKED = settings(derandomize=True, deadline=None, max_examples=60)


def network(name: str, *links: str) -> Network:
    return network_of(Topology.of(load(name)), links or None)


@st.composite
def regular_networks(draw: st.DrawFn) -> Network:
    """Nodes that are alike, on a spine: each a circulant graph of its devices, a switch, or both; uplinks by some of
    the devices.
    """
    nodes, size = draw(st.integers(1, 3)), draw(st.sampled_from([2, 3, 4, 6]))
    capacity = st.integers(1, 6)
    links: dict[tuple[str, str], int] = {}
    steps = draw(st.lists(st.sampled_from(range(1, size)), unique=True, max_size=2))
    wires = {step: draw(capacity) for step in steps}
    switch, spine = draw(st.none() | capacity), draw(capacity)
    uplinks = draw(st.sampled_from([part for part in (1, 2, size) if size % part == 0]))
    for node in range(nodes):
        first = node * size
        for local in range(size):
            for step, width in wires.items():
                ends = f"device {first + local}", f"device {first + (local + step) % size}"
                links[ends] = links.get(ends, 0) + width
            if switch is not None or not wires:
                links[f"device {first + local}", f"switch {node}"] = switch or 1
            links[f"device {first + local}", f"nic {node} {local * uplinks // size}"] = spine
        for nic in range(uplinks):
            links[f"nic {node} {nic}", "spine"] = spine
    made = Network.of(nodes * size, links)
    return Network(made.names, made.devices, made.arcs, 1.0, tuple(rank // size for rank in range(made.devices)))


def check_forest(forest: Forest) -> None:
    """Every root has its share of trees, each spans, and the copies' ways add up to the trees' edges."""
    share = dict.fromkeys(forest.roots, 0)
    edges: dict[tuple[int, int], int] = {}
    for tree in forest.trees:
        share[tree.root] += tree.count
        reached = {tree.root}
        for tail, head in tree.edges:
            assert tail in reached
            assert head not in reached
            reached.add(head)
            edges[tail, head] = edges.get((tail, head), 0) + tree.count
        assert len(reached) == forest.network.devices
    assert set(share.values()) == {forest.share}
    ways: dict[tuple[int, int], int] = {}
    arcs = {(arc.tail, arc.head) for arc in forest.network.arcs}
    for way in forest.ways:
        assert all(ends in arcs for ends in zip(way.path, way.path[1:], strict=False))
        assert all(vertex >= forest.network.devices for vertex in way.path[1:-1])
        ways[way.path[0], way.path[-1]] = ways.get((way.path[0], way.path[-1]), 0) + way.count
    assert ways == edges


@CHECKED
@given(regular_networks())
def test_the_rate_is_that_of_the_general_method(net: Network) -> None:
    by_symmetry, general = spanning_forest(net), spanning_forest(net, quotient=False)
    check_forest(by_symmetry)
    assert by_symmetry.rate == general.rate
    assert by_symmetry.cut.ratio == general.cut.ratio


@CHECKED
@given(regular_networks())
def test_symmetries_keep_every_link_and_no_device(net: Network) -> None:
    group = symmetries(net)
    links = {(arc.tail, arc.head): arc.capacity for arc in net.arcs}
    for number, element in enumerate(group.elements):
        assert sorted(element) == list(range(len(net.names)))
        assert all(links[element[tail], element[head]] == width for (tail, head), width in links.items())
        assert not number or all(element[device] != device for device in range(net.devices))
    assert len(group.representatives) * len(group.elements) == net.devices
    everyone = range(net.devices)
    assert cut_bound(net, everyone, group.representatives).ratio == cut_bound(net, everyone).ratio


@pytest.mark.parametrize(
    ("net", "members"),
    [
        (network("dgx1-v100", "nvlink"), 4),
        (network("mi300x"), 8),
        (network("dgx-a100:2"), 16),
        (network("dgx2-v100:2"), 32),
        (network("gb200-nvl72"), 72),
        (network("mi300x").without("device 0", "device 3"), 1),
    ],
    ids=lambda value: str(value) if isinstance(value, int) else "network",
)
def test_clusters_and_their_symmetries(net: Network, members: int) -> None:
    assert len(symmetries(net).elements) == members
    forest = spanning_forest(net)
    check_forest(forest)
    assert forest.rate * forest.cut.ratio == 1


def test_what_looks_alike_but_is_not_is_no_symmetry() -> None:
    """Two nodes of two devices and a link between two of them: the nodes may change places, unless one has wider links."""
    for width, members in ((2, 2), (3, 1)):
        links = {(f"device {i}", "left"): 2 for i in (0, 1)} | {(f"device {i}", "right"): width for i in (2, 3)}
        net = Network.of(4, {**links, ("left", "right"): 1, ("device 0", "device 2"): 1})
        assert len(symmetries(net).elements) == members


@pytest.mark.parametrize("name", [CollectiveName.ALL_GATHER, CollectiveName.REDUCE_SCATTER, CollectiveName.ALL_REDUCE])
def test_seventy_two_devices_are_proved_on_the_schedule(name: CollectiveName) -> None:
    result = synthesize(network("gb200-nvl72"), name, in_place=True)
    assert result.certificate.optimal
    verify_algorithm(result.algorithm)
    assert verify_schedule(compile_algorithm(result.algorithm)).ranks == 72
