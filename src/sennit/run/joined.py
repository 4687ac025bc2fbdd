"""Steps of a lane that its source runs in one call. The program stays as it was checked; only the calls are fewer.

**Buckets.** The sums of gradients over replicas are one collective each in the program. A call costs its latency, whatever it carries, so the source
puts those that nobody reads before the end of the step into buckets, in the order in which they are made: each is copied into its place in one flat
tensor, and the last one starts the collective. With B bytes in all, a bucket ends at max(16 KiB, min(25 MiB, B / 32)), or before a part that would make it half as large again: so many that little is left to
send when the backward pass ends, and so that nothing waits for a large table that comes last. Operators that `run/order.py` puts at the end do not count as readers. Only collectives whose group lies inside the lane are joined: its members
run one text, and so agree on what is in a bucket.

**Sums in place.** `x = mm(a, b); total = accumulate(total, x)` makes x, reads it and throws it away. A product can add to what is there
(beta = 1 of a BLAS call), and the gradient of an embedding touches the rows of its tokens alone. So where the accumulation follows its term at once, and nothing else
reads the term, both are one call, in place.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import prod

from sennit.ir.dtype import DType
from sennit.ir.graph import Ref
from sennit.ir.layout import Pending, Reduction
from sennit.ir.mesh import Mesh
from sennit.ir.operators import is_view
from sennit.ir.program import Buffer, Collective, CollectiveKind, Compute, Free, Lane, defines, reads

__all__ = ["ADDS", "Bucket", "Joined", "joined"]

_LEAST, _MOST, _PARTS = 16 << 10, 25 << 20, 32
_REDUCTIONS = (CollectiveKind.ALL_REDUCE, CollectiveKind.REDUCE_SCATTER)

ADDS = ("aten.mm.default", "aten.embedding_dense_backward.default", "sennit.embedding_dense_backward")
"""Operators that make a tensor of their own and could as well add to one."""


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


@dataclass(frozen=True, slots=True)
class Joined:
    """`buckets` by the result of each collective in them; `onto`: which accumulation a term is made in, by the term's name."""

    buckets: Mapping[str, Bucket]
    onto: Mapping[str, Compute]
    own: frozenset[str]  # terms that nobody else looks at: a sum may be taken in their memory


def joined(lane: Lane, late: frozenset[str] = frozenset()) -> Joined:
    """`late`: what operators at the end of the lane make (`run/order.py`)."""
    readers = Counter(name for step in lane.steps if not isinstance(step, Free) for name in reads(step))
    readers.update(output.name for output in lane.outputs)
    own = frozenset(
        step.results[0].name
        for step in lane.steps
        if isinstance(step, Compute) and step.kind in ADDS and readers[step.results[0].name] == 1
    )
    return Joined(_buckets(lane, late), _sums(lane, own), own)


def _sums(lane: Lane, own: frozenset[str]) -> dict[str, Compute]:
    found: dict[str, Compute] = {}
    steps = [step for step in lane.steps if not isinstance(step, Free)]
    for term, following in pairwise(steps):
        if isinstance(following, Compute) and following.kind == "sennit.accumulate":
            name = following.args[1].name if isinstance(following.args[1], Ref) else ""
            if name in own and isinstance(term, Compute) and term.results[0].name == name and _is_plain(term):
                found[name] = following
    return found


def _is_plain(term: Compute) -> bool:
    """An embedding may divide a row's gradient by how often it occurs, which a sum of parts does not."""
    return term.kind == "aten.mm.default" or not term.args[4]


# ---- buckets ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Kind:
    kind: CollectiveKind
    axis: str
    op: Reduction
    dtype: DType
    mesh: Mesh


def _buckets(lane: Lane, at_the_end: frozenset[str]) -> dict[str, Bucket]:
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
    inside = all(set(mesh.group(device, step.axes)) <= set(lane.devices) for device in lane.devices)
    if not inside or not source.layout.is_even or not step.result.layout.is_even or not isinstance(entry, Pending):
        return None
    return _Kind(step.kind, axis, entry.op, source.dtype, mesh)


def _cut(steps: list[Collective]) -> list[list[Collective]]:
    sizes = [_elements(step.result) * step.result.dtype.itemsize for step in steps]
    cap = max(_LEAST, min(_MOST, sum(sizes) // _PARTS))
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
