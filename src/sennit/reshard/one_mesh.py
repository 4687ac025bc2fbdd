"""Steps on one mesh of prime axes, between even layouts: the normal form of `normal_form.py`, and the direct exchange.

    source ── slice ── reduce_scatter ── all_reduce ── flat ── all_gather ── partial ── target

The flat step is one all_to_all or one permute where it can be, else an exchange of pieces of equal size. Pending sums
are resolved before anything grows: first on the axes that the target splits (reduce_scatter), then the rest on what is
then smaller (all_reduce).
"""

from __future__ import annotations

from sennit.ir.exchange import Count, traffic
from sennit.ir.layout import Entry, Layout, Split
from sennit.reshard.ends import Ends, become_partial, changed_axes, common_place, fits, split_places
from sennit.reshard.normal_form import Digits, NormalForm, Place, Problem
from sennit.reshard.redistribution import Step, StepKind

__all__ = ["direct_steps", "normal_steps", "problem_of"]


def problem_of(ends: Ends) -> Problem:
    mesh = ends.source.mesh
    return Problem(
        shape=ends.source.shape,
        sizes=tuple(axis.size for axis in mesh.axes),
        source=split_places(ends.source),
        target=split_places(ends.wanted),
        fixed=frozenset(mesh.index(name) for name in ends.kept),
    )


def normal_steps(ends: Ends, problem: Problem, form: NormalForm, count: Count = traffic) -> tuple[Step, ...]:
    """The normal form as steps."""
    mesh, source = ends.source.mesh, ends.source
    sliced, ungathered = dict(form.sliced), dict(form.ungathered)
    _share_reductions(problem, sliced, ungathered, [mesh.index(name) for name in ends.resolved])
    form = NormalForm(sliced, ungathered, form.searched)
    after_flat = _with_digits(source, ends, ungathered)
    before_flat = _with_digits(source, ends, sliced)
    entries: dict[str, Entry | None] = dict(source.entries)
    steps: list[Step] = []

    def change(kind: StepKind, axes: list[str], result: Layout) -> None:
        if axes:
            steps.append(Step(kind, tuple(axes), steps[-1].result if steps else source, result))

    free = [name for name, _ in before_flat.entries if source.entry(name) is None]
    entries.update({name: before_flat.entry(name) for name in free})
    change(StepKind.SLICE, free, Layout.make(mesh, source.shape, entries))
    scattered = [name for name in ends.resolved if before_flat.entry(name) is not None]
    entries.update({name: before_flat.entry(name) for name in scattered})
    change(StepKind.REDUCE_SCATTER, scattered, Layout.make(mesh, source.shape, entries))
    change(StepKind.ALL_REDUCE, [name for name in ends.resolved if name not in scattered], before_flat)
    moved = [name for name in mesh.names if before_flat.entry(name) != after_flat.entry(name)]
    if moved:
        change(_flat_kind(problem, form, before_flat, after_flat, count), moved, after_flat)
    gathered = [name for name, _ in after_flat.entries if ends.wanted.entry(name) is None]
    change(StepKind.ALL_GATHER, gathered, ends.wanted)
    become_partial(steps, ends)
    return tuple(steps)


def _with_digits(source: Layout, ends: Ends, digits: Digits) -> Layout:
    names = source.mesh.names
    entries: dict[str, Entry | None] = {names[axis]: Split(*place) for axis, place in digits.items()}
    entries.update({name: source.entry(name) for name in ends.kept})
    return Layout.make(source.mesh, source.shape, entries)


def _share_reductions(
    problem: Problem, sliced: dict[int, Place], ungathered: dict[int, Place], pending: list[int]
) -> None:
    """Where something is left to all_reduce, let replicas reduce a slice each, and gather after; where a gather follows
    anyway, let the all_reduce be a reduce_scatter whose gather is merged with it.
    """
    left = [axis for axis in pending if axis not in sliced]
    if not left:
        return
    idle = [
        axis
        for axis, size in enumerate(problem.sizes)
        if size > 1 and axis not in {*sliced, *ungathered, *problem.fixed, *pending}
    ]
    for axis in idle:
        _take_common_digit(problem, axis, sliced, ungathered, axis)
    if sliced == ungathered == dict(problem.target):
        return  # nothing follows: an all_reduce it is
    for axis in left:
        end = _end_of_path(problem, axis, sliced, ungathered)
        if end is not None and end not in problem.fixed:
            _take_common_digit(problem, axis, sliced, ungathered, end)


def _end_of_path(problem: Problem, axis: int, sliced: Digits, ungathered: Digits) -> int | None:
    """The axis that is free in the target at the other end of the path (`normal_form.py`) that begins with a pending
    axis.
    """
    holders = {place: holder for holder, place in sliced.items()}
    start = axis
    while axis in ungathered:
        following = holders.get(ungathered[axis])
        if following is None or problem.sizes[following] != problem.sizes[start]:
            return None
        axis = following
    return axis


def _take_common_digit(
    problem: Problem, axis: int, sliced: dict[int, Place], ungathered: dict[int, Place], after: int
) -> None:
    """Split the most significant digit that is local in both layouts and that the axis divides: by `axis` before the
    flat step and by `after` after it.
    """
    place = common_place(problem.shape, problem.sizes, problem.sizes[axis], (sliced, ungathered))
    if place is not None:
        sliced[axis] = ungathered[after] = place


def _flat_kind(problem: Problem, form: NormalForm, before: Layout, after: Layout, count: Count) -> StepKind:
    """An all_to_all where each digit that an axis moves to is local before; a permute where each piece comes whole."""
    sliced, ungathered = form.sliced, form.ungathered
    moved = {axis: place for axis, place in ungathered.items() if sliced.get(axis) != place}
    if sliced.keys() == ungathered.keys() and all(
        fits(sliced, problem.sizes, dim, stride, problem.sizes[axis]) for axis, (dim, stride) in moved.items()
    ):
        return StepKind.ALL_TO_ALL
    return StepKind.PERMUTE if count(before, after).whole else StepKind.EXCHANGE


def direct_steps(ends: Ends, normal: tuple[Step, ...]) -> tuple[Step, ...]:
    """One exchange; where sums are pending, after the reductions of the normal form."""
    steps: list[Step] = []
    if ends.resolved:
        last = max(i for i, s in enumerate(normal) if s.kind in (StepKind.REDUCE_SCATTER, StepKind.ALL_REDUCE))
        steps = list(normal[: last + 1])
    here = steps[-1].result if steps else ends.source
    if here != ends.wanted:
        steps.append(Step(StepKind.EXCHANGE, changed_axes(here, ends.wanted), here, ends.wanted))
    become_partial(steps, ends)
    return tuple(steps)
