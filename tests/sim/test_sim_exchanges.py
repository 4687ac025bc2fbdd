"""Exchanges on the clock: as long as a send where they are one, sharing wires where they are more, folded as exactly as
the rest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace

import msgspec
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from sim_programs import programs

from sennit.cluster import Cluster, Topology, load
from sennit.cost import point_to_point
from sennit.ir.program import Exchange, Lane, Program, Receive, Send, Step
from sennit.ir.program_check import check_program
from sennit.ir.timeline import Category, Event, Timeline
from sennit.sim import parse_what_if, simulate, simulate_fully

Maker = Callable[[int, int], Program]


def by_exchanges(program: Program) -> Program:
    """The same program with an exchange for each send and its receive."""
    tensors: dict[str, str] = {}  # what is sent, by label: random programs do not care that they receive it

    def exchanged(lane: Lane) -> Iterator[Step]:
        count: Counter[tuple[str, str]] = Counter()
        for step in lane.steps:
            match step:
                case Send(source, to):
                    count[lane.name, to] += 1
                    label = f"{lane.name} to {to}, {count[lane.name, to]}"
                    tensors[label] = lane.buffers()[source].tensor
                    yield Exchange(label, source, None, (lane.name, to))
                case Receive(result, origin):
                    count[origin, lane.name] += 1
                    label = f"{origin} to {lane.name}, {count[origin, lane.name]}"
                    yield Exchange(label, None, result, (origin, lane.name))
                case _:
                    yield step

    def named(step: Step) -> Step:
        if isinstance(step, Exchange) and step.result is not None:
            return replace(step, result=replace(step.result, tensor=tensors[step.label]))
        return step

    lanes = [replace(lane, steps=tuple(exchanged(lane))) for lane in program.lanes]
    return replace(program, lanes=tuple(replace(lane, steps=tuple(map(named, lane.steps))) for lane in lanes))


def relays(program: Program) -> bool:
    """Whether a lane sends on what it received: `by_exchanges` names such a tensor once only."""
    for lane in program.lanes:
        received = {step.result.name for step in lane.steps if isinstance(step, Receive)}
        if any(isinstance(step, Send) and step.source in received for step in lane.steps):
            return True
    return False


def moments(timeline: Timeline) -> list[tuple[object, ...]]:
    def one(event: Event) -> tuple[object, ...]:
        name = event.name if event.category is Category.COMPUTE else ""
        return (event.device, event.category.value, name, event.bytes, round(event.start, 12), round(event.stop, 12))

    return sorted(map(one, timeline.events), key=str)


@pytest.mark.parametrize("cluster", ["dgx-a100", "laptop"])
def test_a_plain_exchange_takes_what_a_send_takes(cluster: str, pipeline: Maker) -> None:
    program = pipeline(4, 256)
    exchanged = by_exchanges(program)
    check_program(exchanged)
    there = load(cluster)
    assert moments(simulate(program, there)) == moments(simulate(exchanged, there))


@settings(derandomize=True, deadline=None, max_examples=40)
@given(programs())
def test_any_program_by_exchanges(program: Program) -> None:
    """Folded and not: what a send is, the plain exchange is."""
    exchanged = by_exchanges(program)
    cluster = load(f"dgx-a100:{max(program.devices) // 8 + 1}")
    for fold in (True, False):
        assert moments(simulate(program, cluster, fold=fold)) == moments(simulate(exchanged, cluster, fold=fold))


@settings(derandomize=True, deadline=None, max_examples=40)
@given(programs())
def test_any_program_by_exchanges_of_ranks_that_take_turns(program: Program) -> None:
    assume(not relays(program))
    exchanged = by_exchanges(program)
    cluster = Cluster.parse(str(load("laptop:8")).replace("take_turns = false", "take_turns = true"))
    assert moments(simulate(program, cluster, fold=False)) == moments(simulate(exchanged, cluster, fold=False))


@settings(derandomize=True, deadline=None, max_examples=40)
@given(programs(), st.sampled_from(["link nic:1 down", "bandwidth node 1 nvlink x0.5"]))
def test_exchanges_fold_around_a_fault(program: Program, text: str) -> None:
    assume(not relays(program))
    cluster = load("dgx-h100:4")
    assert cluster.nic is not None
    two = msgspec.structs.replace(
        cluster,
        device=msgspec.structs.replace(cluster.device, per_node=2),
        nic=msgspec.structs.replace(cluster.nic, per_node=2),
    )
    exchanged, what_if = by_exchanges(program), [parse_what_if(text)]
    folded, plain = (simulate_fully(exchanged, two, what_if=what_if, fold=fold).timeline for fold in (True, False))
    assert moments(folded) == moments(plain)


def one_to_all(receivers: int, size: int, *, replicas: int = 1) -> Program:
    """One exchange from the first device (or some that have the same) to others, each of which wants all of it."""
    last = replicas + receivers - 1
    return Program.parse(
        f"""program "one to all" {{ mesh a = r={replicas} mesh b = d={receivers}@{replicas}-{last}
        lane one on 0-{replicas - 1} {{ input %x : f32[{size}] of %x on a "x"
          exchange "x" %x among one, all }}
        lane all on {replicas}-{last} {{ exchange "x" %y : f32[{size}] of %x on b = nothing among one, all
          result "y" %y }} }}"""
    )


def test_the_messages_of_one_sender_share_its_wire() -> None:
    cluster = load("dgx-a100")
    topology = Topology.of(cluster)
    size = 1 << 22
    alone = point_to_point(topology, 0, 1, 4 * size)
    for receivers in (1, 3, 7):
        found = simulate(one_to_all(receivers, size), cluster)
        assert found.span == pytest.approx(alone.latency + receivers * alone.drain(topology))
    # two that have the same share the work
    found = simulate(one_to_all(4, size, replicas=2), cluster)
    assert found.span == pytest.approx(alone.latency + 2 * alone.drain(topology))


def test_who_has_no_message_waits_for_nobody() -> None:
    """Three replicas and one receiver: one of them sends, the others go on at once."""
    timeline = simulate(one_to_all(1, 1 << 20, replicas=3), load("dgx-a100"))
    spans = {event.device: event.stop - event.start for event in timeline.events}
    assert spans[1] == spans[2] == 0.0
    assert spans[0] == spans[3] > 0.0


INTERLACED = """
program "interlaced" {{
  mesh all = pp=2,dp={dp};mb=2
  mesh s0 = dp={dp};mb=2@0-{end0}
  mesh s1 = dp={dp};mb=2@{dp}-{end1}
  lane first on 0-{end0} {{
    param %e : f32[512{{pp}},256] of %e on all "e"
    param %w : f32[256,256] of %a on s0 "a"
    input %x : f32[{rows},512{{pp}}] of %x on all "x"
{first}
  }}
  lane second on {dp}-{end1} {{
    param %e : f32[512{{pp}},256] of %e on all "e"
    param %w : f32[256,256] of %b on s1 "b"
    input %x : f32[{rows},512{{pp}}] of %x on all "x"
{second}
  }}
}}
"""


def interlaced(dp: int) -> Program:
    """An embedding split over two stages of `dp` devices, a layer on each stage, the result split over all devices
    again: collectives over both lanes, and exchanges that a lane takes part in with both sides.
    """
    rows, first, second = 64 * dp, "", ""
    for mb in (0, 1):
        piece, at = f"f32[{rows}{{mb,dp}},256]", f"at mb={mb}"
        head = f"""
    forward %x{mb} : f32[{rows}{{mb,dp}},512{{pp}}] of %x on all {at} = sennit.slice(%x)
    forward %p{mb} : {piece}{{sum:pp}} of %h on all {at} = aten.mm.default(%x{mb}, %e)
    all_reduce %h{mb} : {piece} of %h on all {at} = %p{mb} over pp"""
        tail = f"%y{mb} : f32[{rows}{{mb,dp}},256{{pp}}] of %y on all {at}"
        first += f"""{head}
    forward %t{mb} : {piece} of %h on s0 {at} = sennit.take(%h{mb})
    forward %u{mb} : {piece} of %u on s0 {at} = aten.mm.default(%t{mb}, %w)
    exchange "u at mb={mb}" %u{mb} among first, second
    free %u{mb}
    exchange "y at mb={mb}" {tail} = nothing among first, second"""
        second += f"""{head}
    exchange "u at mb={mb}" %u{mb} : {piece} of %u on s1 {at} = nothing among first, second
    forward %v{mb} : {piece} of %y on s1 {at} = aten.mm.default(%u{mb}, %w)
    exchange "y at mb={mb}" {tail} = %v{mb} among first, second"""
    return Program.parse(INTERLACED.format(dp=dp, end0=dp - 1, end1=2 * dp - 1, rows=rows, first=first, second=second))


@pytest.mark.parametrize(("preset", "dp"), [("dgx-a100", 4), ("dgx-a100:2", 8), ("dgx-h100:4", 16)])
def test_an_interlaced_pipeline_folds_exactly(preset: str, dp: int) -> None:
    program = interlaced(dp)
    check_program(program)
    cluster: Cluster = load(preset)
    folded = simulate_fully(program, cluster)
    assert folded.folded
    assert moments(folded.timeline) == moments(simulate(program, cluster, fold=False))
