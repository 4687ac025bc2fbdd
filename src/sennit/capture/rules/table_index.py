"""Rules of operators whose values depend on positions: embeddings, gathers, scatters, sorts, counts, random numbers.

Along an indexed dim an index is a position in the whole. A piece can still be worked on where a *local form* knows
which positions it holds: it takes what lies in the piece, gives zeros for the rest, and the pieces sum to the whole; or
it writes what falls into the piece and leaves out the rest. `ir/local_forms_numpy.py` has their definitions.
"""

from __future__ import annotations

from math import prod

from sennit.capture.rules.letters import alphabet, argument, independent, named_dims, sums
from sennit.capture.rules.rule import Dims, Letters, Rule, Shapes
from sennit.ir.graph import Op, Ref

__all__ = ["index_rule"]


def index_rule(name: str, op: Op, reads: Shapes, results: Shapes) -> Rule | None:
    match name:
        case "embedding":
            index = alphabet(len(reads[1]))
            return Letters(
                (("v", "d"), index), ((*index, "d"),), sums("v"), linear=((0,),), forms=(("v", "embedding"),)
            )
        case "embedding_dense_backward":
            index = alphabet(len(reads[1]))
            if op.args[4]:  # gradients divided by how often an index occurs in the whole
                whole: Dims = (None,) * len(index)
                return Letters(((*whole, "d"), whole), ((None, "d"),), linear=((0,),))
            summed = sums(*index)
            forms = (("v", "embedding_dense_backward"),)
            return Letters(((*index, "d"), index), (("v", "d"),), summed, linear=((0,),), forms=forms)
        case "gather":
            return _gather(op, reads, results)
        case "scatter" | "scatter_add" | "scatter_reduce":
            return _scatter(name, op, reads, results)
        case "index":
            return _index(op, reads, results)
        case "index_put" | "_unsafe_index_put":
            return _index_put(op, reads, results)
        case "index_select":
            (dim,) = named_dims(op.args[1], len(reads[0]))
            letters = tuple(None if at == dim else letter for at, letter in enumerate(alphabet(len(reads[0]))))
            made = tuple("j" if at == dim else letter for at, letter in enumerate(letters))
            return Letters((letters, ("j",)), (made,), linear=((0,),), structural=True)
        case "index_add":
            (dim,) = named_dims(op.args[1], len(reads[0]))
            letters = tuple(None if at == dim else letter for at, letter in enumerate(alphabet(len(reads[0]))))
            source = tuple("j" if at == dim else letter for at, letter in enumerate(letters))
            return Letters((letters, ("j",), source), (letters,), sums("j"), addends=(0,), linear=((0, 2),))
        case "cumsum" | "cumprod" | "logcumsumexp" | "sort" | "argsort" | "topk" | "cummax" | "cummin":
            default = -1 if name in ("sort", "argsort", "topk") else 0
            position = 2 if name == "topk" else 1
            dims = named_dims(argument(op, position, "dim", default), len(reads[0]))
            rule = independent(reads, results, dims)
            return Letters(rule.reads, rule.results, linear=((0,),) if name == "cumsum" else ())
        case "ones" | "zeros" | "full" | "empty":
            is_zero = name == "zeros" or (name == "full" and op.args[1] == 0)
            return Letters((), (alphabet(len(results[0])),), linear=((),) if is_zero else ())
        case "new_zeros" | "new_ones" | "new_full" | "new_empty":
            made = alphabet(len(results[0]))
            return Letters((made if reads[0] == results[0] else (None,) * len(reads[0]),), (made,))
        case "arange":
            return Letters((), (("i0",),), forms=(("i0", "arange"),))
        case "scalar_tensor":
            return Letters((), ((),))
        case "sennit.uniform":
            made = alphabet(len(results[0]))
            return Letters(((None,),), (made,), forms=tuple((letter, "uniform") for letter in made))
        case _:
            return None


def _gather(op: Op, reads: Shapes, results: Shapes) -> Letters:
    """All dims but the indexed one, where all tensors have one size; along the indexed one by the local form."""
    (dim,) = named_dims(op.args[1], len(reads[0]))
    rule = independent(reads, results, (dim,))
    source = tuple("g" if at == dim else letter for at, letter in enumerate(rule.reads[0]))
    return Letters((source, rule.reads[1]), rule.results, sums("g"), linear=((0,),), forms=(("g", "gather"),))


def _scatter(name: str, op: Op, reads: Shapes, results: Shapes) -> Letters:
    (dim,) = named_dims(op.args[1], len(reads[0]))
    rule = independent(reads, results, (dim,))
    target = tuple("g" if at == dim else letter for at, letter in enumerate(rule.reads[0]))
    overload = op.kind.rsplit(".", 1)[-1]
    linear = ((0, 2),) if len(reads) == 3 and overload in ("src", "default") and name != "scatter_reduce" else ()
    if name == "scatter_reduce" or overload == "reduce":
        return Letters(rule.reads, rule.results)
    forms = (("g", name),)
    if (
        name == "scatter_add" and reads[1][dim] == reads[2][dim]
    ):  # terms may be split: what was there before is added once
        terms = tuple(tuple("s" if at == dim else letter for at, letter in enumerate(dims)) for dims in rule.reads[1:])
        return Letters((target, *terms), (target,), sums("s"), addends=(0,), linear=linear, forms=forms)
    return Letters((target, *rule.reads[1:]), (target,), linear=linear, forms=forms)


def _indexed(op: Op, reads: Shapes) -> tuple[list[int], list[int]]:
    """The dims of the first read that have an index, and the positions of the indices among the reads."""
    indices = op.args[1]
    assert isinstance(indices, tuple)
    dims = [dim for dim, index in enumerate(indices) if isinstance(index, Ref)]
    return dims, list(range(1, 1 + len(dims)))


def _index_letters(op: Op, reads: Shapes, picked_rank: int) -> tuple[Dims, tuple[Dims, ...], Dims] | None:
    """Letters of what is indexed, of each index, and of what is picked; indices are broadcast against each other."""
    dims, positions = _indexed(op, reads)
    shapes = [reads[position] for position in positions]
    rank = max(len(shape) for shape in shapes)
    extents = [
        max(shape[len(shape) - rank + at] if len(shape) - rank + at >= 0 else 1 for shape in shapes)
        for at in range(rank)
    ]
    names = tuple(f"j{at}" for at in range(rank))
    source: Dims = tuple(None if dim in dims else f"i{dim}" for dim in range(len(reads[0])))

    def of(shape: tuple[int, ...]) -> Dims:
        tail = names[rank - len(shape) :]
        return tuple(
            letter if size == extents[rank - len(shape) + at] else None
            for at, (size, letter) in enumerate(zip(shape, tail, strict=True))
        )

    adjacent = dims == list(range(dims[0], dims[-1] + 1))
    kept_before = [source[dim] for dim in range(dims[0])] if adjacent else []
    kept_after = [letter for dim, letter in enumerate(source) if dim not in dims and (not adjacent or dim > dims[-1])]
    picked: Dims = (*kept_before, *names, *kept_after)
    if len(picked) != picked_rank:
        return None  # a mask picks as many as it has truths
    return source, tuple(map(of, shapes)), picked


def _index(op: Op, reads: Shapes, results: Shapes) -> Letters | None:
    found = _index_letters(op, reads, len(results[0]))
    if found is None:
        return None
    source, indices, picked = found
    return Letters((source, *indices), (picked,), linear=((0,),), structural=True)


def _index_put(op: Op, reads: Shapes, results: Shapes) -> Letters | None:
    """With accumulation, entries can be split: what was there before is added once.

    A pending sum passes where the result is no larger than what is put into it: the gradient of a table of position
    biases, against that of the bias of every pair of positions.
    """
    dims, positions = _indexed(op, reads)
    rank = max(len(reads[position]) for position in positions) + len(reads[0]) - len(dims)
    found = _index_letters(op, reads, rank)
    if found is None:
        return None
    source, indices, picked = found
    values = reads[-1]
    extents = {
        letter: size
        for dims_, shape in zip((source, *indices), reads, strict=False)
        for letter, size in zip(dims_, shape, strict=True)
        if letter
    }
    tail = picked[len(picked) - len(values) :]
    given: Dims = tuple(
        letter if letter and extents.get(letter) == size else None for letter, size in zip(tail, values, strict=True)
    )
    accumulate = bool(argument(op, 3, "accumulate", False))
    entries = tuple(letter for letter in picked if letter and letter.startswith("j"))
    if accumulate and all(letter in given for letter in entries):
        joins = ((0, len(reads) - 1),)
        shrinks = prod(results[0]) <= prod(values)
        return Letters(
            (source, *indices, given), (source,), sums(*entries), addends=(0,), linear=joins, carries=shrinks
        )
    frozen = tuple(tuple(None for _ in dims_) for dims_ in indices)
    given = tuple(None if letter in entries else letter for letter in given)
    return Letters((source, *frozen, given), (source,), linear=((0, len(reads) - 1),))
