"""What all plans begin with: the two layouts, what of them is pending, and the places that axes can take."""

from __future__ import annotations

from dataclasses import dataclass

from sennit.ir.layout import Layout, Pending, Split
from sennit.reshard.normal_form import Digits, Place
from sennit.reshard.redistribution import Step, StepKind

__all__ = ["Ends", "become_partial", "changed_axes", "common_place", "fits", "reduce_and_exchange", "split_places"]


@dataclass(frozen=True, slots=True)
class Ends:
    """Source and target, with what is pending apart: `kept` axes are pending in both, `resolved` in the source
    alone. `wanted` is the target before axes become pending."""

    source: Layout
    wanted: Layout
    target: Layout
    kept: frozenset[str]
    resolved: tuple[str, ...]

    @classmethod
    def of(cls, source: Layout, target: Layout) -> Ends:
        on_one_mesh = source.mesh == target.mesh
        kept = frozenset(name for name, _ in source.pending if on_one_mesh and isinstance(target.entry(name), Pending))
        wanted = Layout(
            target.mesh,
            target.shape,
            tuple((name, e) for name, e in target.entries if isinstance(e, Split) or name in kept),
        )
        resolved = tuple(name for name, _ in source.pending if name not in kept)
        return cls(source, wanted, target, kept, resolved)


def split_places(layout: Layout) -> dict[int, Place]:
    return {layout.mesh.index(n): (e.dim, e.stride) for n, e in layout.entries if isinstance(e, Split)}


def become_partial(steps: list[Step], ends: Ends) -> None:
    axes = tuple(name for name in ends.target.mesh.names if ends.target.entry(name) != ends.wanted.entry(name))
    if axes:
        steps.append(Step(StepKind.PARTIAL, axes, ends.wanted, ends.target))


def changed_axes(source: Layout, result: Layout) -> tuple[str, ...]:
    """The axes that change; none are named between two meshes."""
    if source.mesh != result.mesh:
        return ()
    return tuple(name for name in source.mesh.names if source.entry(name) != result.entry(name))


def reduce_and_exchange(ends: Ends) -> tuple[Step, ...]:
    """What works for every two layouts: pieces of one group have one shape where they are pending, so an all_reduce
    needs no even sizes, and neither does an exchange.
    """
    steps: list[Step] = []
    here = ends.source
    if ends.resolved:
        here = Layout.make(here.mesh, here.shape, {n: e for n, e in here.entries if n not in ends.resolved})
        steps.append(Step(StepKind.ALL_REDUCE, ends.resolved, ends.source, here))
    if here != ends.wanted:
        steps.append(Step(StepKind.EXCHANGE, changed_axes(here, ends.wanted), here, ends.wanted))
    become_partial(steps, ends)
    return tuple(steps)


def common_place(
    shape: tuple[int, ...], sizes: tuple[int, ...], size: int, layouts: tuple[Digits, ...]
) -> Place | None:
    """A dim and stride where an axis of `size` can split every one of the layouts; None where there is none."""
    for dim, length in enumerate(shape):
        tops = {length} | {stride for digits in layouts for there, stride in digits.values() if there == dim}
        for top in sorted(tops, reverse=True):
            if top % size or length % top:
                continue
            if all(fits(digits, sizes, dim, top // size, size) for digits in layouts):
                return dim, top // size
    return None


def fits(digits: Digits, sizes: tuple[int, ...], dim: int, stride: int, size: int) -> bool:
    for axis, (there, other) in digits.items():
        if there == dim and sizes[axis] > 1:
            high, low, width = (other, stride, size) if other > stride else (stride, other, sizes[axis])
            if high == low or high % (low * width):
                return False
    return True
