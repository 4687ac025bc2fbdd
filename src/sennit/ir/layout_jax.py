"""Layouts as JAX partition specs, and back.

A `PartitionSpec` names, per dim, the axes that split it, major to minor; the dim is cut into as many equal blocks as
the axes have coordinates together. That is the plain block layout (`Layout.block`), so a layout has a partition spec if
and only if, in every dim, the strides of its digits are the strides of plain blocks and the size is a multiple of their
number. What a spec cannot say is refused with the reason:

- a strided split: the digits of a spec are the most significant ones, with nothing local above them;
- an uneven split: JAX itself refuses to place such an array;
- a split or a pending reduction in time;
- a pending reduction other than a sum. A pending sum is `unreduced={axis}`, which JAX places only on meshes whose axes
  are of the `Explicit` type, and which versions of JAX before it do not have.

An axis in `reduced` reads as replicated: that is what the values are. The word is about the gradient.

This file needs JAX, which sennit does not install by itself: `pip install "sennit[jax]"`.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from sennit.errors import LayoutError
from sennit.ir.layout import Layout, Reduction, block_strides
from sennit.ir.mesh import AxisKind, Mesh

try:
    from jax.sharding import PartitionSpec
except ImportError as missing:
    raise ImportError('sennit.ir.layout_jax needs JAX: pip install "sennit[jax]"') from missing

__all__ = ["from_partition_spec", "to_partition_spec"]


def to_partition_spec(layout: Layout) -> PartitionSpec:
    """The spec of a layout, one entry per dim. The axes of the jax mesh are the space axes, under the same names."""
    where = _where(layout.mesh, layout.shape)
    for name, _ in layout.entries:
        if layout.mesh.axis(name).kind is AxisKind.TIME:
            raise LayoutError(
                f"axis {name!r} of layout {layout} is a time axis, and a PartitionSpec knows space alone",
                where=where,
                fix=f"convert the layout of one pass: the same entries without {name!r}, and the shape that one pass sees",
            )
    dims = [_partition(layout, dim) for dim in range(len(layout.shape))]
    for name, op in layout.pending:
        if op is not Reduction.SUM:
            raise LayoutError(
                f"axis {name!r} of layout {layout} has a pending {op.value}, and a PartitionSpec has pending sums alone",
                where=where,
                fix=f"reduce over {name!r} first",
            )
    return _spec(dims, frozenset(name for name, _ in layout.pending), where)


def from_partition_spec(mesh: Mesh, shape: Sequence[int], spec: PartitionSpec) -> Layout:
    """The layout of an array of global `shape` under a spec that names space axes of `mesh`."""
    where = f"{spec} for {_where(mesh, shape)}"
    # a spec with unreduced axes refuses to be iterated; older ones have no `partitions`
    partitions: tuple[Any, ...] = spec.partitions if hasattr(spec, "partitions") else tuple(spec)
    if len(partitions) > len(shape):
        raise LayoutError(
            f"a spec with {len(partitions)} entries for an array with {len(shape)} dims",
            where=where,
            fix="give one entry per dim at most",
        )
    dims = {dim: _axes(entry, dim, where) for dim, entry in enumerate(partitions) if entry is not None}
    unreduced: frozenset[str] = getattr(spec, "unreduced", frozenset())
    for name in (*(name for axes in dims.values() for name in axes), *sorted(unreduced)):
        if mesh.axis(name).kind is AxisKind.TIME:
            raise LayoutError(f"axis {name!r} is a time axis", where=where, fix="name space axes in a PartitionSpec")
    for dim, axes in dims.items():
        _check_even(dim, shape[dim], prod(mesh.size(name) for name in axes), axes, where)
    return Layout.block(mesh, shape, dims, dict.fromkeys(sorted(unreduced), Reduction.SUM))


def _where(mesh: Mesh, shape: Sequence[int]) -> str:
    return f"an array of shape {list(shape)} on mesh {mesh}"


def _partition(layout: Layout, dim: int) -> tuple[str, ...] | None:
    """The entry of one dim: its axes, major to minor."""
    digits = layout.digits(dim)
    size, where = layout.shape[dim], _where(layout.mesh, layout.shape)
    if not digits:
        return None
    axes = tuple(digit.axis for digit in digits)
    _check_even(dim, size, prod(digit.size for digit in digits), axes, where)
    for digit, stride in zip(digits, block_strides(size, [digit.size for digit in digits]), strict=True):
        # an axis of size 1 splits nothing, whatever its stride
        if digit.size > 1 and digit.stride != stride:
            raise LayoutError(
                f"axis {digit.axis!r} splits dim {dim} of layout {layout} at stride {digit.stride}; plain blocks over "
                f"{list(axes)} have stride {stride} there, and a PartitionSpec has plain blocks alone",
                where=where,
                fix=f"reshape dim {dim} so that what lies above {digit.axis!r} is a dim of its own, or redistribute "
                "to plain blocks first",
            )
    return axes


def _check_even(dim: int, size: int, count: int, axes: Sequence[str], where: str) -> None:
    if size % count:
        raise LayoutError(
            f"dim {dim} of size {size} does not divide into {count} blocks over {list(axes)}, and JAX places equal "
            "blocks alone",
            where=where,
            fix=f"pad dim {dim} to {-(-size // count) * count}",
        )


def _axes(entry: Any, dim: int, where: str) -> tuple[str, ...]:
    match entry:
        case str():
            return (entry,)
        case tuple():
            return entry
        case _:
            raise LayoutError(
                f"dim {dim} is {entry}: the spec leaves its layout open",
                where=where,
                fix="take the spec of a placed array, or name the axes (None where there are none)",
            )


def _spec(dims: Sequence[tuple[str, ...] | None], unreduced: frozenset[str], where: str) -> PartitionSpec:
    make: Any = PartitionSpec  # whose constructor has no types
    try:
        spec: PartitionSpec = make(*dims, unreduced=unreduced) if unreduced else make(*dims)
    except TypeError as missing:
        raise LayoutError(
            f"axes {sorted(unreduced)} have a pending sum, and this version of JAX has no `unreduced` in PartitionSpec",
            where=where,
            fix="reduce over these axes first, or install a newer JAX",
        ) from missing
    return spec
