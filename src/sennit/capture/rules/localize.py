"""Arguments that name sizes or positions, for local pieces.

`localize(op, shapes)` gives the arguments for pieces whose results have these shapes. Most operators keep theirs; those
that say how large a result is (views, fills, derivatives of slices), where a part begins, or how many groups there are,
get those of the piece. It is one function of the result shapes, so every caller (lowering, the proof, certification)
means the same.

Nothing here is trusted: many operators run without complaint on global sizes (`slice_backward`, `select_backward`,
`new_zeros`, `embedding_dense_backward`) and give a wrong shape. `shape_check.py` runs each call on tensors without data
and compares.
"""

from __future__ import annotations

from collections.abc import Sequence

from sennit.capture.rules.letters import argument, named_dims
from sennit.capture.rules.rule import Strategy
from sennit.capture.rules.table_shape import slice_range
from sennit.ir.graph import Arg, Op

__all__ = ["local_kind", "localize"]

Call = tuple[tuple[Arg, ...], tuple[tuple[str, Arg], ...]]


def local_kind(op: Op, strategies: Sequence[Strategy]) -> str:
    """The kind of the step that stands for an operator: its own, or the local form that one of its strategies names."""
    forms = {strategy.form for strategy in strategies if strategy.form is not None}
    assert len(forms) <= 1, (op.describe(), forms)  # the table gives an operator one form
    return f"sennit.{forms.pop()}" if forms else op.kind


def localize(op: Op, results: Sequence[tuple[int, ...]]) -> Call:
    """The arguments for local pieces whose results have these shapes."""
    args = list(op.args)
    match op.kind.split(".")[1]:
        case "view" | "_unsafe_view" | "reshape" | "expand" | "new_zeros" | "new_ones" | "new_full" | "new_empty":
            args[1] = results[0]
        case "slice_backward" | "select_backward" | "unfold_backward":
            args[1] = results[0]
            if op.kind == "aten.slice_backward.default":
                _slice(args, op, results[0], 2)
        case "slice":
            _slice(args, op, results[0], 1)
        case "ones" | "zeros" | "full" | "empty":
            args[0] = results[0]
        case "split_with_sizes":
            (dim,) = named_dims(argument(op, 2, "dim", 0), len(results[0]))
            args[1] = tuple(shape[dim] for shape in results)
        case "convolution":
            args[8] = _groups(op, op.args[8], results[0][1], op.results[0].type.shape[1])
        case "convolution_backward":
            _convolution_backward(args, op, results)
        case "native_group_norm":
            args[3] = results[0][0]
        case "native_group_norm_backward" if op.args[-1][0]:  # type: ignore[index]
            args[5] = results[0][0]
        case _:
            pass
    return tuple(args), op.kwargs


def _slice(args: list[Arg], op: Op, local: tuple[int, ...], first: int) -> None:
    """Where the sliced dim is split, its digits lie below the edges: begin and end shrink alike."""
    whole = op.results[0].type.shape
    (dim,) = named_dims(argument(op, first, "dim", 0), len(whole))
    if local[dim] == whole[dim] or len(args) < first + 3:
        return
    parts = whole[dim] // local[dim]
    total = whole[dim] if first == 2 else 1 << 62  # a slice's own end is bounded by what it reads
    start, end, _ = slice_range(op, total, first)
    if first == 1:
        end = start + whole[dim]
    args[first + 1], args[first + 2] = start // parts, end // parts


def _groups(op: Op, groups: Arg, local: int, whole: int) -> Arg:
    """With one group per channel, a piece has as many groups as channels."""
    return groups if groups == 1 or not isinstance(groups, int) else groups * local // whole


def _convolution_backward(args: list[Arg], op: Op, results: Sequence[tuple[int, ...]]) -> None:
    mask = op.args[10]
    assert isinstance(mask, tuple)
    shapes = iter(zip(results, [value.type.shape for value in op.results], strict=True))
    image, weight, bias = (next(shapes) if wanted else None for wanted in mask)
    if bias is not None:
        args[3] = bias[0]
    for found, dim in ((image, 1), (weight, 0)):
        if found is not None:
            args[9] = _groups(op, op.args[9], found[0][dim], found[1][dim])
            return
