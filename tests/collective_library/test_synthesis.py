"""The synthesiser against brute force over all cuts, and against the verifier on real topologies."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sennit.cluster import Topology, load
from sennit.collective.compile import compile_algorithm
from sennit.collective.synthesis import Forest, spanning_forest, synthesize
from sennit.collective.synthesis_all_to_all import synthesize_all_to_all
from sennit.collective.synthesis_bound import cut_bound
from sennit.collective.synthesis_flow import Residual, add_edge, augment, reachable
from sennit.collective.synthesis_network import Arc, Network, network_of
from sennit.collective.verify import verify_algorithm, verify_schedule
from sennit.errors import CollectiveError
from sennit.ir.collective import CollectiveName

CHECKED = settings(derandomize=True, deadline=None, max_examples=40)
TREES = (
    CollectiveName.ALL_GATHER,
    CollectiveName.REDUCE_SCATTER,
    CollectiveName.ALL_REDUCE,
    CollectiveName.BROADCAST,
    CollectiveName.REDUCE,
)


def network(name: str, links: Sequence[str] | None = None) -> Network:
    return network_of(Topology.of(load(name)), links)


@st.composite
def networks(draw: st.DrawFn, *, switches: int, symmetric: bool) -> Network:
    """A ring through all vertices, so that all is reached, and random links on top."""
    devices = draw(st.integers(2, 4))
    count = devices + draw(st.integers(0, switches))
    capacity = st.integers(1, 5)
    order = draw(st.permutations(range(count)))
    links = {(order[i], order[(i + 1) % count]): draw(capacity) for i in range(count)}
    pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
    for pair in draw(st.lists(st.sampled_from(pairs), max_size=6, unique=True)):
        links.setdefault(pair, draw(capacity))
    if symmetric:
        links = {(head, tail): capacity for (tail, head), capacity in links.items()} | links
        links = {(tail, head): max(capacity, links[head, tail]) for (tail, head), capacity in links.items()}
    names = tuple(f"device {v}" if v < devices else f"switch {v}" for v in range(count))
    return Network(names, devices, tuple(Arc(*ends, capacity) for ends, capacity in links.items()))


def brute_force_bound(net: Network, roots: Sequence[int]) -> Fraction:
    worst = Fraction(0)
    for size in range(1, len(net.names)):
        for cut in combinations(range(len(net.names)), size):
            if set(range(net.devices)) <= set(cut) or not (held := sum(root in cut for root in roots)):
                continue
            worst = max(worst, Fraction(held, net.bandwidth_out(cut)))
    return worst


def check_forest(forest: Forest) -> None:
    """Trees span, `share` from each root, and what they put on each link is what the rate says it can carry."""
    net = forest.network
    for tree in forest.trees:
        reached = {tree.root}
        for tail, head in tree.edges:
            assert tail in reached
            assert head not in reached
            reached.add(head)
        assert reached == set(range(net.devices))
    for root in forest.roots:
        assert sum(tree.count for tree in forest.trees if tree.root == root) == forest.share
    carried: dict[tuple[int, int], int] = {}
    for way in forest.ways:
        assert all(vertex >= net.devices for vertex in way.path[1:-1]), "only switches are passed through"
        ends = way.path[0], way.path[-1]
        carried[ends] = carried.get(ends, 0) + way.count
    wanted: dict[tuple[int, int], int] = {}
    for tree in forest.trees:
        for edge in tree.edges:
            wanted[edge] = wanted.get(edge, 0) + tree.count
    assert carried == wanted
    capacities = {(arc.tail, arc.head): arc.capacity for arc in net.arcs}
    for ends, load_of_link in forest.load().items():
        assert load_of_link * forest.rate <= capacities[ends] * forest.share


@CHECKED
@given(st.data())
def test_maximum_flow_equals_the_least_cut(data: st.DataObject) -> None:
    net = data.draw(networks(switches=3, symmetric=False))
    residual: Residual = [{} for _ in net.names]
    for arc in net.arcs:
        add_edge(residual, arc.tail, arc.head, arc.capacity)
    others = range(2, len(net.names))
    least = min(net.bandwidth_out([0, *more]) for size in range(len(others) + 1) for more in combinations(others, size))
    assert augment(residual, 0, 1, 10**9) == least
    assert net.bandwidth_out(reachable(residual, 0)) == least


@CHECKED
@given(networks(switches=3, symmetric=False), st.data())
def test_the_bound_is_the_worst_of_all_cuts(net: Network, data: st.DataObject) -> None:
    roots = data.draw(st.lists(st.integers(0, net.devices - 1), min_size=1, unique=True))
    cut = cut_bound(net, roots)
    assert cut.ratio == brute_force_bound(net, roots)
    assert cut.bandwidth == net.bandwidth_out(cut.vertices)
    assert cut.roots == sum(root in cut.vertices for root in roots)


@CHECKED
@given(networks(switches=3, symmetric=True))
def test_trees_reach_the_bound_where_links_are_the_same_both_ways(net: Network) -> None:
    forest = spanning_forest(net)
    check_forest(forest)
    assert forest.rate == 1 / brute_force_bound(net, forest.roots)


@CHECKED
@given(networks(switches=0, symmetric=False), st.data())
def test_trees_reach_the_bound_of_any_network_without_switches(net: Network, data: st.DataObject) -> None:
    roots = data.draw(st.lists(st.integers(0, net.devices - 1), min_size=1, unique=True))
    forest = spanning_forest(net, roots)
    check_forest(forest)
    assert forest.rate == 1 / brute_force_bound(net, roots)


@CHECKED
@given(networks(switches=3, symmetric=False))
def test_trees_with_switches_that_send_more_than_they_receive_stay_within_the_bound(net: Network) -> None:
    forest = spanning_forest(net)
    check_forest(forest)
    assert forest.rate <= 1 / brute_force_bound(net, forest.roots)


@CHECKED
@given(networks(switches=2, symmetric=True), st.integers(1, 3))
def test_fewer_trees_are_right_and_no_faster(net: Network, trees: int) -> None:
    forest = spanning_forest(net, trees=trees)
    check_forest(forest)
    assert forest.share <= trees
    assert forest.rate <= 1 / forest.cut.ratio


@settings(derandomize=True, deadline=None, max_examples=25)
@given(networks(switches=2, symmetric=False), st.sampled_from(TREES), st.booleans())
def test_synthesised_algorithms_do_what_the_collective_asks(net: Network, name: CollectiveName, in_place: bool) -> None:
    result = synthesize(net, name, in_place=in_place)
    verify_algorithm(result.algorithm)
    verify_schedule(compile_algorithm(result.algorithm))
    assert 0 < result.certificate.ratio <= 1 + 1e-9


IRREGULAR = Network.of(
    7,
    {
        ("device 0", "device 1"): 50,
        ("device 1", "device 2"): 25,
        ("device 0", "device 3"): 30,
        ("device 2", "hub"): 40,
        ("device 3", "hub"): 40,
        ("device 4", "hub"): 20,
        ("hub", "spur"): 60,
        ("device 5", "spur"): 35,
        ("device 6", "spur"): 45,
        ("device 5", "device 6"): 10,
    },
    1e9,
)


@pytest.mark.parametrize(
    ("net", "bound"),
    [
        (network("dgx1-v100", ["nvlink"]), 8 * 123e9 / 7),
        (network("dgx-a100:2"), 16 * 249e9 / 15),
        (network("mi300x"), 8 * 7 * 48e9 / 7),
        (IRREGULAR, 7 * 20e9 / 6),
        (network("mi300x").without("device 0", "device 3"), 8 * 6 * 48e9 / 7),
        (network("dgx1-v100", ["nvlink"]).without("device 0", "device 3"), 8 * 82e9 / 7),
    ],
    ids=["dgx1-v100", "dgx-a100:2", "mi300x", "irregular", "mi300x, dead link", "dgx1-v100, dead link"],
)
def test_the_optimum_is_reached_and_certified(net: Network, bound: float) -> None:
    gather = synthesize(net, CollectiveName.ALL_GATHER)
    check_forest(gather.forests[0])
    assert gather.certificate.optimal
    assert gather.certificate.bound == pytest.approx(bound)
    reduce = synthesize(net, CollectiveName.ALL_REDUCE, in_place=True)
    assert reduce.certificate.optimal
    assert reduce.certificate.bound == pytest.approx(bound / 2)
    for result in (gather, reduce):
        verify_algorithm(result.algorithm)
        verify_schedule(compile_algorithm(result.algorithm))


def test_sixty_four_devices_are_certified_and_verified() -> None:
    result = synthesize(network("dgx-a100:8"), CollectiveName.ALL_GATHER)
    assert result.certificate.optimal
    check_forest(result.forests[0])
    verify_algorithm(result.algorithm)


def test_the_ways_between_nodes_are_the_routes_of_the_cluster() -> None:
    topology = Topology.of(load("dgx-a100:2"))
    forest = spanning_forest(network_of(topology))
    edges = {edge.wire: (edge.tail, edge.head) for edge in topology.edges()}
    for way in forest.ways:
        route = [edges[wire] for wire in topology.route(way.path[0], way.path[-1])]
        names = [forest.network.names[vertex] for vertex in way.path]
        assert route == list(pairwise(names))


def test_a_shared_bus_is_never_promised_twice() -> None:
    text = str(load("laptop:4")).replace("shared = false", "shared = true")
    topology = Topology.of(type(load("laptop")).parse(text))
    certificate = synthesize(network_of(topology, resolution=1e6), CollectiveName.ALL_GATHER).certificate
    # 4 shards cross the bus 3 times each: 12/4 of the array
    assert certificate.algbw == pytest.approx(topology.wires[0].bandwidth / 3, rel=0.01)


def test_the_certificate_names_the_cut() -> None:
    text = str(synthesize(network("dgx-a100:2"), CollectiveName.ALL_GATHER).certificate)
    assert "265.60 GB/s, bound 265.60 GB/s (optimal)" in text
    assert "15 of 16 shards over 249.0 GB/s into {device 0, node 0 nic 0}" in text


def test_a_reduce_is_limited_into_its_root() -> None:
    net = Network.of(3, {("device 1", "device 0"): 1, ("device 2", "device 0"): 2}, both_ways=False)
    certificate = synthesize(net, CollectiveName.REDUCE, root=0).certificate
    assert certificate.cuts == ("1 of 1 shards over 0.0 GB/s out of {device 1}",)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Network.of(2, {}), "device 1 cannot be reached from device 0"),
        (lambda: network("mi300x").without("device 0", "spine"), "no link between 'device 0' and 'spine'"),
        (lambda: network("mi300x", ["nvlink"]), r"has no links \['nvlink'\]"),
        (lambda: Network.of(1, {}), "1 devices"),
        (lambda: Network.of(2, {("device 0", "device 1"): 0}), "its capacity is 0"),
    ],
    ids=["parts", "no such link", "no such kind", "one device", "dead"],
)
def test_what_cannot_be_synthesised(call, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(CollectiveError, match=message):
        spanning_forest(call())


def test_trees_are_not_for_all_to_all() -> None:
    with pytest.raises(CollectiveError, match="all_to_all has no trees"):
        synthesize(network("mi300x"), CollectiveName.ALL_TO_ALL)
    with pytest.raises(CollectiveError, match="at most 0 trees"):
        spanning_forest(network("mi300x"), trees=0)


@settings(derandomize=True, deadline=None, max_examples=30)
@given(networks(switches=2, symmetric=False), st.integers(1, 2))
def test_all_to_all_is_right_and_never_beats_its_bound(net: Network, pieces: int) -> None:
    result = synthesize_all_to_all(net, pieces=pieces, rounds=20)
    verify_algorithm(result.algorithm)
    verify_schedule(compile_algorithm(result.algorithm))
    assert 0 < result.certificate.ratio <= 1 + 1e-9


@pytest.mark.parametrize(
    ("net", "ratio"),
    [
        (network("mi300x"), 1.0),
        (network("dgx-a100"), 1.0),
        (network("dgx1-v100", ["nvlink"]), 0.9),
        (network("dgx-a100:2"), 0.93),
    ],
    ids=["mi300x", "dgx-a100", "dgx1-v100", "dgx-a100:2"],
)
def test_all_to_all_is_near_its_bound(net: Network, ratio: float) -> None:
    result = synthesize_all_to_all(net, pieces=2)
    verify_algorithm(result.algorithm)
    assert ratio - 1e-9 <= result.certificate.ratio <= 1 + 1e-9
