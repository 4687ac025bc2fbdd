"""Tensor parallelism: products with weights split over `tp`, with the stream between them whole or split on the
sequence.

With y = x w, the columns of the first weight of a branch and the rows of the second are split, so that each device
works on its own heads or hidden units and makes a part of the branch's sum. What is communicated, a layer and
direction, by size of the stream's activation:

    sequence=False   2 all-reduces                       norms, dropouts and residuals are done by every device, on all of it
    sequence=True    2 all-gathers, 2 reduce-scatters    the same bytes; norms, dropouts and residuals on a part of the sequence

So the second keeps 1/tp of the activations between the branches. Gradients of norms, of biases behind rows and of
position embeddings become sums over `tp`. (Megatron-LM, arXiv 1909.08053; sequence parallelism, arXiv 2205.05198.)
"""

from __future__ import annotations

from sennit.errors import PlanError
from sennit.ir.graph import Graph, Op, Phase
from sennit.ir.mesh import Mesh
from sennit.plan.plan import Plan, transform
from sennit.plan.zoo.batch import split_batch
from sennit.plan.zoo.find import Pairs, norms, pairs_of_products, readers_behind_views

__all__ = ["sequence_of", "split_pairs", "split_products", "tensor_parallel"]

_PRODUCTS = "aten.mm.default|aten.addmm.default"
SEQUENCE = 1  # the dim of positions in an activation of samples, positions and width


def tensor_parallel(
    graph: Graph,
    mesh: Mesh,
    *,
    column: str | None = None,
    row: str | None = None,
    qkv: str | None = None,
    sequence: bool = False,
) -> Plan:
    """Megatron's split:

    `column` layers are split on their outputs, `row` layers on their inputs, over `tp`; a fused query, key and value
    layer has three chunks of outputs. Between the two, every device works on its own heads or hidden units. Where none
    is named, the graph tells (`zoo/find.py`). With `sequence`, what lies between the branches is split on the sequence.
    """
    plan = split_batch(Plan("tensor and sequence parallel" if sequence else "tensor parallel", graph, mesh))
    plan, rows = split_products(plan, column=column, row=row, qkv=qkv)
    return transform(plan, sequence_of(graph, rows), dim=f"i{SEQUENCE}", axis="tp") if sequence else plan


def split_products(
    plan: Plan, *, column: str | None, row: str | None, qkv: str | None, axis: str = "tp"
) -> tuple[Plan, tuple[Op, ...]]:
    """The columns and rows over an axis; and the rows."""
    graph = plan.graph
    if column is None and row is None and qkv is None:
        pairs = pairs_of_products(graph)
        return split_pairs(plan, pairs, axis), pairs.rows
    if column is None or row is None:
        raise PlanError("only some of the products are named", fix="name column= and row= (and qkv=), or none of them")
    if qkv is not None:
        plan = transform(plan, graph.select(qkv, _PRODUCTS, Phase.FORWARD), dim="n", axis=axis, chunks=3)
    plan = transform(plan, graph.select(column, _PRODUCTS, Phase.FORWARD), dim="n", axis=axis)
    rows = graph.select(row, _PRODUCTS, Phase.FORWARD)
    return transform(plan, rows, dim="k", axis=axis), rows


def split_pairs(plan: Plan, pairs: Pairs, axis: str) -> Plan:
    """The columns and rows of branches over an axis."""
    for chunks, columns in pairs.by_chunks().items():
        plan = transform(plan, columns, dim="n", axis=axis, chunks=chunks)
    return transform(plan, pairs.rows, dim="k", axis=axis)


def sequence_of(graph: Graph, rows: tuple[Op, ...]) -> tuple[Op, ...]:
    """The operators that pin the stream to its sequence: the norms, and what reads the sums that rows make (dropouts,
    residuals).
    """
    chosen = (*norms(graph), *readers_behind_views(graph, rows))
    found = {op.name: op for op in chosen if len(op.results[0].type.shape) == SEQUENCE + 2}
    if not found:
        raise PlanError(
            f"graph {graph.name!r} has no activations of samples, positions and width",
            fix="use sequence=False: this model has no sequence dim to split",
        )
    return tuple(found.values())
