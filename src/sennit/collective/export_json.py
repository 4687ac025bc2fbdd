"""A schedule as an mscclpp execution plan (JSON), the input of mscclpp's executor and of its NCCL interposition.

mscclpp is one-sided: `put` writes into a peer's registered buffer, `signal` and `wait` count on a channel, which both
ends of a pair of ranks share; nothing is a message. So a connection (sender, receiver, channel) becomes one channel and
`slots` places in the receiver's scratch, each as long as the connection's longest message. `PlanOptions.slots` sets
their number; None is one for every message, which needs the most scratch and the fewest operations. More slots than the
schedule is proved with are always safe:

| instruction | becomes |
|---|---|
| send k | wait (from message `slots` on: for a place); put source -> place k % slots; signal |
| receive k | wait; copy place -> target; signal (where the sender will wait for it) |
| receive_copy_send | wait; copy place -> target; put target -> the next rank's place; signal both |
| receive_reduce | wait; re target += place; signal |
| receive_reduce_send | wait; res place, and the next rank's place, = source + place; signal both |
| receive_reduce_copy_send | wait; res target, and the next rank's place, = target + place; signal both |
| copy, reduce | copy, re with all sources |

- The receiver's first act is a signal, and the sender's a wait for it: the run before has ended, the places are free.
  After it every
  signal is waited for by the end of the run, so that channels start the next one balanced.
- `after` becomes a device semaphore a pair of blocks: the awaited block releases it after each step that the other
  waits for, the
  other acquires it in that order.
- `nop` is the barrier of a thread block's threads. It stands before and after every operation that moves data; signals,
  waits and
  semaphores, which one thread does, need none between them.
- Between nodes (`ranks_per_node`) channels are of type "port": the NIC reads from memory, so data is first stored and
  then put, and
  `flush` keeps the source from being overwritten before it has been read.

The fields are those of mscclpp's parser (src/core/executor/execution_plan.cc). Its plans have no tiles: a chunk of any
size is put at once, the scratch grows with the data.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from sennit.collective.normal_form import SCRATCH, normal_form
from sennit.errors import CollectiveError
from sennit.ir.collective import CollectiveSpec, CustomCollective
from sennit.ir.schedule import Block, Instruction, Opcode, Place, RankSchedule, Schedule

__all__ = ["MscclppLimits", "PlanOptions", "mscclpp_json", "plan_header"]

Connection = tuple[int, int, int]  # sender, receiver, channel
Operation = dict[str, Any]


@dataclass(frozen=True, slots=True)
class MscclppLimits:
    """Of execution_common.hpp: operations and channels a thread block, device semaphores a rank."""

    operations: int = 64
    channels: int = 16
    semaphores: int = 16


@dataclass(frozen=True, slots=True)
class PlanOptions:
    ranks_per_node: int | None = None
    slots: int | None = None
    min_bytes: int = 0
    max_bytes: int = 2**64 - 1
    threads: int = 1024
    limits: MscclppLimits = MscclppLimits()


def mscclpp_json(schedule: Schedule, options: PlanOptions | None = None) -> str:
    """The plan as JSON text. Raises CollectiveError where it exceeds what the executor holds."""
    options = options or PlanOptions()
    lowering = _Lowering(normal_form(schedule, single_reduces=False), options)
    gpus = [lowering.rank(rank) for rank in lowering.schedule.ranks]
    return json.dumps(plan_header(schedule.name, schedule.collective, gpus, options), indent=2) + "\n"


def plan_header(
    name: str, collective: CollectiveSpec | CustomCollective, gpus: list[dict[str, Any]], options: PlanOptions
) -> dict[str, Any]:
    """A whole plan, from what its ranks do."""
    return {
        "name": name,
        "collective": _collective(collective),
        "protocol": "Simple",
        "inplace": collective.in_place,
        "reuse_resources": False,
        "gpus": gpus,
        "num_threads_per_block": options.threads,
        "use_double_scratch_buffer": False,
        "buffer_alignment": 16,
        "min_message_size": options.min_bytes,
        "max_message_size": options.max_bytes,
    }


def _collective(spec: CollectiveSpec | CustomCollective) -> str:
    return spec.title if isinstance(spec, CustomCollective) else spec.name.value.replace("_", "")


@dataclass(frozen=True, slots=True)
class _Places:
    """The places of a connection in the receiver's scratch."""

    start: int
    size: int  # chunks of one place
    messages: int


class _Lowering:
    """What all ranks agree on: the connections, their places, and the number of their channel at each end."""

    def __init__(self, schedule: Schedule, options: PlanOptions) -> None:
        self.schedule, self.options = schedule, options
        if options.slots is not None and options.slots < schedule.slots:
            raise CollectiveError(
                f"{options.slots} slots, the schedule is proved with {schedule.slots}: it could deadlock",
                where=f"schedule {schedule.name!r}",
                fix=f"use {schedule.slots} or more, or leave slots out",
            )
        self.places: dict[Connection, _Places] = {}
        self.scratch: dict[int, int] = {}
        self.channels: dict[int, dict[str, list[Connection]]] = {}  # by rank and type, in the order of their numbers
        lengths: dict[Connection, list[int]] = {}
        for rank in schedule.ranks:
            self.scratch[rank.rank] = sum(scratch.chunks for scratch in rank.scratch)
            self.channels[rank.rank] = {}
            for block in rank.blocks:
                for instruction in block.instructions:
                    if instruction.opcode.sends:
                        assert block.send is not None
                        lengths.setdefault((rank.rank, block.send, block.channel), []).append(_count(instruction))
        # sorted by the pair: both ends then count the channels between them alike
        for connection in sorted(lengths, key=lambda c: (min(c[:2]), max(c[:2]), c)):
            sender, receiver, _ = connection
            counts = lengths[connection]
            self.places[connection] = _Places(self.scratch[receiver], max(counts), len(counts))
            self.scratch[receiver] += max(counts) * min(self.slots(connection), len(counts))
            for end in (sender, receiver):
                self.channels[end].setdefault(self.kind(connection), []).append(connection)

    def kind(self, connection: Connection) -> str:
        per_node = self.options.ranks_per_node
        near = per_node is None or connection[0] // per_node == connection[1] // per_node
        return "memory" if near else "port"

    def slots(self, connection: Connection) -> int:
        return self.options.slots or self.places[connection].messages

    def place(self, connection: Connection, message: int) -> int:
        places = self.places[connection]
        return places.start + places.size * (message % self.slots(connection))

    def rank(self, rank: RankSchedule) -> dict[str, Any]:
        spec = self.schedule.collective
        semaphores = _Semaphores.of(rank)
        where = f"schedule {self.schedule.name!r}, rank {rank.rank}"
        if len(semaphores.numbers) > self.options.limits.semaphores:
            raise CollectiveError(
                f"{len(semaphores.numbers)} pairs of thread blocks wait for each other, the executor has "
                f"{self.options.limits.semaphores} semaphores",
                where=where,
                fix="use fewer thread blocks or channels on a rank",
            )
        remote: dict[tuple[int, str], int] = {}  # the scratch of each peer, by rank and type of channel
        for kind, connections in self.channels[rank.rank].items():
            for sender, receiver, _ in connections:
                if sender == rank.rank:
                    remote.setdefault((receiver, kind), len(remote))
        return {
            "id": rank.rank,
            "input_chunks": spec.input_chunks(rank.rank),
            "output_chunks": spec.output_chunks(rank.rank),
            "scratch_chunks": self.scratch[rank.rank],
            "threadblocks": [
                _BlockLowering(self, rank.rank, number, block, semaphores, remote).run(f"{where}, block {number}")
                for number, block in enumerate(rank.blocks)
            ],
            "channels": [
                {"channel_type": kind, "connected_to": [_peer(connection, rank.rank) for connection in connections]}
                for kind, connections in self.channels[rank.rank].items()
            ],
            "remote_buffers": [{"rank": peer, "type": "s", "access_channel_types": [kind]} for peer, kind in remote],
            "semaphores": [{"init_value": 0} for _ in semaphores.numbers],
        }


def _peer(connection: Connection, rank: int) -> int:
    return connection[1] if connection[0] == rank else connection[0]


def _count(instruction: Instruction) -> int:
    place = instruction.source or instruction.target
    assert place is not None
    return place.count


@dataclass(frozen=True, slots=True)
class _Semaphores:
    """A semaphore for each pair (awaited block, waiting block); after which steps it is released."""

    numbers: dict[tuple[int, int], int]
    releases: dict[tuple[int, int], list[int]]  # by awaited block and step

    @classmethod
    def of(cls, rank: RankSchedule) -> _Semaphores:
        numbers: dict[tuple[int, int], int] = {}
        releases: dict[tuple[int, int], list[int]] = {}
        for number, block in enumerate(rank.blocks):
            for instruction in block.instructions:
                for wait in instruction.after:  # of the normal form: each waits for a later step than those before
                    semaphore = numbers.setdefault((wait.block, number), len(numbers))
                    releases.setdefault((wait.block, wait.step), []).append(semaphore)
        return cls(numbers, releases)


@dataclass(slots=True)
class _BlockLowering:
    """One thread block: its operations as they are appended."""

    whole: _Lowering
    rank: int
    number: int
    block: Block
    semaphores: _Semaphores
    remote: dict[tuple[int, str], int]
    operations: list[Operation] = field(default_factory=list)
    channels: dict[str, list[int]] = field(default_factory=dict)  # by type, numbers of the rank's channels
    buffers: dict[str, list[int]] = field(default_factory=dict)  # by type, numbers of the rank's remote buffers
    sent: int = 0
    received: int = 0

    def run(self, where: str) -> dict[str, Any]:
        if (arriving := self._arriving()) is not None:
            self._synchronise("signal", arriving)
        for step, instruction in enumerate(self.block.instructions):
            for wait in instruction.after:
                self._semaphore("sem_acquire", [self.semaphores.numbers[wait.block, self.number]])
            self._instruction(instruction)
            if released := self.semaphores.releases.get((self.number, step)):
                self._semaphore("sem_release", released)
        limits = self.whole.options.limits
        if len(self.operations) > limits.operations:
            raise CollectiveError(
                f"{len(self.block.instructions)} instructions become {len(self.operations)} operations, "
                f"the executor holds {limits.operations}",
                where=where,
                fix="use fewer chunks or ranks a block, or an algorithm whose blocks do less (all_pairs)",
            )
        for kind, numbers in self.channels.items():
            if len(numbers) > limits.channels:
                raise CollectiveError(
                    f"{len(numbers)} {kind} channels, the executor holds {limits.channels}", where=where
                )
        return {
            "id": self.number,
            "ops": self.operations,
            "channels": [{"channel_type": kind, "channel_ids": numbers} for kind, numbers in self.channels.items()],
            "remote_buffer_refs": [
                {"access_channel_type": kind, "remote_buffer_ids": numbers} for kind, numbers in self.buffers.items()
            ],
        }

    def _instruction(self, instruction: Instruction) -> None:
        opcode, source, target = instruction.opcode, instruction.source, instruction.target
        match opcode:
            case Opcode.COPY:
                self._data("copy", [_local(source)], [_local(target)])
            case Opcode.REDUCE:
                self._data("re", [_local(target), *map(_local, instruction.sources)], [_local(target)])
            case Opcode.SEND:
                self._send(_local(source), _count(instruction))
            case _:
                self._receive(opcode, source, target, _count(instruction))

    def _receive(self, opcode: Opcode, source: Place | None, target: Place | None, count: int) -> None:
        connection = self._arriving()
        assert connection is not None
        arrived = _range("s", self.whole.place(connection, self.received), count)
        self._synchronise("wait", connection)
        # what is kept: the target, or the place itself, which nobody reads again
        kept = _local(target) if target is not None else arrived
        operands = [_local(source if target is None else target), arrived]
        match opcode:
            case Opcode.RECEIVE:
                self._data("copy", [arrived], [kept])
            case Opcode.RECEIVE_COPY_SEND:
                self._data("copy", [arrived], [kept])
                self._send(kept, count)
            case Opcode.RECEIVE_REDUCE:
                self._data("re", operands, [kept])
            case _ if self.whole.kind(self._leaving()) == "memory":
                self._send(kept, count, operands)
            case _:
                self._data("re", operands, [kept])
                self._send(kept, count)
        if self.received + self.whole.slots(connection) < self.whole.places[connection].messages:
            self._synchronise("signal", connection)
        self.received += 1

    def _send(self, source: Operation, count: int, operands: list[Operation] | None = None) -> None:
        """Put `source` on the next rank's place; with operands, compute it on the way."""
        connection = self._leaving()
        kind = self.whole.kind(connection)
        if self.sent == 0 or self.sent >= self.whole.slots(connection):
            self._synchronise("wait", connection)
        numbers = self.buffers.setdefault(kind, [])
        buffer = self.remote[connection[1], kind]
        if buffer not in numbers:
            numbers.append(buffer)
        place = {"buffer_id": numbers.index(buffer), "index": self.whole.place(connection, self.sent), "size": count}
        channel = {"channel_ids": [self._channel(connection)], "channel_type": kind}
        if operands is None:
            self._append({"name": "put", "src_buff": [source], "dst_buff": [place], **channel})
        else:
            self._append(
                {"name": "res", "src_buff": operands, "dst_buff": [source, place], **channel, "reduce_op": "sum"}
            )
        self._synchronise("signal", connection)
        if kind == "port":
            self._synchronise("flush", connection)
        self.sent += 1

    def _arriving(self) -> Connection | None:
        if self.block.receive is None:
            return None
        connection = (self.block.receive, self.rank, self.block.channel)
        return connection if connection in self.whole.places else None

    def _leaving(self) -> Connection:
        assert self.block.send is not None
        return (self.rank, self.block.send, self.block.channel)

    def _channel(self, connection: Connection) -> int:
        """The number, in the block, of a connection's channel."""
        kind = self.whole.kind(connection)
        number = self.whole.channels[self.rank][kind].index(connection)
        numbers = self.channels.setdefault(kind, [])
        if number not in numbers:
            numbers.append(number)
        return numbers.index(number)

    def _synchronise(self, name: str, connection: Connection) -> None:
        self._append(
            {"name": name, "channel_ids": [self._channel(connection)], "channel_type": self.whole.kind(connection)}
        )

    def _semaphore(self, name: str, numbers: list[int]) -> None:
        self._append({"name": name, "semaphore_ids": numbers})

    def _data(self, name: str, sources: list[Operation], targets: list[Operation]) -> None:
        operation: Operation = {"name": name, "src_buff": sources, "dst_buff": targets}
        self._append({**operation, "reduce_op": "sum"} if name == "re" else operation)

    def _append(self, operation: Operation) -> None:
        """With a barrier before it, except between two operations that one thread does: those that move no data."""
        if self.operations and ("src_buff" in self.operations[-1] or "src_buff" in operation):
            self.operations.append({"name": "nop"})
        self.operations.append(operation)


def _range(kind: str, start: int, count: int) -> Operation:
    return {"type": kind, "index": start, "size": count}


def _local(place: Place | None) -> Operation:
    assert place is not None
    return _range({"input": "i", "output": "o", SCRATCH: "s"}[place.buffer], place.start, place.count)
