"""A training step as one phase: groups may then reach from the forward into the backward pass.

Between the passes a step gives its loss to the user, who may do with it what he likes before he calls `backward`. So a
group is of one phase, a strategy that mixes them is refused (`ir/strategy_check.py`), and `DataParallel` enforces none.
Where the step is one program, with the gradient of the loss among its inputs, nothing stands between them. Then a
kernel of both is as good as any other if the kernels still have an order: a log-softmax and its backward pass go over
the logits once, and what a forward kernel has in registers the backward one need not read.

    as_one_phase(graph)      the same operators, values and outputs; every operator is of the forward phase

`is_legal`, the moves and the checkers need nothing else: an order of groups is all that they ask for beside the phase,
and it is that of the whole graph. With gradients to communicate it does not pay to look for such groups: what is fused
into the forward pass delays no gradient, but no gradient comes sooner by it either, and DDP's contract needs the loss
in between. The search against Inductor's default on one GPU uses it (`benchmarks/fuse/gpu_fusion.py`).
"""

from __future__ import annotations

from dataclasses import replace

from sennit.ir.graph import Graph, Phase

__all__ = ["as_one_phase"]


def as_one_phase(graph: Graph) -> Graph:
    """The graph with all operators in the forward phase."""
    return replace(graph, ops=tuple(replace(op, phase=Phase.FORWARD) for op in graph.ops))
