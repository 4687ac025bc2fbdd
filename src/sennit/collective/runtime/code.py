"""Code: a one-sided program as flat tables of integers, which a machine in C, CUDA or numpy walks.

    code        := instruction* operand* block*
    instruction := opcode peer source_buffer source_chunk target_buffer target_chunk count argument     eight int32
    operand     := rank buffer chunk                                                                    three int32
    block       := first instruction, instruction after the last; the blocks of a rank follow one another

| opcode | does | peer | argument |
|---|---|---|---|
| COPY | target here = source here | this rank | |
| REDUCE | target here += source here | this rank | |
| PUT | target on peer = source here | the target's rank | |
| GET | target here = source on peer | the source's rank | |
| READ_REDUCE | target here += source on peer | the source's rank | |
| MULTI_REDUCE | target here += every operand, in their order; with source_buffer 1: = their reduction | operands | first operand |
| MULTICAST | every operand = source here | operands | first operand |
| SWITCH_REDUCE | target here = the reduction of all operands, in their order where there is no switch | operands | first operand |
| SIGNAL | flag `argument` of peer = epoch * stride + count, after all steps of the block before it | waiting rank | flag |
| WAIT | until flag `argument` here >= epoch * stride + count; source_buffer 1: the signal is a gate's | signalling rank | flag |

`count` is a number of chunks, of each operand too. A reduction of many operands in half precision adds up in f32 and
rounds once.

**Flags.** A counter of signals belongs to one (signalling block, waiting block) pair: it is one flag of the waiting
rank, which only that block writes. A call raises the epoch, so flags only grow and are never reset. `stride` is larger
than any count.

**Buffers.** 0 is the input, 1 the output, 2 and more are scratch: `scratch` gives their chunks, the same on all ranks.

**Geometry.** A call gives n, the elements of a *part*: what the collective cuts into `chunks` chunks (an all-gather's
output has a part for each rank; of a custom collective each chunk is a part). Parts lie densely, n elements each. With
s = ceil(n / chunks), rounded up to an alignment,

    chunk i of a part  = elements [min(i s, n), min((i+1) s, n)) of it
    scratch chunk j    = elements [j s, (j+1) s)

so the last chunks of a part may be short or empty. No instruction crosses the edge of a part, so each place is one
range of elements, and a transfer is as long as the shorter of its two ends. That loses nothing if a value never passes
a place that is shorter than itself: `check_code` proves it. **In place** the smaller of input and output begins at
chunk `alias_offset(rank)` of the larger.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sennit.ir.collective import CollectiveSpec, CustomCollective

__all__ = ["FIRST_SCRATCH", "INPUT", "OUTPUT", "STRIDE", "Code", "Geometry", "Instruction", "Op", "Operand", "Table"]

Table = NDArray[np.int32]

INPUT, OUTPUT, FIRST_SCRATCH = 0, 1, 2
STRIDE = 1 << 20  # of flags: an epoch may have as many signals between two blocks


class Op(IntEnum):
    COPY = 0
    REDUCE = 1
    PUT = 2
    GET = 3
    READ_REDUCE = 4
    MULTI_REDUCE = 5
    MULTICAST = 6
    SWITCH_REDUCE = 7
    SIGNAL = 8
    WAIT = 9

    @property
    def moves_data(self) -> bool:
        return self not in (Op.SIGNAL, Op.WAIT)

    @property
    def has_operands(self) -> bool:
        return self in (Op.MULTI_REDUCE, Op.MULTICAST, Op.SWITCH_REDUCE)


@dataclass(frozen=True, slots=True)
class Instruction:
    op: Op
    peer: int
    source_buffer: int = 0
    source_chunk: int = 0
    target_buffer: int = 0
    target_chunk: int = 0
    count: int = 0
    argument: int = 0

    @property
    def overwrites(self) -> bool:
        """Of MULTI_REDUCE: the target is not an operand."""
        return self.source_buffer == 1

    def row(self) -> tuple[int, ...]:
        ends = self.source_buffer, self.source_chunk, self.target_buffer, self.target_chunk
        return self.op, self.peer, *ends, self.count, self.argument


class Operand(NamedTuple):
    rank: int
    buffer: int
    chunk: int


@dataclass(frozen=True, slots=True)
class Geometry:
    """Where chunks lie when a part has `elements` elements and `chunks` chunks `stride` elements apart."""

    elements: int
    chunks: int
    stride: int

    @classmethod
    def of(cls, code: Code, elements: int, alignment: int = 1) -> Geometry:
        """`alignment` is in elements."""
        stride = max(1, -(-elements // code.chunks))
        return cls(elements, code.chunks, -(-stride // alignment) * alignment)

    def span(self, buffer: int, chunk: int, count: int = 1) -> tuple[int, int]:
        """The elements of chunks `chunk` to `chunk + count` of a buffer. They lie in one part."""
        if buffer >= FIRST_SCRATCH:
            return chunk * self.stride, (chunk + count) * self.stride
        part, first = divmod(chunk, self.chunks)
        start, stop = (min(edge * self.stride, self.elements) for edge in (first, first + count))
        return part * self.elements + start, part * self.elements + stop


@dataclass(frozen=True, slots=True, eq=False)
class Code:
    """All ranks' instructions.

    `rank_blocks[r]` to `rank_blocks[r + 1]` are the blocks of rank r; the first one is its gate.
    """

    name: str
    collective: CollectiveSpec | CustomCollective
    instructions: Table  # n x 8
    operands: Table  # m x 3
    blocks: Table  # b x 2
    rank_blocks: Table  # ranks + 1
    flags: Table  # ranks: how many each has
    scratch: tuple[int, ...]  # chunks of buffer 2, 3, ...
    fingerprint: str  # of everything that the machine does: equal code on all ranks has equal fingerprints

    @classmethod
    def of(
        cls,
        name: str,
        collective: CollectiveSpec | CustomCollective,
        blocks: list[list[list[Instruction]]],
        operands: list[Operand],
        flags: list[int],
        scratch: tuple[int, ...],
    ) -> Code:
        """From lists: by rank, by block."""
        flat = [instruction.row() for ranked in blocks for block in ranked for instruction in block]
        lengths = [len(block) for ranked in blocks for block in ranked]
        edges = np.cumsum([0, *lengths])
        tables = (
            _table(flat, 8),
            _table(operands, 3),
            _table(np.stack([edges[:-1], edges[1:]], axis=1), 2),
            np.cumsum([0, *(len(ranked) for ranked in blocks)]).astype(np.int32),
            np.array(flags, dtype=np.int32),
        )
        digest = hashlib.sha256(f"{name} {collective} {scratch}".encode())
        for table in tables:
            table.setflags(write=False)
            digest.update(table.tobytes())
        return cls(name, collective, *tables, scratch, digest.hexdigest())

    @property
    def ranks(self) -> int:
        return self.collective.ranks

    @property
    def chunks(self) -> int:
        """Chunks of a part."""
        return self.collective.chunks if isinstance(self.collective, CollectiveSpec) else 1

    def buffer_chunks(self, rank: int, buffer: int) -> int:
        match buffer:
            case 0:
                return self.collective.input_chunks(rank)
            case 1:
                return self.collective.output_chunks(rank)
            case _:
                return self.scratch[buffer - FIRST_SCRATCH]

    def parts(self, rank: int, buffer: int) -> int:
        """Of the input or the output of a rank."""
        return self.buffer_chunks(rank, buffer) // self.chunks

    def block(self, rank: int, block: int) -> Iterator[Instruction]:
        first, last = self.blocks[self.rank_blocks[rank] + block].tolist()
        for row in self.instructions[first:last].tolist():
            yield Instruction(Op(row[0]), *row[1:])

    def rank_block_count(self, rank: int) -> int:
        return int(self.rank_blocks[rank + 1] - self.rank_blocks[rank])

    def operands_of(self, instruction: Instruction) -> list[Operand]:
        rows = self.operands[instruction.argument : instruction.argument + instruction.peer]
        return [Operand(*row) for row in rows.tolist()]


def _table(rows: object, width: int) -> Table:
    return np.ascontiguousarray(np.array(rows, dtype=np.int32).reshape(-1, width))
