"""Plans at random: any family's graph on a random mesh, with random splits, places and orders.

`random_decisions(graph, rng)` splits the batch over space and time axes where it divides, places layers on stages, and
splits random operators on random letters of their rules. The stages of a plan are a pipeline on equal parts of a mesh,
or lie anywhere: on any devices, in any order, with axes of any sizes, so that they share devices, cross each other and
have unequal meshes. What a rule or a mesh refuses is left out, so that what remains is a plan that must lower, pass the
proof, and compute what the serial program does. All choices come from `rng`: a plan is known by its seed.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import replace
from math import prod

from sennit.capture.rules import Letters, RuleBook
from sennit.errors import PlanError
from sennit.ir.graph import Graph, Op, OutputKind, Phase
from sennit.ir.mesh import Axis, Mesh
from sennit.plan import Plan, data_inputs, lower, order, place, transform
from sennit.plan.pattern import one_forward_one_backward
from sennit.plan.propagate import Decisions, propagate
from sennit.plan.zoo.stages import layers_of

__all__ = ["layers_of", "random_decisions", "trained"]


def trained(graph: Graph) -> Graph:
    """The graph of what training needs: losses, gradients and buffers, without what the model returns besides."""
    kept = tuple(output for output in graph.outputs if output.kind is not OutputKind.RESULT)
    needed = {output.name for output in kept}
    ops: list[Op] = []
    for op in reversed(graph.ops):
        if any(value.name in needed for value in op.results):
            ops.append(op)
            needed.update(op.reads)
    return replace(graph, ops=tuple(reversed(ops)), outputs=kept)


def random_decisions(graph: Graph, rng: random.Random, *, devices: int = 8, anywhere: bool | None = None) -> Decisions:
    """A random plan, complete; `anywhere` asks for stages on any devices, or for none such (None: by chance).

    Its last splits are taken back until what is left has room, and its stages moved apart where two of them would hold
    one parameter on a device in two ways.
    """
    plan = _random_plan(graph, rng, devices, anywhere)
    while True:
        try:
            decisions = propagate(plan)
            if "x" in plan.mesh:
                lower(decisions)
            return decisions
        except PlanError as error:
            named = set(re.findall(r"%([\w.]+)", str(error)))
            if "x" in plan.mesh and " is read on " in str(error):
                plan = _random_plan(graph, rng, devices, anywhere)
            elif len(kept := tuple(split for split in plan.splits if split.op not in named)) < len(plan.splits):
                plan = replace(plan, splits=kept)  # the operator's stage has other axes than the split was drawn for
            elif plan.splits and "has no room for axis" in str(error):
                plan = replace(plan, splits=plan.splits[:-1])
            elif plan.mesh.time and plan.microbatches > 1 and "splits in time" in str(error):
                plan = _without_time(plan)  # batch statistics, say: this model has no micro-batches
            else:
                raise


def _without_time(plan: Plan) -> Plan:
    once = Mesh.make({axis.name: axis.size for axis in plan.mesh.space}, {axis.name: 1 for axis in plan.mesh.time})
    parts = tuple(Mesh((*part.space, *once.time), part.devices) for part in plan.parts)
    bare = replace(plan, mesh=once, parts=parts, pattern=None)
    return order(bare, one_forward_one_backward(len(bare.stages), 1)) if plan.pattern is not None else bare


def _random_plan(graph: Graph, rng: random.Random, devices: int, anywhere: bool | None) -> Plan:
    layers = layers_of(graph)
    stages = 2 if len(layers) >= 2 and (anywhere or rng.random() < 0.4) else 1
    if stages > 1 and (rng.random() < 0.6 if anywhere is None else anywhere):
        return _placed_anywhere(graph, rng, layers, devices)
    sizes = {"dp": rng.choice([1, 2]), "tp": rng.choice([1, 2, 4]), "cp": rng.choice([1, 2])}
    while stages * sizes["dp"] * sizes["tp"] * sizes["cp"] > devices:
        largest = max(sizes, key=lambda axis: sizes[axis])
        sizes[largest] //= 2
    space = {"pp": stages, **sizes} if stages > 1 else sizes
    mesh = Mesh.make(space, {"mb": rng.choice([1, 1, 2])})
    plan = Plan("random", graph, mesh)
    for item in data_inputs(graph):
        try:
            plan = transform(plan, [item], dim=0, axis=("dp", "mb"))
        except PlanError:
            continue  # not a batch, or one that does not divide
    if stages > 1:
        plan = _placed(plan, layers, stages)
    return _split_at_random(plan, rng, [axis for axis in ("tp", "cp") if sizes[axis] > 1])


def _placed(plan: Plan, layers: Sequence[str], stages: int) -> Plan:
    for position, layer in enumerate(layers):
        ops = plan.graph.select(f"{layer}|{layer}.*", phase=Phase.FORWARD)
        plan = place(plan, ops, plan.mesh.at(pp=position * stages // len(layers)))
    return order(plan, one_forward_one_backward(stages, plan.microbatches))


def _placed_anywhere(graph: Graph, rng: random.Random, layers: Sequence[str], devices: int) -> Plan:
    """Two to four stages, each on a mesh of its own. The axis `x` of the plan's mesh only counts the devices."""
    mesh = Mesh.make({"x": devices}, {"mb": rng.choice([1, 2])})
    stages = rng.randint(2, min(4, len(layers)))
    plan = Plan("random stages", graph, mesh)
    for stage in range(stages):
        sizes = {"dp": rng.choice([1, 2]), "tp": rng.choice([1, 2]), "cp": rng.choice([1, 1, 2])}
        if prod(sizes.values()) > devices:
            sizes["cp"] = 1
        chosen = tuple(rng.sample(range(devices), prod(sizes.values())))
        if stage == stages - 1 and rng.random() < 0.3:
            chosen = tuple(range(devices))  # on all devices, as the head of an interlaced pipeline
            sizes = {"dp": 2, "tp": devices // 2}
        part = Mesh((*(Axis(name, size) for name, size in sizes.items()), *mesh.time), chosen)
        here = [layer for position, layer in enumerate(layers) if position * stages // len(layers) == stage]
        for layer in here:
            plan = place(plan, graph.select(f"{layer}|{layer}.*", phase=Phase.FORWARD), part, stage)
    for item in data_inputs(graph):
        try:
            plan = transform(plan, [item], dim=0, axis=("dp", "mb"))
        except PlanError:
            continue  # not a batch, or one that does not divide
    return _split_at_random(plan, rng, ["tp", "cp"])


def _split_at_random(plan: Plan, rng: random.Random, axes: Sequence[str]) -> Plan:
    graph = plan.graph
    book = RuleBook(graph.types())
    weights = [
        8 if op.kind.split(".")[1] in ("mm", "addmm", "bmm", "embedding", "convolution") else 1 for op in graph.ops
    ]
    for op in rng.choices(graph.ops, weights, k=rng.choice([2, 6, 12])):
        rule = book.rule(op)
        letters = (
            rule.letters if isinstance(rule, Letters) else tuple(f"i{d}" for d in range(len(op.results[0].type.shape)))
        )
        for axis in axes:
            if letters and rng.random() < 0.7:
                try:
                    plan = transform(plan, [op], dim=rng.choice(letters), axis=axis)
                except PlanError:
                    continue  # does not divide, or is split already
    return plan
