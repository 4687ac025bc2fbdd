"""What a compiler makes of a group: its kernels, foretold from the graph alone.

A group that is compiled by itself is seldom one kernel. Inductor leaves products to libraries, puts what is pointwise
into its readers, and fuses what runs over the same elements. A part is one launch, or a few, over one space of
elements:

    POINT     one element of the space for one of the result
    ROW       the innermost dim is reduced: a softmax or a norm with what is pointwise around it is one such part
    COLUMN    outer dims are reduced and the innermost is not
    SCATTER   elements go where indices say: a fill, and the writes. A number scattered into a tensor of one value is a comparison with the index, and a POINT
    LIBRARY   a product

`parts_of` walks the operators in order. Each begins as a part of its own and takes in the parts that make what it
reads, where the two fit (`_fits`) and no third part stands between them. At the end, parts over the same space that
read the same value and do not wait for each other are joined too. Traffic is what crosses the borders of a part; what
views of a value show of it counts once.

A reduction to few results would leave most of the device idle, so Inductor splits it: two launches, with partial
results between, and what is pointwise over the whole space behind it is a part of its own. Its rule: no split with as
many results as programs that fill the device (twice its processors for rows, 64 times for columns), nor of a short
reduction (8192 elements for rows, 128 for columns). A reduction of fewer than eight elements is written out, and
pointwise.

**How values lie.** Inductor has a convolution read its values with the channels last. What a pointwise part writes for
it is then written in another order than it is read, an element at a time (`Part.reordered`). A reduction over rows of
up to 1024 elements is one pass over rows that a program keeps (`Part.kept`), longer ones a loop that reads its rows
again. With 8448 rows or more (64 times the processors) Inductor looks closer, and keeps rows of more than 64 elements
only where what the reductions read is one run of memory: not a mask that is broadcast in the middle, not a transposed
value; nor where the reductions' own results have gaps, which it leaves after long strides that are out of step with
lines of the cache. Of 682 groups of one reduction over rows, the kernel that it wrote is the foretold one in all but
four.

What two operators compute alike is computed once (`computed_once.py`).

The backward pass of layer norm also reduces over columns for its weights, with what is pointwise in front of it once
more, and a batch norm whose reduction is split goes over its elements once more: `_beside` adds those parts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from enum import IntEnum
from math import prod

from sennit.fuse.computed_once import computed_once
from sennit.fuse.kernel_cost import added_to
from sennit.fuse.launch_shape import LaunchShape, is_uneven, tile_waste
from sennit.fuse.operator_class import (
    Class,
    classify,
    is_elementwise,
    makes_of_nothing,
    moves_nothing,
    picks,
    stem,
)
from sennit.fuse.part_effort import Effort, effort_of, looked_at, summed_norm
from sennit.ir.dtype import TensorType
from sennit.ir.graph import Op
from sennit.ir.strategy_check import Kernel

__all__ = ["Part", "Sort", "parts_of"]

_PROCESSORS = 132
_SHORT, _LONG = 64, 1024  # elements of a row that a program always keeps, and keeps at most
_SPLIT = {"row": (2 * _PROCESSORS, 8192), "column": (64 * _PROCESSORS, 128)}  # results below, elements above


_WARP = 32
_UNROLLED = 8  # elements that are reduced one by one, as something pointwise


class Sort(IntEnum):
    POINT = 0
    ROW = 1
    COLUMN = 2
    SCATTER = 3
    LIBRARY = 4


@dataclass(frozen=True, slots=True)
class Part:
    """`size` elements in its space, `outer` results of a reduction; `ops` by name, and `stored` those of them whose
    results it writes to memory; `reordered` elements are written with their channels last; `contiguous` says that each
    value it reads is one run of memory, `kept` that programs keep their rows, and `effort` what there is to compute and
    to wait for, and `shape` what its programs hold.
    """

    sort: Sort
    size: int
    outer: int
    launches: int
    read: int
    written: int
    ops: frozenset[str]
    stored: frozenset[str]
    reordered: int = 0
    contiguous: bool = True
    kept: bool = True
    effort: Effort = field(default_factory=Effort)
    shape: LaunchShape = field(default_factory=LaunchShape)


_ROWS = ("softmax", "log_softmax", "softmax_backward_data", "log_softmax_backward_data", "native_layer_norm")
_SCATTERS = ("embedding_dense_backward", "index_put", "scatter", "scatter_add")


@dataclass(slots=True, eq=False)
class _Open:
    """A part that still grows."""

    sort: Sort
    size: int
    outer: int
    ops: list[Op] = field(default_factory=list)

    @property
    def is_split(self) -> bool:
        return _is_split(self.sort, self.size, self.outer)


def _is_split(sort: Sort, size: int, outer: int) -> bool:
    if sort not in (Sort.ROW, Sort.COLUMN):
        return False
    results, elements = _SPLIT["row" if sort is Sort.ROW else "column"]
    return outer < results and size > elements * outer


def _with_twins(part: Part, same: Mapping[str, str]) -> Part:
    """The part with the operators that compute once more what one of it does."""
    twins = {twin: one for twin, one in same.items() if one in part.ops}
    stored = part.stored.union(twin for twin, one in twins.items() if one in part.stored)
    return replace(part, ops=part.ops.union(twins), stored=stored) if twins else part


def parts_of(kernel: Kernel, written: frozenset[str], types: Mapping[str, TensorType]) -> tuple[Part, ...]:
    """The launches of a compiled group, in the order of their last operators."""
    body, same = computed_once(kernel.body)
    wanted = frozenset(same.get(name, name) for name in written)
    group = _Group(body, wanted, types)
    whole = Kernel(body)
    for op in body:
        if (total := added_to(op, whole, wanted, types)) is not None:
            group.called_with[total.name] = op.name
        if not moves_nothing(op):
            group.add(op)
    group.join_siblings()
    group.join_readers()
    found = [_with_twins(group.closed(part), same) for part in group.parts]
    fused = {name for op in body if is_elementwise(op, types) for name in op.reads}
    return (*found, *(part for op in body for part in _beside(op, group, fused)))


class _Group:
    def __init__(self, body: Sequence[Op], written: frozenset[str], types: Mapping[str, TensorType]) -> None:
        self.types = types
        self.base: dict[str, str] = {}  # of what views show
        self.readers: dict[str, list[str]] = {}  # of a value, directly or through views, the operators
        self.turned: dict[
            str, tuple[int, ...] | None
        ] = {}  # views whose elements lie in another order: which, where it is known
        self.narrow: dict[str, tuple[int, ...]] = {}  # of views that repeat elements, the shape before
        self.copies: set[str] = set()  # of products that lie in order already: nothing is copied
        products: set[str] = set()
        self.convolved: dict[str, int] = {}  # what convolutions read, with the copies that lay out it and weights anew
        for op in body:
            if classify(op, types) is Class.PRODUCT:
                products.update(value.name for value in op.results)
            if stem(op.kind) == "clone" and self._is_in_order(op.reads[0], products):
                self.copies.add(op.name)
            if (moves_nothing(op) and op.reads) or op.name in self.copies:
                self._look_through(op)
                continue
            if stem(op.kind) == "convolution":
                weights = self.types[op.reads[1]].shape
                self.convolved[op.reads[0]] = 1 + (max(weights[2:], default=1) > 1)
            for name in () if makes_of_nothing(op) else op.reads:
                self.readers.setdefault(self.base.get(name, name), []).append(op.name)
        self.wanted = {self.base.get(name, name) for name in written}
        self.called_with: dict[str, str] = {}  # sums that a library makes with a product: which
        self.parts: list[_Open] = []
        self.home: dict[str, _Open] = {}  # of a value

    def _is_in_order(self, name: str, products: Set[str]) -> bool:
        base = self.base.get(name, name)
        whole = self.types[name].elements == self.types[base].elements
        return base in products and whole and name not in self.turned and name not in self.narrow

    def _look_through(self, op: Op) -> None:
        source, names = op.reads[0], [value.name for value in op.results]
        shown = self.base.get(source, source)
        self.base.update((name, shown) for name in names)
        if stem(op.kind) in ("permute", "transpose", "t"):
            order = self._order(op)
            if order is None or order != tuple(range(len(order))):
                self.turned.update((name, order) for name in names)
        elif source in self.turned:
            self.turned.update((name, None) for name in names)
        if stem(op.kind) == "expand" or source in self.narrow:
            shape = self.narrow.get(source, self.types[source].shape)
            self.narrow.update((name, shape) for name in names)

    def _order(self, op: Op) -> tuple[int, ...] | None:
        """The dims of a permuted view as dims of what it shows; None where that is not known."""
        source, dims = op.reads[0], op.args[1] if len(op.args) > 1 else None
        before = self.turned.get(source, tuple(range(len(self.types[source].shape))))
        if before is None or stem(op.kind) != "permute" or not isinstance(dims, tuple):
            return None
        return tuple(before[int(dim)] for dim in dims)  # type: ignore[arg-type]

    # ---- growing -----------------------------------------------------------------------------------------------------

    def add(self, op: Op) -> None:
        if op.name in self.copies:
            self.home[self.base[op.name]].ops.append(op)
            return
        part = _alone(op, self.types)
        part.ops.append(op)
        if op.name in self.called_with:
            product = self.home[self.called_with[op.name]]
            self.parts.remove(product)
            part = _Open(Sort.LIBRARY, product.size, product.outer, [*product.ops, op])
            self.home.update((value.name, part) for it in product.ops for value in it.results)
        self.parts.append(part)
        self.home.update((value.name, part) for value in op.results)
        for other in sorted(self._before(part), key=self.parts.index, reverse=True):
            if self._fits(other, part) and not self._is_between(other, part):
                self._merge(other, part)

    def join_siblings(self) -> None:
        for part in list(self.parts):
            for other in self.parts[: self.parts.index(part)] if part in self.parts else ():
                alike = (other.sort, other.size, other.outer) == (part.sort, part.size, part.outer)
                free = part.sort in (Sort.POINT, Sort.ROW, Sort.COLUMN)
                if alike and free and self._elements(other) & self._elements(part):
                    if self._is_before(other, part) or self._is_before(part, other):
                        continue
                    self._merge(other, part)
                    break

    def join_readers(self) -> None:
        """What is pointwise, and only for one other part now that all are there."""
        for part in list(self.parts):
            if part.sort is not Sort.POINT:
                continue
            for other in self.parts:
                free = other is not part and other.sort not in (Sort.LIBRARY, Sort.SCATTER)
                if free and part in self._before(other) and self._is_only_for(part, other):
                    if not self._is_between(part, other):
                        self._merge(part, other)
                    break

    def _fits(self, first: _Open, second: _Open) -> bool:
        """Whether a part that makes values and one that reads them are one."""
        one, two = first.sort, second.sort
        if one in (Sort.SCATTER, Sort.LIBRARY) or two is Sort.LIBRARY:
            return False
        if one is Sort.POINT:
            if self._is_only_for(first, second):
                return True
            return two is not Sort.SCATTER and not second.is_split and first.size in (second.size, second.outer)
        if self._is_looked_up(first, second):
            return False
        if two is Sort.POINT:
            return second.size == first.outer or (second.size == first.size and not first.is_split)
        return one is two and (first.size, first.outer) == (second.size, second.outer)

    def _is_looked_up(self, first: _Open, second: _Open) -> bool:
        """Whether something in the second takes elements of what the first makes from wherever indices say: all of it
        has to be there before.
        """
        tables = (op.reads[0] for op in second.ops if op.reads and stem(op.kind) in ("gather", "index", "embedding"))
        return any(self.home.get(self.base.get(name, name)) is first for name in tables)

    def _merge(self, first: _Open, second: _Open) -> None:
        if first.sort is not Sort.POINT and second.sort is Sort.POINT:
            second.sort, second.size, second.outer = first.sort, first.size, first.outer
        second.ops = [*first.ops, *second.ops]
        self.parts.remove(first)
        self.home.update((value.name, second) for op in first.ops for value in op.results)

    def _is_only_for(self, first: _Open, second: _Open) -> bool:
        inside = {op.name for part in (first, second) for op in part.ops}
        made = [value.name for op in first.ops for value in op.results]
        return not any(
            name in self.wanted or any(reader not in inside for reader in self.readers.get(name, ())) for name in made
        )

    # ---- order -------------------------------------------------------------------------------------------------------

    def _before(self, part: _Open) -> list[_Open]:
        """The parts that make what this one reads."""
        found = [self.home[name] for name in self._reads(part) if name in self.home]
        return list(dict.fromkeys(other for other in found if other is not part))

    def _is_before(self, first: _Open, second: _Open) -> bool:
        waiting, seen = self._before(second), set[int]()
        while waiting:
            part = waiting.pop()
            if part is first:
                return True
            if id(part) not in seen:
                seen.add(id(part))
                waiting += self._before(part)
        return False

    def _is_between(self, first: _Open, second: _Open) -> bool:
        return any(other is not first and self._is_before(first, other) for other in self._before(second))

    # ---- traffic -----------------------------------------------------------------------------------------------------

    def _reads(self, part: _Open) -> dict[str, int]:
        """Of each value from outside the part, how many bytes are looked at, through all of its views together."""
        inside = {name for name, home in self.home.items() if home is part}
        return looked_at(part.ops, inside, self.base, self.types)

    def _is_contiguous(self, part: _Open) -> bool:
        return all(self._reads_runs(op, part) for op in part.ops)

    def _reads_runs(self, op: Op, part: _Open) -> bool:
        """Whether what an operator reads from outside its part is one run of memory, each."""
        made, first = op.results[0].type, self.types[op.reads[0]] if op.reads else op.results[0].type
        space = made.shape if made.elements >= first.elements else first.shape
        for name in op.reads:
            if self.home.get(self.base.get(name, name)) is part or picks(op):
                continue
            if name in self.turned or not _is_one_run(self.narrow.get(name, self.types[name].shape), space):
                return False
        return True

    def _is_kept(self, part: _Open, stored: Set[str]) -> bool:
        """Whether a program keeps whole rows, or loops over them.

        With many rows Inductor looks at what the reductions read and write, and does the first only where each is one
        run of memory.
        """
        inner = part.size // part.outer
        if inner <= _SHORT or part.outer < _SPLIT["column"][0]:
            return inner <= _LONG
        needed: set[str] = set()
        for op in reversed(part.ops):
            reduces = classify(op, self.types) is Class.REDUCTION
            is_first = reduces and not stem(op.kind).endswith("_backward_data")
            if is_first and _is_padded(self.types[op.reads[0]].shape[:-1]):
                return False
            if reduces or (op.name in needed and op.name not in stored):
                needed.update(self.base.get(name, name) for name in op.reads)
                if not self._reads_runs(op, part):
                    return False
        return inner <= _LONG

    def _elements(self, part: _Open) -> set[str]:
        """What it reads from outside: a value, or where it looks at some of its elements only, that view.

        Two parts that read other elements have nothing in common.
        """
        found = set()
        for name in (name for op in part.ops for name in op.reads):
            base = self.base.get(name, name)
            if self.home.get(base) is not part:
                found.add(base if self.types[name].elements == self.types[base].elements else name)
        return found

    def inlined(self, op: Op) -> list[Op]:
        """What is pointwise in front of an operator in its part, and not handed out: another kernel that reads what the
        operator does computes it again.
        """
        found: list[Op] = []
        needed = {self.base.get(name, name) for name in op.reads}
        for other in reversed(self.home[op.name].ops):
            made = {value.name for value in other.results}
            is_inside = other is not op and made & needed and not made & self.wanted
            if is_inside and is_elementwise(other, self.types):
                found.insert(0, other)
                needed.update(self.base.get(name, name) for name in other.reads)
        return found

    def closed(self, part: _Open) -> Part:
        inside = {op.name for op in part.ops}
        stored = [
            (op.name, value.type.bytes)
            for op in part.ops
            for value in op.results
            if value.name in self.wanted or any(r not in inside for r in self.readers.get(value.name, ()))
        ]
        made = [value for op in part.ops for value in op.results] if part.sort is Sort.POINT else []
        launches = 2 if part.is_split or part.sort is Sort.SCATTER else 1
        if part.is_split:
            launches += sum(_sums(op, part.outer) - 1 for op in part.ops if stem(op.kind).endswith("norm_backward"))
        launches += sum(self.convolved.get(value.name, 0) for value in made)
        kept = part.sort is not Sort.ROW or self._is_kept(part, {name for name, _ in stored})
        read = self._reads(part)
        return Part(
            part.sort,
            part.size,
            part.outer,
            launches,
            sum(read.values()),
            sum(size for _, size in stored),
            frozenset(inside),
            frozenset(name for name, _ in stored),
            sum(_scattered(value.type) for value in made if value.name in self.convolved),
            self._is_contiguous(part),
            kept,
            effort_of(part.ops, part.size, kept, self.base, self.turned, read, self.types),
            self._shape(part, read, len(stored)),
        )

    def _shape(self, part: _Open, outside: Mapping[str, int], stores: int) -> LaunchShape:
        names = [
            name
            for name in dict.fromkeys(name for op in part.ops for name in op.reads)
            if self.base.get(name, name) in outside
        ]
        wide = [name for name in names if self.types[name].elements >= part.size and name not in self.narrow]
        across = [
            (self.types[name].shape[-1], self.types[name].shape[order.index(len(order) - 1)])
            for name in names
            if (order := self.turned.get(name)) is not None and order[-1] != len(order) - 1
        ]
        return LaunchShape(
            len(outside),
            len(wide),
            sum(self.types[name].dtype.itemsize for name in wide),
            stores,
            sum(classify(op, self.types) is Class.REDUCTION for op in part.ops),
            max((tile_waste(*sides) for sides in across), default=1.0),
            len(across),
            any(self.types[name].elements < part.size and is_uneven(self.types[name].shape) for name in names),
        )


def _scattered(kind: TensorType) -> int:
    """Elements of a value with its channels last that are alone in a sector when they are written: of planes smaller
    than a warp, those of several channels go there together.
    """
    return kind.elements * min(_WARP, prod(kind.shape[2:])) // _WARP


def _is_padded(shape: tuple[int, ...]) -> bool:
    """Whether Inductor leaves gaps in a value of its own, so that no long stride is out of step with lines of the
    cache.
    """
    strides = [prod(shape[place:]) for place in range(1, len(shape))]
    return any(stride > 1024 and stride % 32 for stride in strides)


def _is_one_run(shape: tuple[int, ...], space: tuple[int, ...]) -> bool:
    """Whether a value that is broadcast to a space is read from its beginning to its end, once or again and again: no
    dim is broadcast between two that are not.
    """
    shape = (1,) * (len(space) - len(shape)) + shape
    own = [size > 1 for size, whole in zip(shape, space, strict=False) if whole > 1]
    places = [place for place, mine in enumerate(own) if mine]
    return not places or places[-1] - places[0] + 1 == len(places)


def _alone(op: Op, types: Mapping[str, TensorType]) -> _Open:
    made = max((value.type.elements for value in op.results), default=1)
    name, kind = stem(op.kind).strip("_"), classify(op, types)
    if kind is Class.PRODUCT or kind is Class.OTHER:
        return _Open(Sort.LIBRARY, made, made)
    if kind is not Class.REDUCTION or not op.reads or op.kind == "aten.scatter.value":
        return _Open(Sort.POINT, made, made)
    first = types[op.reads[0]]
    if name in _SCATTERS:
        return _Open(Sort.SCATTER, made, made)
    if name == "native_layer_norm_backward" or name.startswith(_ROWS) or name in ("cumsum", "fused_rms_norm"):
        inner = first.shape[-1] if first.shape else 1
        return _Open(Sort.ROW, first.elements, max(1, first.elements // max(1, inner)))
    if name.startswith("native_batch_norm"):
        return _Open(Sort.ROW, first.elements, first.shape[1] if len(first.shape) > 1 else 1)
    outer = max(1, prod(op.results[0].type.shape))
    if first.elements < _UNROLLED * outer:
        return _Open(Sort.POINT, made, made)
    given = op.args[1] if len(op.args) > 1 else ()
    dims = given if isinstance(given, tuple) else (given,)
    is_row = not dims or any(dim in (-1, len(first.shape) - 1) for dim in dims) or outer == 1
    return _Open(Sort.ROW if is_row else Sort.COLUMN, first.elements, outer)


def _sums(op: Op, outer: int) -> int:
    """The results of a split reduction are brought together one by one: of weights and bias, two launches."""
    return max(1, sum(value.type.elements == outer for value in op.results))


def _beside(op: Op, group: _Group, fused: Set[str]) -> tuple[Part, ...]:
    """What an operator does over its elements in a part of its own; none if something pointwise reads it and does that
    too.
    """
    name, types = stem(op.kind).strip("_"), group.types
    if not op.reads or not (name == "native_layer_norm_backward" or name.startswith("native_batch_norm")):
        return ()
    full = types[op.reads[0]]
    read = sum(types[value].bytes for value in set(op.reads) if types[value].elements == full.elements)
    mine = frozenset((op.name,))
    if name == "native_layer_norm_backward":
        outer = full.shape[-1] if full.shape else 1
        written = sum(value.type.bytes for value in op.results if value.type.elements == outer)
        launches = 1 + _sums(op, outer) if _is_split(Sort.COLUMN, full.elements, outer) else 1
        before = group.inlined(op)
        outside = looked_at([*before, op], {it.name for it in before}, group.base, types)
        read = sum(size for value, size in outside.items() if 2 * types[value].elements >= full.elements)
        effort, shape = summed_norm(full.elements, len(before)), LaunchShape(loads=2, wide=2, stores=2)
        return (
            Part(
                *(Sort.COLUMN, full.elements, outer, launches, read, written, mine, frozenset()),
                effort=effort,
                shape=shape,
            ),
        )
    outer = full.shape[1] if len(full.shape) > 1 else 1
    if not _is_split(Sort.ROW, full.elements, outer) or op.results[0].name in fused:
        return ()
    return (Part(Sort.POINT, full.elements, full.elements, 1, read, 0, mine, frozenset()),)
