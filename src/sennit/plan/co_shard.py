"""Co-shard: a segment of the model in pieces that one device runs one after another.

Let a segment be operators between a product that opens it and one that closes it (attention from its projections to the
output projection, an MLP from its first to its second product), and let an axis of size c split it as tensor
parallelism would: heads, or hidden units. On c devices each would run one piece. Here one device runs all of them, in
turn:

    y  = sum over k of f(x; w[k])           piece k reads x and its slices of the parameters
    dx = sum over k of f'(x; w[k], dy)      the gradients of the slices, put together, are the gradients of the parameters

The values are those of the unsplit model, up to the order of additions. What a piece makes on its way is 1/c of what
the segment makes, and with recomputation it is gone before the next piece starts: the backward pass of piece k computes
the piece again, right before it. So of all intermediate results (scores, probabilities, hidden units) only 1/c is ever
live. No collective is added, and products keep their other two dims, which is why this can be cheaper than a larger
tensor parallelism or smaller micro-batches. (SuperScaler, arXiv 2301.08984, section 2.)

It is a rewrite of the plan's graph, made in three steps:

1. *decide*: `propagate` along an axis of c pieces, from the letters on which operators are cut. It gives for every
   operator, forward and
   backward, what the axis would do to each read and result: a split, a pending sum, or nothing. The axis lies inside those that the plan splits the same
   dims over: of heads cut in tp blocks, piece k is the k-th part of every block, so that each device cuts its own.
2. *unroll* (`plan/unroll.py`): operators that the axis splits become c operators on pieces, ordered by piece; the
   others stay.
3. *recompute* (`plan/recompute.py`): the forward operators of all pieces. What enters a segment is kept, and what
   leaves it.

Pieces are operators like any other: they are split and placed as the plan splits and places what they are pieces of, so
co-shard composes with tensor parallelism, stages, micro-batches and data parallelism.

Operators whose local form depends on where a piece lies (a split vocabulary) cannot be cut: a decision that needs that
is an error.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from sennit.errors import PlanError
from sennit.ir.graph import Graph, Op, Role
from sennit.ir.layout import Split
from sennit.ir.mesh import Mesh
from sennit.plan.plan import OpSplit, Plan, transform
from sennit.plan.propagate import Decisions, propagate
from sennit.plan.recompute import recompute
from sennit.plan.unroll import Sliced, Unrolled, unroll

__all__ = ["Cut", "co_shard"]

_AXIS = "piece"


@dataclass(frozen=True, slots=True)
class Cut:
    """Operators to cut on a letter of their rule; each of `chunks` equal chunks of the dim is cut."""

    ops: tuple[Op, ...]
    letter: str
    chunks: int = 1


def co_shard(plan: Plan, cuts: Iterable[Cut], pieces: int, *, again: bool = True, before: Iterable[Op] = ()) -> Plan:
    """The plan with the segments that these operators open and close in `pieces`, run one after another.

    With `again`, the backward pass computes each piece again, and with them the operators `before`, which make what
    enters the segments.
    """
    if pieces < 2:
        raise PlanError(f"{pieces} piece is no cut", fix="use two pieces or more")
    decisions = _decide(plan, tuple(cuts), pieces)
    strategies = {name: found[_AXIS] for name, found in decisions.strategies.items() if _AXIS in found}
    unrolled = unroll(plan.graph, strategies, pieces)
    splits = [replace(split, op=name) for split in plan.splits for name in unrolled.pieces.get(split.op, (split.op,))]
    placed = [(part, stage) for name, stage in plan.places for part in unrolled.pieces.get(name, (name,))]
    splits += _slice_splits(plan.graph, decisions, unrolled, pieces)
    result = replace(plan, graph=unrolled.graph, splits=tuple(splits), places=tuple(placed))
    if not again:
        return result
    forward = {*unrolled.forward, *(op.name for op in before)}
    return recompute(result, [op for op in unrolled.graph.ops if op.name in forward])


def _decide(plan: Plan, cuts: tuple[Cut, ...], pieces: int) -> Decisions:
    """What an axis of pieces does to each operator, inside the axes that the plan's operators are split over."""
    if not any(cut.ops for cut in cuts):
        raise PlanError("nothing is cut", fix="name operators and a letter to cut them on")
    outer = {name: plan.mesh.size(name) for name in plan.mesh.names if name in {split.axis for split in plan.splits}}
    flat = Plan(plan.name, plan.graph, Mesh.make({**outer, _AXIS: pieces}), splits=plan.splits)
    for cut in cuts:
        flat = transform(flat, cut.ops, dim=cut.letter, axis=_AXIS, chunks=cut.chunks)
    return propagate(flat)


def _slice_splits(graph: Graph, decisions: Decisions, unrolled: Unrolled, pieces: int) -> list[OpSplit]:
    """Parameters lie as what reads them needs them; what reads them now is a slice.

    So the slices of a parameter are split as it was.
    """
    parameters = {item.value.name: item.value.type.shape for item in graph.inputs if item.role is Role.PARAM}
    found: list[OpSplit] = []
    for sliced in unrolled.slices:
        shape = parameters.get(sliced.value)
        entries = decisions.inputs[sliced.value, 0] if shape is not None else {}
        for axis, entry in entries.items():
            if shape is not None and axis != _AXIS and isinstance(entry, Split):
                size = decisions.plan.mesh.size(axis)
                dim, extent, stride = _in_slice(sliced, shape, entry, pieces)
                found.append(OpSplit(sliced.op, axis, f"i{dim}", extent // (stride * size)))
    return found


def _in_slice(sliced: Sliced, shape: tuple[int, ...], entry: Split, pieces: int) -> tuple[int, int, int]:
    """Where the digit of an outer axis lies in a slice: the dim, its size, and the stride there."""
    cut, period = sliced.entry, sliced.entry.stride * pieces
    if entry.dim != cut.dim:
        moved = 2 if sliced.blocks > 1 and entry.dim > cut.dim else 0
        return entry.dim + moved, shape[entry.dim], entry.stride
    if sliced.blocks == 1:
        return cut.dim, cut.stride, entry.stride
    if entry.stride >= period:
        return cut.dim, sliced.blocks, entry.stride // period
    return cut.dim + 2, cut.stride, entry.stride
