"""Plan a redistribution: candidates, their certificates, and the choice.

    source ── slice ── reduce_scatter ── all_reduce ── flat ── all_gather ── partial ── target      on one mesh, even
    source ── all_reduce ── exchange ── partial ── target                                          on one mesh, uneven
    source ── reduce_scatter ── all_reduce ── exchange ── all_gather ── partial ── target           to another mesh

Any of these steps may be absent. `normal_form.py` has the mathematics of the first line: why it never holds a piece
larger than those of source and target, and when it receives the minimum. `one_mesh.py` and `two_meshes.py` make the
steps.

**Another mesh.** A mesh over the same devices whose axes refine to the same primes is the same mesh by other names.
Else an exchange crosses over.

**Candidates**, the cheapest in predicted seconds wins, then in elements received, then by the order of `Candidate`:

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

from enum import Enum

from sennit.cluster import Cluster
from sennit.errors import LayoutError
from sennit.ir.exchange import Count, Traffic, traffic
from sennit.ir.layout import Layout, Pending
from sennit.ir.mesh import Mesh
from sennit.reshard.certificate import certify, least_received
from sennit.reshard.ends import Ends, reduce_and_exchange
from sennit.reshard.normal_form import constructive, search
from sennit.reshard.one_mesh import direct_steps, normal_steps, problem_of
from sennit.reshard.redistribution import Candidate, Redistribution, Step, StepKind
from sennit.reshard.step_cost import step_cost
from sennit.reshard.stream import stream
from sennit.reshard.timing import ClusterCost, LinkCost, Timing
from sennit.reshard.two_meshes import shared_steps, straight_steps

__all__ = ["Mode", "plan"]

Candidates = list[tuple[Candidate, tuple[Step, ...]]]


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
    """The cheapest steps from `source` to `target`.

    `itemsize` is that of an element in bytes; `budget` the bytes that a device may use beside its pieces of source and
    target. Time is that of `cluster`; of `timing` where it is given (calibrated, say); else of `LinkCost()`.
    """
    _check(source, target)
    if timing is None:
        timing = LinkCost() if cluster is None else _timing(cluster, source, target)
    have, need = _without_trivial(source.refined()), _without_trivial(target.refined())
    if _same_by_other_names(have.mesh, need.mesh):
        names = dict(zip(need.mesh.names, have.mesh.names, strict=True))
        need = Layout(have.mesh, need.shape, tuple((names[name], entry) for name, entry in need.entries))
        _check_kept(have, need)
    counted: dict[tuple[Layout, Layout], Traffic] = {}

    def count(before: Layout, after: Layout) -> Traffic:
        """`traffic`, once for each two layouts: candidates and bounds share many."""
        if (before, after) not in counted:
            counted[before, after] = traffic(before, after)
        return counted[before, after]

    found: Candidates = []
    if have == need:
        found.append((Candidate.NOTHING, ()))
    elif have.mesh == need.mesh:
        found += _on_one_mesh(Ends.of(have, need), mode, count)
    else:
        found += _to_another_mesh(Ends.of(have, need), mode)
    if budget is not None:
        found = _within_budget(found, Ends.of(have, need), budget, itemsize, count)
    bounds = (least_received(have, need, count), max(have.local_elements(), need.local_elements()))
    devices = len(target.mesh.devices)
    certified = [
        (certify(candidate, steps, bounds, devices=devices, itemsize=itemsize, timing=timing, count=count), steps)
        for candidate, steps in found
    ]
    order = list(Candidate)
    certified.sort(key=lambda pair: (pair[0].seconds, pair[0].received, order.index(pair[0].candidate)))
    best, steps = certified[0]
    return Redistribution(source, target, steps, best, tuple(certificate for certificate, _ in certified[1:]))


def _on_one_mesh(ends: Ends, mode: Mode, count: Count) -> Candidates:
    # no digit of an empty dim can be cut
    if not (ends.source.is_even and ends.target.is_even) or 0 in ends.source.shape:
        return [(Candidate.DIRECT, reduce_and_exchange(ends))]
    problem = problem_of(ends)
    if mode is Mode.DIRECT:
        reducing = normal_steps(ends, problem, constructive(problem), count) if ends.resolved else ()
        return [(Candidate.DIRECT, direct_steps(ends, reducing))]
    form = search(problem)
    steps = normal_steps(ends, problem, form, count)
    found = [(Candidate.SEARCH if form.searched else Candidate.CONSTRUCTIVE, steps)]
    if form.searched:
        found.append((Candidate.CONSTRUCTIVE, normal_steps(ends, problem, constructive(problem), count)))
    if mode is Mode.AUTO:
        found.append((Candidate.DIRECT, direct_steps(ends, steps)))
    return found


def _to_another_mesh(ends: Ends, mode: Mode) -> Candidates:
    shared = None if mode is Mode.DIRECT else shared_steps(ends)
    if shared is None:
        return [(Candidate.DIRECT, straight_steps(ends))]
    found = [(Candidate.CONSTRUCTIVE, shared)]
    # between devices that have nothing in common every element crosses once, whatever the links are said to cost
    if mode is Mode.AUTO and set(ends.source.mesh.devices) & set(ends.target.mesh.devices):
        found.append((Candidate.DIRECT, straight_steps(ends)))
    return found


def _within_budget(found: Candidates, ends: Ends, budget: int, itemsize: int, count: Count) -> Candidates:
    """The candidates that stage no more than the budget; and those that do, with each such step as an exchange in
    parts.

    A reduce_scatter that stages too much is given up for an all_reduce, which works in place.
    """
    fitting: Candidates = []
    for candidate, steps in found:
        staged = [step_cost(step, count).staging * itemsize > budget for step in steps]
        if not any(staged):
            fitting.append((candidate, steps))
            continue
        if any(over and step.kind is StepKind.REDUCE_SCATTER for over, step in zip(staged, steps, strict=True)):
            steps = reduce_and_exchange(ends)
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


def _check_kept(source: Layout, target: Layout) -> None:
    """Both on one mesh: what stays pending keeps its reduction."""
    for name, op in source.pending:
        other = target.entry(name)
        if isinstance(other, Pending) and other.op is not op:
            raise LayoutError(
                f"axis {name!r} is pending {op.value} in the source and {other.op.value} in the target",
                where=f"from {source} to {target} on mesh {source.mesh}",
                fix="resolve it first, or keep the reduction",
            )


def _timing(cluster: Cluster, source: Layout, target: Layout) -> Timing:
    cluster.require(
        1 + max(source.mesh.devices + target.mesh.devices), f"from mesh {source.mesh} to mesh {target.mesh}"
    )
    return ClusterCost.of(cluster)


def _without_trivial(layout: Layout) -> Layout:
    """Without the entries of axes of size 1, which say nothing."""
    entries = tuple((name, entry) for name, entry in layout.entries if layout.mesh.size(name) > 1)
    return layout if len(entries) == len(layout.entries) else Layout(layout.mesh, layout.shape, entries)


def _same_by_other_names(left: Mesh, right: Mesh) -> bool:
    return left.devices == right.devices and [a.size for a in left.axes] == [a.size for a in right.axes]
