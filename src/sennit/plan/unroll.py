"""Unroll an axis: the operators that it splits become operators on pieces, which one device runs one after another.

| value is made | read as | by |
|---|---|---|
| whole | a split | slices (a view in memory) |
| whole | a part of a sum | itself for piece 0, zeros for the others (a bias is added once) |
| in pieces | whole | a concatenation |
| as terms of a sum | whole | the sum, term by term |

**Order.** Operators that the axis splits are held back, in a *segment*, until some operator needs one of their values
whole; those that it does not split go ahead, since they need none of them. Then the segment is emitted piece by piece:
all of piece 0, all of piece 1, ... A term of a sum is added as soon as it is there; a concatenation waits for the last
piece. So while piece k runs, of the others only results of the segment are live.

**Names.** Piece k of a value %x is %x.pk; whole values keep their names. Sequence numbers are multiplied, so that the
backward operators of a piece still name its forward ones.

**Digits.** A split takes index i of a dim to piece (i // stride) % pieces. A dim of blocks * pieces * stride elements
is sliced, and put together, as three dims; with one block that is a plain slice and a plain concatenation. Random
numbers of a piece are those of its elements: a flat index is linear in a piece's indices too (`ir/random_numpy.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from sennit.capture.rules import Strategy, localize
from sennit.errors import PlanError
from sennit.ir.dtype import TensorType
from sennit.ir.graph import Arg, Graph, Op, Phase, Ref, Value
from sennit.ir.layout import Entry, Pending, Reduction, Split
from sennit.ir.random_numpy import row_major

__all__ = ["Sliced", "Unrolled", "unroll"]

Strategies = Mapping[str, Strategy]  # operator -> what the axis does to it; absent where it does nothing


@dataclass(frozen=True, slots=True)
class Sliced:
    """A slice of a whole value: `op` cuts it, out of `blocks` blocks where there are several."""

    value: str
    op: str
    entry: Split
    blocks: int


@dataclass(frozen=True, slots=True)
class Unrolled:
    """The graph; the pieces of every operator that was cut, by name; the forward operators of pieces, which can be
    computed again; the slices.
    """

    graph: Graph
    pieces: Mapping[str, tuple[str, ...]]
    forward: tuple[str, ...]
    slices: tuple[Sliced, ...]


def unroll(graph: Graph, strategies: Strategies, pieces: int) -> Unrolled:
    """The graph with the operators of `strategies` in pieces."""
    return _Unroller(graph, strategies, pieces).unrolled()


class _Unroller:
    """Walks the operators in order; those that the axis splits wait in `open` until something needs their values whole."""

    def __init__(self, graph: Graph, strategies: Strategies, pieces: int) -> None:
        self.source, self.pieces = graph, pieces
        self.types = graph.types()
        self.strategy = {op.name: self._checked(op, strategies.get(op.name, _nothing(op))) for op in graph.ops}
        self.made: dict[str, Entry | None] = {
            value.name: entry
            for op in graph.ops
            for value, entry in zip(op.results, self.strategy[op.name].results, strict=True)
        }
        self.needed_whole = self._needed_whole()
        self.open: list[Op] = []
        self.opened: set[str] = set()  # values that the open operators make
        self.ops: list[Op] = []
        self.names: set[str] = set()
        self.sliced: dict[tuple[str, Split, int], str] = {}  # of the open segment
        self.slices: list[Sliced] = []
        self.forward: list[str] = []

    def unrolled(self) -> Unrolled:
        for op in self.source.ops:
            strategy = self.strategy[op.name]
            if self._breaks(op, strategy):
                self._close()
            if strategy.is_replicated:
                self.ops.append(self._renumbered(op, 0))
            else:
                self.open.append(op)
                self.opened.update(value.name for value in op.results)
        self._close()
        cut = [op.name for op in self.source.ops if not self.strategy[op.name].is_replicated]
        pieces = {name: tuple(_of(name, piece) for piece in range(self.pieces)) for name in cut}
        graph = replace(self.source, ops=tuple(self.ops), repeats=())
        return Unrolled(graph, pieces, tuple(self.forward), tuple(self.slices))

    # ---- what the axis does ------------------------------------------------------------------------------------------

    def _checked(self, op: Op, strategy: Strategy) -> Strategy:
        """Positions are made whole, and a piece of them is a slice; other local forms but random numbers cannot be cut."""
        match strategy.form:
            case None | "uniform":
                return strategy
            case "arange":
                return _nothing(op)
            case _:
                raise PlanError(
                    f"{op.kind} cannot be cut: what a piece computes depends on where it lies",
                    where=op.describe(),
                    fix="cut the operators on other letters",
                )

    def _needed_whole(self) -> set[str]:
        """Values that are made in pieces, and that something reads whole: outputs, and readers with another entry."""
        found = {output.name for output in self.source.outputs if self.made.get(output.name) is not None}
        for op in self.source.ops:
            for name, need in zip(op.reads, self.strategy[op.name].reads, strict=True):
                if self.made.get(name) not in (None, need):
                    found.add(name)
        return found

    def _breaks(self, op: Op, strategy: Strategy) -> bool:
        """Whether the operator needs a value of the open segment otherwise than piece by piece."""
        reads = zip(op.reads, strategy.reads, strict=True)
        return any(name in self.opened and self.made[name] != need for name, need in reads)

    # ---- unrolling ---------------------------------------------------------------------------------------------------

    def _close(self) -> None:
        """Emit the open operators, piece by piece, and what others need of them whole."""
        for piece in range(self.pieces):
            for op in self.open:
                self._piece(op, piece)
                for value, entry in zip(op.results, self.strategy[op.name].results, strict=True):
                    if value.name in self.needed_whole and isinstance(entry, Pending):
                        self._add(op, value, entry, piece)
        for op in self.open:
            for value, entry in zip(op.results, self.strategy[op.name].results, strict=True):
                if value.name in self.needed_whole and isinstance(entry, Split):
                    self._join(op, value, entry)
        self.open, self.opened, self.sliced = [], set(), {}

    def _piece(self, op: Op, piece: int) -> None:
        strategy = self.strategy[op.name]
        if strategy.form == "uniform":
            self._draw(op, strategy, piece)
            return
        reads = zip(op.reads, strategy.reads, strict=True)
        names = iter([self._read(name, need, piece, op) for name, need in reads])
        results = tuple(
            Value(_of(value.name, piece), self._local(value.type, entry))
            for value, entry in zip(op.results, strategy.results, strict=True)
        )
        args, kwargs = localize(op, [value.type.shape for value in results])
        args = tuple(_renamed(arg, names) for arg in args)
        kwargs = tuple((key, _renamed(arg, names)) for key, arg in kwargs)
        self._append(replace(self._renumbered(op, piece), args=args, kwargs=kwargs, results=results))

    def _draw(self, op: Op, strategy: Strategy, piece: int) -> None:
        """The random numbers of a piece: those that the whole has there."""
        entry, whole = strategy.results[0], op.results[0].type
        assert isinstance(entry, Split)
        seed, number, _, dtype, *larger = op.args
        if larger:
            raise PlanError(f"{op.kind} is a piece already", where=op.describe(), fix="cut it once, in more pieces")
        steps = list(row_major(whole.shape))
        ((size, step),) = steps[entry.dim]
        period = entry.stride * self.pieces
        steps[entry.dim] = ((size // period, step * period), (entry.stride, step))
        made = self._local(whole, entry)
        args = (seed, number, made.shape, dtype, tuple(steps), piece * entry.stride * step)
        self._emit(op.kind, args, _of(op.name, piece), made, op, piece)

    def _read(self, name: str, need: Entry | None, piece: int, reader: Op) -> str:
        """The name of what piece `piece` of an operator reads; slices and zeros are made here."""
        made = self.made.get(name)
        match need:
            case Split() | Pending() if made == need:
                return _of(name, piece)
            case None:
                return name
            case Split():
                return self._slice(name, need, piece, reader)
            case Pending():
                return name if piece == 0 else self._zero(name, piece, reader)

    def _local(self, whole: TensorType, entry: Entry | None) -> TensorType:
        if not isinstance(entry, Split):
            return whole
        shape = list(whole.shape)
        shape[entry.dim] //= self.pieces
        return TensorType(tuple(shape), whole.dtype)

    def _slice(self, name: str, entry: Split, piece: int, reader: Op) -> str:
        """Piece `piece` of a whole value. In one block that is a slice; in several, a slice of each."""
        if (name, entry, piece) in self.sliced:
            return self.sliced[name, entry, piece]
        whole, made = self.types[name], self._local(self.types[name], entry)
        result = self._fresh(f"{_of(name, piece)}.of{entry.dim}")
        blocks = whole.shape[entry.dim] // (entry.stride * self.pieces)
        if blocks == 1:
            bounds = (entry.dim, piece * entry.stride, (piece + 1) * entry.stride)
            self._emit("aten.slice.Tensor", (Ref(name), *bounds), result, made, reader, piece)
            self.slices.append(Sliced(name, result, entry, 1))
        else:
            apart = TensorType(_with_dim(whole.shape, entry.dim, (blocks, self.pieces, entry.stride)), whole.dtype)
            one = TensorType(_with_dim(whole.shape, entry.dim, (blocks, 1, entry.stride)), whole.dtype)
            blocked, cut = f"{result}.blocks", f"{result}.cut"
            self._emit("aten.view.default", (Ref(name), apart.shape), blocked, apart, reader, piece)
            self._emit("aten.slice.Tensor", (Ref(blocked), entry.dim + 1, piece, piece + 1), cut, one, reader, piece)
            # parts of several blocks lie apart in memory: this copies, and says so
            self._emit("aten.reshape.default", (Ref(cut), made.shape), result, made, reader, piece)
            self.slices.append(Sliced(name, cut, entry, blocks))
        self.sliced[name, entry, piece] = result
        return result

    def _zero(self, name: str, piece: int, reader: Op) -> str:
        result, whole = self._fresh(f"{_of(name, piece)}.zero"), self.types[name]
        like = replace(self._renumbered(reader, piece), kind="aten.full.default", args=(whole.shape, 0))
        self._append(replace(like, kwargs=(("dtype", whole.dtype),), results=(Value(result, whole),)))
        return result

    def _add(self, op: Op, value: Value, entry: Pending, piece: int) -> None:
        """Add a term as soon as it is there, so that no two terms wait. The last sum is the value."""
        if entry.op is not Reduction.SUM:
            raise PlanError(
                f"{op.kind} in pieces leaves a {entry.op.value} to be taken",
                where=op.describe(),
                fix="cut the operators on other letters",
            )
        if piece == 0:
            return
        so_far = _of(value.name, 0) if piece == 1 else f"{value.name}.to{piece - 1}"
        result = value.name if piece == self.pieces - 1 else f"{value.name}.to{piece}"
        args = (Ref(so_far), Ref(_of(value.name, piece)))
        self._emit("aten.add.Tensor", args, result, value.type, op, piece, again=False)

    def _join(self, op: Op, value: Value, entry: Split) -> None:
        """Put the pieces of a value together."""
        parts = [_of(value.name, piece) for piece in range(self.pieces)]
        shape, dtype = value.type.shape, value.type.dtype
        blocks = shape[entry.dim] // (entry.stride * self.pieces)
        if blocks == 1:
            joined: tuple[Arg, ...] = (tuple(map(Ref, parts)), entry.dim)
            self._emit("aten.cat.default", joined, value.name, value.type, op, 0, again=False)
            return
        one = TensorType(_with_dim(shape, entry.dim, (blocks, 1, entry.stride)), dtype)
        apart = TensorType(_with_dim(shape, entry.dim, (blocks, self.pieces, entry.stride)), dtype)
        for piece, part in enumerate(parts):
            args = (Ref(part), one.shape)
            self._emit("aten.view.default", args, f"{part}.blocks", one, op, piece, again=False)
        joined = (tuple(Ref(f"{part}.blocks") for part in parts), entry.dim + 1)
        self._emit("aten.cat.default", joined, f"{value.name}.blocks", apart, op, 0, again=False)
        back = (Ref(f"{value.name}.blocks"), shape)
        self._emit("aten.view.default", back, value.name, value.type, op, 0, again=False)

    # ---- operators ---------------------------------------------------------------------------------------------------

    def _emit(
        self,
        kind: str,
        args: tuple[Arg, ...],
        name: str,
        type_: TensorType,
        like: Op,
        piece: int,
        *,
        again: bool = True,
    ) -> None:
        """A new operator, at the place of `like`."""
        op = replace(self._renumbered(like, piece), kind=kind, args=args, kwargs=(), results=(Value(name, type_),))
        self._append(op, again=again)

    def _append(self, op: Op, *, again: bool = True) -> None:
        self.ops.append(op)
        # a plain slice is a view of something that is kept: nothing is gained by cutting it again
        if again and op.phase is Phase.FORWARD and op.kind != "aten.slice.Tensor":
            self.forward.append(op.name)

    def _renumbered(self, op: Op, piece: int) -> Op:
        """Pieces get sequence numbers of their own, so that the backward operators of a piece find its forward ones."""
        return op if op.seq is None else replace(op, seq=op.seq * self.pieces + piece)

    def _fresh(self, name: str) -> str:
        """Slices are made again in each segment that reads them: kept ones would be kept from the forward to the
        backward pass.
        """
        candidate, count = name, 1
        while candidate in self.names:
            count += 1
            candidate = f"{name}.{count}"
        self.names.add(candidate)
        return candidate


def _of(name: str, piece: int) -> str:
    return f"{name}.p{piece}"


def _nothing(op: Op) -> Strategy:
    return Strategy((None,) * len(op.reads), (None,) * len(op.results))


def _with_dim(shape: tuple[int, ...], dim: int, sizes: tuple[int, ...]) -> tuple[int, ...]:
    return (*shape[:dim], *sizes, *shape[dim + 1 :])


def _renamed(arg: Arg, names: Iterator[str]) -> Arg:
    """The same argument with its references replaced, in order."""
    if isinstance(arg, Ref):
        return Ref(next(names))
    if isinstance(arg, tuple):
        return tuple(_renamed(part, names) for part in arg)
    return arg
