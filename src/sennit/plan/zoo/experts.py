"""Expert parallelism: the experts of a mixture over `ep`, the batch over `dp` and `ep`.

Everything but the experts is data parallel over all devices. Experts' weights, gradients and optimizer state lie on one
device of `ep` each. The experts must be a batched product over experts, of which there are two forms with static shapes
(`capture/experts.py`), and the collectives follow from the form:

    as a batch     forward    all-gather tokens                   reduce-scatter results, a sum over experts
                   backward   all-gather gradients of results     reduce-scatter gradients of tokens
    by capacity    forward    all-to-all of dispatched tokens     all-to-all of their results
                   backward   all-to-all of their gradients       all-to-all of gradients of dispatched tokens

a mixture layer, and a few numbers for each token and its chosen experts. In the first, a device sends all its tokens to
all others of its group, whatever was chosen; in the second, each of the slots of an expert, which hold `factor` times
the tokens that choose it on average. Dispatch and combine are products of each group of tokens: they stay where the
group is.
"""

from __future__ import annotations

from sennit.errors import PlanError
from sennit.ir.graph import Graph, Op, Phase
from sennit.ir.mesh import Mesh
from sennit.plan.plan import Plan, transform
from sennit.plan.zoo.batch import split_batch
from sennit.plan.zoo.find import weights_of

__all__ = ["expert_parallel"]


def expert_parallel(graph: Graph, mesh: Mesh, *, experts: str = "*") -> Plan:
    """The batched products with weights, in modules `experts`, on experts over `ep`; the batch over `dp` and `ep`."""
    plan = split_batch(Plan("expert parallel", graph, mesh), "ep")
    products = expert_products(graph, experts)
    plan = transform(plan, products, dim="b", axis="ep")
    plan = transform(plan, _routing(graph, products), dim="b", axis="ep")
    return transform(plan, _handed_out(graph, products), dim="i0", axis="ep")


def _routing(graph: Graph, products: tuple[Op, ...]) -> tuple[Op, ...]:
    """Dispatch and combine, where experts have a capacity: the batched products beside those of experts, over groups of
    tokens. Left open, the combining one would follow the experts that its read lies on, and leave a sum to scatter.
    """
    names, modules = {op.name for op in products}, {op.module for op in products}
    return tuple(
        op
        for op in graph.ops
        if op.kind == "aten.bmm.default" and op.phase is Phase.FORWARD and op.module in modules and op.name not in names
    )


def _handed_out(graph: Graph, products: tuple[Op, ...]) -> tuple[Op, ...]:
    """Where tokens, and gradients of their results, are handed to all experts: each device hands them to its own.

    Left open, the copies would be exchanged, of which there are as many as experts, and not the tokens.
    """
    modules = {op.module for op in products}
    counts = {op.results[0].type.shape[0] for op in products}
    types = graph.types()

    def is_new(op: Op) -> bool:
        read, made = types[op.reads[0]].shape, op.results[0].type.shape
        return made[0] in counts and len(made) == 3 and (len(read) < 3 or read[0] == 1)

    return tuple(op for op in graph.ops if op.kind == "aten.expand.default" and op.module in modules and is_new(op))


def expert_products(graph: Graph, experts: str = "*") -> tuple[Op, ...]:
    """The batched products with a parameter of three dims: one matrix for each expert."""
    weights = weights_of(graph)
    products = [op for op in graph.ops if op.kind == "aten.bmm.default" and op.phase is Phase.FORWARD]
    if products and experts != "*":
        products = list(graph.select(experts, "aten.bmm.default", Phase.FORWARD))
    found = tuple(op for op in products if any(name in weights for name in op.reads))
    if not found:
        raise PlanError(
            f"graph {graph.name!r} has no batched product with the weights of experts",
            fix="write the experts as one batched product: capture/experts.py has two for Hugging Face models",
        )
    return found
