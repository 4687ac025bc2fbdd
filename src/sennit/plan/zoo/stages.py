"""Pipelines: layers in runs over stages, micro-batches over time.

| plan | stages | what it is for |
|---|---|---|
| `pipeline` | runs of layers, one or two a device | a model that does not fit one device; `schedule` trades bubble against memory |
| `chimera` | stage i on devices i and S-1-i, half of the batch each | half of the bubble, for two copies of the parameters |
| `interlaced` | embedding and head on all devices, layers between them | vocabularies that are larger than a run of layers |
| `recycled` | each pass of a block a stage of its own, on the block's device | models that run their blocks several times and train the last pass |

What comes before the first layer goes with it, what comes after the last one with that. Layers are the longest run of
numbered modules in the graph, unless they are named; runs have about equal flops. Any other axis of the mesh splits the
batch (`dp`) or what the caller transforms afterwards: a pipeline of tensor-parallel stages is
`split_products(pipeline(graph, mesh), ...)`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import inf

from sennit.capture.rewrite import take_apart
from sennit.errors import PlanError
from sennit.ir.graph import Graph, Op, Phase, Role
from sennit.ir.mesh import Axis, Mesh
from sennit.plan import schedules
from sennit.plan.flops import flops_of
from sennit.plan.pattern import Pattern
from sennit.plan.plan import Plan, data_inputs, order, place, transform
from sennit.plan.propagate_index import is_product
from sennit.plan.scheduled import scheduled
from sennit.plan.zoo.batch import split_batch
from sennit.plan.zoo.find import weights_of

__all__ = ["SCHEDULES", "chimera", "interlaced", "layers_of", "pipeline", "recycled", "runs_of"]

Schedule = Callable[[int, int], Pattern]  # lanes and micro-batches

SCHEDULES: Mapping[str, Schedule] = {
    "GPipe": schedules.gpipe,
    "1F1B": schedules.one_forward_one_backward,
    "interleaved": partial(schedules.interleaved, chunks=2),
    "zero bubble H1": schedules.zero_bubble_h1,
    "zero bubble H2": schedules.zero_bubble_h2,
    "dual pipe V": schedules.dual_pipe_v,
}


def pipeline(graph: Graph, mesh: Mesh, *, layers: Sequence[str] = (), axis: str = "pp", schedule: str = "1F1B") -> Plan:
    """The layers in runs over the stages along `axis`, micro-batches over the time axis, in the order of a known
    schedule.
    """
    found = next((name for name in SCHEDULES if name.casefold() == schedule.casefold()), None)
    if found is None:
        raise PlanError(f"no schedule {schedule!r}", fix=f"use one of {', '.join(SCHEDULES)}, or plan.order(...)")
    lanes = mesh.size(axis)
    plan = split_batch(Plan(f"pipeline {found}", graph, mesh))
    pattern = SCHEDULES[found](lanes, plan.microbatches)
    lane_of = {stage: lane for lane, stages in enumerate(pattern.stages) for stage in stages}
    for stage, run in enumerate(runs_of(graph, layers, len(lane_of))):
        plan = place(plan, _inside(graph, run), mesh.at(**{axis: lane_of[stage]}), stage)
    return order(plan, pattern)


def chimera(graph: Graph, mesh: Mesh, *, layers: Sequence[str] = (), axis: str = "pp") -> Plan:
    """Two pipelines through the same devices, one down and one up, each with half of the batch."""
    stages = mesh.size(axis)
    plan = Plan("chimera", graph, mesh)
    pattern = schedules.chimera(stages, plan.microbatches)
    for stage, run in enumerate(runs_of(graph, layers, stages)):
        down, up = mesh.at(**{axis: stage}), mesh.at(**{axis: stages - 1 - stage})
        plan = place(plan, _inside(graph, run), Mesh((Axis("way", 2), *down.axes), down.devices + up.devices), stage)
    space = tuple(name for name in ("dp", "way") if name == "way" or name in mesh)
    plan = transform(plan, data_inputs(graph), dim=0, axis=space + tuple(time.name for time in mesh.time))
    return order(plan, pattern)


def interlaced(
    graph: Graph,
    mesh: Mesh,
    *,
    layers: Sequence[str] = (),
    axis: str = "pp",
    in_flight: int | None = None,
) -> Plan:
    """Embeddings of the vocabulary and the head split over all devices, on the vocabulary; the layers in stages between
    them.

    A pipeline that holds an embedding of two million rows on its first stage leaves the others idle, or does not fit.
    Here every device has a part of it. `in_flight` caps the micro-batches that a device holds (left out: one more than
    there are stages).
    """
    lanes = mesh.size(axis)
    graph = take_apart(graph, [op for op in graph.ops if op.kind.startswith("aten._log_softmax")])
    tables, heads = _vocabulary(graph, lanes)
    plan = split_batch(Plan("interlaced", graph, mesh))
    plan = place(plan, tables, mesh, 0)
    for stage, run in enumerate(runs_of(graph, layers, lanes)):
        plan = place(plan, _inside(graph, run), mesh.at(**{axis: stage}), stage + 1)
    plan = place(plan, heads, mesh, lanes + 1)
    plan = transform(plan, tables, dim="v", axis=axis)
    plan = transform(plan, heads, dim="n", axis=axis)
    return order(plan, scheduled(plan, in_flight=in_flight if in_flight is not None else lanes + 1))


def recycled(
    graph: Graph, mesh: Mesh, *, layers: Sequence[str] = (), axis: str = "pp", in_flight: int | None = None
) -> Plan:
    """Models that run their blocks several times on their own results and train the last pass (AlphaFold 2: three
    forward, one backward). Pass r of block i is stage r S + i: data goes around the devices, and other micro-batches
    fill the way.
    """
    lanes = mesh.size(axis)
    plan = split_batch(Plan("recycled", graph, mesh))
    runs = runs_of(graph, layers, lanes)
    blocks = [_inside(graph, run) for run in runs]
    passes = 1 + max(op.call for ops in blocks for op in ops)
    for turn in range(passes):
        for lane, ops in enumerate(blocks):
            mine = [op for op in ops if op.call == turn]
            if not mine:
                raise PlanError(
                    f"pass {turn} of {passes} does not run {', '.join(runs[lane])}",
                    fix="name layers= that every pass runs, or use pipeline",
                )
            plan = place(plan, mine, mesh.at(**{axis: lane}), turn * lanes + lane)
    return order(plan, scheduled(plan, in_flight=in_flight if in_flight is not None else inf))


# ---- what is cut -----------------------------------------------------------------------------------------------------


def layers_of(graph: Graph) -> tuple[str, ...]:
    """The modules that repeat: paths that end in a number, in the order of the model, those of the longest runs.

    Runs of the same length (an encoder and a decoder) follow each other.
    """
    runs: dict[str, list[str]] = {}
    for op in graph.ops:
        parts = op.module.split(".")
        for position, part in enumerate(parts):
            if part.isdigit() and op.phase is Phase.FORWARD:
                path = ".".join(parts[: position + 1])
                run = runs.setdefault(".".join(parts[:position]), [])
                if path not in run:
                    run.append(path)
                break
    longest = max((len(run) for run in runs.values()), default=0)
    return tuple(layer for run in runs.values() if len(run) == longest for layer in run)


def runs_of(graph: Graph, layers: Sequence[str], stages: int) -> list[tuple[str, ...]]:
    """The layers in `stages` runs, such that the run with the most flops has the fewest."""
    named = tuple(layers) or layers_of(graph)
    if len(named) < stages:
        raise PlanError(f"{len(named)} layers for {stages} stages", fix=f"use at most {len(named)} stages")
    types = graph.types()
    cost = [sum(flops_of(op, types) for op in _inside(graph, (layer,))) for layer in named]
    ends = _balanced(cost, stages)
    return [named[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def _balanced(cost: Sequence[float], parts: int) -> list[int]:
    """Where to cut a sequence in non-empty parts so that the greatest part is least: ends of the parts.

    best[p][j] = the least greatest sum of p parts of the first j = min over i of max(best[p-1][i], sum(i..j)); of equal
    choices the most even.
    """
    total = [0.0]
    for item in cost:
        total.append(total[-1] + item)
    count = len(cost)
    best: list[list[tuple[float, float, int]]] = [[(0.0, 0.0, 0)] + [(float("inf"), float("inf"), 0)] * count]
    for part in range(1, parts + 1):
        row = [(float("inf"), float("inf"), 0)] * (count + 1)
        for end in range(part, count + 1):
            row[end] = min(
                (
                    max(best[part - 1][start][0], total[end] - total[start]),
                    best[part - 1][start][1] + (total[end] - total[start]) ** 2,
                    start,
                )
                for start in range(part - 1, end)
            )
        best.append(row)
    ends, end = [], count
    for part in range(parts, 0, -1):
        ends.append(end)
        end = best[part][end][2]
    return ends[::-1]


def _inside(graph: Graph, layers: Sequence[str]) -> tuple[Op, ...]:
    return graph.select("|".join(f"{layer}|{layer}.*" for layer in layers), phase=Phase.FORWARD)


def _vocabulary(graph: Graph, parts: int) -> tuple[list[Op], list[Op]]:
    """The embeddings with the most rows, and the products that make as many columns."""
    types = graph.types()
    parameters = {item.value.name for item in graph.inputs if item.role is Role.PARAM}
    found = [
        op
        for op in graph.ops
        if op.kind == "aten.embedding.default" and op.phase is Phase.FORWARD and op.reads[0] in parameters
    ]
    if not found:
        raise PlanError(
            f"graph {graph.name!r} has no embedding", fix="use pipeline: nothing is to be split over all stages"
        )
    rows = max(types[op.reads[0]].shape[0] for op in found)
    if rows % parts:
        raise PlanError(
            f"a vocabulary of {rows} does not divide over {parts} devices", fix=f"pad it to {rows + -rows % parts}"
        )
    weights = weights_of(graph)
    heads = [
        op
        for op in graph.ops
        if is_product(op)
        and op.phase is Phase.FORWARD
        and op.reads[-1] in weights
        and op.results[0].type.shape[-1] == rows
    ]
    return [op for op in found if types[op.reads[0]].shape[0] == rows], heads
