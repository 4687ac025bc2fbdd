"""The value that a redistribution is planned into: moves from one layout to another, and a certificate of what they cost.

Layouts of a redistribution lie on refined meshes (`Mesh.refined`): axes of prime size, so that any part of an axis can move
alone. Each move says what it makes of what it gets; its kind says with which communication:

| kind | along its axes | communication |
|---|---|---|
| slice | nothing -> split | none |
| partial | nothing -> pending | none |
| reduce_scatter | pending -> split | one collective over the group of all its axes |
| all_to_all | split -> split on another digit | one collective over the group |
| all_reduce | pending -> nothing | one collective over the group |
| all_gather | split -> nothing | one collective over the group |
| permute | any change that keeps the size of every piece, each piece from one device | point to point, one message a device |
| exchange | anything, also to another mesh, on uneven pieces, or for a region of the array only | point to point, regions |

The meaning of every kind but exchange is `layout_numpy.regroup`; the meaning of an exchange is that each device ends with the
indices of its region in the result, from any holder.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from sennit.ir.layout import Layout
from sennit.ir.region import Region

__all__ = ["Candidate", "Certificate", "Redistribution", "Step", "StepKind"]


class StepKind(Enum):
    SLICE = "slice"
    PARTIAL = "partial"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_TO_ALL = "all_to_all"
    ALL_REDUCE = "all_reduce"
    ALL_GATHER = "all_gather"
    PERMUTE = "permute"
    EXCHANGE = "exchange"

    @property
    def communicates(self) -> bool:
        return self not in (StepKind.SLICE, StepKind.PARTIAL)


@dataclass(frozen=True, slots=True)
class Step:
    """One move. `axes` are those that change, major to minor in the group; an exchange over a part of the array, as in
    streaming under a byte budget, names its `region`."""

    kind: StepKind
    axes: tuple[str, ...]
    source: Layout
    result: Layout
    region: Region | None = None

    def continues_in(self, later: Step) -> bool:
        """Whether both fill one result: exchanges of parts of the array between the same layouts."""
        parts = self.region is not None and later.region is not None
        return parts and self.source == later.source and self.result == later.result


class Candidate(Enum):
    """How a sequence of moves was found."""

    NOTHING = "nothing"
    CONSTRUCTIVE = "constructive"
    SEARCH = "search"
    DIRECT = "direct"
    STREAMED = "streamed"


@dataclass(frozen=True, slots=True)
class Certificate:
    """What the moves cost, and the bounds that no sequence of moves can beat. Elements are per device; `received` is the mean
    over the devices of the target, `peak` the largest piece that any device holds at any time (staging apart)."""

    candidate: Candidate
    received: float
    received_bound: float
    peak: int
    peak_bound: int
    staging: int
    messages: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Redistribution:
    """`alternatives` are the certificates of the candidates that lost, for `--explain`."""

    source: Layout
    target: Layout
    steps: tuple[Step, ...]
    certificate: Certificate
    alternatives: tuple[Certificate, ...] = ()
