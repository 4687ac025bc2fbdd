"""A deep model as a shallow one: one copy of each run of equal layers, and how often it stands.

A graph says which operators are copies of each other (`Graph.repeats`): the units 1 to n-2 of a run of n layers.
`shallow` keeps unit 1 of each run with its backward, and drops the other copies:

- whoever read the last copy's result reads that of the copy that is kept, at the same place;
- what the kept copy read from its neighbour, it reads from where the first copy did.

So the shallow graph is a graph of the same model with three units of each run (first, middle, last): every pass works
on it, in a time that does not grow with depth, and what is found for the middle unit holds for all `copies` of it.

**Items** are what a pipeline places: what comes before the first unit, the units, what stands between runs, what comes
behind the last. Units are the children of the runs, and of other lists of modules beside them. `Item.copies` says how
many units of the deep model one stands for; the order of items is the order of the data. An operator of a backward pass
belongs to the item of its forward one, and a sum of gradients to the earliest item of its terms.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from sennit.errors import PlanError
from sennit.ir.graph import Arg, Graph, Op, OutputKind, Phase, Ref, Repeat, Role

__all__ = ["Item", "Shallow", "shallow"]


@dataclass(frozen=True, slots=True)
class Item:
    """`modules` are the paths of its units in the deep model, in order; empty for what lies outside of units."""

    name: str
    modules: tuple[str, ...]
    copies: int = 1


@dataclass(frozen=True, slots=True)
class Shallow:
    """`item_of` gives the position in `items` of each operator of the shallow graph."""

    graph: Graph
    items: tuple[Item, ...]
    item_of: Mapping[str, int]


def shallow(graph: Graph) -> Shallow:
    """The shallow form of a graph, or the graph itself where nothing repeats."""
    folded = _Fold(graph).graph() if graph.repeats else graph
    # what a model returns besides its loss (logits) comes whole to every device, once: that is no part of a step's
    # choices
    outputs = tuple(output for output in folded.outputs if output.kind is not OutputKind.RESULT)
    return _itemised(graph, replace(folded, outputs=outputs, repeats=()))


# ---- folding ---------------------------------------------------------------------------------------------------------


class _Fold:
    def __init__(self, graph: Graph) -> None:
        self.source = graph
        self.places: dict[str, tuple[Repeat, int, int, int]] = {}  # value -> its repeat, copy, operator and result
        for repeat in graph.repeats:
            for position in range(repeat.start, repeat.end):
                copy, offset = divmod(position - repeat.start, repeat.length)
                for number, value in enumerate(graph.ops[position].results):
                    self.places[value.name] = (repeat, copy, offset, number)
        units: dict[str, frozenset[str]] = {}  # run -> the units of the copy that is kept
        self.kept: dict[Repeat, int] = {}
        for repeat in graph.repeats:
            named = [self._units(repeat, copy) for copy in range(repeat.copies)]
            if not named[0]:
                raise PlanError(f"the copies of `{repeat}` name no unit", fix="plan the graph without its repeats")
            wanted = units.setdefault(repeat.module, named[0])
            # a copy may be several units (a Swin's plain and shifted block), and its backward names them in the other
            # order
            self.kept[repeat] = max(range(repeat.copies), key=lambda copy: (len(named[copy] & wanted), -copy))

    def _units(self, repeat: Repeat, copy: int) -> frozenset[str]:
        """The units that the operators of a copy name."""
        begin = repeat.start + copy * repeat.length
        names = [_child(op.module, repeat.module) for op in self.source.ops[begin : begin + repeat.length]]
        return frozenset(name for name in names if name is not None)

    def graph(self) -> Graph:
        dropped = {
            position
            for repeat, kept in self.kept.items()
            for position in range(repeat.start, repeat.end)
            if (position - repeat.start) // repeat.length != kept
        }
        ops = tuple(self._rewired(position) for position in range(len(self.source.ops)) if position not in dropped)
        made = {value.name for op in ops for value in op.results}
        read = {name for op in ops for name in op.reads}
        inputs = tuple(item for item in self.source.inputs if item.value.name in read or item.role is not Role.PARAM)
        known = {item.path for item in inputs}
        outputs = []
        for output in self.source.outputs:
            name = self._outside(output.name)
            if output.path in known or output.name in made or output.name not in self.places:
                outputs.append(replace(output, name=name))
        defined = made | {item.value.name for item in inputs}
        return Graph(self.source.name, inputs, ops, tuple(item for item in outputs if item.name in defined))

    def _rewired(self, position: int) -> Op:
        op = self.source.ops[position]
        home = self.places.get(op.name)
        first = self.source.ops[home[0].start + home[2]] if home is not None else op
        names = iter(
            [
                self._inside(name, home[0], home[1], alike) if home is not None else self._outside(name)
                for name, alike in zip(op.reads, first.reads, strict=True)
            ]
        )
        args = tuple(_renamed(arg, names) for arg in op.args)
        return replace(op, args=args, kwargs=tuple((key, _renamed(arg, names)) for key, arg in op.kwargs))

    def _inside(self, name: str, repeat: Repeat, copy: int, alike: str) -> str:
        """What the kept copy reads: of itself as it is; of its neighbour, what the first copy reads there."""
        place = self.places.get(name)
        if place is None:
            return name
        if place[0] == repeat and place[1] != copy:
            return self._outside(alike)
        return self._outside(name)

    def _outside(self, name: str) -> str:
        place = self.places.get(name)
        if place is None:
            return name
        repeat, _, offset, number = place
        return self.source.ops[repeat.start + self.kept[repeat] * repeat.length + offset].results[number].name


def _renamed(arg: Arg, names: Iterator[str]) -> Arg:
    if isinstance(arg, Ref):
        return Ref(next(names))
    if isinstance(arg, tuple):
        return tuple(_renamed(part, names) for part in arg)
    return arg


# ---- items -----------------------------------------------------------------------------------------------------------


def _child(path: str, parent: str) -> str | None:
    """`h.3` of `h.3.mlp.up` for the parent `h`."""
    prefix = f"{parent}."
    if not path.startswith(prefix):
        return None
    return prefix + path[len(prefix) :].partition(".")[0]


def _runs(graph: Graph) -> tuple[str, ...]:
    """The modules whose children are the units: those of the repeats, and lists with several numbered children that lie
    beside them (a Swin's resolutions, of which the long one repeats). Of lists in lists, the outer ones.
    """
    folded = tuple(dict.fromkeys(repeat.module for repeat in graph.repeats))
    parents: dict[str, set[str]] = {}
    for op in graph.ops:
        parts = op.module.split(".")
        for depth, part in enumerate(parts):
            if part.isdigit() and op.phase is Phase.FORWARD:
                parents.setdefault(".".join(parts[:depth]), set()).add(part)
    lists = sorted((path for path, children in parents.items() if len(children) > 1), key=lambda path: path.count("."))
    found = list(folded)
    for path in lists:
        around = any(f"{other}.".startswith(f"{path}.") for other in folded)
        if not around and not any(path.startswith(f"{other}.") for other in found):
            found.append(path)
    return tuple(found)


def _itemised(deep: Graph, graph: Graph) -> Shallow:
    runs = _runs(deep)
    children = {
        run: _in_order(child for op in deep.ops if (child := _child(op.module, run)) is not None) for run in runs
    }

    def unit(op: Op) -> str | None:
        return next((child for run in runs if (child := _child(op.module, run)) is not None), None)

    present = {label for op in graph.ops if (label := unit(op)) is not None}
    copies = {repeat.module: repeat.copies for repeat in deep.repeats}
    stands_for: dict[str, tuple[str, ...]] = {}
    for run in runs:
        stands_for.update(_stands_for(children[run], present, copies.get(run, 1)))
    items: list[Item] = []
    number: dict[str, int] = {}
    item_of: dict[str, int] = {}
    producers = graph.producers()
    outside: int | None = None
    for op in graph.ops:
        if op.phase is not Phase.FORWARD:
            continue
        label = unit(op)
        if label is None:
            above = [item_of[producers[name].name] for name in op.reads if name in producers]
            if not items or (outside is None and above and max(above) == len(items) - 1 and items[-1].modules):
                outside = len(items)
                items.append(Item("before" if not items else f"behind {items[-1].name}", ()))
            item_of[op.name] = outside if outside is not None else max(above, default=0)
            continue
        if label not in number:
            number[label] = len(items)
            items.append(Item(label, stands_for[label], len(stands_for[label])))
            outside = None
        item_of[op.name] = number[label]
    return Shallow(graph, tuple(items), {**item_of, **_backward(graph, item_of)})


def _stands_for(children: tuple[str, ...], present: set[str], copies: int) -> dict[str, tuple[str, ...]]:
    """The children of a run that each child of the shallow graph stands for, itself first.

    Dropped ones follow the copy that was kept, and a copy may be a group of children.
    """
    missing = [position for position, child in enumerate(children) if child not in present]
    found: dict[str, tuple[str, ...]] = {child: (child,) for child in children if child in present}
    if missing:
        begin, end, group = missing[0], missing[-1] + 1, len(missing) // (copies - 1)
        for place in range(group):
            kept = children[begin - group + place]
            found[kept] = (kept, *children[begin + place : end : group])
    return found


def _in_order(names: Iterator[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(names))


def _backward(graph: Graph, forward: Mapping[str, int]) -> dict[str, int]:
    by_seq = {
        op.seq: forward[op.name] for op in graph.ops if op.phase is Phase.FORWARD and op.seq is not None
    }  # of several operators of one autograd node, the last
    producers, found = graph.producers(), dict[str, int]()
    for op in graph.ops:
        if op.phase is Phase.BACKWARD:
            above = [
                found.get(producers[name].name, forward.get(producers[name].name, 0))
                for name in op.reads
                if name in producers
            ]
            if op.seq is None:
                found[op.name] = min(above, default=0)
            else:
                found[op.name] = by_seq.get(op.seq, max(above, default=0))
    return found
