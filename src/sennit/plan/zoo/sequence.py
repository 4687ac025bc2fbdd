"""Context parallelism: the sequence split over `cp` from the input to the loss.

All that works position by position needs nothing from other devices. Attention does: each device has its own queries
and all keys and values,

    scores = q[m] k[all]',  out = softmax(scores) v[all]

so a layer gathers keys and values forward (2 all-gathers), and scatters the sums of their gradients backward (2
reduce-scatters). The gathered keys and values are kept for the backward pass. The mask is made in pieces, of positions
that each piece knows, so it is the mask of the whole. Parameters are whole on every device; their gradients are sums
over `cp`, as over `dp`. The causal mask leaves the device of the last positions more to do than the first; it does not
skip what is masked, so all take equally long.

Where the model repeats keys and values for grouped queries, what is gathered is what was repeated.
"""

from __future__ import annotations

from sennit.ir.graph import Graph
from sennit.ir.mesh import Mesh
from sennit.plan.plan import Plan, transform
from sennit.plan.zoo.batch import split_batch
from sennit.plan.zoo.find import attention_products
from sennit.plan.zoo.tensor import SEQUENCE, sequence_of

__all__ = ["context_parallel"]


def context_parallel(graph: Graph, mesh: Mesh) -> Plan:
    """The sequence over `cp`, all through; attention on its own queries and all keys and values."""
    plan = split_batch(Plan("context parallel", graph, mesh))
    plan = transform(plan, sequence_of(graph, ()), dim=f"i{SEQUENCE}", axis="cp")
    return transform(plan, attention_products(graph), dim="m", axis="cp")
