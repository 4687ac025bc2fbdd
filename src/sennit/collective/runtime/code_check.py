"""The checker of `Code`: run on what a machine will be handed, not on what it was made from.

| rule | says |
|---|---|
| tables | of the shape that `code.py` gives; blocks follow one another and cover all instructions |
| places | ranks, buffers and chunks exist; a place lies in one part; source and target of one instruction do not overlap |
| flags | a flag exists, one block writes it and one block of its rank waits for it; its counts grow by one |

What the code does (its end, races, the result) is a matter of `code_verify.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from sennit.collective.runtime.code import FIRST_SCRATCH, INPUT, OUTPUT, Code, Instruction, Op, Operand
from sennit.errors import CollectiveError

__all__ = ["CheckedCode", "Home", "check_code"]

Home = tuple[int, int]


def check_code(code: Code) -> CheckedCode:
    """Raise `CollectiveError` for the first rule that the code breaks; return the code, read."""
    check = CheckedCode(code)
    check.tables()
    for home, steps in check.steps.items():
        for number, step in enumerate(steps):
            check.step(home, number, step)
    return check


@dataclass(slots=True)
class CheckedCode:
    code: Code
    steps: dict[Home, list[Instruction]] = field(default_factory=dict)
    writers: dict[tuple[int, int], tuple[Home, int]] = field(default_factory=dict)  # (rank, flag): by whom, how often
    waiters: dict[tuple[int, int], Home] = field(default_factory=dict)

    def fault(self, what: str, home: Home | None = None, number: int = 0) -> CollectiveError:
        place = "" if home is None else f", rank {home[0]}, block {home[1]}, instruction {number}"
        return CollectiveError(what, where=f"code {self.code.name!r}{place}", fix="encode the program again")

    def tables(self) -> None:
        code = self.code
        edges = code.blocks.reshape(-1).tolist()
        covered = edges[:1] == [0] and edges[-1:] == [len(code.instructions)] and edges[1:-1:2] == edges[2::2]
        counts = code.rank_blocks.tolist()
        if not covered or edges != sorted(edges) or counts != sorted(counts) or counts[-1] != len(code.blocks):
            raise self.fault("the blocks do not cover the instructions one after another")
        if len(counts) != code.ranks + 1 or len(code.flags) != code.ranks:
            raise self.fault(f"tables for {len(counts) - 1} ranks, and the collective has {code.ranks}")
        known = set(Op)
        if wrong := [op for op in code.instructions[:, 0].tolist() if op not in known]:
            raise self.fault(f"there is no opcode {wrong[0]}")
        for rank in range(code.ranks):
            for block in range(code.rank_block_count(rank)):
                self.steps[rank, block] = list(code.block(rank, block))

    def step(self, home: Home, number: int, step: Instruction) -> None:
        if not step.op.has_operands and not 0 <= step.peer < self.code.ranks:
            raise self.fault(f"there is no rank {step.peer}", home, number)
        if step.op in (Op.SIGNAL, Op.WAIT):
            self.flag(home, number, step)
            return
        if step.count < 1:
            raise self.fault(f"{step.op.name} of {step.count} chunks", home, number)
        if step.op.has_operands and not (
            step.peer > 0 <= step.argument and step.argument + step.peer <= len(self.code.operands)
        ):
            raise self.fault(f"operands {step.argument} to {step.argument + step.peer} do not exist", home, number)
        sources, targets = self.ends(home[0], step)
        for place in (*sources, *targets):
            self.place(home, number, step, place)
        for source in sources:
            for target in targets:
                # what goes through a switch may come back to where it was: all is read before anything is written
                same = step.op.has_operands and self.cell(source) == self.cell(target)
                if self.overlap(source, target, step.count) and not same:
                    raise self.fault(f"{step.op.name} from {source} to {target}: they overlap", home, number)

    def flag(self, home: Home, number: int, step: Instruction) -> None:
        rank = step.peer if step.op is Op.SIGNAL else home[0]
        flag = rank, step.argument
        if not 0 <= step.argument < self.code.flags[rank]:
            raise self.fault(f"rank {rank} has no flag {step.argument}", home, number)
        if step.count < 1:
            raise self.fault(f"{step.op.name} with count {step.count}", home, number)
        if step.op is Op.WAIT:
            if self.waiters.setdefault(flag, home) != home:
                raise self.fault(f"two blocks wait for flag {step.argument} of rank {rank}", home, number)
            return
        writer, count = self.writers.get(flag, (home, 0))
        if writer != home or step.count != count + 1:
            raise self.fault(
                f"flag {step.argument} of rank {rank} is set to {step.count} after {count} by {writer}", home, number
            )
        self.writers[flag] = home, count + 1

    def place(self, home: Home, number: int, step: Instruction, place: Operand) -> None:
        code = self.code
        if not (0 <= place.rank < code.ranks and 0 <= place.buffer < FIRST_SCRATCH + len(code.scratch)):
            raise self.fault(f"{step.op.name} names {place}, which does not exist", home, number)
        chunks = code.buffer_chunks(place.rank, place.buffer)
        if not 0 <= place.chunk <= place.chunk + step.count <= chunks:
            raise self.fault(f"{step.op.name} names {step.count} chunks at {place} of {chunks}", home, number)
        if place.buffer < FIRST_SCRATCH and place.chunk % code.chunks + step.count > code.chunks:
            raise self.fault(
                f"{step.op.name} of {step.count} chunks at {place} crosses the edge of a part", home, number
            )

    def ends(self, rank: int, step: Instruction) -> tuple[list[Operand], list[Operand]]:
        """What a step reads beside its target, and what it writes."""
        source = Operand(rank, step.source_buffer, step.source_chunk)
        target = Operand(rank, step.target_buffer, step.target_chunk)
        match step.op:
            case Op.MULTI_REDUCE | Op.SWITCH_REDUCE:
                return self.code.operands_of(step), [target]
            case Op.MULTICAST:
                return [source], self.code.operands_of(step)
            case Op.PUT:
                return [source], [target._replace(rank=step.peer)]
            case _:
                return [source._replace(rank=step.peer)], [target]

    def cell(self, place: Operand) -> tuple[int, int, int]:
        """The same for two places that are one in memory."""
        rank, buffer, chunk = place
        collective = self.code.collective
        if not collective.in_place or buffer >= FIRST_SCRATCH:
            return rank, buffer, chunk
        small = OUTPUT if collective.output_chunks(rank) < collective.input_chunks(rank) else INPUT
        return rank, INPUT, chunk + (collective.alias_offset(rank) if buffer == small else 0)

    def overlap(self, left: Operand, right: Operand, count: int) -> bool:
        one, other = self.cell(left), self.cell(right)
        return one[:2] == other[:2] and abs(one[2] - other[2]) < count
