from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from sim_programs import one_lane_programs, programs

from sennit.cluster import Cluster, Topology, load
from sennit.cost import collective, point_to_point
from sennit.errors import ClusterError, ProgramError
from sennit.ir.program import CollectiveKind, Program
from sennit.ir.timeline import Category, Event, MemoryKind, Origin, Timeline
from sennit.sim import simulate
from sennit.sim.build import build
from sennit.sim.engine import successors

Maker = Callable[[int, int], Program]


def key(event: Event) -> tuple[object, ...]:
    return (event.device, event.stream, event.name, event.bytes)


# ---- what a person sees ----------------------------------------------------------------------------------------------


def test_a_product_and_its_all_reduce(tensor_parallel: Maker) -> None:
    cluster = load("dgx-a100")
    timeline = simulate(tensor_parallel(4, 1024), cluster)
    assert timeline.origin is Origin.SIMULATED
    mine = timeline.by_device()[0]
    assert [(event.name, event.category) for event in mine] == [
        ("slice x", Category.COMPUTE),
        ("up forward", Category.COMPUTE),
        ("all_reduce y", Category.COLLECTIVE),
    ]
    reduce = mine[2]
    topology = Topology.of(cluster)
    alone = collective(topology, CollectiveKind.ALL_REDUCE, range(4), 4 * 1024**2).seconds(topology)
    assert reduce.stop - reduce.start == pytest.approx(alone)
    assert reduce.bytes == 2 * 3 * 4 * 1024**2 // 4
    assert timeline.critical_path() == tuple(mine)
    assert timeline.span == reduce.stop


def test_a_pipeline_overlaps_its_sends(pipeline: Maker) -> None:
    cluster = load("dgx-a100")
    timeline = simulate(pipeline(3, 512), cluster)
    names = [event.name for event in timeline.by_device()[1]]
    assert names[:2] == ["receive h from first [mb 0]", "second forward [mb 0]"]
    sends = [event for event in timeline.events if event.category is Category.SEND]
    receives = [event for event in timeline.events if event.category is Category.RECEIVE]
    assert [(a.start, a.stop) for a in sends] == [(b.start, b.stop) for b in receives]
    topology = Topology.of(cluster)
    size = 4 * 512 * 512
    assert sends[0].stop - sends[0].start == pytest.approx(point_to_point(topology, 0, 1, size).seconds(topology))
    assert [event.bytes for event in sends] == [size] * 3
    assert [event.bytes for event in receives] == [0] * 3
    # the second product of the first stage runs while the first result is on its way
    second = next(event for event in timeline.events if event.name == "first forward [mb 1]")
    assert second.start < sends[0].stop


def test_a_rank_that_blocks_posts_its_receive_after_its_compute(pipeline: Maker) -> None:
    timeline = simulate(pipeline(3, 512), load("laptop"))
    events = {event.name: event for event in timeline.events}
    assert events["receive h from first [mb 1]"].start == events["second forward [mb 0]"].stop


def test_transfers_on_one_wire_slow_each_other_down() -> None:
    text = """
    program "contention" {
      mesh m0 = x=1@0
      mesh m1 = x=1@1
      mesh m2 = x=1@2
      lane a on 0 {
        input %x : f32[1024,1024] of %x on m0 "x"
        send %x to b
        send %x to c
      }
      lane b on 1 { receive %y : f32[1024,1024] of %x on m1 from a }
      lane c on 2 { receive %y : f32[1024,1024] of %x on m2 from a }
    }
    """
    cluster = load("dgx-a100")
    topology = Topology.of(cluster)
    transfer = point_to_point(topology, 0, 1, 4 * 1024**2)
    timeline = simulate(Program.parse(text), cluster)
    # both leave device 0 by one wire: each at half the rate
    assert timeline.span == pytest.approx(transfer.latency + 2 * transfer.drain(topology))


def test_ranks_that_take_turns_hold_up_each_others_messages() -> None:
    text = """
    program "both ways" {
      mesh m0 = x=1@0
      mesh m1 = x=1@1
      lane a on 0 {
        input %x : f32[1024,1024] of %x on m0 "x"
        send %x to b
        send %x to b
        receive %z : f32[1024,1024] of %y on m0 from b
      }
      lane b on 1 {
        input %w : f32[1024,1024] of %w on m1 "w"
        receive %x : f32[1024,1024] of %x on m1 from a
        forward %y : f32[1024,1024] of %y on m1 = aten.mm.default(%w, %w) for %y "b"
        send %y to a
        receive %v : f32[1024,1024] of %x on m1 from a
      }
    }
    """
    plain = str(load("laptop"))
    both, turns = (
        simulate(Program.parse(text), Cluster.parse(plain.replace("take_turns = false", f"take_turns = {more}")))
        for more in ("false", "true")
    )
    way = next(event for event in both.events if event.name.startswith("send y"))
    second = [event for event in turns.events if event.name.startswith("receive x")][1]
    back = next(event for event in turns.events if event.name.startswith("send y"))
    # b posts its second receive behind its own message, which was announced long before
    assert (second.start, second.start - back.start) == (back.stop, pytest.approx(way.stop - way.start))


def test_a_transfer_on_a_slow_link_leaves_its_core_free(tensor_parallel: Maker) -> None:
    part = 'transfer_cores = { value = 0.01, basis = "measured", source = "a test" }'
    plain = str(load("laptop:4")).replace("cores = { value = 8.0", "cores = { value = 2.0")
    whole, free = (
        Cluster.parse(text) for text in (plain, plain.replace("blocking = true", f"blocking = true\n{part}"))
    )
    # four transfers of a ring on two cores
    assert simulate(tensor_parallel(4, 512), free).span < simulate(tensor_parallel(4, 512), whole).span


def test_ranks_beyond_the_cores_slow_down(tensor_parallel: Maker) -> None:
    few = Cluster.parse(str(load("laptop:4")).replace("cores = { value = 8.0", "cores = { value = 2.0"))
    plain, slow = (simulate(tensor_parallel(4, 512), cluster) for cluster in (load("laptop:4"), few))
    assert slow.busy(0, Category.COMPUTE) == pytest.approx(2 * plain.busy(0, Category.COMPUTE))


def test_views_make_no_event_and_share_storage() -> None:
    text = """
    program "views" {
      mesh m0 = x=1
      lane all on 0 {
        param %w : f32[64,64] of %w on m0 "w"
        forward %t : f32[64,64] of %t on m0 = aten.t.default(%w)
        forward %y : f32[64,64] of %y on m0 = aten.mm.default(%w, %t)
        forward %v : f32[4096] of %v on m0 = aten.view.default(%y, [4096])
        free %y
        forward %z : f32[4096] of %z on m0 = aten.gelu.default(%v)
        free %v
        forward %a : f32[4096] of %a on m0 = aten.gelu.default(%z)
        gradient "w" %a
      }
    }
    """
    timeline = simulate(Program.parse(text), load("dgx-a100"))
    assert [event.name for event in timeline.events] == ["mm forward", "gelu forward", "gelu forward"]
    size = 64 * 64 * 4
    activations = [dict(sample.live).get(MemoryKind.ACTIVATIONS, 0) // size for sample in timeline.memory]
    # y; y and z (y is freed by name, but its view is still read); z alone, beside the gradient
    assert activations == [1, 2, 1]
    assert dict(timeline.memory[-1].live)[MemoryKind.GRADIENTS] == size
    assert all(dict(sample.live)[MemoryKind.PARAMETERS] == size for sample in timeline.memory)
    assert timeline.peak_memory(0) == 3 * size


def test_kinds_of_memory(pipeline: Maker) -> None:
    timeline = simulate(pipeline(2, 64), load("dgx-a100"))
    kinds = {kind for sample in timeline.memory for kind, _ in sample.live}
    assert kinds == {MemoryKind.PARAMETERS, MemoryKind.INPUTS, MemoryKind.ACTIVATIONS, MemoryKind.STAGING}
    last = [sample for sample in timeline.memory if sample.device == 0][-1]
    assert dict(last.live) == {MemoryKind.PARAMETERS: 4 * 64 * 64, MemoryKind.INPUTS: 2 * 4 * 64 * 64}


def test_accumulated_sums_are_gradients() -> None:
    text = """
    program "sums" {
      mesh m0 = x=1;mb=2
      lane all on 0 {
        input %a : f32[64]{sum:mb} of %g on m0 at mb=0 "a"
        input %b : f32[64]{sum:mb} of %g on m0 at mb=1 "b"
        backward %s : f32[64] of %g on m0 at mb=0+1 = sennit.accumulate(%a, %b)
      }
    }
    """
    timeline = simulate(Program.parse(text), load("laptop"))
    assert [event.name for event in timeline.events] == ["accumulate g [mb 0-1]"]
    assert dict(timeline.memory[-1].live)[MemoryKind.GRADIENTS] == 256


def test_uneven_pieces_are_timed_by_their_own_size() -> None:
    text = """
    program "uneven" {
      mesh m0 = x=4
      lane all on 0-3 {
        input %a : f32[10{x},1000000] of %a on m0 "a"
        forward %b : f32[10{x},1000000] of %b on m0 = aten.gelu.default(%a)
        all_gather %c : f32[10,1000000] of %b on m0 = %b over x
      }
    }
    """
    timeline = simulate(Program.parse(text), load("dgx-a100"))
    seconds = {event.device: event.stop for event in timeline.events if event.category is Category.COMPUTE}
    assert seconds[0] == seconds[1] == seconds[2] > seconds[3]
    gathers = [event for event in timeline.events if event.category is Category.COLLECTIVE]
    assert {event.start for event in gathers} == {seconds[0]}


# ---- errors ----------------------------------------------------------------------------------------------------------


def test_a_program_that_is_larger_than_the_cluster(tensor_parallel: Maker) -> None:
    with pytest.raises(ClusterError) as error:
        simulate(tensor_parallel(16, 64), load("dgx-a100"))
    assert "16 devices are needed, the cluster 'dgx-a100' has 8 devices (1 node of 8)" in str(error.value)
    assert "where: program 'tensor parallel'" in str(error.value)
    assert "fix: use the cluster dgx-a100:2, or a mesh of at most 8 devices" in str(error.value)


def test_a_send_without_a_receive(pipeline: Maker) -> None:
    program = pipeline(2, 64)
    second = program.lane("second")
    lanes = (program.lane("first"), replace(second, steps=second.steps[:3]))
    with pytest.raises(ProgramError) as error:
        simulate(Program("broken", lanes), load("dgx-a100"))
    assert "'send h to second [mb 1]' waits for device 1, which has no such step" in str(error.value)


def test_lanes_of_unequal_size_cannot_send() -> None:
    text = """
    program "unequal" {
      mesh m0 = x=2@0-1
      mesh m1 = x=1@2
      lane a on 0-1 {
        input %x : f32[4] of %x on m0 "x"
        send %x to b
      }
      lane b on 2 { receive %y : f32[4] of %x on m1 from a }
    }
    """
    for fold in (True, False):
        with pytest.raises(ProgramError, match="lane 'a' has 2 devices and sends to lane 'b', which has 1"):
            simulate(Program.parse(text), load("dgx-a100"), fold=fold)


def test_a_deadlock_is_named() -> None:
    text = """
    program "crossed" {
      mesh m0 = x=1@0
      mesh m1 = x=1@1
      lane a on 0 {
        receive %y : f32[4] of %y on m0 from b
        send %y to b
      }
      lane b on 1 {
        receive %z : f32[4] of %z on m1 from a
        send %z to a
      }
    }
    """
    with pytest.raises(ProgramError, match="the program deadlocks: 2 of 2 steps never start"):
        simulate(Program.parse(text), load("dgx-a100"))


def test_a_group_over_several_lanes_meets() -> None:
    text = """
    program "together" {
      mesh m0 = x=2
      lane a on 0 {
        input %v : f32[4]{sum:x} of %v on m0 "v"
        forward %u : f32[4]{sum:x} of %u on m0 = aten.gelu.default(%v)
        all_reduce %w : f32[4] of %u on m0 = %u over x
      }
      lane b on 1 {
        input %v : f32[4]{sum:x} of %v on m0 "v"
        all_reduce %w : f32[4] of %v on m0 = %v over x
      }
    }
    """
    timeline = simulate(Program.parse(text), load("dgx-a100"))
    gelu, left, right = timeline.events
    assert left.start == right.start == gelu.stop
    # what device 1 waited for ran on device 0
    assert (right.device, right.after) == (1, 0)


def test_different_collectives_cannot_meet() -> None:
    text = """
    program "apart" {
      mesh m0 = x=2
      lane a on 0 {
        input %v : f32[4]{sum:x} of %v on m0 "v"
        all_reduce %w : f32[4] of %v on m0 = %v over x
      }
      lane b on 1 {
        input %v : f32[4{x}] of %v on m0 "v"
        all_gather %w : f32[4] of %v on m0 = %v over x
      }
    }
    """
    with pytest.raises(ProgramError, match=r"devices \[0, 1\] meet in all_reduce and in all_gather"):
        simulate(Program.parse(text), load("dgx-a100"))


def test_a_buffer_that_is_read_before_it_is_there() -> None:
    text = """
    program "early" {
      mesh m0 = x=1
      lane a on 0 { forward %y : f32[4] of %y on m0 = aten.gelu.default(%x) }
    }
    """
    with pytest.raises(ProgramError, match="buffer %x is used before it is defined"):
        simulate(Program.parse(text), load("dgx-a100"))


# ---- invariants ------------------------------------------------------------------------------------------------------

CLUSTERS = ("dgx-a100", "laptop:8", "mi300x")


@settings(derandomize=True, deadline=None, max_examples=60)
@given(programs())
def test_the_span_is_never_below_its_bounds(program: Program) -> None:
    for name in CLUSTERS:
        cluster = load(name)
        topology = Topology.of(cluster)
        timeline = simulate(program, cluster)
        slack = timeline.span * (1 + 1e-9)
        tasks = build(program, cluster, topology, fold=False).tasks
        chain = [0.0] * len(tasks)
        after, waits = successors(tasks)
        ready = [task for task in range(len(tasks)) if not waits[task]]
        for task in ready:
            chain[task] += tasks.latency[task] + tasks.drain[task]
            for other in after[task]:
                chain[other] = max(chain[other], chain[task])
                waits[other] -= 1
                if not waits[other]:
                    ready.append(other)
        assert max(chain, default=0.0) <= slack
        for wire, item in enumerate(topology.wires):
            assert sum(size for load_ in tasks.load for w, size in load_ if w == wire) / item.bandwidth <= slack
        for device in timeline.devices:
            assert timeline.busy(device, Category.COMPUTE) <= slack


@settings(derandomize=True, deadline=None, max_examples=60)
@given(programs())
def test_the_critical_path_has_no_gaps(program: Program) -> None:
    for name in CLUSTERS:
        timeline = simulate(program, load(name))
        path = timeline.critical_path()
        if path:
            assert path[0].start == 0.0
            assert path[-1].stop == timeline.span
            assert all(before.stop == after.start for before, after in itertools.pairwise(path))


@settings(derandomize=True, deadline=None, max_examples=60)
@given(programs())
def test_folding_changes_nothing(program: Program) -> None:
    for name in (*CLUSTERS, "dgx-a100:2"):
        folded, plain = (simulate(program, load(name), fold=fold) for fold in (True, False))
        left, right = (sorted(item.events, key=lambda e: (key(e), e.start)) for item in (folded, plain))
        assert [key(event) for event in left] == [key(event) for event in right]
        assert [event.start for event in left] == pytest.approx([event.start for event in right], rel=1e-9)
        assert [event.stop for event in left] == pytest.approx([event.stop for event in right], rel=1e-9)
        for device in folded.devices:
            assert folded.peak_memory(device) == plain.peak_memory(device)


def test_devices_fold_only_where_the_cluster_treats_them_alike(tensor_parallel: Maker) -> None:
    cluster = load("dgx-a100:2")
    topology = Topology.of(cluster)
    assert len(build(tensor_parallel(8, 64), cluster, topology, fold=True).actors) == 1
    # nine devices in threes: the last group has devices 6, 7 and 8, which lie on two nodes
    text = """
    program "threes" {
      mesh m0 = a=3,b=3
      lane all on 0-8 {
        input %v : f32[1000,1000]{sum:b} of %v on m0 "v"
        all_reduce %w : f32[1000,1000] of %v on m0 = %v over b
      }
    }
    """
    program = Program.parse(text)
    assert len(build(program, cluster, topology, fold=True).actors) == 9
    stops = {event.device: event.stop for event in simulate(program, cluster).events}
    assert stops[0] == stops[3] < stops[6]


@settings(derandomize=True, deadline=None, max_examples=40)
@given(programs())
def test_the_order_of_lanes_means_nothing(program: Program) -> None:
    turned = Program(program.name, program.lanes[::-1])
    for fold in (True, False):
        assert simulate(program, load("dgx-a100"), fold=fold) == simulate(turned, load("dgx-a100"), fold=fold)


@settings(derandomize=True, deadline=None, max_examples=40)
@given(one_lane_programs())
def test_more_bandwidth_is_never_slower_without_contention(program: Program) -> None:
    text = str(load("dgx-a100"))
    spans = []
    for factor in (1, 2, 8):
        fast = text.replace("bandwidth = { value = 300000000000.0", f"bandwidth = {{ value = {factor * 300e9!r}")
        spans.append(simulate(program, Cluster.parse(fast)).span)
    assert spans[0] >= spans[1] * (1 - 1e-12)
    assert spans[1] >= spans[2] * (1 - 1e-12)


@settings(derandomize=True, deadline=None, max_examples=30)
@given(programs())
def test_a_simulated_timeline_prints_and_parses_back(program: Program) -> None:
    timeline = simulate(program, load("dgx-a100"))
    assert Timeline.parse(str(timeline)) == timeline


def test_cores_bound_the_compute_of_a_host(tensor_parallel: Maker) -> None:
    cluster = Cluster.parse(str(load("laptop:8")).replace("cores = { value = 8.0", "cores = { value = 3.0"))
    timeline = simulate(tensor_parallel(8, 256), cluster, fold=False)
    alone = simulate(tensor_parallel(8, 256), load("laptop:8"))
    work = sum(alone.busy(device, Category.COMPUTE) for device in alone.devices)
    assert timeline.span >= work / 3
