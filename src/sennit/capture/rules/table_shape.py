"""Rules of operators that only move values: views, permutations, slices, concatenations, paddings, and their
derivatives.

Views keep digits (`Reshape`), parts of a dim keep digits whose period divides their edges (`Chunks`), the others name
dims by letters. All of them are linear and only move values, so a pending value of any reduction passes through.
"""

from __future__ import annotations

from dataclasses import replace

from sennit.capture.rules.letters import alphabet, argument, independent, named_dims
from sennit.capture.rules.rule import Chunks, Dims, Letters, Part, Reshape, Rule, Shapes
from sennit.ir.graph import Op

__all__ = ["shape_rule", "slice_range"]


def shape_rule(name: str, op: Op, reads: Shapes, results: Shapes) -> Rule | None:
    match name:
        case "view" | "_unsafe_view" | "reshape" | "unsqueeze" | "squeeze" | "alias" | "detach" if len(reads) == 1:
            return Reshape(reads[0], results[0])
        case "permute" | "transpose" | "t":
            return _permute(name, op, reads[0])
        case "expand":
            return _expand(reads[0], results[0])
        case "repeat":
            return _repeat(reads[0], results[0])
        case "split_with_sizes" | "split" | "chunk":
            (dim,) = named_dims(argument(op, 2, "dim", 0), len(reads[0]))
            return Chunks(dim, (Part(0, reads[0][dim]),), _in_a_row(results, dim))
        case "cat":
            (dim,) = named_dims(argument(op, 1, "dim", 0), len(results[0]))
            if any(len(shape) != len(results[0]) for shape in reads):
                return None  # torch lets an empty vector pass here
            return Chunks(dim, _in_a_row(reads, dim), (Part(0, results[0][dim]),))
        case "slice" | "slice_backward":
            return _slice(name, op, reads[0], results[0])
        case "select" | "select_backward" | "stack" | "unbind":
            return _one_dim_less(name, op, reads, results)
        case "select_scatter":
            (dim,) = named_dims(op.args[2], len(reads[0]))
            letters = tuple(None if at == dim else letter for at, letter in enumerate(alphabet(len(reads[0]))))
            source = tuple(letter for at, letter in enumerate(letters) if at != dim)
            return Letters((letters, source), (letters,), linear=((0, 1),), carries=True)
        case "slice_scatter":
            (dim,) = named_dims(argument(op, 2, "dim", 0), len(reads[0]))
            return independent(reads, results, (dim,), linear=True)
        case "flip" | "roll":
            dims = named_dims(
                op.args[1 if name == "flip" else 2] if len(op.args) > 1 + (name == "roll") else (), len(reads[0])
            )
            frozen = dims if dims or name == "flip" else tuple(range(len(reads[0])))
            return replace(independent(reads, results, frozen, linear=True), structural=True)
        case "constant_pad_nd":
            padding, value = op.args[1], argument(op, 2, "value", 0)
            assert isinstance(padding, tuple)
            count = len(padding) // 2
            frozen = tuple(len(reads[0]) - 1 - at for at in range(count) if padding[2 * at] or padding[2 * at + 1])
            return independent(reads, results, frozen, linear=value == 0)
        case "unfold":
            (dim,) = named_dims(op.args[1], len(reads[0]))
            letters = tuple(None if at == dim else letter for at, letter in enumerate(alphabet(len(reads[0]))))
            return Letters((letters,), ((*letters, None),), linear=((0,),), structural=True, carries=True)
        case "unfold_backward":
            (dim,) = named_dims(op.args[2], len(results[0]))
            letters = tuple(None if at == dim else letter for at, letter in enumerate(alphabet(len(results[0]))))
            return Letters(((*letters, None),), (letters,), linear=((0,),), carries=True)
        case "tril" | "triu":
            rank = len(reads[0])
            return independent(reads, results, (rank - 1, rank - 2), linear=True)
        case _:
            return None


def _permute(name: str, op: Op, shape: tuple[int, ...]) -> Letters:
    letters = list(alphabet(len(shape)))
    if name == "permute":
        order = list(named_dims(op.args[1], len(shape)))
    else:
        order = list(range(len(shape)))
        one, other = named_dims((op.args[1], op.args[2]), len(shape)) if name == "transpose" else (0, len(shape) - 1)
        order[one], order[other] = order[other], order[one]
    moved = tuple(letters[dim] for dim in order)
    return Letters((tuple(letters),), (moved,), linear=((0,),), structural=True, carries=True)


def _expand(shape: tuple[int, ...], result: tuple[int, ...]) -> Letters:
    """A dim that is expanded has a letter in the result only: any piece of it can be made from the whole."""
    letters = alphabet(len(result))
    added = len(result) - len(shape)
    source = tuple(letters[added + dim] if size == result[added + dim] else None for dim, size in enumerate(shape))
    return Letters((source,), (letters,), linear=((0,),), structural=True, carries=True)


def _repeat(shape: tuple[int, ...], result: tuple[int, ...]) -> Letters:
    """Dims that are repeated are frozen: a piece of a repetition is none."""
    expanded = _expand(shape, result)
    made = tuple(letter if letter in expanded.reads[0] else None for letter in expanded.results[0])
    return replace(expanded, results=(made,))


def _in_a_row(shapes: Shapes, dim: int) -> tuple[Part, ...]:
    parts: list[Part] = []
    start = 0
    for shape in shapes:
        parts.append(Part(start, shape[dim]))
        start += shape[dim]
    return tuple(parts)


def slice_range(op: Op, extent: int, first: int) -> tuple[int, int, int]:
    """Start, end and step of a slice whose arguments begin at `first` with the dim, within an extent."""

    def at(value: object, default: int) -> int:
        if not isinstance(value, int):
            return default
        return min(max(value + extent if value < 0 else value, 0), extent)

    start = at(argument(op, first + 1, "start"), 0)
    end = at(argument(op, first + 2, "end"), extent)
    step = argument(op, first + 3, "step", 1)
    return start, max(start, end), step if isinstance(step, int) else 1


def _slice(name: str, op: Op, read: tuple[int, ...], result: tuple[int, ...]) -> Rule:
    backward = name == "slice_backward"
    first = 2 if backward else 1
    (dim,) = named_dims(argument(op, first, "dim", 0), len(read))
    total = result[dim] if backward else read[dim]
    start, end, step = slice_range(op, total, first)
    if step != 1:
        return replace(independent([read], [result], (dim,), linear=True), structural=True)
    part, everything = Part(start, end - start), Part(0, total)
    return Chunks(dim, (part,), (everything,)) if backward else Chunks(dim, (everything,), (part,))


def _one_dim_less(name: str, op: Op, reads: Shapes, results: Shapes) -> Letters:
    """One side has a dim that the other has not, and needs it whole."""
    longer = reads[0] if name in ("select", "unbind") else results[0]
    position = {"select": 1, "unbind": 1, "stack": 1, "select_backward": 2}[name]
    (dim,) = named_dims(argument(op, position, "dim", 0), len(longer))
    letters: Dims = tuple(None if at == dim else letter for at, letter in enumerate(alphabet(len(longer))))
    short = tuple(letter for at, letter in enumerate(letters) if at != dim)
    backwards = name in ("stack", "select_backward")
    reads_, results_ = ((short,) * len(reads), (letters,)) if backwards else ((letters,), (short,) * len(results))
    linear = (tuple(range(len(reads))),)
    return Letters(reads_, results_, linear=linear, structural=name != "select_backward", carries=True)
