"""Layouts as DTensor placements, and back.

**What DTensor does.** A DTensor has one placement per mesh axis. They are applied from left to right to the tensor that
the axes before left on the device, which is g elements long in the dim:

- `Shard(d)` over an axis of size n cuts it into n chunks and gives chunk r to coordinate r;
- `_StridedShard(d, split_factor=k)` cuts it into k chunks, each of these into n, and gives coordinate r the r-th of
  every n, in order: k*n chunks, of which r holds r, r + n, r + 2n, ...;
- `Replicate()` and `Partial(op)` leave it.

**Over factors.** Let k*n divide g and write the index of the tensor that is left as a mixed-radix number. Then
`_StridedShard` takes away the digit of size n that has k values of more significant digits above it, and `Shard` is
k = 1: it takes the most significant digit there is. So the split factor of an axis is the product of the factors of
the dim (`Layout.factors`) that are above its own and are still there when its turn comes: local factors, and factors
of axes later in the mesh. `to_placements` walks the list that way and removes a factor each time; `from_placements`
walks it backwards and finds the stride of the digit that was taken.

**Uneven dims.** Sennit cuts g indices over axes of K coordinates in all into K blocks of ceil(g / K). DTensor cuts once
per axis, the next axis cutting what the one before left. With one axis these agree. With more they agree for some sizes
(7 over 2 x 2) and not for others (9 over 2 x 2 is 3, 2, 2, 2 in DTensor and 3, 3, 3, 0 here). What agrees at every
coordinate converts; the rest is refused (`_check_same_chunks`), because no layout says it.

The j-th placement belongs to the j-th space axis of the mesh. An axis of size 1 splits nothing, and a dim of size 0 has
nothing to split: there a round trip keeps every piece but may change the stride that the text form shows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from torch.distributed.tensor import Partial, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from sennit.errors import LayoutError
from sennit.ir.layout import Digit, Entry, Factor, Layout, Pending, Reduction, Split, block_strides
from sennit.ir.mesh import Axis, AxisKind, Mesh

__all__ = ["from_placements", "to_placements"]


def to_placements(layout: Layout) -> tuple[Placement, ...]:
    """One placement per space axis of the layout's mesh. Refuses an axis that splits or is pending in time."""
    for name, entry in layout.entries:
        if layout.mesh.axis(name).kind is AxisKind.TIME:
            does = f"splits dim {entry.dim}" if isinstance(entry, Split) else f"has a pending {entry.op.value}"
            raise LayoutError(
                f"axis {name!r} of layout {layout} {does} in time, and a DTensor lies in space alone",
                where=_where(layout.mesh, layout.shape),
                fix=f"convert the layout of one pass: the same entries without {name!r}, and the shape that one pass sees",
            )
    shards: dict[str, Placement] = {}
    for dim in range(len(layout.shape)):
        shards |= _shards_of(layout, dim)
    placements: list[Placement] = []
    for axis in layout.mesh.space:
        match layout.entry(axis.name):
            case Split():
                placements.append(shards[axis.name])
            case Pending(op):
                placements.append(Partial("product" if op is Reduction.PROD else op.value))
            case None:
                placements.append(Replicate())
    return tuple(placements)


def from_placements(mesh: Mesh, shape: Sequence[int], placements: Sequence[Placement]) -> Layout:
    """The layout of a DTensor of global `shape`, its DeviceMesh being the space axes of `mesh` in their order."""
    where = _where(mesh, shape)
    if len(placements) != len(mesh.space):
        axes = ", ".join(map(str, mesh.space)) or "none"
        raise LayoutError(
            f"{len(placements)} placements for {len(mesh.space)} space axes ({axes})",
            where=where,
            fix="give one placement per space axis, in the order of the mesh",
        )
    entries: dict[str, Entry] = {}
    shards: dict[int, list[_Shard]] = {}
    for axis, placement in zip(mesh.space, placements, strict=True):
        if isinstance(placement, Shard | _StridedShard):
            # in some versions of torch one class derives from the other, so the split factor is asked for, not the
            # class
            shard = _Shard(axis, int(getattr(placement, "split_factor", 1)))
            shards.setdefault(_checked_dim(placement.dim, shape, axis, where), []).append(shard)
        elif isinstance(placement, Replicate):
            continue
        else:
            entries[axis.name] = Pending(_checked_reduction(placement, axis, where))
    for dim, on_dim in shards.items():
        entries |= _splits_of(dim, shape[dim], on_dim, where)
    return Layout.make(mesh, shape, entries)


@dataclass(frozen=True, slots=True)
class _Shard:
    axis: Axis
    split_factor: int


@dataclass(frozen=True, slots=True)
class _Run:
    """Digits of a dim that no axis has taken: `size` values, the least significant standing at `stride`."""

    size: int
    stride: int


def _where(mesh: Mesh, shape: Sequence[int]) -> str:
    return f"an array of shape {list(shape)} on mesh {mesh}"


# ---- layout to placements --------------------------------------------------------------------------------------------


def _shards_of(layout: Layout, dim: int) -> dict[str, Placement]:
    """The placement of each axis that splits `dim`."""
    size = layout.shape[dim]
    on_dim = [axis for axis in layout.mesh.space if (split := layout.split(axis.name)) and split.dim == dim]
    axes = [axis for axis in on_dim if axis.size > 1]  # the others split nothing
    digits = [digit for digit in layout.digits(dim) if digit.size > 1]
    placements: dict[str, Placement] = {axis.name: Shard(dim) for axis in on_dim}
    if any(size % (digit.stride * digit.size) for digit in digits):
        _check_uneven(layout, dim, axes)
        return placements
    if size == 0:
        return placements
    left = _factors(size, digits)
    for axis in axes:
        place = next(place for place, factor in enumerate(left) if factor.axis == axis.name)
        above = prod(factor.size for factor in left[:place])
        if above > 1:
            placements[axis.name] = _strided(dim, above)
        del left[place]
    return placements


def _factors(size: int, digits: Sequence[Digit]) -> list[Factor]:
    """`Layout.factors` of one even dim, in a layout whose other dims may be uneven."""
    mesh = Mesh.make({digit.axis: digit.size for digit in digits})
    return list(Layout.make(mesh, (size,), {digit.axis: Split(0, digit.stride) for digit in digits}).factors(0))


def _strided(dim: int, split_factor: int) -> Placement:
    try:
        return _StridedShard(dim, split_factor=split_factor)
    except TypeError:  # torch is moving to the shorter name
        return _StridedShard(dim, sf=split_factor)


def _check_uneven(layout: Layout, dim: int, axes: Sequence[Axis]) -> None:
    """Refuse an uneven dim that is not in plain blocks over `axes`, which are in the order of the mesh."""
    size, where = layout.shape[dim], _where(layout.mesh, layout.shape)
    plain = block_strides(size, [axis.size for axis in axes])
    if any(layout.entry(axis.name) != Split(dim, stride) for axis, stride in zip(axes, plain, strict=True)):
        raise LayoutError(
            f"dim {dim} of layout {layout} is uneven and not in plain blocks over {[axis.name for axis in axes]}: "
            "DTensor has no such placement",
            where=where,
            fix=f"pad dim {dim} until every stride times axis size divides it, or split it in plain blocks, the first "
            "axis of the mesh being the major one",
        )
    _check_same_chunks(dim, size, axes, where)


# ---- placements to layout --------------------------------------------------------------------------------------------


def _splits_of(dim: int, size: int, shards: Sequence[_Shard], where: str) -> dict[str, Entry]:
    """The entries of the axes that shard one dim, given in the order of the mesh."""
    axes = [shard.axis for shard in shards]
    plain = all(shard.split_factor == 1 for shard in shards)
    if size == 0 or (plain and size % prod(axis.size for axis in axes)):
        _check_same_chunks(dim, size, axes, where)
        strides = block_strides(size, [axis.size for axis in axes])
        return {axis.name: Split(dim, stride) for axis, stride in zip(axes, strides, strict=True)}
    entries: dict[str, Entry] = {}
    left: list[_Run] = [_Run(size, 1)]
    for shard in shards:
        stride, left = _take_digit(left, shard, dim, where)
        entries[shard.axis.name] = Split(dim, stride)
    return entries


def _take_digit(left: Sequence[_Run], shard: _Shard, dim: int, where: str) -> tuple[int, list[_Run]]:
    """The stride of the digit that a shard takes from the runs that are left, and the runs without it."""
    name, n, k = shard.axis.name, shard.axis.size, shard.split_factor
    length = prod(run.size for run in left)
    if n > 1 and length % (k * n):
        raise LayoutError(
            f"axis {name!r} of size {n} with split factor {k} cuts dim {dim} into {k * n} chunks, and the {length} "
            "indices that the axes before it leave are no multiple of that",
            where=where,
            fix=f"pad dim {dim}, or redistribute to placements that divide it first",
        )
    above = k  # what is still to be skipped
    for place, run in enumerate(left):
        if above % run.size == 0:
            above //= run.size
            continue
        if run.size % (above * n):
            break  # the digit does not begin and end inside this run
        below = run.size // (above * n)
        if n == 1:
            return run.stride * below, list(left)
        parts = (_Run(above, run.stride * below * n), _Run(below, run.stride))
        rest = [*left[:place], *(part for part in parts if part.size > 1), *left[place + 1 :]]
        return run.stride * below, rest
    if n == 1:
        return 1, list(left)  # it splits nothing, and stride 1 overlaps with nothing
    runs = ", ".join(f"{run.size} at stride {run.stride}" for run in left)
    raise LayoutError(
        f"axis {name!r} of size {n} with split factor {k} takes no single digit of dim {dim}: the axes before it leave "
        f"the digits {runs}",
        where=where,
        fix=f"write {name!r} as several smaller axes of the mesh, or redistribute to plain Shard placements first",
    )


def _checked_dim(dim: int, shape: Sequence[int], axis: Axis, where: str) -> int:
    if not -len(shape) <= dim < len(shape):
        raise LayoutError(
            f"the placement of axis {axis.name!r} shards dim {dim} of an array with {len(shape)} dims",
            where=where,
            fix="shard a dim that the array has, or replicate over the axis",
        )
    return dim % len(shape)


def _checked_reduction(placement: Placement, axis: Axis, where: str) -> Reduction:
    # a masked Partial holds a mask beside its values and reduces by both: it derives from Partial and is not one of
    # ours
    if type(placement) is not Partial:
        raise LayoutError(
            f"placement {placement!r} of axis {axis.name!r} has no layout",
            where=where,
            fix="redistribute to Shard, Replicate or a plain Partial first",
        )
    match placement.reduce_op:
        case "sum":
            return Reduction.SUM
        case "max":
            return Reduction.MAX
        case "min":
            return Reduction.MIN
        case "product":
            return Reduction.PROD
        case "avg":
            raise LayoutError(
                f"axis {axis.name!r} has a pending average, and layouts have sums: a mean is a sum of parts scaled once",
                where=where,
                fix=f"divide the local values by {axis.size} and use Partial('sum')",
            )
        case other:
            raise LayoutError(
                f"axis {axis.name!r} has a pending {other!r}",
                where=where,
                fix="reduce it first: layouts know sum, max, min and product",
            )


# ---- uneven dims -----------------------------------------------------------------------------------------------------


def _check_same_chunks(dim: int, size: int, axes: Sequence[Axis], where: str) -> None:
    """Refuse a dim that DTensor's nested chunks and our blocks of ceil(size / K) cut at different places."""
    total = prod(axis.size for axis in axes)
    block = max(1, -(-size // total))
    nested = [(0, size)]
    for axis in axes:
        nested = [chunk for start, stop in nested for chunk in _chunks(start, stop, axis.size)]
    for place, (start, stop) in enumerate(nested):
        ours = (min(place * block, size), min((place + 1) * block, size))
        # two empty pieces are the same piece, wherever they are said to start
        if ours != (start, stop) and (start < stop or ours[0] < ours[1]):
            names = " x ".join(map(str, axes))
            raise LayoutError(
                f"dim {dim} of size {size} over {names} is uneven: piece {place} of {total} is {start}:{stop} in DTensor, "
                f"which cuts once per axis, and {ours[0]}:{ours[1]} in a layout, which cuts into blocks of {block}",
                where=where,
                fix=f"pad dim {dim} to {-(-size // total) * total}, or split it over one axis",
            )


def _chunks(start: int, stop: int, count: int) -> list[tuple[int, int]]:
    """`torch.chunk` on a range, filled up with empty chunks."""
    length = -(-(stop - start) // count)
    return [(min(start + r * length, stop), min(start + (r + 1) * length, stop)) for r in range(count)]
