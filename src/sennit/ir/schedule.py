"""A schedule: one collective algorithm compiled, per rank, per thread block, to a list of instructions.

    schedule := "schedule" STRING collective "slots" "=" INT "{" rank* "}"
    rank     := "rank" INT ("scratch" NAME "=" INT)* "{" block* "}"
    block    := "block" INT ("send" "=" RANK)? ("receive" "=" RANK)? "channel" "=" INT "{" instruction* "}"
    instruction := OPCODE part* ("after" wait ("," wait)*)?
    part     := "from" place | "to" place
    place    := BUFFER "[" START ":" STOP "]"
    wait     := BLOCK "." STEP                                     of the same rank

**Machine.** Each rank has buffers cut into chunks (input, output, scratch) and thread blocks. A block runs its instructions in order.
Between the sending block of one rank and the receiving block of another lies a *connection*, named by (sender, receiver, channel):
a FIFO of `slots` messages. An instruction that sends waits for a free slot, one that receives waits for a message; `after` waits until
those steps of other blocks of the rank are done. Each block has at most one peer to send to and one to receive from.

| opcode | does | reads | writes |
|---|---|---|---|
| copy | target = source | source | target |
| reduce | target += source | source, target | target |
| send | message = source | source | |
| receive | target = message | | target |
| receive_copy_send | target = message; send it on | | target |
| receive_reduce | target += message | target | target |
| receive_reduce_send | send message + source | source | |
| receive_reduce_copy_send | target += message; send it on | target | target |

A message has as many chunks as the instruction names. In MSCCL's words: s, r, rcs, rrc, rrs, rrcs.

`slots` is part of the schedule: the least number of slots with which it is proved not to deadlock. A schedule for data larger than a
slot is run tile by tile, all tiles through the same instructions.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from sennit.ir.collective import CollectiveSpec, CustomCollective, Scratch

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
        return self is Opcode.SEND or self.value.endswith("_send")

    @property
    def receives(self) -> bool:
        return self.value.startswith("receive")


@dataclass(frozen=True, slots=True)
class Place:
    """Chunks `start` to `start + count` of a buffer of the rank."""

    buffer: str
    start: int
    count: int

    def __str__(self) -> str:
        return f"{self.buffer}[{self.start}:{self.start + self.count}]"


@dataclass(frozen=True, slots=True)
class Wait:
    """Step `step` of block `block` of the same rank must be done."""

    block: int
    step: int


@dataclass(frozen=True, slots=True)
class Instruction:
    opcode: Opcode
    source: Place | None = None
    target: Place | None = None
    after: tuple[Wait, ...] = ()


@dataclass(frozen=True, slots=True)
class Block:
    send: int | None
    receive: int | None
    channel: int
    instructions: tuple[Instruction, ...]


@dataclass(frozen=True, slots=True)
class RankSchedule:
    rank: int
    blocks: tuple[Block, ...]
    scratch: tuple[Scratch, ...] = ()


@dataclass(frozen=True, slots=True)
class Schedule:
    name: str
    collective: CollectiveSpec | CustomCollective
    slots: int
    ranks: tuple[RankSchedule, ...]
