"""The order in which a lane's source takes its steps: what comes from others is started early and read late.

A collective is started where the program has it and waited for where it is first read. Where that is the next line,
every rank stands still until the slowest is there and all that was started before has left. Some cases need not be so,
and are moved. The program stays as it was checked: each step still comes after those that it reads.

**Early.** A small sum of the batch alone, as the number of targets that a loss is a mean over, does not need the model.
Its operators and its collective go to the start of the lane, so that it travels under the forward pass. Moved are
collectives whose group lies inside the lane, and that only operators on inputs and constants lead to; what these make
may not be larger than `_SMALL` in all.

**Late.** A gradient may be reduced before its last operator (the sum over the batch that a table of positions gets).
Operators that only lead from a collective to results of the lane go to its end, and the backward pass goes on
meanwhile. Only operators of collectives that nobody else reads are moved, so that weights' gradients stay where their
activations are let go of; none where that would hold more than an eighth of the bytes of the lane's results.

**Ahead.** A message travels when its receiver is ready for it (gloo asks before it sends). Posted where it is read, a
receive waits for the whole transfer. So receives are posted one task ahead: those of a task where the program has those
of the task before, all in the same order. It costs the memory of one message more. This needs messages that do not wait
for each other: NCCL's occupy the device from when they are posted, so there they stay where the program has them, which
was proved free of deadlock for messages that block.

**Parameters.** Those that lie in pieces are gathered a run ahead of their use (`kernels/gathers.py`).

**Sums.** What replicas reduce at each micro-batch (ZeRO-2 and 3) is added up a bucket behind
(`kernels/sums_behind.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from sennit.ir.graph import Role
from sennit.ir.operators import is_view
from sennit.ir.program import Buffer, Collective, Compute, Free, Lane, Receive, Step, defines, reads
from sennit.kernels.buckets import term_runs
from sennit.kernels.gathers import gathers, with_gathers_ahead
from sennit.kernels.lane_code import is_inside, with_frees
from sennit.kernels.sums_behind import with_sums_behind

__all__ = ["Ordered", "ordered"]

_SMALL = 4 << 20
_PARTS = 8


@dataclass(frozen=True, slots=True)
class Ordered:
    """A lane in the order of its source; `late` names what the operators at its end make."""

    lane: Lane
    late: frozenset[str]


def ordered(lane: Lane, *, ahead: bool = True) -> Ordered:
    """`ahead`: receives are posted a task before they are read."""
    steps: list[Step] = [step for step in lane.steps if not isinstance(step, Free)]
    early = _early(lane, steps)
    late = _late(lane, steps)
    moved = [
        *(step for number, step in enumerate(steps) if number in early),
        *(step for number, step in enumerate(steps) if number not in early and number not in late),
        *(step for number, step in enumerate(steps) if number in late),
    ]
    if ahead:
        moved = _ahead(moved)
    moved = with_gathers_ahead(moved, gathers(replace(lane, steps=tuple(moved))))
    names = frozenset(buffer.name for number in late for buffer in defines(steps[number]))
    moved = with_sums_behind(moved, term_runs(replace(lane, steps=tuple(moved)), names))
    if moved == steps:
        return Ordered(lane, frozenset())
    freed = {step.source for step in lane.steps if isinstance(step, Free)}
    return Ordered(replace(lane, steps=tuple(with_frees(moved, freed))), names)


# ---- early -----------------------------------------------------------------------------------------------------------


def _early(lane: Lane, steps: list[Step]) -> set[int]:
    """The numbers of the steps that go to the start."""
    given = {item.buffer.name for item in lane.inputs if item.role in (Role.INPUT, Role.BUFFER)}
    maker: dict[str, int] = {}  # of what the batch alone leads to
    found: set[int] = set()
    size = 0
    for number, step in enumerate(steps):
        if not all(name in given or name in maker for name in reads(step)):
            continue
        if isinstance(step, Compute):
            maker |= {buffer.name: number for buffer in step.results}
        elif isinstance(step, Collective) and is_inside(step, lane):
            chain = _leading_to(step, steps, maker) - found
            new = sum(_bytes(buffer, lane) for at in (*chain, number) for buffer in defines(steps[at]))
            if maker.keys() & set(reads(step)) and size + new <= _SMALL:
                size += new
                found |= {*chain, number}
    return found


def _leading_to(step: Step, steps: list[Step], maker: dict[str, int]) -> set[int]:
    found: set[int] = set()
    new = [maker[name] for name in reads(step) if name in maker]
    while new:
        number = new.pop()
        if number not in found:
            found.add(number)
            new += [maker[name] for name in reads(steps[number]) if name in maker]
    return found


# ---- ahead -----------------------------------------------------------------------------------------------------------


def _ahead(steps: list[Step]) -> list[Step]:
    """Each run of receives where the run before it was; the first at the start."""
    runs: list[list[Step]] = []
    rest: list[Step | int] = []  # a number: where that run was
    for step in steps:
        if not isinstance(step, Receive):
            rest.append(step)
        elif runs and rest and rest[-1] == len(runs) - 1:
            runs[-1].append(step)
        else:
            rest.append(len(runs))
            runs.append([step])
    moved: list[Step] = runs[0][:] if runs else []
    for item in rest:
        if isinstance(item, int):
            moved += runs[item + 1] if item + 1 < len(runs) else []
        else:
            moved.append(item)
    return moved


# ---- late ------------------------------------------------------------------------------------------------------------


def _late(lane: Lane, steps: list[Step]) -> set[int]:
    """The numbers of the steps that go to the end."""
    needed: set[str] = set()  # by something that stays where it is
    sinks: set[int] = set()
    for number in reversed(range(len(steps))):
        step = steps[number]
        made = {buffer.name for buffer in defines(step)}
        # a running sum takes its terms as they come: put off, it would hold all of them
        if isinstance(step, Compute) and step.kind != "sennit.accumulate" and not made & needed:
            sinks.add(number)
        else:
            needed |= set(reads(step))
    waited = {
        step.result.name for step in steps if isinstance(step, Collective) and step.result.name not in needed
    }  # that only such operators read
    found: set[int] = set()
    for number in sorted(sinks):
        step = steps[number]
        if waited & set(reads(step)):
            found.add(number)
            waited |= {buffer.name for buffer in defines(step)}
    found = _without_mere_looks(found, steps)
    buffers = lane.buffers()
    inside = {buffer.name for number in found for buffer in defines(steps[number])}
    results = {output.name for output in lane.outputs}
    held = {name for number in found for name in reads(steps[number])} - inside - results
    held -= {item.buffer.name for item in lane.inputs}
    bound = sum(_bytes(buffers[name], lane) for name in results) // _PARTS
    return found if sum(_bytes(buffers[name], lane) for name in held) <= bound else set()


def _without_mere_looks(found: set[int], steps: list[Step]) -> set[int]:
    """Without views that no operator is before or behind: they read nothing, and the source puts them off by itself."""
    kept: set[int] = set()
    behind: set[str] = set()
    for number in sorted(found):
        if not _is_look(steps[number]) or behind & set(reads(steps[number])):
            kept.add(number)
            behind |= {buffer.name for buffer in defines(steps[number])}
    before = {name for number in kept for name in reads(steps[number])}
    for number in sorted(found - kept, reverse=True):
        if before & {buffer.name for buffer in defines(steps[number])}:
            kept.add(number)
            before |= set(reads(steps[number]))
    return kept


def _is_look(step: Step) -> bool:
    return isinstance(step, Compute) and (is_view(step.kind) or step.kind == "sennit.take")


def _bytes(buffer: Buffer, lane: Lane) -> int:
    return buffer.bytes(lane.devices[0])
