"""Typing of data movement in a program: which change of layout a step may claim.

Write `-` for an axis on which the layout says nothing. Over its axes, and nowhere else, a step changes

| step | an axis goes | of kind | further |
|---|---|---|---|
| `all_reduce` | pending -> `-` | space | one reduction |
| `all_gather` | split -> `-` | space | |
| `reduce_scatter` | pending -> split | space | one reduction |
| `all_to_all` | split -> another split | space | |
| `sennit.slice` | `-` -> split | space or time | a time axis enters at one coordinate |
| `sennit.partial` | `-` -> pending | space or time | a time axis enters at one coordinate |
| `sennit.accumulate` | pending -> pending, or `-` | time | disjoint times; the union; `-` if and only if all are in |
| `sennit.concat` | split -> `-` | time | the pieces at 0, 1, ..., n-1, in this order |

and keeps the tensor, its type, the mesh, and the entries and times of every other axis. Each change is sound by the
meaning of layouts alone: in a group of devices that agree on the other axes, both sides stand for the same values.

`sennit.take` goes by regions instead, so that its result may lie on another mesh: on every device of the lane the
region of the result, at its times, lies within that of the source. Pending axes are kept, with their sizes, reductions
and times, and every device keeps its coordinates on them: then the devices that hold parts of one piece hold all of
them, each once.

Any other operator computes. Whether it may be split as its buffers claim follows from the operator's rules, which are
not known here; that it does not mix two micro-batches is checked here: all its buffers that a time axis divides lie at
the same coordinates of that axis.
"""

from __future__ import annotations

from collections.abc import Sequence

from sennit.ir.graph import Ref
from sennit.ir.layout import Entry, Pending, Split
from sennit.ir.mesh import AxisKind
from sennit.ir.program import Buffer, Collective, CollectiveKind, Compute
from sennit.ir.program_regions import coordinates_on, first_device_lacking
from sennit.ir.program_site import Site, describe_entry, describe_times

__all__ = ["check_collective", "check_local_move", "check_times_agree", "covered_times"]


def covered_times(buffer: Buffer) -> dict[str, frozenset[int]]:
    """The coordinates that a buffer covers, per time axis; their order means nothing."""
    return {axis: frozenset(covered) for axis, covered in buffer.times}


# ---- collectives -----------------------------------------------------------------------------------------------------


def check_collective(site: Site, step: Collective, source: Buffer) -> None:
    """A collective changes each of its axes, distinct space axes of the mesh, as its row of the table says."""
    result, name = step.result, step.kind.value
    mesh = source.layout.mesh
    if not step.axes or len(set(step.axes)) != len(step.axes):
        raise site.error(f"{name} of %{source.name} over the axes {list(step.axes)}", fix="name each axis once")
    for axis in step.axes:
        if axis not in mesh or mesh.axis(axis).kind is AxisKind.TIME:
            kind = "a time axis" if axis in mesh else "no axis"
            space = ", ".join(str(a) for a in mesh.space) or "none"
            raise site.error(
                f"{name} of %{source.name} of tensor %{source.tensor} runs over {axis!r}, {kind} of its mesh {mesh}",
                fix=f"use the mesh's space axes ({space}); over time use sennit.accumulate or sennit.concat",
            )
    _check_rest(site, name, source, result, step.axes)
    for axis in step.axes:
        before, after = source.layout.entry(axis), result.layout.entry(axis)
        if not _collective_changes(step.kind, before, after):
            raise site.error(
                f"{name} over {axis} cannot turn %{source.name} of tensor %{source.tensor}, "
                f"{describe_entry(before)} over {axis}, into %{result.name}, {describe_entry(after)} over {axis}",
                fix=_remedy(axis, before, after),
            )
    ops = {entry.op for axis in step.axes if isinstance(entry := source.layout.entry(axis), Pending)}
    if len(ops) > 1:
        raise site.error(
            f"{name} of %{source.name} of tensor %{source.tensor} mixes the reductions "
            f"{', '.join(sorted(op.value for op in ops))}",
            fix="reduce over the axes of one reduction at a time: they do not commute",
        )


def _collective_changes(kind: CollectiveKind, before: Entry | None, after: Entry | None) -> bool:
    match kind:
        case CollectiveKind.ALL_REDUCE:
            return isinstance(before, Pending) and after is None
        case CollectiveKind.ALL_GATHER:
            return isinstance(before, Split) and after is None
        case CollectiveKind.REDUCE_SCATTER:
            return isinstance(before, Pending) and isinstance(after, Split)
        case CollectiveKind.ALL_TO_ALL:
            return isinstance(before, Split) and isinstance(after, Split) and before != after


def _remedy(axis: str, before: Entry | None, after: Entry | None) -> str:
    """The step that does make this change of a space axis."""
    match before, after:
        case Pending(), None:
            return f"all_reduce over {axis}"
        case Pending(), Split():
            return f"reduce_scatter over {axis}"
        case Split(), None:
            return f"all_gather over {axis}"
        case Split(), Split() if before != after:
            return f"all_to_all over {axis}"
        case None, Split():
            return f"sennit.slice, which needs no communication over {axis}"
        case None, Pending():
            return f"sennit.partial, which needs no communication over {axis}"
        case Split(), Pending():
            return f"all_gather over {axis}, then sennit.partial"
        case _:
            return f"leave {axis} out: nothing changes over it"


# ---- local moves -----------------------------------------------------------------------------------------------------


def check_local_move(site: Site, step: Compute, buffers: dict[str, Buffer]) -> None:
    """A local move reads buffers and nothing else, writes one, and changes axes as its row of the table says."""
    sources = [buffers[arg.name] for arg in step.args if isinstance(arg, Ref)]
    many = {"sennit.slice": 1, "sennit.take": 1, "sennit.partial": 1, "sennit.accumulate": 2}.get(step.kind)
    right_count = len(sources) >= 1 if many is None else len(sources) == many
    if len(sources) != len(step.args) or step.kwargs or len(step.results) != 1 or not right_count:
        raise site.error(
            f"{step.kind} has {len(sources)} buffers among {len(step.args) + len(step.kwargs)} arguments, "
            f"and {len(step.results)} results",
            fix=f"give it {'the pieces' if many is None else many} as buffers, no other argument, and one result",
        )
    match step.kind:
        case "sennit.slice":
            _check_enters(site, step.kind, sources[0], step.results[0], Split)
        case "sennit.take":
            _check_take(site, sources[0], step.results[0])
        case "sennit.partial":
            _check_enters(site, step.kind, sources[0], step.results[0], Pending)
        case "sennit.accumulate":
            _check_accumulate(site, sources[0], sources[1], step.results[0])
        case "sennit.concat":
            _check_concat(site, sources, step.results[0])
        case _:
            raise AssertionError(f"{step.kind} is no local move")


def _check_enters(site: Site, kind: str, source: Buffer, result: Buffer, entry: type[Split] | type[Pending]) -> None:
    """`slice` and `partial`: replicated axes get an entry; a time axis enters at one coordinate."""
    before, after = dict(source.layout.entries), dict(result.layout.entries)
    changed = [axis for axis in {**before, **after} if before.get(axis) != after.get(axis)]
    if not changed:
        raise site.error(
            f"{kind} changes nothing: %{source.name} and %{result.name} of tensor %{source.tensor} have the layout "
            f"{result.layout}",
            fix="remove the step, or give its result the layout it should have",
        )
    for axis in changed:
        if axis in before or not isinstance(after.get(axis), entry):
            raise site.error(
                f"{kind} cannot turn %{source.name} of tensor %{source.tensor}, {describe_entry(before.get(axis))} "
                f"over {axis}, into %{result.name}, {describe_entry(after.get(axis))} over {axis}",
                fix=_remedy(axis, before.get(axis), after.get(axis)),
            )
    _check_rest(site, kind, source, result, changed)
    for axis, covered in result.times:
        if axis in changed and len(covered) != 1:
            raise site.error(
                f"{kind} gives %{result.name} {describe_times(result)}", fix=f"take one coordinate of {axis} at a time"
            )


def _check_take(site: Site, source: Buffer, result: Buffer) -> None:
    """`take`: every device of the lane has what its piece of the result is made of."""
    facts = [
        ("the tensor", f"%{source.tensor}", f"%{result.tensor}"),
        ("the element type", source.dtype.value, result.dtype.value),
        ("the shape", list(source.layout.shape), list(result.layout.shape)),
        ("what is pending", _pending(source), _pending(result)),
    ]
    for name, old, new in facts:
        if old != new:
            raise site.error(
                f"sennit.take changes {name} from {old} to {new}: %{source.name} of tensor %{source.tensor} is "
                f"{source.layout}, %{result.name} is {result.layout}",
                fix=f"give %{result.name} {name} of %{source.name}: sennit.take only leaves out indices",
            )
    devices = site.lane.devices
    for axis, _ in source.layout.pending:
        there, here = coordinates_on(source, axis, devices), coordinates_on(result, axis, devices)
        for device in (device for device, a, b in zip(devices, there, here, strict=True) if a != b):
            raise site.error(
                f"sennit.take moves device {device} along {axis}, over which %{source.name} of tensor %{source.tensor} is "
                f"pending: two devices would count one part",
                fix=f"reduce it over {axis} first, or take it on a mesh where the devices keep their places on {axis}",
            )
    lacking = first_device_lacking(source, result, devices)
    if lacking is not None:
        raise site.error(
            f"device {lacking} has the indices {source.layout.region(source.point(lacking))} of tensor %{source.tensor} in "
            f"%{source.name}, and its piece of %{result.name} is {result.layout.region(result.point(lacking))}",
            fix="take what each device has; an exchange or a collective brings the rest",
        )


def _pending(buffer: Buffer) -> str:
    """Axes, sizes, reductions and times of what is pending, in an order of their own: meshes may list axes differently."""
    mesh, times = buffer.layout.mesh, covered_times(buffer)
    parts = [
        f"{op.value} over {mesh.axis(axis)}" + (f" at {sorted(times[axis])}" if axis in times else "")
        for axis, op in buffer.layout.pending
    ]
    return ", ".join(sorted(parts)) or "nothing"


def _check_accumulate(site: Site, total: Buffer, part: Buffer, result: Buffer) -> None:
    """`accumulate`: two disjoint sets of times of one pending time axis; the union, resolved when it is whole."""
    _check_pieces(site, "sennit.accumulate", [total, part])
    left, right = covered_times(total), covered_times(part)
    differing = [axis for axis in left if left[axis] != right.get(axis)]
    if len(differing) != 1 or not isinstance(total.layout.entry(differing[0]), Pending):
        raise site.error(
            f"sennit.accumulate adds %{total.name} ({describe_times(total)}) and %{part.name} ({describe_times(part)}) "
            f"of tensor %{total.tensor}, {total.layout}",
            fix="add two buffers that differ in the times of one pending time axis, and in nothing else",
        )
    axis = differing[0]
    if twice := left[axis] & right[axis]:
        raise site.error(
            f"sennit.accumulate counts {axis}={'+'.join(map(str, sorted(twice)))} of tensor %{total.tensor} twice: "
            f"%{total.name} is {describe_times(total)}, %{part.name} {describe_times(part)}",
            fix="add each micro-batch once",
        )
    union = left[axis] | right[axis]
    whole = len(union) == total.layout.mesh.size(axis)
    _check_resolved(site, "sennit.accumulate", total, result, axis, None if whole else union)


def _check_concat(site: Site, pieces: Sequence[Buffer], result: Buffer) -> None:
    """`concat`: every piece of one split time axis, in order."""
    _check_pieces(site, "sennit.concat", pieces)
    first = pieces[0]
    times = [covered_times(piece) for piece in pieces]
    for axis in times[0]:
        size = first.layout.mesh.size(axis)
        in_order = [at.get(axis) for at in times] == [frozenset([coordinate]) for coordinate in range(size)]
        rest_equal = all(at.get(other) == times[0][other] for at in times for other in times[0] if other != axis)
        if in_order and rest_equal and isinstance(first.layout.entry(axis), Split):
            _check_resolved(site, "sennit.concat", first, result, axis, None)
            return
    found = "; ".join(f"%{piece.name} {describe_times(piece)}" for piece in pieces)
    raise site.error(
        f"sennit.concat of tensor %{first.tensor}, {first.layout} on mesh {first.layout.mesh}, reads {found}",
        fix="read the piece at each coordinate of one split time axis, once, in order from 0",
    )


def _check_pieces(site: Site, kind: str, pieces: Sequence[Buffer]) -> None:
    for piece in pieces[1:]:
        _check_rest(site, kind, pieces[0], piece, [axis for axis, _ in pieces[0].times])
        if piece.layout.entries != pieces[0].layout.entries:
            raise site.error(
                f"{kind} reads %{pieces[0].name} : {pieces[0].layout} and %{piece.name} : {piece.layout}",
                fix="read pieces of one layout",
            )


def _check_resolved(
    site: Site, kind: str, source: Buffer, result: Buffer, axis: str, union: frozenset[int] | None
) -> None:
    """The result covers `union` of the axis, or, where that is None, the axis is gone from it."""
    _check_rest(site, kind, source, result, [axis])
    entry = None if union is None else source.layout.entry(axis)
    if result.layout.entry(axis) == entry and covered_times(result).get(axis) == union:
        return
    should = "is replicated over it" if union is None else f"covers {axis}={'+'.join(map(str, sorted(union)))}"
    raise site.error(
        f"{kind} gives %{result.name} of tensor %{result.tensor}, {describe_entry(result.layout.entry(axis))} over {axis}, "
        f"{describe_times(result)}",
        fix=f"with these pieces of {axis} (of {source.layout.mesh.size(axis)}) the result {should}: change its layout or times",
    )


def _check_rest(site: Site, kind: str, source: Buffer, result: Buffer, axes: Sequence[str]) -> None:
    """What no move changes: tensor, type, mesh, and the entries and times of every other axis."""
    old_times, new_times = covered_times(source), covered_times(result)
    facts: list[tuple[str, object, object]] = [
        ("the tensor", f"%{source.tensor}", f"%{result.tensor}"),
        ("the element type", source.dtype.value, result.dtype.value),
        ("the shape", source.layout.shape, result.layout.shape),
        ("the mesh", source.layout.mesh, result.layout.mesh),
    ]
    for axis in [name for name in source.layout.mesh.names if name not in axes]:
        facts.append((f"axis {axis}", source.layout.entry(axis), result.layout.entry(axis)))
        facts.append((f"the times of {axis}", old_times.get(axis), new_times.get(axis)))
    for name, old, new in facts:
        if old != new:
            raise site.error(
                f"{kind} over {', '.join(axes) or 'no axis'} changes {name} from {_show(old)} to {_show(new)}: "
                f"%{source.name} of tensor %{source.tensor} is {source.layout}, %{result.name} is {result.layout}",
                fix=f"give %{result.name} {name} of %{source.name}, or make this change in a step of its own",
            )


def _show(fact: object) -> str:
    match fact:
        case Split() | Pending() | None:
            return describe_entry(fact)
        case frozenset():
            return "+".join(map(str, sorted(fact)))
        case _:
            return str(fact)


# ---- computation -----------------------------------------------------------------------------------------------------


def check_times_agree(site: Site, step: Compute, sources: Sequence[Buffer]) -> None:
    """All buffers of an operator that a time axis divides lie at the same coordinates of it."""
    seen: dict[str, tuple[frozenset[int], Buffer]] = {}
    for buffer in (*sources, *step.results):
        for axis, covered in covered_times(buffer).items():
            times, other = seen.setdefault(axis, (covered, buffer))
            if times != covered:
                raise site.error(
                    f"{step.kind} mixes %{other.name} of tensor %{other.tensor} {describe_times(other)} with "
                    f"%{buffer.name} of tensor %{buffer.tensor} {describe_times(buffer)}",
                    fix=f"read and write buffers of one coordinate of {axis}",
                )
