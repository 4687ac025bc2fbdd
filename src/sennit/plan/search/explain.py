"""Why a module is treated as it is: the options that its units had, each with its costs, and which was chosen.

The options differ in one decision from the chosen way: what is kept, the number of devices that share products, whether
the stream is split on the sequence. Costs are those of one unit and one micro-batch on one device, probed as the search
does (`probe.py`).
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator
from dataclasses import dataclass, replace

from sennit.cluster import Cluster
from sennit.errors import PlanError
from sennit.ir.graph import Graph
from sennit.plan.search.choice import Choice
from sennit.plan.search.costs import CostBook
from sennit.plan.search.probe import ItemCost, Wires
from sennit.plan.search.shallow import Item, Shallow, shallow
from sennit.plan.search.ways import Keep, Way
from sennit.sim.optimizer import optimizer as named_optimizer

__all__ = ["Explained", "Explanation", "explain"]


@dataclass(frozen=True, slots=True)
class Explained:
    """One option; `chosen` where units of the item take it."""

    way: Way
    chosen: bool
    cost: ItemCost


@dataclass(frozen=True, slots=True)
class Explanation:
    """An item: how many units it has, the stages that they are in, the options, cheapest first."""

    item: str
    units: int
    stages: tuple[int, ...]
    options: tuple[Explained, ...]


def explain(
    glob: str, choice: Choice, graph: Graph, cluster: Cluster, optimizer: str = "adamw-master"
) -> tuple[Explanation, ...]:
    """The items of the modules that a glob matches."""
    model = shallow(graph)
    found = [number for number, item in enumerate(model.items) if _matches(glob, item, model, graph)]
    if not found:
        some = ", ".join(sorted({op.module for op in graph.ops if op.module})[:6])
        raise PlanError(f"{glob!r} matches no module", where=f"graph {graph.name!r}", fix=f"it has {some}, ...")
    book = CostBook(model, Wires(cluster), named_optimizer(optimizer), choice.batch)
    return tuple(_explanation(number, choice, model, book) for number in found)


def _matches(glob: str, item: Item, model: Shallow, graph: Graph) -> bool:
    position = model.items.index(item)
    outside = {op.module for op in model.graph.ops if model.item_of[op.name] == position and op.module}
    inside = {
        op.module
        for op in graph.ops
        if any(op.module == unit or op.module.startswith(f"{unit}.") for unit in item.modules)
    }
    return any(fnmatch.fnmatchcase(module, part) for module in outside | inside for part in glob.split("|"))


def _explanation(number: int, choice: Choice, model: Shallow, book: CostBook) -> Explanation:
    item = model.items[number]
    parts = [(stage, part) for stage, row in enumerate(choice.stages) for part in row if part.item == item.name]
    taken = {replace(choice.way, keep=part.keep, pieces=part.pieces) for _, part in parts}
    options = []
    for way in dict.fromkeys((*taken, *_others(choice.way, bool(item.modules), book))):
        costs = book.probed(way, choice.size)
        if costs is not None:
            options.append(Explained(way, way in taken, costs[number]))
    options.sort(key=lambda option: option.cost.seconds * option.way.devices)
    return Explanation(item.name, item.copies, tuple(sorted({stage for stage, _ in parts})), tuple(options))


def _others(way: Way, is_unit: bool, book: CostBook) -> Iterator[Way]:
    for keep in Keep if is_unit else ():
        yield replace(way, keep=keep)
    if way.tp > 1:
        yield replace(way, sequence=not way.sequence)
    node = book.wires.cluster.device.per_node
    for tp in (way.tp // 2, way.tp * 2):
        if 1 <= tp <= node:
            yield replace(way, tp=tp, sequence=way.sequence and tp > 1, vocabulary=way.vocabulary and tp > 1)
