"""The verifier: what a schedule does, proved on the form that runs, without running it.

`verify_schedule` shows four things, in this order, and raises `CollectiveError` at the first that fails:

1. **Form.** Every rank, block, peer and place exists (`ir/schedule_check.py`), and every message has one sender and one
   receiver that
   agree on its size (`step_graph.py`).
2. **No deadlock** with the stated slots, under any timing (`step_graph.py`).
3. **No race.** Every two steps that touch the same memory, one of them to write, are ordered by block order, waits and
   messages alone
   (`verify_races.py`). So every timing gives each step the same operands as one linear extension does.
4. **The result.** Along that one linear extension, symbolically: what each chunk holds as a sum of contributions. A
   step must not read
   what nobody wrote nor count a contribution twice, and at the end every output chunk holds what the collective asks for.

**Tiles.** Data larger than a slot is run tile by tile: each block runs its list for tile 0, then for tile 1, and so on,
and blocks need not be at the same tile. The proof for one tile holds for any number:

- tiles touch disjoint elements, so steps of different tiles never conflict, and for steps of one tile happens-before
  has all edges
  of the single run;
- a connection carries m messages per tile on both sides, so message t * m + k is the k-th of tile t on both sides:
  tiles do not mix;
- every edge of the unrolled graph leads to the same tile or a later one: block order from the last step of a tile to
  the first of
  the next, and a slot edge from receive k of tile t to send (k + s) mod m of tile t + (k + s) div m, with (k + s) div m >= 0. A cycle
  returns to the tile where it began, so it has no edge that leaves the tile; within a tile the edges are those of the single run,
  which has no cycle.

Time is near-linear in the number of steps and of chunks that they touch. `verify_algorithm` does the same for the
sequential meaning.
"""

from __future__ import annotations

from dataclasses import dataclass

from sennit.collective.step_graph import StepGraph, order_steps
from sennit.collective.verify_races import check_races
from sennit.collective.verify_values import SymbolicMemory
from sennit.ir.algorithm_check import check_algorithm, describe_move
from sennit.ir.cells import RankCells
from sennit.ir.collective import Algorithm, MoveKind, Value
from sennit.ir.schedule import Opcode, Schedule
from sennit.ir.schedule_check import check_schedule

__all__ = ["Proof", "outputs_of", "verify_algorithm", "verify_schedule"]


@dataclass(frozen=True, slots=True)
class Proof:
    """What was shown, in numbers: it holds for any timing, any number of tiles, and `slots` slots or more."""

    schedule: str
    slots: int
    ranks: int
    blocks: int
    steps: int
    messages: int
    ordered_pairs: int  # conflicting pairs of steps compared; the others follow by transitivity
    output_chunks: int  # compared with what the collective asks for

    def __str__(self) -> str:
        return (
            f"schedule {self.schedule!r} is right: {self.output_chunks} output chunks on {self.ranks} ranks hold what is "
            f"asked; {self.steps} steps in {self.blocks} blocks with {self.messages} messages cannot deadlock with "
            f"{self.slots} slots; {self.ordered_pairs} conflicting pairs are ordered"
        )


def verify_schedule(schedule: Schedule) -> Proof:
    """Prove a schedule right, or raise `CollectiveError` that names rank, block, step and chunk."""
    cells = check_schedule(schedule)
    graph = StepGraph.of(schedule)
    order = order_steps(graph)
    pairs = check_races(graph, order, cells)
    compared = _check_result(graph, order, cells)
    return Proof(
        schedule.name,
        schedule.slots,
        len(schedule.ranks),
        sum(len(ranked.blocks) for ranked in schedule.ranks),
        len(order),
        len(graph.message),
        pairs,
        compared,
    )


def verify_algorithm(algorithm: Algorithm) -> None:
    """Raise `CollectiveError` unless the moves, one after another, compute what the collective asks for."""
    _run_moves(algorithm).check_outputs(f"algorithm {algorithm.name!r}")


def outputs_of(algorithm: Algorithm) -> tuple[tuple[Value | None, ...], ...]:
    """What the outputs hold at the end, by rank and chunk; None where nobody writes.

    The collective may ask for other values.
    """
    memory = _run_moves(algorithm)
    return tuple(
        tuple(values[held.extents["output"].first :][: held.extents["output"].chunks])
        for held, values in zip(memory.cells, memory.values, strict=True)
    )


def _run_moves(algorithm: Algorithm) -> SymbolicMemory:
    cells = check_algorithm(algorithm)
    memory = SymbolicMemory.start(algorithm.collective, cells, lambda index: describe_move(algorithm, index))
    for index, move in enumerate(algorithm.moves):
        moved = memory.read(index, move.source.rank, move.source)
        if move.kind is MoveKind.REDUCE:
            moved = memory.add(index, move.target.rank, move.target, moved)
        memory.write(index, move.target.rank, move.target, moved)
    return memory


def _check_result(graph: StepGraph, order: list[int], cells: tuple[RankCells, ...]) -> int:
    """Run the steps symbolically; return the number of output chunks compared."""
    memory = SymbolicMemory.start(graph.schedule.collective, cells, graph.describe)
    sent: dict[int, list[Value]] = {}  # by sending node
    for node in order:
        instruction, rank = graph.instructions[node], graph.rank[node]
        source, target = instruction.source, instruction.target
        message = sent.pop(graph.message[node]) if instruction.opcode.receives else []
        match instruction.opcode:
            case Opcode.COPY | Opcode.SEND:
                assert source is not None  # here and below: the checker has seen it
                result = memory.read(node, rank, source)
            case Opcode.REDUCE:
                assert target is not None
                result = memory.read(node, rank, target)
                for place in instruction.sources:
                    result = memory.total(node, rank, target, result, memory.read(node, rank, place))
            case Opcode.RECEIVE | Opcode.RECEIVE_COPY_SEND:
                result = message
            case Opcode.RECEIVE_REDUCE | Opcode.RECEIVE_REDUCE_COPY_SEND:
                assert target is not None
                result = memory.add(node, rank, target, message)
            case Opcode.RECEIVE_REDUCE_SEND:
                assert source is not None
                result = memory.add(node, rank, source, message)
        if target is not None:
            memory.write(node, rank, target, result)
        if instruction.opcode.sends:
            sent[node] = result
    return memory.check_outputs(f"schedule {graph.schedule.name!r}")
