"""Pass 4, the global order: one sequence of all operations that keeps every wait and message.

Operations are taken in rounds. A round takes all that are ready, by number; so the order is by depth, and what can run
at the same time stands together. An operation is ready if what it waits for is taken and its message is sent. Besides,
messages between two ranks on a lane should arrive in the order of their sending, so that one connection carries them: a
receive whose message is not the oldest is held back. If only such receives are left, the first of them *overtakes*: it
is taken all the same, and pass 5 gives it another channel.

The result is a linear extension of the DAG whatever overtakes: a receive is taken after its send, an operation after
those it waits for.
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass
from heapq import heappop, heappush

from sennit.collective.compile_operations import OperationDag

__all__ = ["GlobalOrder", "global_order"]


@dataclass(frozen=True, slots=True)
class GlobalOrder:
    operations: tuple[int, ...]
    overtaking: tuple[int, ...]  # moves whose messages do not arrive in the order of their sending


def global_order(dag: OperationDag) -> GlobalOrder:
    owner, sent, received, connection = dag.owner, dag.sent, dag.received, dag.connection
    missing, after = _successors(dag)
    queues: defaultdict[int, deque[int]] = defaultdict(deque)  # moves under way on a connection, the oldest first
    held: set[int] = set()  # moves whose receive lacks nothing but its turn
    turns: list[int] = []  # the same as a heap, with entries that are gone
    order: list[int] = []
    overtaking: list[int] = []
    ready = [op for op, code in enumerate(dag.opcode) if code is not None and not missing[op]]
    while ready:
        order += ready
        arrived: list[int] = []
        for op in ready:
            if (move := sent[op]) is not None:
                queues[connection[move]].append(move)
        following: list[int] = []
        for op in ready:
            for later in after[op]:
                missing[later] -= 1
                if not missing[later]:
                    arrived.append(later)
            if (move := received[op]) is not None:
                queue = queues[connection[move]]
                if queue[0] == move:
                    queue.popleft()
                else:
                    queue.remove(move)  # it overtakes
                if queue and queue[0] in held:
                    held.remove(queue[0])
                    following.append(owner[2 * queue[0] + 1])
        for op in arrived:
            move = received[op]
            if move is None or queues[connection[move]][0] == move:
                following.append(op)
            else:
                held.add(move)
                heappush(turns, move)
        while not following and held:
            if (move := heappop(turns)) in held:
                held.remove(move)
                overtaking.append(move)
                following.append(owner[2 * move + 1])
        following.sort()
        ready = following
    assert len(order) == len(dag.opcode) - dag.opcode.count(None), "the operations wait in a cycle"
    return GlobalOrder(tuple(order), tuple(overtaking))


def _successors(dag: OperationDag) -> tuple[list[int], list[list[int]]]:
    """By operation: how many entries it waits for, and the operations that wait for it, as often as they do."""
    owner, opcode = dag.owner, dag.opcode
    missing = [0] * len(opcode)
    after: list[list[int]] = [[] for _ in opcode]
    for op, waits in enumerate(dag.before):
        if opcode[op] is None:
            continue
        for access in waits:
            after[owner[access]].append(op)
        missing[op] = len(waits)
        if dag.received[op] is not None:
            after[owner[op - 1]].append(op)  # the send of a move stands before its receive
            missing[op] += 1
    return missing, after
