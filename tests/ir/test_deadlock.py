"""Deadlock: known cases by hand, and random programs against a small machine that executes the rules one by one."""

from __future__ import annotations

import random
from collections import Counter, defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from program_texts import one_forward_one_backward

from sennit.errors import ProgramError
from sennit.ir.deadlock import check_deadlock
from sennit.ir.program import Collective, Program, Receive, Send, reads, stream_of
from sennit.ir.program_check import check_program


def lanes(*bodies: str) -> Program:
    """A program of one device per lane; every lane starts with a value %x and a pending one per mesh."""
    size = len(bodies)
    text = f'program "lanes" {{ mesh m0 = pp={size} mesh m1 = qq={size} mesh m2 = pp={size},ep=1\n'
    for number, body in enumerate(bodies):
        text += f'lane l{number} on {number} {{ input %x : f32[4] of %t on m0 "x"\n'
        text += 'input %p : f32[4]{sum:pp} of %t on m0 "p" input %q : f32[4]{sum:qq} of %t on m1 "q"\n'
        text += 'input %v : f32[4]{sum:pp} of %t on m2 "v"\n'
        text += body + "\n}\n"
    return Program.parse(text + "}")


def receive(name: str, lane: int) -> str:
    return f"receive %{name} : f32[4] of %t on m0 from l{lane}\n"


def send(name: str, lane: int) -> str:
    return f"send %{name} to l{lane}\n"


def use(name: str, *args: str) -> str:
    names = ", ".join(f"%{arg}" for arg in args)
    return f'forward %{name} : f32[4] of %t on m0 = aten.add.Tensor({names}) for %{name} "h.{name}"\n'


def over_pp(name: str) -> str:
    return f"all_reduce %{name} : f32[4] of %t on m0 = %p over pp\n"


def over_qq(name: str) -> str:
    return f"all_reduce %{name} : f32[4] of %t on m1 = %q over qq\n"


def over_pp_of_m2(name: str) -> str:
    """On another mesh than `over_pp`, but on the same stream: streams go by the names of axes."""
    return f"all_reduce %{name} : f32[4] of %t on m2 = %v over pp\n"


# ---- by hand ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("micro_batches", [2, 4, 8])
def test_one_forward_one_backward_does_not_hang(micro_batches: int) -> None:
    check_program(Program.parse(one_forward_one_backward(micro_batches)))


def test_both_lanes_send_first() -> None:
    body = [send("x", 1 - lane) + receive("r", 1 - lane) + use("y", "r") for lane in range(2)]
    check_program(lanes(*body))


def test_both_lanes_receive_first() -> None:
    body = [receive("r", 1 - lane) + use("y", "r") + send("x", 1 - lane) for lane in range(2)]
    with pytest.raises(ProgramError) as caught:
        check_program(lanes(*body))
    message = str(caught.value)
    assert "deadlock: 2 communications wait for each other" in message
    assert (
        "lane 'l0' (device 0): step 2, send %x to l1, comes after step 1, forward %y = aten.add.Tensor (op %y, module "
        "'h.y'), which waits for step 0, receive %r from l1"
    ) in message
    assert "lane 'l1' (device 1): step 2, send %x to l0, comes after step 1" in message
    assert "fix: in lane 'l" in message
    assert "move step 2 (send %x" in message


def test_receives_that_nothing_waits_for_yet_do_not_hang() -> None:
    body = [receive("r", 1 - lane) + send("x", 1 - lane) + use("y", "r") for lane in range(2)]
    check_program(lanes(*body))


def test_free_does_not_wait() -> None:
    sends = [use("y", "x", "x") + send("y", 1 - lane) + "free %y\n" + receive("r", 1 - lane) for lane in range(2)]
    check_program(lanes(*sends))
    receives = [receive("r", 1 - lane) + "free %r\n" + send("x", 1 - lane) for lane in range(2)]
    check_program(lanes(*receives))


def test_a_ring_that_only_passes_on() -> None:
    body = [receive("r", (lane + 2) % 3) + send("r", (lane + 1) % 3) for lane in range(3)]
    with pytest.raises(ProgramError, match="3 communications") as caught:
        check_program(lanes(*body))
    assert "step 1, send %r to l1, waits for step 0, receive %r from l2" in str(caught.value)
    assert "start the cycle from a buffer that a lane computes itself" in str(caught.value)


def test_the_fix_moves_the_step_that_may_move() -> None:
    """Lane 1 can only answer what it has received; lane 0 could have sent before."""
    first = receive("r", 1) + use("y", "r") + send("x", 1)
    second = receive("r", 0) + use("y", "r") + send("y", 0)
    with pytest.raises(
        ProgramError, match=r"fix: in lane 'l0' move step 2 \(send %x to l1\).* before step 1 \(forward"
    ):
        check_program(lanes(first, second))


def test_crossed_collectives_over_two_meshes() -> None:
    crossed = lanes(over_pp("a") + use("y", "a") + over_qq("b"), over_qq("b") + use("y", "b") + over_pp("a"))
    with pytest.raises(ProgramError, match="2 communications") as caught:
        check_program(crossed)
    assert "all_reduce %b = %q over qq, comes after step 1, forward %y" in str(caught.value)
    straight = over_pp("a") + use("y", "a") + over_qq("b")
    check_program(lanes(straight, straight))


def test_crossed_collectives_on_streams_of_their_own_do_not_hang() -> None:
    check_program(lanes(over_pp("a") + over_qq("b"), over_qq("b") + over_pp("a")))


def test_crossed_collectives_on_one_stream() -> None:
    crossed = lanes(over_pp("a") + over_pp_of_m2("b"), over_pp_of_m2("b") + over_pp("a"))
    with pytest.raises(ProgramError, match="before it on stream 'collective pp'"):
        check_program(crossed)


def test_a_collective_against_a_transfer() -> None:
    first = over_pp("a") + use("y", "a") + send("x", 1)
    second = receive("r", 0) + use("y", "r") + over_pp("a")
    with pytest.raises(ProgramError, match="deadlock"):
        check_program(lanes(first, second))


def test_the_shortest_cycle_is_reported() -> None:
    """A ring of three lanes waits, and two of them wait for each other besides."""
    ring = [receive("r", (lane + 2) % 3) + send("r", (lane + 1) % 3) for lane in range(3)]
    pair = [receive("s", 1 - lane) + use("y", "s") + send("x", 1 - lane) for lane in range(2)]
    with pytest.raises(ProgramError, match="2 communications") as caught:
        check_program(lanes(ring[0] + pair[0], ring[1] + pair[1], ring[2]))
    assert "l2" not in str(caught.value)


# ---- against a machine -----------------------------------------------------------------------------------------------


def runs_to_the_end(program: Program, seed: int) -> bool:
    """Execute the rules at random until nothing can happen.

    Shares nothing with the checker but `reads` and `stream_of`.
    """
    chance = random.Random(seed)
    counts: Counter[tuple[object, ...]] = Counter()
    key_of: dict[tuple[str, int], tuple[object, ...]] = {}  # a step -> its communication
    members: dict[tuple[object, ...], list[tuple[str, int]]] = defaultdict(list)
    for lane in program.lanes:
        for index, step in enumerate(lane.steps):
            match step:
                case Send(to=to):
                    channel: tuple[object, ...] = (lane.name, to)
                case Receive(origin=origin):
                    channel = (origin, lane.name)
                case Collective(axes=axes, result=result):
                    channel = (str(result.layout.mesh), *axes)
                case _:
                    continue
            side = (lane.name, type(step), channel)
            key_of[lane.name, index] = key = (channel, counts[side])
            counts[side] += 1
            members[key].append((lane.name, index))
    at = {lane.name: 0 for lane in program.lanes}
    done: set[tuple[object, ...]] = set()

    def may_issue(name: str) -> bool:
        lane = program.lane(name)
        if at[name] == len(lane.steps):
            return False
        step = lane.steps[at[name]]
        for earlier in range(at[name]):
            key, other = key_of.get((name, earlier)), lane.steps[earlier]
            if key is None or key in done:
                continue
            written = other.result.name if isinstance(other, Collective | Receive) else None
            if written in reads(step):
                return False
        return True

    def may_complete(key: tuple[object, ...]) -> bool:
        for name, index in members[key]:
            steps = program.lane(name).steps
            if at[name] <= index:
                return False
            for earlier in range(index):
                before = key_of.get((name, earlier))
                if before is not None and before not in done and stream_of(steps[earlier]) == stream_of(steps[index]):
                    return False
        return True

    while True:
        issues = [name for name in at if may_issue(name)]
        completions = [key for key in members if key not in done and may_complete(key)]
        if not issues and not completions:
            return len(done) == len(members) and all(at[lane.name] == len(lane.steps) for lane in program.lanes)
        choice = chance.randrange(len(issues) + len(completions))
        if choice < len(issues):
            at[issues[choice]] += 1
        else:
            done.add(completions[choice - len(issues)])


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """Two or three lanes with matched transfers and collectives, each lane in an order of its own."""
    size = draw(st.integers(2, 3))
    pairs = [(a, b) for a in range(size) for b in range(size) if a != b]
    transfers = draw(st.lists(st.sampled_from(pairs), min_size=1, max_size=5))
    collectives = draw(st.lists(st.sampled_from([over_pp, over_qq, over_pp_of_m2]), max_size=3))
    bodies: list[str] = []
    for lane in range(size):
        events: list[tuple[str, int]] = [("send", b) for a, b in transfers if a == lane]
        events += [("receive", a) for a, b in transfers if b == lane]
        events += [("collective", number) for number in range(len(collectives))]
        order = draw(st.permutations(events))
        bodies.append(_body(draw, order, collectives))
    return lanes(*bodies)


def _body(draw: st.DrawFn, order: list[tuple[str, int]], collectives: list[object]) -> str:
    lines: list[str] = []
    there = ["x"]  # what can be read
    for number, (kind, other) in enumerate(order):
        if kind == "send":
            lines.append(send(draw(st.sampled_from(there)), other))
        elif kind == "receive":
            lines.append(receive(f"r{number}", other))
            there.append(f"r{number}")
        else:
            make = collectives[other]
            assert callable(make)
            lines.append(make(f"c{number}"))
            there.append(f"c{number}")
        if draw(st.integers(0, 2)) == 0:
            lines.append(use(f"y{number}", *draw(st.lists(st.sampled_from(there), min_size=1, max_size=2))))
            there.append(f"y{number}")
        if len(there) > 1 and draw(st.integers(0, 5)) == 0:
            victim = draw(st.sampled_from(there[1:]))
            there.remove(victim)
            lines.append(f"free %{victim}\n")
    return "".join(lines)


def deadlock_of(program: Program) -> ProgramError | None:
    try:
        check_deadlock(program)
    except ProgramError as error:
        return error
    return None


def test_the_verdict_is_that_of_every_execution() -> None:
    """Both directions: what is accepted runs to the end however it is timed, and what is refused never does."""
    verdicts: Counter[bool] = Counter()

    @settings(derandomize=True, deadline=None, max_examples=250)
    @given(programs())
    def run(program: Program) -> None:
        fault = deadlock_of(program)
        accepted = fault is None
        assert fault is None or ("deadlock" in fault.what and fault.fix)
        assert [runs_to_the_end(program, seed) for seed in range(3)] == [accepted] * 3
        verdicts[accepted] += 1

    run()
    assert min(verdicts[True], verdicts[False]) > 30  # the generator makes enough of both
