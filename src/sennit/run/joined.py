"""Steps of a lane that its source runs in one call. The program stays as it was checked; only the calls are fewer.

**Buckets.** The sums of gradients over replicas are one collective each in the program; the source puts several in one
(`kernels/buckets.py` says which). Operators that `run/order.py` puts at the end do not count as readers.

**Gathers.** Small parameters that lie in pieces are gathered several at a time (`kernels/gathers.py` says which).

**Sums in place.** `x = mm(a, b); total = accumulate(total, x)` makes x, reads it and throws it away. A product can add
to what is there (beta = 1 of a BLAS call), and the gradient of an embedding touches the rows of its tokens alone. So
where the accumulation follows its term at once, and nothing else reads the term, both are one call, in place. What a
reduction over replicas gives has memory of its own too, and the terms that follow are added there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from sennit.ir.graph import Ref
from sennit.ir.program import Collective, CollectiveKind, Compute, Free, Lane, Step, defines, reads
from sennit.kernels.buckets import Bucket, buckets
from sennit.kernels.gathers import Gathers, gathers

__all__ = ["ADDS", "Bucket", "Gathers", "Joined", "joined"]

ADDS = ("aten.mm.default", "aten.embedding_dense_backward.default", "sennit.embedding_dense_backward")
"""Operators that make a tensor of their own and could as well add to one."""


@dataclass(frozen=True, slots=True)
class Joined:
    """`buckets` and `gathers` by the result of each collective in them; `onto`: which accumulation a term is made in,
    by the term's name.
    """

    buckets: Mapping[str, Bucket]
    gathers: Mapping[str, Gathers]
    onto: Mapping[str, Compute]
    own: frozenset[str]  # terms that nobody else looks at: a sum may be taken in their memory


def joined(lane: Lane, late: frozenset[str] = frozenset()) -> Joined:
    """`late`: what operators at the end of the lane make (`run/order.py`)."""
    readers = Counter(name for step in lane.steps if not isinstance(step, Free) for name in reads(step))
    readers.update(output.name for output in lane.outputs)
    own = frozenset(
        defines(step)[0].name for step in lane.steps if _has_own_memory(step) and readers[defines(step)[0].name] == 1
    )
    several = {name: run for name, run in gathers(lane).items() if name in run.packed}
    return Joined(buckets(lane, late), several, _sums(lane, own), own)


def _has_own_memory(step: Step) -> bool:
    match step:
        case Compute(kind=kind):
            return kind in ADDS
        case Collective(kind=CollectiveKind.ALL_REDUCE | CollectiveKind.REDUCE_SCATTER, result=result, axes=axes):
            return any(result.layout.mesh.size(axis) > 1 for axis in axes)
        case _:
            return False


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
