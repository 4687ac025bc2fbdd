"""What a part of a compiled group has to do beside moving its bytes: instructions, and waiting.

    instructions   of every element, over all elements of the part. What is inlined into a larger space is computed again for each of its elements: a mask that is made of two rows of numbers costs as much as the square that it fills
    depth          how many loads wait for one another: 0 for what is made from numbers, 1 for most, 2 where an index is loaded before what it names
    passes         how many reductions wait for one another: a softmax has the maximum before the sum
    again          bytes that a loop over rows reads once more, because what is behind a reduction needs them too

A multiprocessor issues an instruction for 128 elements in a cycle. Few operators are more than a handful of
instructions; those that are (`_INSTRUCTIONS`) are written out by the compiler, with divisions, exponentials and the
selection of a range. They were read off lone operators on an H200 whose bytes were in the cache
(`benchmarks/fuse/data`): seconds beyond the traffic, in instructions.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from sennit.fuse.operator_class import Class, classify, looks_up, makes_of_nothing, moves_nothing, stem
from sennit.ir.dtype import TensorType
from sennit.ir.graph import Op

__all__ = ["Effort", "effort_of", "looked_at", "summed_norm"]

_INSTRUCTIONS = {
    "tanh": 33.0,
    "sigmoid": 18.0,
    "silu": 18.0,
    "silu_backward": 28.0,
    "gelu": 42.0,
    "gelu_backward": 61.0,
    "sin": 35.0,
    "cos": 35.0,
    "exp": 6.0,
    "log": 6.0,
    "slice_backward": 4.0,
    "select_backward": 4.0,
    "roll": 8.0,
    "index": 4.0,
    "gather": 4.0,
    "embedding": 1.0,
    "cat": 0.0,  # its readers' loads have conditions, and are counted as such
}
_LIGHT = 2.0
_SPREAD = 4.0  # to find the place of an element in a value that is broadcast
_TURNED, _ACROSS = 4.0, 12.0  # in a value that lies in another order; and where rows are columns there
# in one that lies in another order and is joined with others, by such divisions: nothing is loaded as a vector
_JOINED = 50.0
_REDUCED = {  # where a program keeps its rows, and where it loops over them
    "_softmax": (39.5, 80.0),
    "_log_softmax": (23.0, 55.0),
    "_softmax_backward_data": (19.3, 20.0),
    "_log_softmax_backward_data": (15.0, 13.0),
    "native_layer_norm": (19.3, 77.0),
    "native_layer_norm_backward": (15.0, 15.0),
    "_native_batch_norm_legit_functional": (10.0, 33.0),
    "native_batch_norm_backward": (85.0, 48.0),
    "all": (7.4, 12.0),
}
_SUMMED = (1.7, 1.0)
_ODD = (60.0, 45.0)  # the same; rows that do not begin where a vector of elements does are read one by one
_NORMED = 30.0  # of a norm's backward pass over columns: rows are normed once more
_TWICE = (
    "_softmax",
    "_log_softmax",
    "native_layer_norm",
    "native_layer_norm_backward",
    "_native_batch_norm_legit_functional",
)


@dataclass(frozen=True, slots=True)
class Effort:
    instructions: float = 0.0
    depth: int = 0
    passes: int = 0
    again: int = 0


@dataclass(slots=True)
class _Value:
    """Of a value inside a part, or before it: loads and reductions that stand before it."""

    depth: int = 0
    passes: int = 0


def effort_of(
    ops: Sequence[Op],
    size: int,
    kept: bool,
    base: Mapping[str, str],
    turned: Mapping[str, tuple[int, ...] | None],
    read: Mapping[str, int],
    types: Mapping[str, TensorType],
) -> Effort:
    """Of operators of one part over `size` elements, in order, whose rows a program keeps or not.

    `base` has what views show, `turned` the views that lie in another order, `read` the bytes of each value that comes
    from outside.
    """
    found: dict[str, _Value] = {}
    instructions, odd, joined = 0.0, False, False
    views: list[tuple[str, tuple[int, ...] | None]] = []
    seen_after = {name: set[int]() for name in read}
    for op in ops:
        if moves_nothing(op):
            continue
        name, reduces = stem(op.kind), classify(op, types) is Class.REDUCTION
        names = () if makes_of_nothing(op) else tuple(dict.fromkeys(base.get(it, it) for it in op.reads))
        depths = [found[it].depth if it in found else int(it in read) for it in names]
        depth = max(depths, default=0)
        if looks_up(op) and names and names[0] not in found:
            depth = max((found[it].depth if it in found else 1 for it in names[1:]), default=0) + 1
        passes = max((found[it].passes for it in names if it in found), default=0)
        outside = [it for it in names if it in seen_after]
        for it in outside:
            seen_after[it].add(passes)
        made = max(value.type.elements for value in op.results)
        if reduces:
            instructions += _REDUCED.get(name, _SUMMED)[not kept] * types[op.reads[0]].elements
            odd |= _is_odd(op, types)
            passes += 2 if name in _TWICE else 1
            if name in _REDUCED and name != "all":  # what it writes is over the whole space again
                for it in outside:
                    seen_after[it].add(passes)
        elif made > 1:
            spread = sum(1 < types[it].elements < size for it in outside)
            instructions += (_INSTRUCTIONS.get(name, _LIGHT) + _SPREAD * spread) * max(made, size if passes == 0 else 0)
            joined |= name == "cat"
        views += [(it, turned[it]) for it in op.reads if it in turned and base.get(it, it) in read]
        for value in op.results:
            found[value.name] = _Value(depth, passes)
    return Effort(
        instructions
        + (_ODD[not kept] * odd + sum(_finding(types[it].shape, order, joined) for it, order in views)) * size,
        max((value.depth for value in found.values()), default=0),
        max((value.passes for value in found.values()), default=0),
        sum(read[name] for name, places in seen_after.items() if len(places) > 1),
    )


def summed_norm(size: int, before: int) -> Effort:
    """Of the sums over columns in a norm's backward pass, with so many operators computed again in front of it."""
    return Effort((_NORMED + _LIGHT * before) * size, 1, 1)


def _finding(shape: tuple[int, ...], order: tuple[int, ...] | None, joined: bool) -> float:
    """Instructions to find an element of a view whose dims are those of a value in another order."""
    if joined and _is_uneven(shape):
        return _JOINED
    return _TURNED if order is None or order[-1] == len(order) - 1 else _ACROSS


def _is_uneven(shape: tuple[int, ...]) -> bool:
    """Whether an inner dim is no power of two: a place in it is found by a division."""
    return any(size & (size - 1) for size in shape[1:])


def _is_odd(op: Op, types: Mapping[str, TensorType]) -> bool:
    """Whether a run of memory that is reduced is no multiple of eight elements."""
    shape = types[op.reads[0]].shape
    run = prod(shape[2:]) if "batch_norm" in op.kind else shape[-1] if shape else 1
    return run > 1 and run % 8 != 0


def looked_at(
    ops: Sequence[Op], inside: Container[str], base: Mapping[str, str], types: Mapping[str, TensorType]
) -> dict[str, int]:
    """Of each value that is not made inside, how many bytes operators look at.

    Two slices of one value show other elements; of a table, what is found counts.
    """
    views: dict[str, dict[str, int]] = {}
    for op in ops:
        if makes_of_nothing(op):
            continue
        made = sum(value.type.bytes for value in op.results)
        for name in op.reads:
            shown = base.get(name, name)
            if shown in inside:
                continue
            size = min(types[name].bytes, types[shown].bytes)
            mine = views.setdefault(shown, {})
            mine[name] = max(mine.get(name, 0), min(size, made) if looks_up(op) else size)
    return {shown: min(sum(mine.values()), types[shown].bytes) for shown, mine in views.items()}
