"""Find in a graph what plans split, where nobody names modules.

**Pairs of products.** Megatron's split needs to know which products with a weight open a branch of the residual stream
(the *columns*: query, key, value, the first product of an MLP) and which one closes it (the *rows*). The graph tells.
Walk back from the activation that a product reads, up to products with weights, to embeddings of the model's input, and
to norms over all columns of a product:

    row      the walk meets columns and nothing else: what it reads lives inside a branch
    column   anything else: it reads the stream

A column counts only if every product that reads it is a row, and a row only if all its columns count. So the head,
whose result no product reads, and the router of a mixture of experts, whose weights join the stream, are left whole.

**Chunks.** A fused query, key and value weight has its heads in three chunks of its columns. What cuts the result in
equal parts shows how many: a `split`, or a view that gives the parts a dim of their own which is then taken apart.

**Norms** are the operators that open a normalisation over the last dim: `native_layer_norm`, or the first operator of a
module whose operators take an `rsqrt` (a norm written out).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from sennit.capture.rules import is_relabelling
from sennit.errors import PlanError
from sennit.ir.graph import Graph, Op, Phase, Role
from sennit.plan.propagate_index import is_copy, is_product

__all__ = [
    "Pairs",
    "attention_products",
    "depends_on_input",
    "norms",
    "pairs_of_products",
    "readers_behind_views",
    "weights_of",
]


@dataclass(frozen=True, slots=True)
class Pairs:
    """Products that open a branch, those that close it, and in how many equal chunks the columns of an opening one lie."""

    columns: tuple[Op, ...]
    rows: tuple[Op, ...]
    chunks: Mapping[str, int]

    def by_chunks(self) -> dict[int, tuple[Op, ...]]:
        """The columns that lie in one chunk, in three, ..."""
        return {
            count: tuple(op for op in self.columns if self.chunks[op.name] == count)
            for count in sorted({self.chunks[op.name] for op in self.columns})
        }


def pairs_of_products(graph: Graph) -> Pairs:
    """The columns and rows of every branch. An error if there is none."""
    walk = _Walk(graph)
    opened_by: dict[str, frozenset[str]] = {}  # row -> its columns
    columns: dict[str, Op] = {}
    for op in graph.ops:
        if walk.is_stop(op) and walk.is_weighted(op):
            met = walk.nearest(op)
            if met and all(name in columns for name in met):
                opened_by[op.name] = met
            else:
                columns[op.name] = op
    sound = _sound(columns, opened_by, walk)
    rows = [name for name, met in opened_by.items() if met <= sound]
    if not rows:
        raise PlanError(
            f"no pair of products opens and closes a branch in graph {graph.name!r}",
            fix="name the products to split: column=..., row=...",
        )
    used = {name for row in rows for name in opened_by[row]}
    chosen = tuple(op for name, op in columns.items() if name in used)
    producers = graph.producers()
    return Pairs(chosen, tuple(producers[name] for name in rows), {op.name: _chunks(op, walk) for op in chosen})


def _sound(columns: Mapping[str, Op], opened_by: Mapping[str, frozenset[str]], walk: _Walk) -> set[str]:
    """The columns that only rows read, none of them through another one that is not sound: a greatest fixed point."""
    sound = set(columns)
    while True:
        bad = {
            name
            for name in sound
            if not walk.readers[name]
            or any(reader not in opened_by or not opened_by[reader] <= sound for reader in walk.readers[name])
        }
        if not bad:
            return sound
        sound -= bad


class _Walk:
    """Walks back from activations to the nearest products with weights. Forward operators only."""

    def __init__(self, graph: Graph) -> None:
        self.ops = [op for op in graph.ops if op.phase is Phase.FORWARD]
        self.users: dict[str, list[Op]] = {}
        for op in self.ops:
            for name in dict.fromkeys(op.reads):
                self.users.setdefault(name, []).append(op)
        self.producers = {value.name: op for op in self.ops for value in op.results}
        self.norms = {op.module for op in self.ops if op.kind == "aten.rsqrt.default"}  # modules that write a norm out
        self.data = depends_on_input(graph)
        self.weights = weights_of(graph)
        self.met: dict[
            str, frozenset[str]
        ] = {}  # value -> the products and embeddings that the walk back from it meets
        self.readers: dict[str, set[str]] = {}  # product -> the products that read what it makes
        for op in self.ops:
            if self.is_stop(op):
                found = frozenset({op.name})
                self.readers[op.name] = set()
                for name in self.nearest(op):
                    if name in self.readers:
                        self.readers[name].add(op.name)
            else:
                found = self.nearest(op)
            for value in op.results:
                self.met[value.name] = found

    def is_weighted(self, op: Op) -> bool:
        return is_product(op) and op.kind != "aten.bmm.default" and op.reads[-1] in self.weights

    def is_stop(self, op: Op) -> bool:
        """Where a walk ends: at products with weights, where the model's input enters the stream, and at norms."""
        if self.is_weighted(op):
            return True
        if op.kind in ("aten.embedding.default", "aten.convolution.default"):
            return op.name in self.data
        if op.kind not in _NORMS and op.module not in self.norms:
            return False
        width = op.results[0].type.shape[-1:]  # a norm of each head passes: a branch may have those
        return any(self.producers[name].results[0].type.shape[-1:] == width for name in self.nearest(op))

    def nearest(self, op: Op) -> frozenset[str]:
        """What the walk back from an operator meets; of a product, from its activation."""
        reads = op.reads[-2:-1] if self.is_weighted(op) else op.reads
        return frozenset().union(*(self.met.get(name, frozenset()) for name in reads))


_NORMS = ("aten.native_layer_norm.default", "aten._fused_rms_norm.default")


def depends_on_input(graph: Graph) -> set[str]:
    """The inputs of the model, and all that the forward pass makes of them."""
    found = {item.value.name for item in graph.inputs if item.role is Role.INPUT}
    for op in graph.ops:
        if op.phase is Phase.FORWARD and any(name in found for name in op.reads):
            found.update(value.name for value in op.results)
    return found


def _chunks(op: Op, walk: _Walk) -> int:
    """How many equal parts the last dim of a product's result is cut in."""
    width, waiting = op.results[0].type.shape[-1], [op.name]
    while waiting:
        for user in walk.users.get(waiting.pop(), []):
            shapes = [value.type.shape for value in user.results]
            if user.kind.startswith("aten.split") and len({shape[-1] for shape in shapes}) == 1:
                return width // shapes[0][-1]
            if user.kind == "aten.unbind.int" or user.kind == "aten.select.int":
                read = walk.producers[user.reads[0]].results[0].type.shape
                dim = user.args[1] if len(user.args) > 1 else 0
                assert isinstance(dim, int)
                return read[dim]
            if is_relabelling(user):
                waiting.append(user.name)
    return 1


def weights_of(graph: Graph) -> set[str]:
    """Parameters, and what relabels, copies or casts them."""
    found = {item.value.name for item in graph.inputs if item.role is Role.PARAM}
    for op in graph.ops:
        if is_copy(op) and op.phase is Phase.FORWARD and op.reads[0] in found:
            found.add(op.name)
    return found


# ---- other places ----------------------------------------------------------------------------------------------------


def norms(graph: Graph) -> tuple[Op, ...]:
    """The first operator of every normalisation over the last dim."""
    found: list[Op] = []
    written_out = {op.module for op in graph.ops if op.phase is Phase.FORWARD and op.kind == "aten.rsqrt.default"}
    seen: set[tuple[str, int]] = set()
    for op in graph.ops:
        if op.phase is not Phase.FORWARD:
            continue
        if op.kind in _NORMS:
            found.append(op)
        elif op.module in written_out and (op.module, op.call) not in seen and len(op.results[0].type.shape) > 1:
            seen.add((op.module, op.call))
            found.append(op)
    return tuple(found)


def attention_products(graph: Graph) -> tuple[Op, ...]:
    """The batched products of activations: scores, and sums of values."""
    weights = weights_of(graph)
    picked = {op.name for op in graph.ops if op.kind == "aten.index.Tensor" and op.reads[0] in weights}  # of experts
    chosen = graph.select(kind="aten.bmm.default", phase=Phase.FORWARD)
    return tuple(op for op in chosen if not any(name in weights or name in picked for name in op.reads))


def readers_behind_views(graph: Graph, ops: Iterable[Op]) -> Iterator[Op]:
    """The forward operators that read what these make, through views."""
    users: dict[str, list[Op]] = {}
    for user in graph.ops:
        if user.phase is Phase.FORWARD:
            for name in dict.fromkeys(user.reads):
                users.setdefault(name, []).append(user)
    waiting = [op.name for op in ops]
    while waiting:
        for user in users.get(waiting.pop(), []):
            if is_relabelling(user):
                waiting.append(user.name)
            else:
                yield user
