"""The sums of gradients over replicas, several in one collective: which ones a rank joins.

A call costs its latency, whatever it carries. The sums of gradients are one collective each in a program. They go into
buckets, in the order in which they are made: each is copied into its place in one flat tensor (`ir/flat_numpy.py` has
its layout), and the last one starts the collective. With B bytes in all, a bucket ends at `bucket_bytes(B)` = max(16
KiB, min(25 MiB, B / 32)), or before a part that would make it half as large again: so many that little is left to send
when the backward pass ends. What fills a bucket by itself travels by itself, at once and without the copy; the small
ones around it (biases, norms) go on filling theirs, so that neither waits for the other. Only collectives whose group
lies inside the lane are joined: its members run one text, and so agree on what is in a bucket. Two sorts of sums can
wait for their bucket:

- those that nobody reads before the end of the step: of data parallelism, ZeRO-1, and ZeRO-2 and 3 without
  micro-batches;
- *terms*, which nothing but a sum over micro-batches reads: of ZeRO-2 and 3, which scatter at each micro-batch. A
  bucket of them ends with its task, so that nothing stays whole while others run; B is what one task reduces. It is no
  larger than 8 MiB of what a member gives: beyond, the copy costs more than the call, and
  with ZeRO-3 the next parameters wait behind it. Where something reads
  such a sum in between (a tied weight's goes to another stage), the bucket ends before. The additions follow one bucket behind (`sums_behind.py`), so that a bucket travels while the next one is made.

| | |
|---|---|
| what is in which bucket | `buckets` |
| the same with buckets of one, of terms alone | `term_runs` |
| the program with one collective for each, for the simulator's clock | `in_buckets` (`joined_program.py`) |
| how many there are of so many tensors and bytes, for the search | `bucket_count` |

The source of a rank calls them by its own means (`run/joined.py`), from the program without.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, prod

from sennit.ir.dtype import DType
from sennit.ir.layout import Pending, Reduction
from sennit.ir.mesh import Mesh
from sennit.ir.operators import is_local_move, is_view
from sennit.ir.program import Buffer, Collective, CollectiveKind, Compute, Free, Lane, Step, Times, defines, reads
from sennit.kernels.lane_code import Inside

__all__ = ["MOST_BYTES", "Bucket", "bucket_bytes", "bucket_count", "buckets", "can_wait", "term_runs"]

MOST_BYTES = 25 << 20
_LEAST, _PARTS = 16 << 10, 32
_MOST_OF_TERMS = 8 << 20  # bytes that each member gives to one call
_REDUCTIONS = (CollectiveKind.ALL_REDUCE, CollectiveKind.REDUCE_SCATTER)


@dataclass(frozen=True, slots=True)
class Bucket:
    """Reductions of one kind over one axis; `sources` by name, in the order of the lane.

    `elements` of what a device has afterwards.
    """

    number: int
    kind: CollectiveKind
    axis: str
    op: Reduction
    dtype: DType
    mesh: Mesh
    sources: tuple[str, ...]
    elements: int


def bucket_bytes(total: int) -> int:
    """The bytes at which a bucket is full, where all of them have so many."""
    return max(_LEAST, min(MOST_BYTES, total // _PARTS))


def bucket_count(tensors: int, total: int) -> int:
    """How many buckets there are of `tensors` tensors of one size, with `total` bytes."""
    each, cap = total / tensors, bucket_bytes(total)
    return ceil(tensors / max(1, min(ceil(cap / each), int(1.5 * cap / each)))) if each else 1


# ---- which ones ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Kind:
    kind: CollectiveKind
    axis: str
    op: Reduction
    dtype: DType
    mesh: Mesh
    task: int | None  # of terms: in which task they are made


@dataclass(frozen=True, slots=True)
class _Reduction:
    """A collective that can wait, and the position of the step that it cannot wait for any longer."""

    step: Collective
    position: int
    due: int


def buckets(lane: Lane, at_the_end: frozenset[str] = frozenset()) -> dict[str, Bucket]:
    """The buckets of a lane, by the result of each collective in them.

    `at_the_end`: what operators make that run when the step is over.
    """
    found: dict[str, Bucket] = {}
    number = 0
    for kind, members in _runs(lane, at_the_end):
        if len(members) > 1:
            sources = tuple(step.source for step in members)
            elements = sum(_elements(step.result) for step in members)
            bucket = Bucket(number, kind.kind, kind.axis, kind.op, kind.dtype, kind.mesh, sources, elements)
            found.update((step.result.name, bucket) for step in members)
            number += 1
    return found


def term_runs(lane: Lane, at_the_end: frozenset[str] = frozenset()) -> list[tuple[str, ...]]:
    """What terms travel together, by their results; also those that travel alone."""
    runs = [members for kind, members in _runs(lane, at_the_end) if kind.task is not None]
    return [tuple(step.result.name for step in members) for members in runs]


def can_wait(step: Step) -> bool:
    """Whether a step only adds up, or looks: nothing is late if it comes later."""
    return isinstance(step, Compute) and (is_view(step.kind) or step.kind in ("sennit.take", "sennit.accumulate"))


def _runs(lane: Lane, at_the_end: frozenset[str]) -> list[tuple[_Kind, list[Collective]]]:
    buffers, late = lane.buffers(), _read_at_the_end(lane, at_the_end)
    terms, due, tasks, inside = _terms(lane), _due(lane), _tasks(lane), Inside(lane)
    kinds: dict[_Kind, list[_Reduction]] = {}
    for position, step in enumerate(lane.steps):
        if isinstance(step, Collective) and step.kind in _REDUCTIONS:
            name = step.result.name
            if name in late or name in terms:
                kind = _kind_of(step, buffers[step.source], inside, None if name in late else tasks[position])
                if kind is not None:
                    until = len(lane.steps) if name in late else due.get(name, len(lane.steps))
                    kinds.setdefault(kind, []).append(_Reduction(step, position, until))
    return [(kind, members) for kind, steps in kinds.items() for members in _cut(steps, _most(kind))]


def _kind_of(step: Collective, source: Buffer, inside: Inside, task: int | None) -> _Kind | None:
    """What collectives must have in common to be one; None where a group has members in other lanes, or pieces of
    several sizes.
    """
    (axis,) = step.axes
    mesh, entry = source.layout.mesh.in_space(), source.layout.entry(axis)
    if (
        not inside(step)
        or not source.layout.is_even
        or not step.result.layout.is_even
        or not isinstance(entry, Pending)
    ):
        return None
    return _Kind(step.kind, axis, entry.op, source.dtype, mesh, task)


def _most(kind: _Kind) -> int:
    """The bytes that a device may have of one bucket afterwards."""
    if kind.task is None:
        return MOST_BYTES
    pieces = kind.mesh.size(kind.axis) if kind.kind is CollectiveKind.REDUCE_SCATTER else 1
    return max(_LEAST, _MOST_OF_TERMS // pieces)


def _cut(reductions: list[_Reduction], most: int) -> list[list[Collective]]:
    sizes = [_elements(item.step.result) * item.step.result.dtype.itemsize for item in reductions]
    cap = min(most, bucket_bytes(sum(sizes)))
    alone: list[list[Collective]] = []
    runs: list[list[Collective]] = []
    full, due = cap, 0
    for item, size in zip(reductions, sizes, strict=True):
        if size >= cap:
            alone.append([item.step])
            continue
        if full >= cap or full + size > cap + cap // 2 or item.position > due:
            runs.append([])
            full, due = 0, item.due
        runs[-1].append(item.step)
        full, due = full + size, min(due, item.due)
    return [*alone, *runs]


def _elements(buffer: Buffer) -> int:
    return prod(buffer.layout.local_shape())


def _read_at_the_end(lane: Lane, at_the_end: frozenset[str]) -> set[str]:
    """Buffers that nothing but the lane's outputs needs, through views or operators at the end, or as they are."""
    late = {output.name for output in lane.outputs}
    early: set[str] = set()
    for step in reversed(lane.steps):
        if isinstance(step, Free):
            continue
        looks = isinstance(step, Compute) and (
            is_view(step.kind) or step.kind == "sennit.take" or step.results[0].name in at_the_end
        )
        unread = looks and not any(buffer.name in early for buffer in defines(step))
        if not unread:
            early.update(reads(step))
        elif any(buffer.name in late for buffer in defines(step)):
            late.update(reads(step))
    return late - early


# ---- terms of sums over micro-batches --------------------------------------------------------------------------------


def _terms(lane: Lane) -> set[str]:
    """Results of reductions that sums over micro-batches read, and nothing else."""
    found = {step.result.name for step in lane.steps if isinstance(step, Collective) and step.kind in _REDUCTIONS}
    read: set[str] = set()
    for step in lane.steps:
        names = found.intersection(reads(step))
        if isinstance(step, Compute) and step.kind == "sennit.accumulate":
            read |= names
        else:
            found -= names
    return found & read - {output.name for output in lane.outputs}


def _due(lane: Lane) -> dict[str, int]:
    """For each buffer the position of the first step that needs it, through those that can wait.

    Outputs are needed at the end.
    """
    due: dict[str, int] = {}
    for position in reversed(range(len(lane.steps))):
        step = lane.steps[position]
        needed = position
        if can_wait(step):
            needed = min((due.get(buffer.name, len(lane.steps)) for buffer in defines(step)), default=position)
        for name in reads(step):
            due[name] = min(due.get(name, needed), needed)
    return due


def _tasks(lane: Lane) -> list[int]:
    """For each step a number that changes where the operators of another micro-batch begin."""
    found: list[int] = []
    now: Times = ()
    number = 0
    for step in lane.steps:
        if isinstance(step, Compute) and not is_local_move(step.kind):
            times = step.results[0].times
            if times and times != now:
                now = times
                number += 1
        found.append(number)
    return found
