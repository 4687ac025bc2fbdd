"""Plan a redistribution: candidates, their certificates, and the choice.

    source ── slice ── reduce_scatter ── all_reduce ── flat ── all_gather ── partial ── target      on one mesh, even
    source ── all_reduce ── exchange ── partial ── target                                          on one mesh, uneven
    source ── reduce_scatter | all_reduce ── exchange ── all_gather ── partial ── target            to another mesh

Any of these steps may be absent. `normal_form.py` has the mathematics of the first line: why it never holds a piece larger
than those of source and target, and when it receives the minimum. The flat step is one all_to_all or one permute where it can
be, else an exchange of pieces of equal size.

**Pending sums** are resolved before anything grows: first on the axes that the target splits (reduce_scatter), then the rest
on what is then smaller (all_reduce). Where a gather follows anyway, an all_reduce is a reduce_scatter whose gather is merged
into it; and replicas share the work of an all_reduce (each reduces its own slice).

**Another mesh.** A mesh over the same devices whose axes refine to the same primes is the same mesh by other names. Else an
exchange crosses over. Replicas in the target receive 1/r each and gather on their own mesh, so that every element leaves the
source's devices once.

**Candidates**, the cheapest in predicted seconds wins, ties by the order of `Candidate`:

| candidate | mode | |
|---|---|---|
| nothing | any | every device has its piece |
| constructive | collective | the normal form, first slices that are possible |
| search | collective | the normal form with the largest overlap, where digits are misaligned |
| direct | direct | one exchange of regions: receives the minimum, in one message from each holder |
| streamed | any, with a budget | the direct exchange in parts, each staged within the budget |

A plan is a pure function of its arguments: every rank makes the same one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from sennit.cluster import Cluster
from sennit.errors import LayoutError
from sennit.ir.layout import Entry, Layout, Pending, Reduction, Split
from sennit.ir.mesh import Mesh
from sennit.reshard.certificate import certify, least_received
from sennit.reshard.exchange import traffic
from sennit.reshard.normal_form import Digits, NormalForm, Place, Problem, constructive, search
from sennit.reshard.redistribution import Candidate, Redistribution, Step, StepKind
from sennit.reshard.step_cost import step_cost
from sennit.reshard.stream import stream
from sennit.reshard.timing import ClusterCost, LinkCost, Timing

__all__ = ["Mode", "plan"]


class Mode(Enum):
    """Which candidates are allowed: all, those in normal form, or the point-to-point exchange."""

    AUTO = "auto"
    COLLECTIVE = "collective"
    DIRECT = "direct"


def plan(
    source: Layout,
    target: Layout,
    *,
    itemsize: int = 4,
    budget: int | None = None,
    cluster: Cluster | None = None,
    mode: Mode = Mode.AUTO,
    timing: Timing | None = None,
) -> Redistribution:
    """The cheapest steps from `source` to `target`. `itemsize` is that of an element in bytes; `budget` the bytes that a
    device may use beside its pieces of source and target. Time is that of `cluster`; of `timing` where it is given (calibrated,
    say); else of `LinkCost()`."""
    _check(source, target)
    if timing is None:
        timing = LinkCost() if cluster is None else _timing(cluster, source, target)
    have, need = _without_trivial(source.refined()), _without_trivial(target.refined())
    if _same_by_other_names(have.mesh, need.mesh):
        names = dict(zip(need.mesh.names, have.mesh.names, strict=True))
        need = Layout(have.mesh, need.shape, tuple((names[name], entry) for name, entry in need.entries))
    found: list[tuple[Candidate, tuple[Step, ...]]] = []
    if have == need:
        found.append((Candidate.NOTHING, ()))
    elif have.mesh == need.mesh:
        found += _on_one_mesh(have, need, mode)
    else:
        found += _to_another_mesh(have, need, mode)
    if budget is not None:
        found = _within_budget(found, have, need, budget, itemsize)
    bounds = (least_received(have, need), max(have.local_elements(), need.local_elements()))
    devices = len(target.mesh.devices)
    certified = [
        (certify(candidate, steps, bounds, devices=devices, itemsize=itemsize, timing=timing), steps)
        for candidate, steps in found
    ]
    order = list(Candidate)
    certified.sort(key=lambda pair: (pair[0].seconds, order.index(pair[0].candidate)))
    best, steps = certified[0]
    return Redistribution(source, target, steps, best, tuple(certificate for certificate, _ in certified[1:]))


def _within_budget(
    found: Sequence[tuple[Candidate, tuple[Step, ...]]], source: Layout, target: Layout, budget: int, itemsize: int
) -> list[tuple[Candidate, tuple[Step, ...]]]:
    """The candidates that stage no more than the budget; and those that do, with each such step as an exchange in parts. A
    reduce_scatter that stages too much is given up for an all_reduce, which works in place."""
    fitting: list[tuple[Candidate, tuple[Step, ...]]] = []
    for candidate, steps in found:
        staged = [step_cost(step).staging * itemsize > budget for step in steps]
        if not any(staged):
            fitting.append((candidate, steps))
            continue
        if any(over and step.kind is StepKind.REDUCE_SCATTER for over, step in zip(staged, steps, strict=True)):
            steps = _reduce_and_exchange(source, target)
            staged = [step.kind is StepKind.EXCHANGE for step in steps]
        parts: list[Step] = []
        for over, step in zip(staged, steps, strict=True):
            parts += stream(step, budget, itemsize) if over else (step,)
        if (Candidate.STREAMED, tuple(parts)) not in fitting:
            fitting.append((Candidate.STREAMED, tuple(parts)))
    return fitting


# ---- what can be planned ---------------------------------------------------------------------------------------------


def _check(source: Layout, target: Layout) -> None:
    if source.shape != target.shape:
        raise LayoutError(
            f"the source has shape {list(source.shape)} and the target {list(target.shape)}",
            fix="a redistribution moves an array as it is: use one shape",
        )
    for role, layout in (("source", source), ("target", target)):
        if layout.mesh.time:
            raise LayoutError(
                f"the mesh of the {role} has the time axes {[axis.name for axis in layout.mesh.time]}",
                where=f"layout {layout} on mesh {layout.mesh}",
                fix="redistribute in space: use mesh.in_space()",
            )
        ops = sorted({op.value for _, op in layout.pending})
        if len(ops) > 1:
            raise LayoutError(
                f"the {role} mixes the reductions {' and '.join(ops)}, whose order would matter",
                where=f"layout {layout} on mesh {layout.mesh}",
                fix="resolve one of them first",
            )
    kept = {name for name, _ in source.pending} & {name for name, _ in target.pending}
    for name in sorted(kept):
        if source.mesh == target.mesh and source.entry(name) != target.entry(name):
            raise LayoutError(
                f"axis {name!r} is pending {_op(source, name).value} in the source and {_op(target, name).value} in the target",
                where=f"from {source} to {target} on mesh {source.mesh}",
                fix="resolve it first, or keep the reduction",
            )


def _timing(cluster: Cluster, source: Layout, target: Layout) -> Timing:
    cluster.require(
        1 + max(source.mesh.devices + target.mesh.devices), f"from mesh {source.mesh} to mesh {target.mesh}"
    )
    return ClusterCost.of(cluster)


def _op(layout: Layout, axis: str) -> Reduction:
    return dict(layout.pending)[axis]


def _without_trivial(layout: Layout) -> Layout:
    """Without the entries of axes of size 1, which say nothing."""
    entries = tuple((name, entry) for name, entry in layout.entries if layout.mesh.size(name) > 1)
    return layout if len(entries) == len(layout.entries) else Layout(layout.mesh, layout.shape, entries)


def _same_by_other_names(left: Mesh, right: Mesh) -> bool:
    return left.devices == right.devices and [a.size for a in left.axes] == [a.size for a in right.axes]


# ---- on one mesh -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Ends:
    """Source and target, with what is pending apart: `kept` axes are pending in both, `resolved` in the source
    alone. `wanted` is the target before axes become pending."""

    source: Layout
    wanted: Layout
    target: Layout
    kept: frozenset[str]
    resolved: tuple[str, ...]


def _ends(source: Layout, target: Layout) -> _Ends:
    on_one_mesh = source.mesh == target.mesh
    kept = frozenset(name for name, _ in source.pending if on_one_mesh and isinstance(target.entry(name), Pending))
    wanted = Layout(
        target.mesh,
        target.shape,
        tuple((name, e) for name, e in target.entries if isinstance(e, Split) or name in kept),
    )
    resolved = tuple(name for name, _ in source.pending if name not in kept)
    return _Ends(source, wanted, target, kept, resolved)


def _on_one_mesh(source: Layout, target: Layout, mode: Mode) -> list[tuple[Candidate, tuple[Step, ...]]]:
    ends = _ends(source, target)
    if not (source.is_even and target.is_even):
        return [(Candidate.DIRECT, _reduce_and_exchange(source, target))]
    problem = _problem(ends)
    found: list[tuple[Candidate, tuple[Step, ...]]] = []
    form = search(problem)
    steps = _normal_steps(ends, problem, form)
    if mode is not Mode.DIRECT:
        found.append((Candidate.SEARCH if form.searched else Candidate.CONSTRUCTIVE, steps))
        if form.searched:
            found.append((Candidate.CONSTRUCTIVE, _normal_steps(ends, problem, constructive(problem))))
    if mode is not Mode.COLLECTIVE:
        found.append((Candidate.DIRECT, _direct_steps(ends, steps)))
    return found


def _problem(ends: _Ends) -> Problem:
    mesh = ends.source.mesh
    return Problem(
        shape=ends.source.shape,
        sizes=tuple(axis.size for axis in mesh.axes),
        source=_digits(ends.source),
        target=_digits(ends.wanted),
        fixed=frozenset(mesh.index(name) for name in ends.kept),
    )


def _digits(layout: Layout) -> dict[int, Place]:
    return {layout.mesh.index(n): (e.dim, e.stride) for n, e in layout.entries if isinstance(e, Split)}


def _normal_steps(ends: _Ends, problem: Problem, form: NormalForm) -> tuple[Step, ...]:
    """The normal form as steps."""
    mesh, source = ends.source.mesh, ends.source
    sliced, ungathered = dict(form.sliced), dict(form.ungathered)
    _share_reductions(problem, sliced, ungathered, [mesh.index(name) for name in ends.resolved])
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
        change(_flat_kind(problem, sliced, ungathered, before_flat, after_flat), moved, after_flat)
    gathered = [name for name, _ in after_flat.entries if ends.wanted.entry(name) is None]
    change(StepKind.ALL_GATHER, gathered, ends.wanted)
    _become_partial(steps, ends)
    return tuple(steps)


def _become_partial(steps: list[Step], ends: _Ends) -> None:
    axes = tuple(name for name in ends.target.mesh.names if ends.target.entry(name) != ends.wanted.entry(name))
    if axes:
        steps.append(Step(StepKind.PARTIAL, axes, ends.wanted, ends.target))


def _with_digits(source: Layout, ends: _Ends, digits: Digits) -> Layout:
    names = source.mesh.names
    entries: dict[str, Entry | None] = {names[axis]: Split(*place) for axis, place in digits.items()}
    entries.update({name: source.entry(name) for name in ends.kept})
    return Layout.make(source.mesh, source.shape, entries)


def _share_reductions(
    problem: Problem, sliced: dict[int, Place], ungathered: dict[int, Place], pending: list[int]
) -> None:
    """Where something is left to all_reduce, let replicas reduce a slice each, and gather after; where a gather follows anyway,
    let the all_reduce be a reduce_scatter whose gather is merged with it."""
    left = [axis for axis in pending if axis not in sliced]
    if not left:
        return
    idle = [
        axis
        for axis, size in enumerate(problem.sizes)
        if size > 1 and axis not in {*sliced, *ungathered, *problem.fixed, *pending}
    ]
    for axis in idle:
        _take_common_digit(problem, axis, sliced, ungathered)
    if sliced != ungathered or ungathered != dict(problem.target):
        for axis in left:
            if axis not in ungathered:
                _take_common_digit(problem, axis, sliced, ungathered)


def _take_common_digit(problem: Problem, axis: int, sliced: dict[int, Place], ungathered: dict[int, Place]) -> None:
    """Split the most significant digit that is local in both layouts and that the axis divides, in both."""
    place = common_place(problem.shape, problem.sizes, problem.sizes[axis], (sliced, ungathered))
    if place is not None:
        sliced[axis] = ungathered[axis] = place


def common_place(
    shape: tuple[int, ...], sizes: tuple[int, ...], size: int, layouts: tuple[Digits, ...]
) -> Place | None:
    """A dim and stride where an axis of `size` can split every one of the layouts; None where there is none."""
    for dim, length in enumerate(shape):
        tops = {length} | {stride for digits in layouts for there, stride in digits.values() if there == dim}
        for top in sorted(tops, reverse=True):
            if top % size or length % top:
                continue
            if all(_fits(digits, sizes, dim, top // size, size) for digits in layouts):
                return dim, top // size
    return None


def _fits(digits: Digits, sizes: tuple[int, ...], dim: int, stride: int, size: int) -> bool:
    for axis, (there, other) in digits.items():
        if there == dim and sizes[axis] > 1:
            high, low, width = (other, stride, size) if other > stride else (stride, other, sizes[axis])
            if high == low or high % (low * width):
                return False
    return True


def _flat_kind(problem: Problem, sliced: Digits, ungathered: Digits, before: Layout, after: Layout) -> StepKind:
    """An all_to_all where each digit that an axis moves to is local before; a permute where each piece comes whole."""
    moved = {axis: place for axis, place in ungathered.items() if sliced.get(axis) != place}
    if all(_fits(sliced, problem.sizes, dim, stride, problem.sizes[axis]) for axis, (dim, stride) in moved.items()):
        return StepKind.ALL_TO_ALL
    return StepKind.PERMUTE if traffic(before, after).whole else StepKind.EXCHANGE


def _direct_steps(ends: _Ends, normal: tuple[Step, ...]) -> tuple[Step, ...]:
    """One exchange; where sums are pending, after the reductions of the normal form."""
    steps: list[Step] = []
    if ends.resolved:
        last = max(i for i, s in enumerate(normal) if s.kind in (StepKind.REDUCE_SCATTER, StepKind.ALL_REDUCE))
        steps = list(normal[: last + 1])
    here = steps[-1].result if steps else ends.source
    if here != ends.wanted:
        steps.append(Step(StepKind.EXCHANGE, _changed(here, ends.wanted), here, ends.wanted))
    _become_partial(steps, ends)
    return tuple(steps)


def _changed(source: Layout, result: Layout) -> tuple[str, ...]:
    """The axes that change; none are named between two meshes."""
    if source.mesh != result.mesh:
        return ()
    return tuple(name for name in source.mesh.names if source.entry(name) != result.entry(name))


def _reduce_and_exchange(source: Layout, target: Layout) -> tuple[Step, ...]:
    """What works for every two layouts: pieces of one group have one shape where they are pending, so an all_reduce needs no
    even sizes, and neither does an exchange."""
    ends = _ends(source, target)
    steps: list[Step] = []
    here = source
    if ends.resolved:
        here = Layout.make(here.mesh, here.shape, {n: e for n, e in here.entries if n not in ends.resolved})
        steps.append(Step(StepKind.ALL_REDUCE, ends.resolved, source, here))
    if here != ends.wanted:
        steps.append(Step(StepKind.EXCHANGE, _changed(here, ends.wanted), here, ends.wanted))
    _become_partial(steps, ends)
    return tuple(steps)


# ---- to another mesh -------------------------------------------------------------------------------------------------


def _to_another_mesh(source: Layout, target: Layout, mode: Mode) -> list[tuple[Candidate, tuple[Step, ...]]]:
    steps: list[Step] = []
    ends = _ends(source, target)
    here, wanted = _resolve(source, steps) if ends.resolved else source, ends.wanted
    spread = _spread(wanted)
    found: list[tuple[Candidate, tuple[Step, ...]]] = []
    if mode is not Mode.DIRECT and spread != wanted:
        gathered = tuple(name for name in wanted.mesh.names if spread.entry(name) != wanted.entry(name))
        shared = [*steps, Step(StepKind.EXCHANGE, (), here, spread)]
        shared.append(Step(StepKind.ALL_GATHER, gathered, spread, wanted))
        _become_partial(shared, ends)
        found.append((Candidate.CONSTRUCTIVE, tuple(shared)))
    if mode is not Mode.COLLECTIVE or not found:
        straight = [*steps, Step(StepKind.EXCHANGE, (), here, wanted)]
        _become_partial(straight, ends)
        found.append((Candidate.DIRECT, tuple(straight)))
    return found


def _resolve(source: Layout, steps: list[Step]) -> Layout:
    """Reduce on the source's own mesh: scattered over its devices where a digit divides, else to all of them."""
    here = source
    for kind in (StepKind.REDUCE_SCATTER, StepKind.ALL_REDUCE):
        axes = [name for name, _ in here.pending]
        result = _spread(here, axes) if kind is StepKind.REDUCE_SCATTER else here
        if kind is StepKind.ALL_REDUCE:
            result = Layout.make(here.mesh, here.shape, {n: e for n, e in here.entries if n not in axes})
        taken = tuple(name for name in axes if not isinstance(result.entry(name), Pending))
        if taken:
            steps.append(Step(kind, taken, here, result))
            here = result
    return here


def _spread(layout: Layout, axes: list[str] | None = None) -> Layout:
    """The layout with these axes (else all that replicate) on digits that they divide, where there are such."""
    if not layout.is_even:
        return layout
    mesh = layout.mesh
    sizes = tuple(axis.size for axis in mesh.axes)
    digits = _digits(layout)
    for name in [name for name in mesh.names if layout.entry(name) is None] if axes is None else axes:
        index = mesh.index(name)
        place = common_place(layout.shape, sizes, sizes[index], (digits,)) if sizes[index] > 1 else None
        if place is not None:
            digits[index] = place
            layout = layout.with_entry(name, Split(*place))
    return layout
