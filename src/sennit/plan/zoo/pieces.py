"""Co-shard, of all branches or of some: `plan/co_shard.py` on the pairs of products that `zoo/find.py` finds.

**What is kept for the backward pass.** With pieces that are computed again, a branch keeps what enters its pieces.
Between the residual stream and its first product stand a norm, and in a Swin a shift and the cut into windows: each
makes a tensor as large as the stream, and none of them costs a product. So these are computed again too, right before
the first piece, and a branch keeps the stream alone:

    x -> norm -> windows -> pieces -> + x        kept: x; computed again in the backward pass: the norm, the windows, each piece

The walk from a product back to the stream (`_up_to_the_stream`) ends at other products, at convolutions and embeddings,
and where two activations are added: that is the stream, or costs as much to keep as what it was made of. With
`sequence` nothing of this is done: what stands between stream and product is gathered there, and would be gathered once
more.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Set

from sennit.errors import PlanError
from sennit.ir.graph import Graph, Op, Phase
from sennit.ir.mesh import Mesh
from sennit.plan.co_shard import Cut
from sennit.plan.co_shard import co_shard as cut_in_pieces
from sennit.plan.plan import Plan, transform
from sennit.plan.propagate_index import is_product
from sennit.plan.zoo.batch import split_batch
from sennit.plan.zoo.find import Pairs, depends_on_input, pairs_of_products, weights_of
from sennit.plan.zoo.tensor import SEQUENCE, sequence_of, split_pairs

__all__ = ["co_shard"]


def co_shard(
    graph: Graph, mesh: Mesh, *, pieces: int, modules: str = "*", sequence: bool = False, again: bool = True
) -> Plan:
    """Attention by heads and MLPs by hidden units, in `pieces` that a device runs one after another, each computed
    again before its backward pass, with what leads to it from the stream; over `tp` too, where the mesh has it (with
    `sequence` as in `tensor_parallel`): then every device cuts its own heads. `modules` are globs of the branches'
    products (`*.attn.*`): a branch whose products all match is cut. The batch over `dp` and time, as ever.
    """
    pairs = pairs_of_products(graph)
    chosen = _matching(pairs, modules)
    plan = split_batch(Plan(f"co-shard in {pieces}", graph, mesh))
    if "tp" in mesh:
        plan = split_pairs(plan, pairs, "tp")
    if sequence:
        plan = transform(plan, sequence_of(graph, pairs.rows), dim=f"i{SEQUENCE}", axis="tp")
    cuts = [Cut(columns, "n", chunks) for chunks, columns in chosen.by_chunks().items()]
    before = () if sequence else _up_to_the_stream(graph, modules)
    return cut_in_pieces(plan, [*cuts, Cut(chosen.rows, "k")], pieces, again=again, before=before)


def _up_to_the_stream(graph: Graph, modules: str) -> tuple[Op, ...]:
    """What makes the activations that products with weights read, up to the stream."""
    producers = {value.name: op for op in graph.ops if op.phase is Phase.FORWARD for value in op.results}
    weights, active = weights_of(graph), depends_on_input(graph)
    products = [op for op in graph.ops if is_product(op) and op.phase is Phase.FORWARD and op.reads[-1] in weights]
    waiting = [op.reads[-2] for op in products if _matches(op, modules)]
    found: dict[str, Op] = {}
    while waiting:
        op = producers.get(waiting.pop())
        if op is None or op.name in found or _is_kept(op, active):
            continue
        found[op.name] = op
        waiting += [name for name in op.reads if name in active]
    return tuple(found.values())


def _is_kept(op: Op, active: Set[str]) -> bool:
    if is_product(op) or op.kind in ("aten.convolution.default", "aten.embedding.default"):
        return True
    return op.kind == "aten.add.Tensor" and len([name for name in op.reads if name in active]) > 1


def _matches(op: Op, modules: str) -> bool:
    return any(fnmatch.fnmatchcase(op.module, pattern) for pattern in modules.split("|"))


def _matching(pairs: Pairs, modules: str) -> Pairs:
    columns = tuple(op for op in pairs.columns if _matches(op, modules))
    rows = tuple(op for op in pairs.rows if _matches(op, modules))
    if not columns or not rows:
        some = ", ".join(op.module for op in (*pairs.columns, *pairs.rows)[:6])
        raise PlanError(f"no branch has products in {modules!r}", fix=f"products of branches are {some}, ...")
    return Pairs(columns, rows, pairs.chunks)
