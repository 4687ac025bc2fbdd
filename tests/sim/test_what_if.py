from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sim_programs import programs

from sennit.cluster import Cluster, Fault, LinkChoice, Topology, Variant, load
from sennit.cost import collective
from sennit.errors import ClusterError, ParseError
from sennit.ir.dtype import DType
from sennit.ir.graph import Phase, Ref, Role
from sennit.ir.layout import Layout, Pending, Reduction
from sennit.ir.mesh import Mesh
from sennit.ir.program import Buffer, Collective, CollectiveKind, Compute, Lane, LaneInput, Program, Step
from sennit.ir.timeline import Category
from sennit.sim import Straggler, WhatIf, parse_what_if, simulate, simulate_fully
from sennit.sim.build import build
from sennit.sim.likeness import different_nodes
from sennit.sim.what_if import faults_of

Maker = Callable[[int, int], Program]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("node 3 compute x1.1", Straggler(1.1, node=3)),
        ("device 12  compute x 2", Straggler(2.0, device=12)),
        ("all compute x0.5", Straggler(0.5)),
        ("link nic:3 down", Fault(LinkChoice("nic", None, 3), bandwidth=0.0)),
        ("link node 1 nvlink:3 down", Fault(LinkChoice("nvlink", 1, 3), bandwidth=0.0)),
        ("bandwidth fabric x0.5", Fault(LinkChoice("fabric"), bandwidth=0.5)),
        ("latency node 0 nvlink x2", Fault(LinkChoice("nvlink", 0), latency=2.0)),
    ],
)
def test_what_ifs_read(text: str, value: WhatIf) -> None:
    assert parse_what_if(text) == value


@pytest.mark.parametrize("text", ["", "node 3 slow", "link down", "bandwidth nic 0.5", "node compute x2"])
def test_what_is_no_what_if_is_refused_with_examples(text: str) -> None:
    with pytest.raises(ParseError, match=r"node 3 compute x1\.1"):
        parse_what_if(text)


def test_a_factor_of_nothing_is_refused() -> None:
    with pytest.raises(ParseError, match="link NAME down"):
        parse_what_if("bandwidth nic x0")


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("node 9 compute x2", "there is no such place among 16 devices"),
        ("link nic:99 down", "there is no link nic:99: the cluster has 16 devices"),
        ("bandwidth nvlnk x2", "did you mean 'nvlink'"),
        ("link spine down", "bandwidth spine x0.5"),
        ("link node 0 nvlink:3 down", "device 0 cannot reach device 3"),
    ],
)
def test_what_ifs_of_places_that_are_not_there(text: str, fault: str, tensor_parallel: Maker) -> None:
    with pytest.raises(ClusterError, match=fault):
        simulate_fully(tensor_parallel(16, 1024), load("dgx-h100:2"), what_if=[parse_what_if(text)])


def span(program: Program, cluster: Cluster, *texts: str, fold: bool = True) -> float:
    return simulate_fully(program, cluster, fold=fold, what_if=[parse_what_if(text) for text in texts]).timeline.span


def test_a_straggler_delays_those_who_wait_for_it(tensor_parallel: Maker) -> None:
    program, cluster = tensor_parallel(8, 8192), load("dgx-h100")
    slow = simulate_fully(program, cluster, what_if=[parse_what_if("device 5 compute x1.5")])
    plain = simulate(program, cluster)
    work = plain.busy(0, Category.COMPUTE)
    assert slow.folded  # the seven others stand as one
    assert slow.timeline.busy(5, Category.COMPUTE) == pytest.approx(1.5 * work)
    assert slow.timeline.span == pytest.approx(plain.span + 0.5 * work)
    # the one that all wait for is on the critical path
    assert {event.device for event in slow.timeline.critical_path() if event.category is Category.COMPUTE} == {5}


def test_all_slow_alike_still_folds(tensor_parallel: Maker) -> None:
    result = simulate_fully(tensor_parallel(8, 4096), load("dgx-h100"), what_if=[Straggler(2.0)])
    assert result.folded


def test_less_bandwidth_between_nodes(tensor_parallel: Maker) -> None:
    program, cluster = tensor_parallel(16, 8192), load("dgx-h100:2")
    assert span(program, cluster, "bandwidth fabric x0.5") > 1.3 * span(program, cluster)
    assert span(program, cluster, "bandwidth pcie x10") == span(program, cluster)


def test_traffic_of_a_dead_nic_goes_over_its_neighbour() -> None:
    cluster = load("dgx-h100:2")
    topology = Topology.of(cluster, [Fault(LinkChoice("nic", None, 3), bandwidth=0.0)])
    names = [topology.wires[wire].name for wire in topology.route(3, 8 + 3)]
    assert names == [
        "node 0 nvlink device 3 > nvswitch",
        "node 0 nvlink nvswitch > device 2",
        "node 0 pcie device 2 > nic 2",
        "node 0 nic 2 up",
        "leaf 2 up",
        "leaf 3 down",
        "node 1 nic 3 down",
        "node 1 pcie nic 3 > device 3",
    ]
    whole = Topology.of(cluster)
    group = [3, 8 + 3]
    broken, plain = (collective(t, CollectiveKind.ALL_REDUCE, group, 1 << 28).seconds(t) for t in (topology, whole))
    assert broken >= plain
    # all devices at once: what two NICs carried goes over one
    everyone = range(16)
    broken, plain = (collective(t, CollectiveKind.ALL_REDUCE, everyone, 1 << 30).seconds(t) for t in (topology, whole))
    assert broken == pytest.approx(2 * plain, rel=0.1)


def test_a_node_needs_a_nic(tensor_parallel: Maker) -> None:
    with pytest.raises(ClusterError, match="node 1 has no NIC left"):
        span(tensor_parallel(16, 64), load("dgx-h100:2"), "link node 1 nic down")


def test_a_mesh_of_links_routes_around_one_that_is_down() -> None:
    cluster = load("dgx1-v100")
    topology = Topology.of(cluster)
    (wire,) = topology.route(0, 1)
    name = topology.wires[wire].link
    with pytest.raises(ClusterError, match="cannot reach"):
        # devices do not forward: a cube mesh has pairs that only one link joins
        Topology.of(cluster, [Fault(LinkChoice(name, 0, 0), bandwidth=0.0), Fault(LinkChoice("pcie"), bandwidth=0.0)])


def test_nodes_may_differ(tensor_parallel: Maker) -> None:
    cluster = load("dgx-h100:2")
    slower = load("dgx-a100").device
    mixed = msgspec.structs.replace(cluster, variant=(Variant((1,), device=slower),))
    assert Cluster.parse(str(mixed)) == mixed
    timeline = simulate(tensor_parallel(16, 8192), mixed)
    assert timeline.busy(8, Category.COMPUTE) > 1.5 * timeline.busy(7, Category.COMPUTE)
    assert cluster.nic is not None
    half = msgspec.structs.replace(cluster.nic.bandwidth, value=25e9)
    thin = Variant((1,), nic=msgspec.structs.replace(cluster.nic, bandwidth=half))
    narrow = msgspec.structs.replace(cluster, variant=(thin,))
    assert Topology.of(narrow).bandwidth(0, 8) == pytest.approx(Topology.of(cluster).bandwidth(0, 8) / 2)
    assert simulate(tensor_parallel(16, 8192), narrow).span > simulate(tensor_parallel(16, 8192), cluster).span


@pytest.mark.parametrize(
    ("variant", "fault"),
    [
        (Variant((2,), device=None), "changes nothing"),
        (Variant((5,), device=load("dgx-a100").device), "there is no node 5, of 2"),
        (Variant((1,), device=load("dgx2-v100").device), "16 devices a node among nodes of 8"),
    ],
)
def test_variants_that_do_not_fit(variant: Variant, fault: str) -> None:
    with pytest.raises(ClusterError, match=fault):
        msgspec.structs.replace(load("dgx-h100:2"), variant=(variant,)).__post_init__()


CHANGES = [
    "all compute x2",
    "bandwidth nvlink x0.25",
    "latency nvlink x3",
    "device 0 compute x3",
    "device 1 compute x1.5",
    "device 5 compute x2",
]


@settings(derandomize=True, deadline=None, max_examples=120)
@given(programs(), st.sampled_from(CHANGES))
def test_folded_and_every_device_for_itself_are_the_same(program: Program, text: str) -> None:
    cluster = load("dgx-a100")
    what_if = [parse_what_if(text)]
    folded = simulate_fully(program, cluster, what_if=what_if).timeline
    plain = simulate_fully(program, cluster, what_if=what_if, fold=False).timeline
    assert folded.span == pytest.approx(plain.span)
    left, right = (sorted((e.device, e.stream, e.name, e.start, e.stop) for e in t.events) for t in (folded, plain))
    for one, other in zip(left, right, strict=True):
        assert one[:3] == other[:3]
        assert one[3:] == pytest.approx(other[3:], rel=1e-9, abs=1e-15)
    for device in plain.devices:
        assert plain.busy(device, Category.COMPUTE) <= plain.span * (1 + 1e-9)


def test_one_slow_node_of_many_still_folds(tensor_parallel: Maker) -> None:
    """The slow node is one actor, all others another: 512 devices stay cheap."""
    text = """
    program "both" {
      mesh m0 = dp=64,tp=8
      lane all on 0-511 {
        param %w : bf16[4096,4096{tp}] of %w on m0 "w"
        input %x : bf16[65536{dp},4096] of %x on m0 "x"
        forward %y : bf16[65536{dp},4096{tp}] of %y on m0 = aten.mm.default(%x, %w) for %y "up"
        all_gather %z : bf16[65536{dp},4096] of %y on m0 = %y over tp
        backward %g : bf16[4096,4096{tp}]{sum:dp} of %g on m0 = aten.mm.default(%z, %y) for %g "up"
        all_reduce %r : bf16[4096,4096{tp}] of %g on m0 = %g over dp
        gradient "w" %r
      }
    }
    """
    program, cluster = Program.parse(text), load("dgx-h100:64")
    what_if = [parse_what_if("node 3 compute x1.5")]
    folded = simulate_fully(program, cluster, what_if=what_if)
    plain = simulate_fully(program, cluster, what_if=what_if, fold=False)
    assert folded.folded
    assert not plain.folded
    assert folded.timeline.span == pytest.approx(plain.timeline.span)
    assert folded.timeline.span > simulate(program, cluster).span
    for device in (0, 23, 24, 31, 32, 511):
        assert folded.timeline.exposed(device) == pytest.approx(plain.timeline.exposed(device))


def pairs_of_nodes() -> Cluster:
    """Four nodes of two GPUs, each with its NIC."""
    cluster = load("dgx-h100:4")
    assert cluster.nic is not None
    return msgspec.structs.replace(
        cluster,
        device=msgspec.structs.replace(cluster.device, per_node=2),
        nic=msgspec.structs.replace(cluster.nic, per_node=2),
    )


FAULTS = ["link nic:3 down", "bandwidth node 1 nvlink x0.5", "latency node 2 nic x3", "bandwidth node 0 nic:1 x0.25"]


@settings(derandomize=True, deadline=None, max_examples=100)
@given(programs(), st.sampled_from(FAULTS))
def test_folded_around_a_fault_and_every_device_for_itself_are_the_same(program: Program, text: str) -> None:
    what_if = [parse_what_if(text)]
    folded = simulate_fully(program, pairs_of_nodes(), what_if=what_if).timeline
    plain = simulate_fully(program, pairs_of_nodes(), what_if=what_if, fold=False).timeline
    left, right = (sorted((e.device, e.stream, e.name, e.start, e.stop) for e in t.events) for t in (folded, plain))
    for one, other in zip(left, right, strict=True):
        assert one[:3] == other[:3]
        assert one[3:] == pytest.approx(other[3:], rel=1e-9, abs=1e-15)


def test_what_is_far_from_a_failed_link_stays_one() -> None:
    mesh = Mesh.make({"dp": 64, "tp": 8})
    x = Buffer("x", "x", DType.BF16, Layout.block(mesh, (4096, 1024), {0: ["dp"]}))
    steps: list[Step] = []
    for axis in ("tp", "dp"):
        pending = Layout(mesh, (1024, 1024), ((axis, Pending(Reduction.SUM)),))
        part = Buffer(f"part {axis}", f"g {axis}", DType.BF16, pending)
        steps.append(Compute("aten.mm.default", (Ref("x"), Ref("x")), (), (part,), Phase.FORWARD))
        result = Buffer(f"whole {axis}", f"g {axis}", DType.BF16, Layout(mesh, (1024, 1024)))
        steps.append(Collective(CollectiveKind.ALL_REDUCE, part.name, result, (axis,)))
    lane = Lane("all", mesh.devices, (LaneInput(Role.INPUT, x, "x"),), tuple(steps), ())
    program, cluster = Program("dp=64,tp=8", (lane,)), load("dgx-h100:64")
    topology = Topology.of(cluster, faults_of([parse_what_if("link nic:19 down")]))
    assert different_nodes(topology) == {2}
    built = build(program, cluster, topology, fold=True)
    # the eight devices of node 2 each, and the others by their place in a node
    assert sorted(len(actor.devices) for actor in built.actors) == [1] * 8 + [63] * 8
