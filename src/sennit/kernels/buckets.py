"""The sums of gradients over replicas, several in one collective: which ones a rank joins.

A call costs its latency, whatever it carries. The sums of gradients are one collective each in a program. Those that nobody reads before the end of the step go into buckets, in
the order in which they are made: each is copied into its place in one flat tensor, and the last one starts the collective. With B bytes in all, a bucket ends at
`bucket_bytes(B)` = max(16 KiB, min(25 MiB, B / 32)), or before a part that would make it half as large again: so many that little is left to send when the backward pass ends, and so that nothing waits for a large table
that comes last. Only collectives whose group lies inside the lane are joined: its members run one text, and so agree on what is in a bucket.

| | |
|---|---|
| what is in which bucket | `buckets` |
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
from sennit.ir.operators import is_view
from sennit.ir.program import Buffer, Collective, CollectiveKind, Compute, Free, Lane, defines, reads
from sennit.kernels.lane_code import is_inside

__all__ = ["MOST_BYTES", "Bucket", "bucket_bytes", "bucket_count", "buckets"]

MOST_BYTES = 25 << 20
_LEAST, _PARTS = 16 << 10, 32
_REDUCTIONS = (CollectiveKind.ALL_REDUCE, CollectiveKind.REDUCE_SCATTER)


@dataclass(frozen=True, slots=True)
class Bucket:
    """Reductions of one kind over one axis; `sources` by name, in the order of the lane. `elements` of what a device has afterwards."""

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


# ---- which ones -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Kind:
    kind: CollectiveKind
    axis: str
    op: Reduction
    dtype: DType
    mesh: Mesh


def buckets(lane: Lane, at_the_end: frozenset[str] = frozenset()) -> dict[str, Bucket]:
    """The buckets of a lane, by the result of each collective in them. `at_the_end`: what operators make that run when the step is over."""
    buffers, late = lane.buffers(), _read_at_the_end(lane, at_the_end)
    kinds: dict[_Kind, list[Collective]] = {}
    for step in lane.steps:
        if isinstance(step, Collective) and step.result.name in late and step.kind in _REDUCTIONS:
            kind = _kind_of(step, buffers[step.source], lane)
            if kind is not None:
                kinds.setdefault(kind, []).append(step)
    found: dict[str, Bucket] = {}
    number = 0
    for kind, steps in kinds.items():
        for members in _cut(steps):
            if len(members) > 1:
                sources = tuple(step.source for step in members)
                elements = sum(_elements(step.result) for step in members)
                bucket = Bucket(number, kind.kind, kind.axis, kind.op, kind.dtype, kind.mesh, sources, elements)
                found.update((step.result.name, bucket) for step in members)
                number += 1
    return found


def _kind_of(step: Collective, source: Buffer, lane: Lane) -> _Kind | None:
    """What collectives must have in common to be one; None where a group has members in other lanes, or pieces of several sizes."""
    (axis,) = step.axes
    mesh, entry = source.layout.mesh.in_space(), source.layout.entry(axis)
    if (
        not is_inside(step, lane)
        or not source.layout.is_even
        or not step.result.layout.is_even
        or not isinstance(entry, Pending)
    ):
        return None
    return _Kind(step.kind, axis, entry.op, source.dtype, mesh)


def _cut(steps: list[Collective]) -> list[list[Collective]]:
    sizes = [_elements(step.result) * step.result.dtype.itemsize for step in steps]
    cap = bucket_bytes(sum(sizes))
    runs: list[list[Collective]] = [[]]
    full = 0
    for step, size in zip(steps, sizes, strict=True):
        if full >= cap or (full and full + size > cap + cap // 2):
            runs.append([])
            full = 0
        runs[-1].append(step)
        full += size
    return runs


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
