"""The steps of a schedule as a graph: what must happen before what, and the cycle that a deadlock is.

A node is one step of one block of one rank, numbered in the order of the schedule's text. Edges are

- block order: a step after the step before it in its block;
- waits: a step after the steps that its `after` names;
- messages: the k-th receive of a connection after its k-th send.

A connection is a FIFO with one block at each end, and both ends are lists of instructions without branches, so which
send meets which receive does not depend on timing. Together these edges are *happens-before*.

**Deadlock.** With s slots the sender of message k + s waits until message k is taken out: an edge from the k-th receive
of a connection to its send k + s. An instruction becomes able to run when all its predecessors are done and stays able
until it runs, since no other block takes its messages or slots. So the schedule runs to its end under every timing if
and only if the graph with these edges has no cycle.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from sennit.errors import CollectiveError
from sennit.ir.schedule import Instruction, Place, Schedule
from sennit.ir.schedule_check import describe_step

__all__ = ["StepGraph", "least_slots", "order_steps", "place_of"]


@dataclass(frozen=True, slots=True, eq=False)
class StepGraph:
    """Lists by node. `connections` holds, per connection, its sending and its receiving nodes in order."""

    schedule: Schedule
    instructions: list[Instruction]
    rank: list[int]
    block: list[int]
    step: list[int]
    before: list[list[int]]  # predecessors by happens-before
    message: dict[int, int]  # receiving node -> sending node
    connections: list[tuple[list[int], list[int]]]

    @classmethod
    def of(cls, schedule: Schedule) -> StepGraph:
        """The graph of a schedule that `check_schedule` has passed. Raises where messages do not match."""
        instructions: list[Instruction] = []
        rank: list[int] = []
        block: list[int] = []
        step: list[int] = []
        before: list[list[int]] = []
        ends: dict[tuple[int, int, int], tuple[list[int], list[int]]] = defaultdict(lambda: ([], []))
        for ranked in schedule.ranks:
            first = [len(instructions)]
            for held in ranked.blocks:
                first.append(first[-1] + len(held.instructions))
            for index, held in enumerate(ranked.blocks):
                for position, instruction in enumerate(held.instructions):
                    node = len(instructions)
                    instructions.append(instruction)
                    rank.append(ranked.rank)
                    block.append(index)
                    step.append(position)
                    earlier = [node - 1] if position else []
                    before.append(earlier + [first[wait.block] + wait.step for wait in instruction.after])
                    if held.send is not None and instruction.opcode.sends:
                        ends[ranked.rank, held.send, held.channel][0].append(node)
                    if held.receive is not None and instruction.opcode.receives:
                        ends[held.receive, ranked.rank, held.channel][1].append(node)
        graph = cls(schedule, instructions, rank, block, step, before, {}, list(ends.values()))
        for connection, (sends, receives) in ends.items():
            graph._match(connection, sends, receives)
        return graph

    def _match(self, connection: tuple[int, int, int], sends: list[int], receives: list[int]) -> None:
        sender, receiver, channel = connection
        if len(sends) != len(receives):
            alone = (sends if len(sends) > len(receives) else receives)[min(len(sends), len(receives))]
            raise CollectiveError(
                f"rank {sender} sends {len(sends)} messages to rank {receiver} on channel {channel}, which receives "
                f"{len(receives)}",
                where=f"{self.describe(alone)} has no partner",
                fix="send and receive as many",
            )
        for k, (send, receive) in enumerate(zip(sends, receives, strict=True)):
            sent, taken = place_of(self.instructions[send]).count, place_of(self.instructions[receive]).count
            if sent != taken:
                raise CollectiveError(
                    f"message {k} from rank {sender} to rank {receiver} on channel {channel} has {sent} chunks and is "
                    f"received as {taken}",
                    where=f"{self.describe(send)} meets {self.describe(receive)}",
                    fix="send and receive in one order",
                )
            self.message[receive] = send
            self.before[receive].append(send)

    def describe(self, node: int) -> str:
        return describe_step(self.schedule, self.rank[node], self.block[node], self.step[node])

    def slot_edges(self, slots: int) -> list[tuple[int, int]]:
        """(receive, send) pairs: the send waits for the slot that the receive frees."""
        return [pair for sends, receives in self.connections for pair in zip(receives, sends[slots:], strict=False)]


def place_of(instruction: Instruction) -> Place:
    """The place whose size is the size of the instruction's message."""
    place = instruction.target if instruction.target is not None else instruction.source
    assert place is not None  # the checker has seen it
    return place


def order_steps(graph: StepGraph) -> list[int]:
    """A linear extension of happens-before that also runs with the schedule's slots. Raises on a deadlock."""
    slots = graph.schedule.slots
    order = _sort(graph, slots)
    if len(order) == len(graph.before):
        return order
    least = least_slots(graph)
    if least is None:
        what, fix = "whatever the number of slots", "break the circle: move a step, or drop a wait that is not needed"
        slots = len(graph.before)
    else:
        what, fix = f"with {graph.schedule.slots} slots", f"give the schedule {least} slots, the least that suffice"
    raise CollectiveError(
        f"schedule {graph.schedule.name!r} deadlocks {what}: these steps wait for each other, each for the next",
        where="\n         ".join(map(graph.describe, _cycle(graph, slots))),
        fix=fix,
    )


def least_slots(graph: StepGraph) -> int | None:
    """The least number of slots without deadlock, or None where no number suffices. More slots mean fewer edges."""
    low, high = 1, max((len(sends) for sends, _ in graph.connections), default=1)
    if len(_sort(graph, high)) < len(graph.before):
        return None
    while low < high:
        middle = (low + high) // 2
        if len(_sort(graph, middle)) == len(graph.before):
            high = middle
        else:
            low = middle + 1
    return high


def _sort(graph: StepGraph, slots: int) -> list[int]:
    """The nodes that can run, in an order in which they can: all of them, or those ahead of every cycle."""
    after: list[list[int]] = [[] for _ in graph.before]
    missing = [len(earlier) for earlier in graph.before]
    for node, earlier in enumerate(graph.before):
        for other in earlier:
            after[other].append(node)
    for receive, send in graph.slot_edges(slots):
        after[receive].append(send)
        missing[send] += 1
    order = [node for node, count in enumerate(missing) if not count]
    for node in order:  # grows while it is walked
        for later in after[node]:
            missing[later] -= 1
            if not missing[later]:
                order.append(later)
    return order


def _cycle(graph: StepGraph, slots: int) -> list[int]:
    """Nodes that wait for each other, each for the next."""
    stuck = set(range(len(graph.before))) - set(_sort(graph, slots))
    waits = {node: [other for other in graph.before[node] if other in stuck] for node in stuck}
    for receive, send in graph.slot_edges(slots):
        if receive in stuck and send in stuck:
            waits[send].append(receive)
    path: dict[int, int] = {}
    node = min(stuck)
    while node not in path:
        path[node] = len(path)
        node = waits[node][-1]  # every stuck node waits for a stuck one
    return list(path)[path[node] :]
