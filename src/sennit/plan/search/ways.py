"""The ways to split and keep what is inside a stage, and the plan of each.

    way   := word ("," word)*                       "plain" where nothing is split
    word  := "tp=" N     products over N devices, Megatron's columns and rows (zoo/tensor.py)
           | "sp"        what lies between the branches on the sequence, over the same devices
           | "cp=" N     the sequence over N devices, all through (zoo/sequence.py)
           | "ep=" N     experts over N devices (zoo/experts.py)
           | "vocab"     embeddings and head on the vocabulary, over the devices of tp
           | "co=" N     the products of tp again in N pieces, one after another on each device (co-shard)
           | "keep=" K   what of a unit is kept for backward: "all", "products" (with weights, the rest computed again), "none"

`plan_of` gives the plan that a way means for a graph, on a mesh that has its axes: `dp` for the batch, `tp`, `cp`,
`ep`, and `co` for the pieces. `ways` lists those that a model and a cluster allow. A way that the model cannot take (a
dim that does not divide) is left out, with the reason: `Refusal`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from enum import Enum

from sennit.capture.rewrite import take_apart
from sennit.errors import ParseError
from sennit.ir.graph import Graph, Op, Phase, Role
from sennit.ir.mesh import Mesh
from sennit.plan.plan import Plan, transform
from sennit.plan.recompute import recompute
from sennit.plan.search.shallow import Shallow
from sennit.plan.zoo.batch import split_batch
from sennit.plan.zoo.experts import expert_parallel
from sennit.plan.zoo.find import pairs_of_products, weights_of
from sennit.plan.zoo.sequence import context_parallel
from sennit.plan.zoo.tensor import sequence_of, split_products

__all__ = ["Keep", "Way", "computed_again", "embeddings", "heads", "plan_of", "split_as"]

_PRODUCTS = ("aten.mm.default", "aten.addmm.default", "aten.convolution.default")


class Keep(Enum):
    """What of a unit's forward is kept for its backward."""

    ALL = "all"
    PRODUCTS = "products"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class Way:
    tp: int = 1
    sequence: bool = False
    cp: int = 1
    ep: int = 1
    vocabulary: bool = False
    pieces: int = 1
    keep: Keep = Keep.ALL

    @property
    def devices(self) -> int:
        """The devices that one replica of a stage has."""
        return self.tp * self.cp * self.ep

    def mesh(self, replicas: int) -> Mesh:
        """`replicas` parts of the batch, the axes of the way, and the pieces of co-shard innermost."""
        sizes = {"dp": replicas, "ep": self.ep, "cp": self.cp, "tp": self.tp, "co": self.pieces}
        return Mesh.make({name: size for name, size in sizes.items() if size > 1 or name == "dp"})

    def __str__(self) -> str:
        words = [f"{name}={size}" for name, size in (("tp", self.tp), ("cp", self.cp), ("ep", self.ep)) if size > 1]
        words += ["sp"] if self.sequence else []
        words += ["vocab"] if self.vocabulary else []
        words += [f"co={self.pieces}"] if self.pieces > 1 else []
        words += [f"keep={self.keep.value}"] if self.keep is not Keep.ALL else []
        return ",".join(words) or "plain"

    @classmethod
    def parse(cls, text: str) -> Way:
        way = cls()
        for word in text.split(",") if text != "plain" else ():
            name, _, value = word.partition("=")
            number = int(value) if value.isdigit() else None
            if name == "tp" and number:
                way = replace(way, tp=number)
            elif name == "cp" and number:
                way = replace(way, cp=number)
            elif name == "ep" and number:
                way = replace(way, ep=number)
            elif name == "co" and number:
                way = replace(way, pieces=number)
            elif name == "keep" and value in [keep.value for keep in Keep]:
                way = replace(way, keep=Keep(value))
            elif word == "sp":
                way = replace(way, sequence=True)
            elif word == "vocab":
                way = replace(way, vocabulary=True)
            else:
                raise ParseError(
                    f"{word!r} is no word of a way", fix="use tp=N, cp=N, ep=N, sp, vocab, co=N, keep=all|products|none"
                )
        return way


def plan_of(way: Way, model: Shallow) -> Callable[[Graph, Mesh], Plan]:
    """The planner of a way, for the shallow graph of a model."""

    def planner(graph: Graph, mesh: Mesh) -> Plan:
        plan = split_as(way, graph, mesh)
        if way.keep is Keep.ALL:
            return plan
        units = {name: item for name, item in model.item_of.items() if model.items[item].modules}
        keeps = dict.fromkeys(units.values(), way.keep)
        closing = {op.name for op in pairs_of_products(graph).rows} if way.pieces > 1 else set()
        return recompute(plan, computed_again(plan.graph, units, keeps, closing))

    return planner


def split_as(way: Way, graph: Graph, mesh: Mesh) -> Plan:
    """The plan that splits operators as a way says; what is kept is not looked at."""
    if way.ep > 1:
        return expert_parallel(graph, mesh)
    if way.cp > 1:
        return context_parallel(graph, mesh)
    if way.vocabulary:
        graph = take_apart(graph, [op for op in graph.ops if op.kind.startswith("aten._log_softmax")])
    plan = split_batch(Plan(str(way), graph, mesh))
    if way.tp > 1:
        plan, rows = split_products(plan, column=None, row=None, qkv=None)
        if way.sequence:
            plan = transform(plan, sequence_of(graph, rows), dim="i1", axis="tp")
    if way.vocabulary and way.tp > 1:
        plan = transform(plan, embeddings(graph), dim="v", axis="tp")
        plan = transform(plan, heads(graph), dim="n", axis="tp")
    if way.pieces > 1:
        plan, _ = split_products(plan, column=None, row=None, qkv=None, axis="co")
    return plan


def embeddings(graph: Graph) -> tuple[Op, ...]:
    """The embeddings with the largest tables whose indices are made of the model's inputs: of vocabularies, not of
    positions.
    """
    data = {item.value.name for item in graph.inputs if item.role is Role.INPUT}
    trained = {item.value.name for item in graph.inputs if item.role is Role.PARAM}
    for op in graph.ops:
        for names in (data, trained):
            if any(name in names for name in op.reads):
                names.update(value.name for value in op.results)
    tables = [op for op in graph.ops if op.kind == "aten.embedding.default" and op.phase is Phase.FORWARD]
    types = graph.types()
    largest = max((types[op.reads[0]].shape[0] for op in tables), default=0)
    fed = [op for op in tables if op.reads[1] in data and op.reads[1] not in trained]
    return tuple(op for op in fed if types[op.reads[0]].shape[0] == largest)


def heads(graph: Graph) -> tuple[Op, ...]:
    """The products whose columns are the vocabulary."""
    tables = {name for op in embeddings(graph) for name in op.reads[:1]}
    sizes = {graph.types()[name].shape[0] for name in tables}
    weights = weights_of(graph)
    return tuple(
        op
        for op in graph.ops
        if op.phase is Phase.FORWARD
        and op.kind in ("aten.mm.default", "aten.addmm.default")
        and op.reads[-1] in weights
        and op.results[0].type.shape[-1] in sizes
    )


def computed_again(
    graph: Graph, unit_of: Mapping[str, int], keeps: Mapping[int, Keep], kept: Collection[str] = ()
) -> tuple[Op, ...]:
    """The forward operators that the backward pass of their unit computes again: none that another unit reads, so each
    unit starts from what enters it; with `PRODUCTS`, none of the products with weights; none of those `kept`.
    """
    weights = weights_of(graph) if Keep.PRODUCTS in keeps.values() else set()
    producers, leaves = graph.producers(), set(kept)
    for op in graph.ops:
        if op.phase is Phase.FORWARD:
            makers = {producers[name].name for name in op.reads if name in producers}
            leaves.update(name for name in makers if unit_of.get(name) != unit_of.get(op.name))
    found: list[Op] = []
    for op in graph.ops:
        keep = keeps.get(unit_of.get(op.name, -1), Keep.ALL)
        if op.phase is not Phase.FORWARD or keep is Keep.ALL or op.name in leaves:
            continue
        weighted = op.kind in _PRODUCTS and any(name in weights for name in op.reads)
        if keep is Keep.NONE or not weighted:
            found.append(op)
    return tuple(found)
