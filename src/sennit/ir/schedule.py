"""A schedule: one collective algorithm compiled, per rank, per thread block, to a list of instructions.

    schedule := "schedule" STRING collective "slots" "=" INT "{" rank* "}"
    rank     := "rank" INT ("scratch" NAME "=" INT)* "{" block* "}"
    block    := "block" INT ("send" "=" RANK)? ("receive" "=" RANK)? "channel" "=" INT "{" instruction* "}"
    instruction := OPCODE part* ("after" wait ("," wait)*)?
    part     := "from" place ("," place)* | "to" place             several sources: a reduce only
    place    := BUFFER "[" START ":" STOP "]"
    wait     := BLOCK "." STEP                                     of the same rank

**Machine.** Each rank has buffers cut into chunks (input, output, scratch) and thread blocks. A block runs its
instructions in order. Between the sending block of one rank and the receiving block of another lies a *connection*,
named by (sender, receiver, channel): a FIFO of `slots` messages. An instruction that sends waits for a free slot, one
that receives waits for a message; `after` waits until those steps of other blocks of the rank are done. Each block has
at most one peer to send to and one to receive from.

| opcode | does | reads | writes |
|---|---|---|---|
| copy | target = source | source | target |
| reduce | target += every source, in their order | sources, target | target |
| send | message = source | source | |
| receive | target = message | | target |
| receive_copy_send | target = message; send it on | | target |
| receive_reduce | target += message | target | target |
| receive_reduce_send | send message + source | source | |
| receive_reduce_copy_send | target += message; send it on | target | target |

A message has as many chunks as the instruction names. In MSCCL's words: s, r, rcs, rrc, rrs, rrcs.

`slots` is part of the schedule: the least number of slots with which it is proved not to deadlock. A schedule for data
larger than a slot is run tile by tile, all tiles through the same instructions.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from sennit.ir.collective import CollectiveSpec, CustomCollective, Scratch, read_collective
from sennit.ir.text import Scanner, quote

__all__ = ["Block", "Instruction", "Opcode", "Place", "RankSchedule", "Schedule", "Wait"]


class Opcode(Enum):
    COPY = "copy"
    REDUCE = "reduce"
    SEND = "send"
    RECEIVE = "receive"
    RECEIVE_COPY_SEND = "receive_copy_send"
    RECEIVE_REDUCE = "receive_reduce"
    RECEIVE_REDUCE_SEND = "receive_reduce_send"
    RECEIVE_REDUCE_COPY_SEND = "receive_reduce_copy_send"

    @property
    def sends(self) -> bool:
        return self in (
            Opcode.SEND,
            Opcode.RECEIVE_COPY_SEND,
            Opcode.RECEIVE_REDUCE_SEND,
            Opcode.RECEIVE_REDUCE_COPY_SEND,
        )

    @property
    def receives(self) -> bool:
        return self not in (Opcode.COPY, Opcode.REDUCE, Opcode.SEND)


@dataclass(frozen=True, slots=True)
class Place:
    """Chunks `start` to `start + count` of a buffer of the rank."""

    buffer: str
    start: int
    count: int

    def __str__(self) -> str:
        return f"{self.buffer}[{self.start}:{self.start + self.count}]"

    @classmethod
    def read(cls, scanner: Scanner) -> Place:
        buffer = scanner.word("the name of a buffer")
        scanner.expect("[")
        start = scanner.integer()
        scanner.expect(":")
        stop = scanner.integer()
        scanner.expect("]")
        return cls(buffer, start, stop - start)


@dataclass(frozen=True, slots=True)
class Wait:
    """Step `step` of block `block` of the same rank must be done."""

    block: int
    step: int

    def __str__(self) -> str:
        return f"{self.block}.{self.step}"

    @classmethod
    def read(cls, scanner: Scanner) -> Wait:
        block = scanner.integer()
        scanner.expect(".")
        return cls(block, scanner.integer())


@dataclass(frozen=True, slots=True)
class Instruction:
    opcode: Opcode
    source: Place | None = None
    target: Place | None = None
    after: tuple[Wait, ...] = ()
    further: tuple[Place, ...] = ()  # of a reduce: sources after the first, all added in one pass

    @property
    def sources(self) -> tuple[Place, ...]:
        return self.further if self.source is None else (self.source, *self.further)

    def __str__(self) -> str:
        text = self.opcode.value
        text += f" from {', '.join(map(str, self.sources))}" if self.sources else ""
        text += f" to {self.target}" if self.target is not None else ""
        return text + (f" after {', '.join(map(str, self.after))}" if self.after else "")

    @classmethod
    def read(cls, scanner: Scanner) -> Instruction:
        for opcode in Opcode:
            if scanner.accept_word(opcode.value):
                break
        else:
            raise scanner.expected("'}' or one of " + ", ".join(opcode.value for opcode in Opcode))
        sources: list[Place] = []
        if scanner.accept_word("from"):
            sources.append(Place.read(scanner))
            while scanner.accept(","):
                sources.append(Place.read(scanner))
        target = Place.read(scanner) if scanner.accept_word("to") else None
        after: list[Wait] = []
        if scanner.accept_word("after"):
            after.append(Wait.read(scanner))
            while scanner.accept(","):
                after.append(Wait.read(scanner))
        return cls(opcode, sources[0] if sources else None, target, tuple(after), tuple(sources[1:]))


@dataclass(frozen=True, slots=True)
class Block:
    send: int | None
    receive: int | None
    channel: int
    instructions: tuple[Instruction, ...]

    @classmethod
    def read(cls, scanner: Scanner) -> Block:
        """What follows the number of a block."""
        peers: dict[str, int | None] = {"send": None, "receive": None}
        for name in peers:
            if scanner.accept_word(name):
                scanner.expect("=")
                peers[name] = scanner.integer()
        scanner.expect("channel")
        scanner.expect("=")
        channel = scanner.integer()
        scanner.expect("{")
        instructions: list[Instruction] = []
        while not scanner.accept("}"):
            instructions.append(Instruction.read(scanner))
        return cls(peers["send"], peers["receive"], channel, tuple(instructions))


@dataclass(frozen=True, slots=True)
class RankSchedule:
    rank: int
    blocks: tuple[Block, ...]
    scratch: tuple[Scratch, ...] = ()

    @classmethod
    def read(cls, scanner: Scanner) -> RankSchedule:
        scanner.expect("rank")
        rank = scanner.integer()
        scratch: list[Scratch] = []
        while scanner.accept_word("scratch"):
            name = scanner.word("the name of a buffer")
            scanner.expect("=")
            scratch.append(Scratch(rank, name, scanner.integer()))
        scanner.expect("{")
        blocks: list[Block] = []
        while not scanner.accept("}"):
            scanner.expect("block")
            if scanner.integer() != len(blocks):
                raise scanner.expected(f"block {len(blocks)} before this, in order")
            blocks.append(Block.read(scanner))
        return cls(rank, tuple(blocks), tuple(scratch))


@dataclass(frozen=True, slots=True)
class Schedule:
    name: str
    collective: CollectiveSpec | CustomCollective
    slots: int
    ranks: tuple[RankSchedule, ...]

    def __str__(self) -> str:
        lines = [f"schedule {quote(self.name)} {self.collective} slots={self.slots} {{"]
        for ranked in self.ranks:
            scratch = "".join(f" scratch {piece.name}={piece.chunks}" for piece in ranked.scratch)
            lines.append(f"  rank {ranked.rank}{scratch} {{")
            for index, block in enumerate(ranked.blocks):
                send = f" send={block.send}" if block.send is not None else ""
                receive = f" receive={block.receive}" if block.receive is not None else ""
                lines.append(f"    block {index}{send}{receive} channel={block.channel} {{")
                lines += [f"      {instruction}" for instruction in block.instructions]
                lines.append("    }")
            lines.append("  }")
        return "\n".join([*lines, "}"]) + "\n"

    @classmethod
    def read(cls, scanner: Scanner) -> Schedule:
        scanner.expect("schedule")
        name = scanner.string()
        collective = read_collective(scanner)
        scanner.expect("slots")
        scanner.expect("=")
        slots = scanner.integer()
        scanner.expect("{")
        ranks: list[RankSchedule] = []
        while not scanner.accept("}"):
            ranks.append(RankSchedule.read(scanner))
        return cls(name, collective, slots, tuple(ranks))

    @classmethod
    def parse(cls, text: str) -> Schedule:
        """The schedule that a text states. Whether its places and peers exist, `check_schedule` says."""
        return Scanner.whole(text, cls.read)
