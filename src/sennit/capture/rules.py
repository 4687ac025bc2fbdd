"""How each operator may be split over one mesh axis.

A *rule* annotates an operator like an einsum: every dim of every tensor it reads or writes has a letter or none.

    addmm:  n, m k, k n -> m n        k is summed over, n of the bias is added after the sum

Over one axis of size p, an operator may run in one of these ways, its *strategies*:

- replicated: the axis does nothing to any of its tensors;
- split on a letter: every tensor that has the letter is split there, with one stride, the others are replicated; a result
  without the letter is pending, by the letter's reduction; what is added after a split sum must come as a pending part too
  (or a bias would be counted p times);
- pending through: where the operator is linear in a set of its reads, and all of them are pending sums, so is the result.
  `Letters.carries` says where that is worth doing in space: through structural and scalar-linear operators and through sums
  of pending terms. Anything else resolves first, or pending sums would flow through everything and multiply.

Every strategy computes exactly what the unsplit operator does, on the pieces: that is the meaning of a rule, and what
tests execute. Axes are independent of each other, so one axis at a time is enough.

Views (reshapes, splits and concatenations in equal chunks) keep digits instead of letters. A digit of dim d at stride s
lies in the flat index at F = s * prod(shape[d+1:]), and belongs to the dim d' of the new shape with
inner = prod(new[d'+1:]) dividing F and (F / inner) * p dividing new[d']; if there is none, the view cannot be split there.

`letters_of` is the table; `propose` lists the strategies that follow what the reads already have; `decide` makes the one
that a user asks for; `localize` adapts arguments that name sizes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from sennit.errors import PlanError
from sennit.ir.dtype import TensorType
from sennit.ir.graph import Arg, Op
from sennit.ir.layout import Entry, Pending, Reduction, Split, block_strides

__all__ = [
    "Letters",
    "Strategy",
    "carries_pending",
    "decide",
    "is_relabelling",
    "letters_of",
    "localize",
    "map_split",
    "propose",
    "through_view",
]

Types = Mapping[str, TensorType]
Dims = tuple[str | None, ...]


@dataclass(frozen=True, slots=True)
class Strategy:
    """What one axis does to each tensor that an operator reads (in the order of `Op.reads`) and to each result."""

    reads: tuple[Entry | None, ...]
    results: tuple[Entry | None, ...]

    @property
    def is_replicated(self) -> bool:
        return not any(self.reads) and not any(self.results)


@dataclass(frozen=True, slots=True)
class Letters:
    """A rule. `summed` maps a letter that no result has to its reduction; `addends` are reads added after that; `linear`
    lists the sets of reads in which the operator is linear; `structural` operators only move values, so any reduction passes."""

    reads: tuple[Dims, ...]
    results: tuple[Dims, ...]
    summed: tuple[tuple[str, Reduction], ...] = ()
    addends: tuple[int, ...] = ()
    linear: tuple[tuple[int, ...], ...] = ()
    structural: bool = False
    carries: bool = False

    @property
    def letters(self) -> tuple[str, ...]:
        """Every letter that can be split, in order of first appearance."""
        found = [letter for dims in (*self.reads, *self.results) for letter in dims if letter is not None]
        return tuple(dict.fromkeys(found))


# ---- the table -------------------------------------------------------------------------------------------------------


def letters_of(op: Op, types: Types) -> Letters:
    """The rule of an operator. One without a rule is replicated, always right."""
    reads = [types[name].shape for name in op.reads]
    results = [value.type.shape for value in op.results]
    name = op.kind.split(".")[1] if op.kind.startswith("aten.") else op.kind
    match name:
        case "mm":
            return Letters((("m", "k"), ("k", "n")), (("m", "n"),), (("k", Reduction.SUM),), linear=((0,), (1,)))
        case "addmm":
            bias: Dims = ("m", "n")[-len(reads[0]) :] if reads[0] else ()
            bias = tuple(None if size == 1 else letter for size, letter in zip(reads[0], bias, strict=True))
            return Letters(
                (bias, ("m", "k"), ("k", "n")),
                (("m", "n"),),
                (("k", Reduction.SUM),),
                addends=(0,),
                linear=((0, 1), (0, 2)),
            )
        case "bmm":
            return Letters(
                (("b", "m", "k"), ("b", "k", "n")), (("b", "m", "n"),), (("k", Reduction.SUM),), linear=((0,), (1,))
            )
        case "sum" | "amax" | "amin" | "any" | "all":
            return _reduction(name, op, reads[0], results[0])
        case "_softmax" | "_log_softmax" | "_softmax_backward_data" | "_log_softmax_backward_data":
            dim = op.args[len(reads)]
            rule = _pointwise(reads, results, frozen=_dims(dim, len(reads[0])))
            return Letters(rule.reads, rule.results, linear=((0,),) if name.endswith("backward_data") else ())
        case "native_layer_norm" | "native_layer_norm_backward":
            return _layer_norm(name, op, reads, results)
        case "embedding":
            index = _alphabet(len(reads[1]))
            return Letters(((None, "d"), index), ((*index, "d"),))
        case "embedding_dense_backward":
            index = _alphabet(len(reads[1]))
            summed = tuple((letter, Reduction.SUM) for letter in index)
            return Letters(((*index, "d"), index), ((None, "d"),), summed, linear=((0,),))
        case "gather" | "scatter":
            return _along(op, reads, results)
        case "permute":
            order = op.args[1]
            assert isinstance(order, tuple)
            letters = _alphabet(len(reads[0]))
            moved = tuple(letters[dim] for dim in _dims(order, len(letters)))
            return Letters((letters,), (moved,), linear=((0,),), structural=True, carries=True)
        case "expand":
            return _expand(reads[0], results[0])
        case "ones" | "zeros" | "full":
            return Letters((), (_alphabet(len(results[0])),))
        case _ if name in _POINTWISE:
            rule = _pointwise(reads, results)
            linear, carries = _linear(name, reads)
            return Letters(rule.reads, rule.results, linear=linear, structural=name == "clone", carries=carries)
        case _:
            return Letters(
                tuple((None,) * len(shape) for shape in reads), tuple((None,) * len(shape) for shape in results)
            )


_POINTWISE = frozenset(
    [
        "add",
        "sub",
        "mul",
        "div",
        "neg",
        "exp",
        "log",
        "tanh",
        "erf",
        "sqrt",
        "rsqrt",
        "pow",
        "reciprocal",
        "sigmoid",
        "relu",
        "gelu",
        "gelu_backward",
        "tanh_backward",
        "threshold_backward",
        "where",
        "eq",
        "ne",
        "lt",
        "le",
        "gt",
        "ge",
        "logical_and",
        "logical_or",
        "logical_not",
        "bitwise_and",
        "bitwise_or",
        "bitwise_not",
        "maximum",
        "minimum",
        "clamp",
        "masked_fill",
        "clone",
        "zeros_like",
        "ones_like",
        "full_like",
        "_to_copy",
        "sin",
        "cos",
        "abs",
        "silu",
        "sigmoid_backward",
        "silu_backward",
    ]
)
_VIEWS = frozenset(
    [
        "aten.view.default",
        "aten._unsafe_view.default",
        "aten.reshape.default",
        "aten.unsqueeze.default",
        "aten.squeeze.dim",
        "aten.squeeze.dims",
    ]
)
_CHUNKS = frozenset(["aten.split_with_sizes.default", "aten.cat.default"])


def _linear(name: str, reads: Sequence[tuple[int, ...]]) -> tuple[tuple[tuple[int, ...], ...], bool]:
    """The sets of reads in which a pointwise operator is linear, and whether it should carry pending sums in space."""
    match name, len(reads):
        case ("neg" | "clone" | "zeros_like" | "_to_copy" | "mul" | "div", 1):
            return ((0,),), True
        case ("add" | "sub", 2):
            return ((0, 1),), True
        case ("mul", 2):
            return ((0,), (1,)), () in reads
        case ("div", 2):
            return ((0,),), reads[1] == ()
        case ("where", 3):
            return ((1, 2),), False
        case ("gelu_backward" | "tanh_backward" | "threshold_backward" | "sigmoid_backward" | "silu_backward", _):
            return ((0,),), False
        case _:
            return (), False


def _alphabet(count: int) -> tuple[str, ...]:
    return tuple(f"i{position}" for position in range(count))


def _dims(dims: Arg, rank: int) -> tuple[int, ...]:
    many = dims if isinstance(dims, tuple) else (dims,)
    return tuple(dim % rank for dim in many if isinstance(dim, int)) if rank else ()


def _pointwise(
    reads: Sequence[tuple[int, ...]], results: Sequence[tuple[int, ...]], frozen: tuple[int, ...] = ()
) -> Letters:
    """One letter per result dim, aligned from the right; a read that is broadcast along a dim has none there."""
    letters = tuple(None if dim in frozen else letter for dim, letter in enumerate(_alphabet(len(results[0]))))

    def aligned(shape: tuple[int, ...]) -> Dims:
        tail = letters[len(letters) - len(shape) :]
        full = results[0][len(letters) - len(shape) :]
        return tuple(letter if size == whole else None for size, whole, letter in zip(shape, full, tail, strict=True))

    return Letters(tuple(map(aligned, reads)), tuple(map(aligned, results)))


def _reduction(name: str, op: Op, shape: tuple[int, ...], result: tuple[int, ...]) -> Letters:
    dims = _dims(op.args[1], len(shape)) if len(op.args) > 1 and op.args[1] is not None else ()
    dims = dims or tuple(range(len(shape)))  # no dims means all of them
    letters = _alphabet(len(shape))
    keeps = len(result) == len(shape) and bool(shape)
    kept = tuple(None if dim in dims else letter for dim, letter in enumerate(letters) if keeps or dim not in dims)
    ops = {"sum": Reduction.SUM, "amax": Reduction.MAX, "amin": Reduction.MIN}
    if name not in ops:  # any, all: along the reduced dims the whole must be there
        return Letters((tuple(None if dim in dims else letter for dim, letter in enumerate(letters)),), (kept,))
    summed = tuple((letters[dim], ops[name]) for dim in dims)
    return Letters((letters,), (kept,), summed, linear=((0,),) if name == "sum" else (), carries=True)


def _layer_norm(name: str, op: Op, reads: Sequence[tuple[int, ...]], results: Sequence[tuple[int, ...]]) -> Letters:
    """Leading dims are independent of each other; the normalised ones are needed whole. Weight and bias gradients are
    sums over the leading dims."""
    normalised = op.args[2 if name.endswith("backward") else 1]
    assert isinstance(normalised, tuple)
    leading = _alphabet(len(reads[0]) - len(normalised))

    def dims(shape: tuple[int, ...]) -> Dims:
        return (*leading, *[None] * len(normalised)) if len(shape) == len(reads[0]) else (None,) * len(shape)

    summed = tuple((letter, Reduction.SUM) for letter in leading) if name.endswith("backward") else ()
    linear = ((0,),) if name.endswith("backward") else ()
    return Letters(tuple(map(dims, reads)), tuple(map(dims, results)), summed, linear=linear)


def _along(op: Op, reads: Sequence[tuple[int, ...]], results: Sequence[tuple[int, ...]]) -> Letters:
    """gather, scatter: all dims but the indexed one, where all tensors have one size."""
    (dim,) = _dims(op.args[1], len(reads[0]))
    shapes = [*reads, *results]
    letters: Dims = tuple(
        letter if position != dim and len({shape[position] for shape in shapes}) == 1 else None
        for position, letter in enumerate(_alphabet(len(reads[0])))
    )
    return Letters((letters,) * len(reads), (letters,) * len(results))


def _expand(shape: tuple[int, ...], result: tuple[int, ...]) -> Letters:
    letters = _alphabet(len(result))
    added = len(result) - len(shape)
    source = tuple(letters[added + dim] if size == result[added + dim] else None for dim, size in enumerate(shape))
    return Letters((source,), (letters,), linear=((0,),), structural=True, carries=True)


# ---- strategies ------------------------------------------------------------------------------------------------------


def propose(op: Op, types: Types, size: int, have: Sequence[Entry | None]) -> tuple[Strategy, ...]:
    """The strategies that follow what the reads already have on an axis of `size`, replication first. The first read that
    is split on a letter proposes that letter and stride."""
    found = {_replicated(op): None}
    if op.kind in _VIEWS or op.kind in _CHUNKS:
        for entry in have:
            if (strategy := _follow_view(op, types, size, entry)) is not None:
                found.setdefault(strategy)
        return tuple(found)
    rule = letters_of(op, types)
    for position, entry in enumerate(have):
        if isinstance(entry, Split) and (letter := rule.reads[position][entry.dim]) is not None:
            extent = types[op.reads[position]].shape[entry.dim]
            if extent % (entry.stride * size) == 0:
                found.setdefault(_on_letter(rule, letter, entry.stride))
    for group in rule.linear:
        parts = {have[position] for position in group}
        part = parts.pop()
        if not parts and isinstance(part, Pending) and (part.op is Reduction.SUM or rule.structural):
            reads = tuple(part if position in group else None for position in range(len(have)))
            found.setdefault(Strategy(reads, tuple(part for _ in op.results)))
    return tuple(found)


def decide(op: Op, types: Types, size: int, letter: str, chunks: int = 1) -> Strategy:
    """Split on a letter, in plain blocks; with `chunks`, each of so many equal chunks of the dim is split in blocks."""
    rule = letters_of(op, types)
    if letter not in rule.letters:
        known = ", ".join(rule.letters) or "none: it cannot be split"
        raise PlanError(f"{op.kind} has no dim {letter!r}", where=op.describe(), fix=f"its dims are {known}")
    extent = _extent(op, types, rule, letter)
    if extent % (size * chunks):
        raise PlanError(
            f"dim {letter!r} of size {extent} does not divide into {chunks} x {size} pieces",
            where=op.describe(),
            fix="choose an axis whose size divides the dim",
        )
    (stride,) = block_strides(extent // chunks, [size])
    return _on_letter(rule, letter, stride)


def _extent(op: Op, types: Types, rule: Letters, letter: str) -> int:
    shapes = [types[name].shape for name in op.reads] + [value.type.shape for value in op.results]
    for dims, shape in zip((*rule.reads, *rule.results), shapes, strict=True):
        if letter in dims:
            return shape[dims.index(letter)]
    raise AssertionError(letter)


def carries_pending(op: Op, types: Types) -> bool:
    """Whether a pending sum in space should travel through the operator rather than be resolved before it."""
    return op.kind in _VIEWS or op.kind in _CHUNKS or letters_of(op, types).carries


def through_view(op: Op, types: Types, size: int, entry: Entry | None) -> Entry | None:
    """For an operator that only relabels elements: what its read must have for its result to have `entry`. Raises
    `LookupError` where there is no such thing."""
    if entry is None or isinstance(entry, Pending):
        return entry
    source, target = types[op.reads[0]].shape, op.results[0].type.shape
    if op.kind in _VIEWS:
        back = map_split(target, source, entry, size)
        if back is None:
            raise LookupError(op.name)
        return back
    if op.kind == "aten.permute.default":
        return Split(_dims(op.args[1], len(source))[entry.dim], entry.stride)
    raise LookupError(op.name)


def is_relabelling(op: Op) -> bool:
    """Whether `through_view` knows the operator."""
    return op.kind in _VIEWS or op.kind == "aten.permute.default"


def _replicated(op: Op) -> Strategy:
    return Strategy((None,) * len(op.reads), (None,) * len(op.results))


def _on_letter(rule: Letters, letter: str, stride: int) -> Strategy:
    summed = dict(rule.summed)

    def entry(dims: Dims) -> Entry | None:
        return Split(dims.index(letter), stride) if letter in dims else None

    def result(dims: Dims) -> Entry | None:
        return Pending(summed[letter]) if letter not in dims and letter in summed else entry(dims)

    reads = tuple(
        Pending(summed[letter]) if position in rule.addends and letter in summed else entry(dims)
        for position, dims in enumerate(rule.reads)
    )
    return Strategy(reads, tuple(map(result, rule.results)))


def _follow_view(op: Op, types: Types, size: int, entry: Entry | None) -> Strategy | None:
    """Views, splits and concatenations: every tensor gets the same digit."""
    if entry is None or isinstance(entry, Pending):
        return Strategy((entry,) * len(op.reads), (entry,) * len(op.results)) if entry is not None else None
    source, target = types[op.reads[0]].shape, op.results[0].type.shape
    if op.kind in _VIEWS:
        moved = map_split(source, target, entry, size)
        return Strategy((entry,), (moved,)) if moved is not None else None
    (dim,) = _dims(op.args[-1] if isinstance(op.args[-1], int) else 0, len(source))
    if entry.dim == dim:
        pieces = [value.type.shape[dim] for value in op.results] if len(op.results) > 1 else []
        pieces = pieces or [types[name].shape[dim] for name in op.reads]
        if len(set(pieces)) > 1 or pieces[0] % (entry.stride * size):
            return None  # the digit would run over the edge of a chunk
    return Strategy((entry,) * len(op.reads), (entry,) * len(op.results))


def map_split(source: tuple[int, ...], target: tuple[int, ...], split: Split, size: int) -> Split | None:
    """The same digit of the flat index in another shape of the same elements, if it lies within one dim there."""
    if source[split.dim] % (split.stride * size):
        return None
    flat = split.stride * prod(source[split.dim + 1 :])
    inner = 1
    for dim in reversed(range(len(target))):
        if flat % inner == 0 and target[dim] % ((flat // inner) * size) == 0:
            return Split(dim, flat // inner)
        inner *= target[dim]
    return None


# ---- arguments that name sizes ---------------------------------------------------------------------------------------


def localize(op: Op, results: Sequence[tuple[int, ...]]) -> tuple[tuple[Arg, ...], tuple[tuple[str, Arg], ...]]:
    """The arguments for local pieces whose results have these shapes."""
    match op.kind:
        case "aten.view.default" | "aten._unsafe_view.default" | "aten.reshape.default" | "aten.expand.default":
            return (op.args[0], results[0], *op.args[2:]), op.kwargs
        case "aten.ones.default" | "aten.zeros.default" | "aten.full.default":
            return (results[0], *op.args[1:]), op.kwargs
        case "aten.split_with_sizes.default":
            (dim,) = _dims(op.args[2] if len(op.args) > 2 else 0, len(results[0]))
            return (op.args[0], tuple(shape[dim] for shape in results), *op.args[2:]), op.kwargs
        case _:
            return op.args, op.kwargs
