"""The small patterns that a written attention is made of: operands that were flattened and scaled, products, and how a
result leaves.

Each function goes over a chain of steps, one way or the other, and gives None where a step is another one than it
should be.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sennit.ir.dtype import DType
from sennit.ir.graph import Arg, Ref
from sennit.ir.program import Buffer, Compute, reads
from sennit.kernels.lane_code import LaneCode

__all__ = [
    "ADD",
    "CAST",
    "COPY",
    "PERMUTE",
    "PRODUCT",
    "Flat",
    "Operand",
    "Way",
    "before_repeating",
    "find_product",
    "flattened",
    "leaving",
    "operand",
    "operands",
    "product_above",
    "source_of",
]

PRODUCT = "aten.bmm.default"
SCALED = "aten.mul.Scalar"
ADD = "aten.add.Tensor"
CAST = "aten._to_copy.default"
COPY = "aten.clone.default"
EXPAND = "aten.expand.default"
PERMUTE = "aten.permute.default"
UNSQUEEZE = "aten.unsqueeze.default"
VIEWS = ("aten.view.default", "aten._unsafe_view.default")


# ---- how operands come -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Operand:
    """What the model gave for an operand of a product: in the product's type, and, where it was cast to that, before
    the cast.
    """

    name: str
    factor: Arg
    narrow: str | None


def operand(code: LaneCode, flat: str, *, scaled: bool = False, swapped: bool = False) -> Operand | None:
    """What was cast, transposed where `swapped`, multiplied by a number where `scaled`, and flattened."""
    view = code.made_by(flat, *VIEWS)
    if view is None or not _merges_leading(code.shape(reads(view)[0]), code.shape(flat)):
        return None
    name = reads(view)[0]
    while (step := code.made_by(name, COPY, EXPAND)) is not None and code.shape(reads(step)[0]) == code.shape(name):
        name = reads(step)[0]
    factor: Arg = None
    if scaled:
        step = code.made_by(name, SCALED)
        if step is None:
            return None
        name, factor = reads(step)[0], step.args[1]
    if swapped:
        step = code.made_by(name, PERMUTE)
        if step is None or not _swaps(step):
            return None
        name = reads(step)[0]
    cast = code.made_by(name, CAST)
    return Operand(name, factor, reads(cast)[0] if cast is not None else None)


def before_repeating(code: LaneCode, name: str) -> str | None:
    """Heads before each was repeated for the heads of the query that it serves: [b, h, t, d] of [b, h r, t, d]."""
    view = code.made_by(name, *VIEWS)
    copy = code.made_by(reads(view)[0], COPY) if view else None
    expand = code.made_by(reads(copy)[0], EXPAND) if copy else None
    room = code.made_by(reads(expand)[0], UNSQUEEZE) if expand else None
    if expand is None or room is None:
        return None
    found, shape, rows = reads(room)[0], code.shape(name), code.shape(expand.results[0].name)
    is_repeated = (
        len(shape) == 4 and len(rows) == 5 and room.args[1] == 2 and code.shape(found) == (*rows[:2], *rows[3:])
    )
    return found if is_repeated and shape == (rows[0], rows[1] * rows[2], *rows[3:]) else None


def _merges_leading(shape: tuple[int, ...], flat: tuple[int, ...]) -> bool:
    """Whether a view makes one dim of all but the last two."""
    return len(flat) == 3 and len(shape) > 3 and shape[-2:] == flat[-2:]


def _swaps(step: Compute) -> bool:
    """Whether a permutation swaps the last two dims and leaves the others."""
    order = step.args[1]
    return isinstance(order, tuple) and order == (*range(len(order) - 2), len(order) - 1, len(order) - 2)


# ---- products --------------------------------------------------------------------------------------------------------


Source = tuple[str, bool]  # a buffer, and whether it is read transposed


def source_of(code: LaneCode, name: str) -> Source:
    step = code.made_by(name, PERMUTE)
    return (reads(step)[0], True) if step is not None and _swaps(step) else (name, False)


def find_product(code: LaneCode, left: Source, right: Source) -> int | None:
    """Where the one product of these operands is computed."""
    name, turned = left
    names = [step.results[0].name for _, step in code.reading(name, PERMUTE) if _swaps(step)] if turned else [name]
    found = [
        position
        for item in names
        for position, step in code.reading(item, PRODUCT)
        if operands(step)[0] == item and source_of(code, operands(step)[1]) == right
    ]
    return found[0] if len(found) == 1 else None


def product_above(code: LaneCode, name: str) -> tuple[int, int] | None:
    """The product that an array is a view of, its leading dims taken apart again; the positions of both."""
    view = code.made_by(name, *VIEWS)
    if view is None or not _merges_leading(code.shape(name), code.shape(reads(view)[0])):
        return None
    product = code.made_by(reads(view)[0], PRODUCT)
    return (code.maker[reads(view)[0]], code.maker[name]) if product is not None else None


@dataclass(frozen=True, slots=True)
class Flat:
    """An array with its leading dims merged, and the steps that made it so."""

    name: str
    steps: tuple[int, ...]


def flattened(code: LaneCode, name: str) -> Flat | None:
    """The one flat form of an array."""
    for position, step in code.reading(name, EXPAND, *VIEWS):
        result = step.results[0].name
        if step.kind == EXPAND and code.shape(result) == code.shape(name):
            below = flattened(code, result)
            return Flat(below.name, (position, *below.steps)) if below is not None else None
        if step.kind != EXPAND and _merges_leading(code.shape(name), code.shape(result)):
            return Flat(result, (position,))
    return None


def operands(step: Compute) -> tuple[str, str]:
    """The first two arguments, both arrays."""
    left, right = step.args[:2]
    assert isinstance(left, Ref)
    assert isinstance(right, Ref)
    return left.name, right.name


# ---- how results leave -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Way:
    """What happens to a product before the model takes it: leading dims apart; times `factor`; transposed; cast; heads
    that share one summed.
    """

    factor: Arg = None
    swapped: bool = False
    cast: DType | None = None
    grouped: bool = False


def leaving(code: LaneCode, product: int, way: Way) -> tuple[Buffer, frozenset[int]] | None:
    """What the model takes of a product, and the steps up to there. Each must be the only reader of the one before."""
    made = code.compute(product)
    assert made is not None
    flat = made.results[0].name
    wanted: list[Callable[[Compute], bool]] = [
        lambda step: step.kind in VIEWS and _merges_leading(code.shape(step.results[0].name), code.shape(flat))
    ]
    if way.factor is not None:
        wanted.append(lambda step: step.kind == SCALED and step.args[1] == way.factor)
    if way.swapped:
        wanted.append(lambda step: step.kind == PERMUTE and _swaps(step))
    if way.cast is not None:
        wanted.append(lambda step: step.kind == CAST and step.results[0].dtype is way.cast)
    if way.grouped:
        wanted.append(lambda step: step.kind in VIEWS and _takes_heads_apart(code, step))
        wanted.append(lambda step: step.kind == "aten.sum.dim_IntList" and step.args[1:] == ((2,), True))
        wanted.append(lambda step: step.kind == "aten.squeeze.dims" and step.args[1] == (2,))
    name, steps = flat, {product}
    for is_next in wanted:
        reader = code.only_reader(name)
        step = code.compute(reader) if reader is not None else None
        if reader is None or step is None or not is_next(step):
            return None
        steps.add(reader)
        name = step.results[0].name
    return code.buffers[name], frozenset(steps)


def _takes_heads_apart(code: LaneCode, step: Compute) -> bool:
    whole, apart = code.shape(reads(step)[0]), code.shape(step.results[0].name)
    return len(whole) == 4 and len(apart) == 5 and apart[0] == whole[0] and apart[3:] == whole[2:]
