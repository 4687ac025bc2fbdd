"""Weights that a forward pass reads block by block of rows, each when it has arrived.

A weight that is waited for in the next step is needed by the first product that reads it, and until then nothing of it
may be missing. But column k of that product needs row k of the weight only:

    y = x @ W.T + b        for start, stop in blocks:    wait for W[start:stop];  y[:, start:stop] = x @ W[start:stop].T + b[start:stop]

So where a strategy cuts the gradient of W over several buckets, the last of them travels while the product of the
others is computed. For the last large layer of a model this is the time in which nothing else can travel: what came
before was needed earlier, and no gradient is there yet.

`row_uses` finds such weights: the first operators that read them are transposing views, and the first that reads one of
these is `mm` or `addmm` in the forward pass, with the view as its right factor. `use_blocks` turns a strategy's buckets
into blocks, in the order in which buckets travel. A cut inside a row leaves the weight in one piece, and so does a
bucket that is waited for in the step that made it. Rows must be updated by themselves too, so the optimizer must treat
each element by itself (`update_torch.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from sennit.fuse.looked_up import ROWS
from sennit.fuse.row_blocks import turns
from sennit.ir.graph import Graph, Op, OutputKind, Phase, Ref, Role
from sennit.ir.strategy import Bucket, WaitAt

__all__ = ["RowUse", "UseBlock", "row_uses", "use_blocks"]


@dataclass(frozen=True, slots=True)
class RowUse:
    """%product = x @ weight.T + bias, or without one; the weight has `rows` rows of `width` elements."""

    product: str
    x: str
    weight: str
    bias: str | None
    rows: int
    width: int


@dataclass(frozen=True, slots=True)
class UseBlock:
    """Rows that bucket `bucket` brings."""

    start: int
    stop: int
    bucket: int


def row_uses(graph: Graph) -> dict[str, RowUse]:
    """By parameter, the products that may read it in blocks of rows."""
    types = graph.types()
    sent = {output.path for output in graph.outputs if output.kind is OutputKind.GRADIENT}
    trained = {path for path in sent if path + ROWS not in sent}
    names = {item.value.name: item.path for item in graph.inputs if item.role is Role.PARAM and item.path in trained}
    views: dict[str, str] = {}  # transposed view -> weight
    found: dict[str, RowUse | None] = {}  # None: something else was the first to read it
    for op in graph.ops:
        for name in op.reads:
            weight = views.get(name, name)
            if (path := names.get(weight)) is None or path in found:
                continue
            if name == weight and turns(op):
                views.update((value.name, weight) for value in op.results)
            else:
                shape = types[weight].shape
                found[path] = _use(op, name, weight, shape) if name != weight and len(shape) == 2 else None
    return {path: use for path, use in found.items() if use is not None}


def _use(op: Op, view: str, weight: str, shape: tuple[int, ...]) -> RowUse | None:
    if op.phase is Phase.BACKWARD or op.kwargs:
        return None
    match op.kind, op.args:
        case "aten.mm.default", (Ref(x), Ref(right)) if right == view != x:
            return RowUse(op.name, x, weight, None, *shape)
        case "aten.addmm.default", (Ref(bias), Ref(x), Ref(right)) if right == view and view not in (x, bias):
            return RowUse(op.name, x, weight, bias, *shape)
        case _:
            return None


def use_blocks(
    buckets: Sequence[Bucket], uses: Mapping[str, RowUse], alone: Collection[str]
) -> dict[str, tuple[UseBlock, ...]]:
    """By parameter, the blocks in which it is read where it is cut between rows.

    `alone` are operators that are a kernel by themselves: others are not computed in parts.
    """
    cut: dict[str, list[UseBlock]] = {}
    whole: set[str] = set()
    for number, bucket in enumerate(buckets):
        for part in bucket.parts:
            if (use := uses.get(part.path)) is None or use.product not in alone:
                continue
            start, stop = part.span or (0, use.rows * use.width)
            if bucket.wait is WaitAt.STEP or start % use.width or stop % use.width:
                whole.add(part.path)
            cut.setdefault(part.path, []).append(UseBlock(start // use.width, stop // use.width, number))
    return {path: tuple(blocks) for path, blocks in cut.items() if path not in whole and len(blocks) > 1}
