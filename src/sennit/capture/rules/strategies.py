"""What a rule allows: the ways to split one operator over one axis.

- `propose`: the strategies that follow what the reads already have;
- `making`: the strategy that gives a result the entry that its reader wants (for operators that read nothing split);
- `decide`: the one that a user asks for by letter; `split_on`: the same, for a known stride;
- `through_view`: what a view's read must have for its result to have an entry.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from sennit.capture.rules.letters import named_dims
from sennit.capture.rules.lookup import rule_of
from sennit.capture.rules.rule import Chunks, Dims, Letters, Listed, Reshape, Row, Rule, Strategy, Types
from sennit.errors import PlanError
from sennit.ir.graph import Op
from sennit.ir.layout import Entry, Pending, Reduction, Split, block_strides

__all__ = [
    "carries_pending",
    "decide",
    "from_row",
    "is_relabelling",
    "making",
    "map_split",
    "propose",
    "split_on",
    "through_view",
]


def propose(
    op: Op, types: Types, size: int, have: Sequence[Entry | None], rule: Rule | None = None
) -> tuple[Strategy, ...]:
    """The strategies that follow what the reads already have on an axis of `size`, replication first.

    The first read that is split on a letter proposes that letter and stride.
    """
    found = {_replicated(op): None}
    match rule or rule_of(op, types):
        case Reshape() | Chunks() as digits:
            for position, entry in enumerate(have):
                if entry is not None and (strategy := _keep_digit(digits, size, entry, "reads", position)) is not None:
                    found.setdefault(strategy)
        case Letters() as letters:
            for strategy in _follow_letters(op, types, letters, size, have):
                found.setdefault(strategy)
        case Listed(rows):
            for position, entry in enumerate(have):
                for row in rows:
                    if (strategy := _follow_row(op, types, row, size, position, entry)) is not None:
                        found.setdefault(strategy)
    return tuple(found)


def making(
    op: Op, types: Types, size: int, position: int, entry: Entry | None, rule: Rule | None = None
) -> Strategy | None:
    """The strategy under which the result at `position` has `entry`, for an axis of `size`."""
    if entry is None:
        return _replicated(op)
    match rule or rule_of(op, types):
        case Reshape() | Chunks() as digits:
            return _keep_digit(digits, size, entry, "results", position)
        case Letters() as letters if isinstance(entry, Pending):
            zeros = () in letters.linear and entry.op is Reduction.SUM
            return Strategy((None,) * len(op.reads), (entry,) * len(op.results)) if zeros else None
        case Letters() as letters if isinstance(entry, Split):
            letter = letters.results[position][entry.dim]
            even = op.results[position].type.shape[entry.dim] % (entry.stride * size) == 0
            return split_on(letters, letter, entry.stride) if letter is not None and even else None
        case _:
            return None


def decide(op: Op, types: Types, size: int, letter: str, chunks: int = 1) -> Strategy:
    """Split on a letter, in plain blocks; with `chunks`, each of so many equal chunks of the dim is split in blocks.

    Where the rule keeps digits (views, slices), `i0`, `i1`, ... are the dims of the first result.
    """
    rule = rule_of(op, types)
    names = _letters(op, rule)
    if letter not in names:
        known = ", ".join(names) or "none: it cannot be split"
        raise PlanError(f"{op.kind} has no dim {letter!r}", where=op.describe(), fix=f"its dims are {known}")
    extent = _extent(op, types, rule, letter)
    if extent % (size * chunks):
        raise PlanError(
            f"dim {letter!r} of size {extent} does not divide into {chunks} x {size} pieces",
            where=op.describe(),
            fix="choose an axis whose size divides the dim",
        )
    (stride,) = block_strides(extent // chunks, [size])
    match rule:
        case Letters():
            return split_on(rule, letter, stride)
        case Listed(rows):
            return from_row(rows[int(letter[1:])], stride)
        case _:
            strategy = making(op, types, size, 0, Split(int(letter[1:]), stride), rule)
            if strategy is None:
                raise PlanError(
                    f"dim {letter!r} of {op.kind} cannot be cut into {chunks} x {size} pieces: a piece would not be a piece of what it reads",
                    where=op.describe(),
                    fix="split another dim, or other chunks of this one",
                )
            return strategy


def _letters(op: Op, rule: Rule) -> tuple[str, ...]:
    match rule:
        case Letters():
            return rule.letters
        case Listed(rows):
            return tuple(
                f"r{number}" for number, row in enumerate(rows) if any(isinstance(dim, int) for dim in row.reads)
            )
        case Reshape() | Chunks():
            return tuple(f"i{dim}" for dim in range(len(op.results[0].type.shape)))


def _extent(op: Op, types: Types, rule: Rule, letter: str) -> int:
    shapes = [types[name].shape for name in op.reads] + [value.type.shape for value in op.results]
    match rule:
        case Letters():
            for dims, shape in zip((*rule.reads, *rule.results), shapes, strict=True):
                if letter in dims:
                    return shape[dims.index(letter)]
            raise AssertionError(letter)
        case Listed(rows):
            row = rows[int(letter[1:])]
            return next(
                shape[dim]
                for dim, shape in zip((*row.reads, *row.results), shapes, strict=True)
                if isinstance(dim, int)
            )
        case Reshape() | Chunks():
            return op.results[0].type.shape[int(letter[1:])]


def carries_pending(rule: Rule) -> bool:
    """Whether a pending sum in space should travel through an operator rather than be resolved before it."""
    match rule:
        case Reshape() | Chunks():
            return True
        case Letters(carries=carries):
            return carries
        case Listed():
            return False


def through_view(op: Op, types: Types, size: int, entry: Entry | None) -> Entry | None:
    """For an operator that only relabels elements: what its read must have for its result to have `entry`. Raises
    `LookupError` where there is no such thing."""
    if entry is None or isinstance(entry, Pending):
        return entry
    source, target = types[op.reads[0]].shape, op.results[0].type.shape
    if op.kind == "aten.permute.default":
        return Split(named_dims(op.args[1], len(source))[entry.dim], entry.stride)
    back = map_split(target, source, entry, size) if is_relabelling(op) else None
    if back is None:
        raise LookupError(op.name)
    return back


def is_relabelling(op: Op) -> bool:
    """Whether `through_view` knows the operator."""
    return op.kind in (
        "aten.view.default",
        "aten._unsafe_view.default",
        "aten.reshape.default",
        "aten.unsqueeze.default",
        "aten.squeeze.dim",
        "aten.squeeze.dims",
        "aten.permute.default",
    )


# ---- letters ---------------------------------------------------------------------------------------------------------


def _replicated(op: Op) -> Strategy:
    return Strategy((None,) * len(op.reads), (None,) * len(op.results))


def _follow_letters(op: Op, types: Types, rule: Letters, size: int, have: Sequence[Entry | None]) -> list[Strategy]:
    found: list[Strategy] = []
    for position, entry in enumerate(have):
        if isinstance(entry, Split) and (letter := rule.reads[position][entry.dim]) is not None:
            extent = types[op.reads[position]].shape[entry.dim]
            if extent % (entry.stride * size) == 0:
                found.append(split_on(rule, letter, entry.stride))
    for group in rule.linear:
        parts = {have[position] for position in group}
        part = parts.pop() if parts else None
        if not parts and isinstance(part, Pending) and (part.op is Reduction.SUM or rule.structural):
            reads = tuple(part if position in group else None for position in range(len(have)))
            found.append(Strategy(reads, tuple(part for _ in op.results)))
    return found


def split_on(rule: Letters, letter: str, stride: int) -> Strategy:
    """Split on a letter, with a stride that every tensor that has the letter shares."""
    summed = dict(rule.summed)

    def entry(dims: Dims) -> Entry | None:
        return Split(dims.index(letter), stride) if letter in dims else None

    def result(dims: Dims) -> Entry | None:
        return Pending(summed[letter]) if letter not in dims and letter in summed else entry(dims)

    reads = tuple(
        Pending(summed[letter]) if position in rule.addends and letter in summed and letter not in dims else entry(dims)
        for position, dims in enumerate(rule.reads)
    )
    return Strategy(reads, tuple(map(result, rule.results)), dict(rule.forms).get(letter))


# ---- rows ------------------------------------------------------------------------------------------------------------


def _follow_row(op: Op, types: Types, row: Row, size: int, position: int, entry: Entry | None) -> Strategy | None:
    wanted = row.reads[position]
    match entry:
        case Split(dim, stride) if wanted == dim and not isinstance(wanted, Reduction):
            shapes = [types[name].shape for name in op.reads] + [value.type.shape for value in op.results]
            split = [
                (shape, at) for shape, at in zip(shapes, (*row.reads, *row.results), strict=True) if isinstance(at, int)
            ]
            return from_row(row, stride) if all(shape[at] % (stride * size) == 0 for shape, at in split) else None
        case Pending(op=reduction) if wanted is reduction:
            is_through = not any(isinstance(dim, int) for dim in (*row.reads, *row.results))
            return from_row(row, 1) if is_through else None
        case _:
            return None


def from_row(row: Row, stride: int) -> Strategy:
    """The strategy of a row, with a stride for the dims that it splits."""

    def entry(item: int | Reduction | None) -> Entry | None:
        if item is None:
            return None
        return Pending(item) if isinstance(item, Reduction) else Split(item, stride)

    return Strategy(tuple(map(entry, row.reads)), tuple(map(entry, row.results)))


# ---- digits ----------------------------------------------------------------------------------------------------------


def _keep_digit(rule: Reshape | Chunks, size: int, entry: Entry, side: str, position: int) -> Strategy | None:
    """Every tensor gets the digit that one of them has."""
    match rule:
        case Reshape(source, target):
            if isinstance(entry, Pending):
                return Strategy((entry,), (entry,))
            forth = side == "reads"
            moved = map_split(source, target, entry, size) if forth else map_split(target, source, entry, size)
            if moved is None:
                return None
            return Strategy((entry,), (moved,)) if forth else Strategy((moved,), (entry,))
        case Chunks(dim, reads, results):
            if isinstance(entry, Split) and entry.dim == dim:
                period = entry.stride * size
                if any(part.start % period or part.length % period for part in (*reads, *results)):
                    return None  # the digit would run over the edge of a chunk
            return Strategy((entry,) * len(reads), (entry,) * len(results))


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
