"""Deadlock: whether the lanes of a program can come to wait for each other for ever.

**Rules of execution.** A lane issues its steps in program order. Computing is done when it is issued. A communication
only starts when it is issued; it *completes* once every participant has issued it and, on every lane that takes part,
the communication before it on the same stream (`stream_of`) has completed (of exchanges, that from the same devices to
the same devices; such come in one order in all their lanes, by a rule of `program_exchange.py`). A step waits at its
issue for the completion of every communication whose result it reads. A `free` does not wait: the memory is given back
once the communications that use it have completed.

**The graph.** One *issue* node per step of each lane; one *completion* node per communication, contracted over its
participants (`program_match.py`). Edges: step to next step; the issue of each participant to the completion; completion
to the next completion on a stream; completion to the issue of each step that waits for it. By the rules above a node
can happen if and only if all its predecessors have happened. Exchanges need no edge for their order: the later of two
has all participants of the earlier, each behind it, so what waits for the later one waits for every issue of the
earlier one too. So:

- *A cycle is a deadlock.* Suppose a node of a cycle happened, and take the first of the cycle that did: its predecessor
  on
  the cycle had not happened, against the rules. No node of the cycle ever happens: a set of steps each waiting on another.
- *No cycle, no deadlock.* At any moment the nodes that have not happened form an acyclic graph; if there are any, one
  of
  them has no predecessor among them, and can happen. A topological order is a legal execution, and however the lanes are
  timed, the execution never gets stuck.

**Lanes for devices.** The rules hold device by device, with a collective per group and a transfer per pair of devices,
also in an exchange. Mapping a device to its lane maps the device graph onto this one, edge to edge, and so a cycle to a
closed walk: what is accepted here does not hang on any device. Conversely, where each group of a collective has a
device in each lane that the collective joins, each edge out of a node here lifts to an edge out of each of its device
nodes; walking round a cycle again and again must then revisit a device node, which closes a cycle of devices. Where
groups join lanes only pairwise (A with B, B with C), or some devices of an exchange have no message for each other, the
contraction waits for more than the devices do, and errs on the safe side.

| part | function | time |
|---|---|---|
| the graph | `_wait_graph` | linear in steps and reads |
| what cannot happen | `_stuck` | linear |
| the shortest cycle there, for the message | `_shortest_cycle` | on failure only; bounded by `_SEARCH` visits |
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from sennit.errors import ProgramError
from sennit.ir.program import Exchange, Lane, Program, defines, reads, stream_of
from sennit.ir.program_match import Communication, Position, match_communications
from sennit.ir.program_site import describe_lane, describe_step

__all__ = ["check_deadlock"]

_SEARCH = 2_000_000  # nodes visited in search of a shorter cycle, once one is known


def check_deadlock(program: Program, communications: Sequence[Communication] | None = None) -> None:
    """Raise `ProgramError` with the shortest cycle if the program can deadlock: if and only if it always does."""
    if communications is None:
        communications = match_communications(program)
    graph = _wait_graph(program, communications)
    stuck = _stuck(graph.after)
    if stuck:
        raise _deadlock(graph, _shortest_cycle(graph, stuck))


@dataclass(frozen=True, slots=True)
class _WaitGraph:
    """Nodes are numbers: the issue nodes, lane by lane, then one completion per communication."""

    program: Program
    communications: tuple[Communication, ...]
    places: tuple[Position, ...]  # of the issue nodes
    after: tuple[list[int], ...]  # the successors of each node

    def is_completion(self, node: int) -> bool:
        return node >= len(self.places)

    def participants(self, node: int) -> tuple[Position, ...]:
        return self.communications[node - len(self.places)].participants


def _wait_graph(program: Program, communications: Sequence[Communication]) -> _WaitGraph:
    places = tuple(Position(lane.name, index) for lane in program.lanes for index in range(len(lane.steps)))
    after: tuple[list[int], ...] = tuple([] for _ in range(len(places) + len(communications)))
    completion = {
        (place.lane, place.step): len(places) + number
        for number, communication in enumerate(communications)
        for place in communication.participants
    }
    first = 0
    for lane in program.lanes:
        _add_lane(lane, first, completion, after)
        first += len(lane.steps)
    return _WaitGraph(program, tuple(communications), places, after)


def _add_lane(lane: Lane, first: int, completion: dict[tuple[str, int], int], after: tuple[list[int], ...]) -> None:
    """The edges of one lane, whose issue nodes count from `first`."""
    writer: dict[str, int] = {}  # buffer -> the communication that writes it
    newest: dict[str, int] = {}  # stream -> its last communication so far
    waited: set[int] = set()  # a completion waited for once is there for all later steps of the lane
    for index, step in enumerate(lane.steps):
        node = first + index
        if index:
            after[node - 1].append(node)
        read = reads(step)
        for done in (writer[name] for name in read if name in writer):
            if done not in waited:
                waited.add(done)
                after[done].append(node)
        done_here = completion.get((lane.name, index))
        if done_here is None:
            continue
        after[node].append(done_here)
        if not isinstance(step, Exchange):
            stream = stream_of(step)
            if stream in newest:
                after[newest[stream]].append(done_here)
            newest[stream] = done_here
        writer.update((buffer.name, done_here) for buffer in defines(step))


def _stuck(after: Sequence[list[int]]) -> set[int]:
    """The nodes that never happen: let everything happen that can, and see what remains (Kahn's algorithm)."""
    missing = [0] * len(after)
    for successors in after:
        for node in successors:
            missing[node] += 1
    ready = [node for node, count in enumerate(missing) if count == 0]
    for node in ready:  # grows while we walk it
        for successor in after[node]:
            missing[successor] -= 1
            if missing[successor] == 0:
                ready.append(successor)
    return set(range(len(after))).difference(ready)


def _shortest_cycle(graph: _WaitGraph, stuck: set[int]) -> list[int]:
    """A cycle with the fewest communications, starting with one. Every cycle has at least two: a step that waits for a
    communication stands, in its own lane, behind the issue of it."""
    best: list[int] = []
    visits = 0
    for start in sorted(node for node in stuck if graph.is_completion(node)):
        limit = sum(map(graph.is_completion, best)) - 1 if best else len(graph.communications)
        if best and (limit < 2 or visits > _SEARCH):
            break
        cycle, seen = _cycle_through(graph, stuck, start, limit)
        visits += seen
        best = cycle or best
    assert best  # a finite graph in which every node has a predecessor has a cycle, and a lane alone is a chain
    return best


def _cycle_through(graph: _WaitGraph, stuck: set[int], start: int, limit: int) -> tuple[list[int], int]:
    """The cycle through `start` with the fewest communications, at most `limit`, and the number of nodes visited.
    Breadth first, where only a step into a completion has a length: nodes leave the queue by distance."""
    came_from: dict[int, int] = {start: start}
    length = {start: 0}
    queue = deque([start])
    settled: set[int] = set()
    while queue:
        node = queue.popleft()
        if node in settled:
            continue
        settled.add(node)
        for successor in graph.after[node]:
            if successor not in stuck:
                continue
            distance = length[node] + graph.is_completion(successor)
            if distance > limit:
                continue
            if successor == start:
                path = [node]
                while path[-1] != start:
                    path.append(came_from[path[-1]])
                return path[::-1], len(settled)
            if distance < length.get(successor, limit + 1):
                length[successor], came_from[successor] = distance, node
                if distance == length[node]:
                    queue.appendleft(successor)
                else:
                    queue.append(successor)
    return [], len(settled)


# ---- the message -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Wait:
    """Why one communication cannot complete before another. All are steps of `lane`: `earlier` takes part in the one,
    `waits` waits for it, and `issues`, the same step or a later one, takes part in the other. On a stream nothing
    stands between: `waits` is `issues`."""

    lane: Lane
    earlier: int
    waits: int
    issues: int
    on_stream: bool = False

    def __str__(self) -> str:
        def step(index: int) -> str:
            return f"step {index}, {describe_step(self.lane.steps[index])}"

        lane, issues = describe_lane(self.lane), step(self.issues)
        if self.on_stream:
            stream = stream_of(self.lane.steps[self.issues])
            return f"{lane}: {issues}, waits for {step(self.earlier)}, before it on stream {stream!r}"
        if self.waits == self.issues:
            return f"{lane}: {issues}, waits for {step(self.earlier)}"
        return f"{lane}: {issues}, comes after {step(self.waits)}, which waits for {step(self.earlier)}"

    def is_by_data(self) -> bool:
        """Whether `issues` needs what `earlier` brings, at once or through steps between: then no order helps."""
        needed = set(reads(self.lane.steps[self.issues]))
        for index in range(self.issues - 1, self.earlier - 1, -1):
            step = self.lane.steps[index]
            if any(buffer.name in needed for buffer in defines(step)):
                needed.update(reads(step))
                if index == self.earlier:
                    return True
        return False


def _deadlock(graph: _WaitGraph, cycle: list[int]) -> ProgramError:
    starts = [position for position, node in enumerate(cycle) if graph.is_completion(node)]
    waits = [
        _wait_between(graph, cycle[start], cycle[stop % len(cycle)], cycle[start + 1 : stop])
        for start, stop in zip(starts, [*starts[1:], len(cycle)], strict=True)
    ]
    return ProgramError(
        f"deadlock: {len(starts)} communications wait for each other, and none of them can complete",
        where=f"program {graph.program.name!r}\n    " + "\n    ".join(map(str, waits)),
        fix=_remedy(waits),
    )


def _wait_between(graph: _WaitGraph, earlier: int, later: int, issues: list[int]) -> _Wait:
    """The edge or path from one completion to the next, over the issue nodes between them."""
    mine = {place.lane: place.step for place in graph.participants(earlier)}
    if issues:
        first, last = graph.places[issues[0]], graph.places[issues[-1]]
        return _Wait(graph.program.lane(first.lane), mine[first.lane], first.step, last.step)
    for place in graph.participants(later):
        lane = graph.program.lane(place.lane)
        before = mine.get(place.lane)
        if (
            before is not None
            and before < place.step
            and stream_of(lane.steps[before]) == stream_of(lane.steps[place.step])
        ):
            return _Wait(lane, before, place.step, place.step, on_stream=True)
    raise AssertionError("completions are joined by a step or by a stream")


def _remedy(waits: list[_Wait]) -> str:
    """Where a step is merely behind another, the order can be changed; where it needs the other's data, it cannot."""
    for wait in waits:
        if not wait.is_by_data():
            # what is waited for on a stream is the communication itself; else the step that waits for it
            front = wait.earlier if wait.on_stream else wait.waits
            later, sooner = wait.lane.steps[wait.issues], wait.lane.steps[front]
            return (
                f"in lane {wait.lane.name!r} move step {wait.issues} ({describe_step(later)}) before step {front} "
                f"({describe_step(sooner)}): it does not need what that waits for"
            )
    return "each lane sends on what it is to receive: start the cycle from a buffer that a lane computes itself"
