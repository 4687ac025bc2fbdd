"""Co-shard, of all branches or of some: `plan/co_shard.py` on the pairs of products that `zoo/find.py` finds."""

from __future__ import annotations

import fnmatch

from sennit.errors import PlanError
from sennit.ir.graph import Graph, Op
from sennit.ir.mesh import Mesh
from sennit.plan.co_shard import Cut
from sennit.plan.co_shard import co_shard as cut_in_pieces
from sennit.plan.plan import Plan, transform
from sennit.plan.zoo.batch import split_batch
from sennit.plan.zoo.find import Pairs, pairs_of_products
from sennit.plan.zoo.tensor import SEQUENCE, sequence_of, split_pairs

__all__ = ["co_shard"]


def co_shard(
    graph: Graph, mesh: Mesh, *, pieces: int, modules: str = "*", sequence: bool = False, again: bool = True
) -> Plan:
    """Attention by heads and MLPs by hidden units, in `pieces` that a device runs one after another, each computed again before its backward pass;
    over `tp` too, where the mesh has it (with `sequence` as in `tensor_parallel`): then every device cuts its own heads. `modules` are globs of the branches' products (`*.attn.*`): a
    branch whose products all match is cut. The batch over `dp` and time, as ever."""
    pairs = pairs_of_products(graph)
    chosen = _matching(pairs, modules)
    plan = split_batch(Plan(f"co-shard in {pieces}", graph, mesh))
    if "tp" in mesh:
        plan = split_pairs(plan, pairs, "tp")
    if sequence:
        plan = transform(plan, sequence_of(graph, pairs.rows), dim=f"i{SEQUENCE}", axis="tp")
    cuts = [Cut((op,), "n", pairs.chunks[op.name]) for op in chosen.columns]
    return cut_in_pieces(plan, [*cuts, Cut(chosen.rows, "k")], pieces, again=again)


def _matching(pairs: Pairs, modules: str) -> Pairs:
    def matches(op: Op) -> bool:
        return any(fnmatch.fnmatchcase(op.module, pattern) for pattern in modules.split("|"))

    columns = tuple(op for op in pairs.columns if matches(op))
    rows = tuple(op for op in pairs.rows if matches(op))
    if not columns or not rows:
        some = ", ".join(op.module for op in (*pairs.columns, *pairs.rows)[:6])
        raise PlanError(f"no branch has products in {modules!r}", fix=f"products of branches are {some}, ...")
    return Pairs(columns, rows, pairs.chunks)
