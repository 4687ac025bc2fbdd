"""The checker of the program level: what it accepts is well formed, moves data soundly, and does not hang.

| rule | says | function |
|---|---|---|
| lanes | lane names are unique; a device runs one lane, a lane at least one device | `check_lanes` |
| definitions | a buffer is defined once in its lane | `check_definitions` |
| lifetimes | a buffer is read after its definition and before its `free`; it is freed once at most | `check_lifetimes` |
| places | a buffer's mesh has all devices of the lane; its pending axes share one reduction | `check_places` |
| times | `times` names exactly the time axes with an entry; coordinates are in range and distinct, one where split | `check_times` |
| moves | collectives and local moves change the layout as the table in `program_moves.py` says | `check_moves` |
| micro-batches | an operator does not mix coordinates of a time axis | `check_moves` |
| outputs | an output exists, is not freed, and is not pending over any axis | `check_outputs` |
| matching | every send, receive, collective and exchange meets its partners, which agree on the piece | `match_communications` |
| deadlock | no set of steps waits for each other | `check_deadlock` |

`check_program` applies them in this order; each may rely on those before it. Together they take time linear in the
number of steps (devices enter once per mesh). Whether an operator may be split as its buffers say is a question about
operators, which `plan/` answers.
"""

from __future__ import annotations

from collections.abc import Iterator

from sennit.errors import ProgramError
from sennit.ir.deadlock import check_deadlock
from sennit.ir.graph import Output
from sennit.ir.layout import Split
from sennit.ir.mesh import AxisKind, print_ranges
from sennit.ir.operators import is_local_move
from sennit.ir.program import Buffer, Collective, Compute, Free, Lane, Program, defines, reads
from sennit.ir.program_match import match_communications
from sennit.ir.program_moves import check_collective, check_local_move, check_times_agree
from sennit.ir.program_site import Site, describe_lane, describe_step, describe_times

__all__ = ["check_program", "describe_step"]


def check_program(program: Program) -> None:
    """Raise `ProgramError` for the first rule that the program breaks."""
    check_lanes(program)
    for lane in program.lanes:
        check_definitions(program, lane)
        check_lifetimes(program, lane)
        check_places(program, lane)
        check_times(program, lane)
        check_moves(program, lane)
        check_outputs(program, lane)
    check_deadlock(program, match_communications(program))


def check_lanes(program: Program) -> None:
    """Lane names are unique; a device runs one lane, and a lane at least one device."""
    names: set[str] = set()
    owner: dict[int, str] = {}
    for lane in program.lanes:
        if lane.name in names:
            raise ProgramError(
                f"two lanes have the name {lane.name!r}",
                where=f"program {program.name!r}, {describe_lane(lane)}",
                fix="give each lane its own name: sends and receives go by it",
            )
        names.add(lane.name)
        if not lane.devices:
            raise Site(program, lane).error(f"lane {lane.name!r} has no device", fix="name its devices, or remove it")
        for device in lane.devices:
            if device in owner:
                raise Site(program, lane).error(
                    f"device {device} runs lane {owner[device]!r} and lane {lane.name!r}",
                    fix=f"list device {device} once, in one lane",
                )
            owner[device] = lane.name


def check_definitions(program: Program, lane: Lane) -> None:
    """A buffer is defined once in its lane."""
    known: set[str] = set()
    for index, buffer in _definitions(lane):
        if buffer.name in known:
            raise Site(program, lane, index).error(
                f"buffer %{buffer.name} of tensor %{buffer.tensor} is defined twice in {describe_lane(lane)}",
                fix="give the second one a name of its own: a buffer is written once",
            )
        known.add(buffer.name)


def check_lifetimes(program: Program, lane: Lane) -> None:
    """A buffer is read after its definition and before its `free`; it is freed once at most."""
    live = {item.buffer.name for item in lane.inputs}
    freed: dict[str, int] = {}
    for index, step in enumerate(lane.steps):
        ends = (step.source,) if isinstance(step, Free) else ()
        for name in (*reads(step), *ends):
            if name not in live:
                raise _not_live(Site(program, lane, index), name, freed, "frees" if ends else "reads")
        if isinstance(step, Free):
            live.discard(step.source)
            freed[step.source] = index
        live.update(buffer.name for buffer in defines(step))


def _not_live(site: Site, name: str, freed: dict[str, int], verb: str) -> ProgramError:
    lane = describe_lane(site.lane)
    if name in freed:
        fix = "remove this second free" if verb == "frees" else f"move the free of %{name} behind its last read"
        return site.error(f"step {site.step} {verb} %{name}, which step {freed[name]} of {lane} has freed", fix=fix)
    if late := [index for index, buffer in _definitions(site.lane) if buffer.name == name]:
        return site.error(
            f"step {site.step} {verb} %{name} before step {late[0]} of {lane} defines it",
            fix=f"move it behind step {late[0]}",
        )
    return site.error(
        f"step {site.step} {verb} %{name}, which {lane} does not define",
        fix=f"define %{name} in this lane before, or receive it from the lane that has it",
    )


def check_places(program: Program, lane: Lane) -> None:
    """A buffer's mesh has all devices of the lane, and its pending axes share one reduction."""
    seen: set[int] = set()  # meshes by identity: the program keeps them alive, and a hash takes time per device
    for index, buffer in _definitions(lane):
        mesh = buffer.layout.mesh
        if id(mesh) not in seen:
            seen.add(id(mesh))
            outside = tuple(sorted(set(lane.devices).difference(mesh.devices)))
            if outside:
                raise Site(program, lane, index).error(
                    f"buffer %{buffer.name} of tensor %{buffer.tensor} lies on mesh {mesh}, which does not have the devices "
                    f"{print_ranges(outside)} of {describe_lane(lane)}",
                    fix="use a mesh of the lane's devices, or run those devices in another lane",
                )
        ops = sorted({op.value for _, op in buffer.layout.pending})
        if len(ops) > 1:
            raise Site(program, lane, index).error(
                f"buffer %{buffer.name} of tensor %{buffer.tensor} is a pending {' and a pending '.join(ops)} at once "
                f"in {describe_lane(lane)}",
                fix="reduce over one of them first: they do not commute",
            )


def check_times(program: Program, lane: Lane) -> None:
    """`times` names exactly the time axes with an entry; coordinates are in range and distinct, one where split."""
    for index, buffer in _definitions(lane):
        mesh = buffer.layout.mesh
        entries = {axis: entry for axis, entry in buffer.layout.entries if mesh.axis(axis).kind is AxisKind.TIME}
        named = [axis for axis, _ in buffer.times]
        if sorted(named) != sorted(entries):
            raise Site(program, lane, index).error(
                f"buffer %{buffer.name} of tensor %{buffer.tensor} is {describe_times(buffer)} in {describe_lane(lane)}, while its "
                f"layout {buffer.layout} on mesh {mesh} is split or pending over the time axes "
                f"{', '.join(entries) or '(none)'}",
                fix="give `at` one entry for each of these time axes, and no other",
            )
        for axis, covered in buffer.times:
            size, entry = mesh.size(axis), entries[axis]
            legal = covered and len(set(covered)) == len(covered) and all(0 <= at < size for at in covered)
            if not legal or (isinstance(entry, Split) and len(covered) > 1):
                many = "one of" if isinstance(entry, Split) else "distinct coordinates among"
                raise Site(program, lane, index).error(
                    f"buffer %{buffer.name} of tensor %{buffer.tensor} covers {axis}={'+'.join(map(str, covered))} of {axis}={size}, "
                    f"over which it is {'split' if isinstance(entry, Split) else 'pending'}, in {describe_lane(lane)}",
                    fix=f"use {many} {axis}=0 to {size - 1}",
                )


def check_moves(program: Program, lane: Lane) -> None:
    """Collectives and local moves change layouts as `program_moves.py` says; no operator mixes micro-batches."""
    buffers = lane.buffers()
    for index, step in enumerate(lane.steps):
        match step:
            case Collective(source=source):
                check_collective(Site(program, lane, index), step, buffers[source])
            case Compute(kind=kind) if is_local_move(kind):
                check_local_move(Site(program, lane, index), step, buffers)
            case Compute():
                check_times_agree(Site(program, lane, index), step, [buffers[name] for name in reads(step)])
            case _:
                pass  # transfers change nothing, `match_communications` compares their two ends; `free` has no type


def check_outputs(program: Program, lane: Lane) -> None:
    """An output exists, is not freed, and is not pending over any axis."""
    buffers = lane.buffers()
    freed = {step.source: index for index, step in enumerate(lane.steps) if isinstance(step, Free)}
    for output in lane.outputs:
        name = f"{output.kind.value} {output.path!r}" if output.path else output.kind.value
        if output.name not in buffers:
            raise Site(program, lane).error(
                f"{name} is buffer %{output.name}, which {describe_lane(lane)} does not define",
                fix="name a buffer of this lane",
            )
        if output.name in freed:
            raise Site(program, lane, freed[output.name]).error(
                f"{name} is buffer %{output.name}, which step {freed[output.name]} of {describe_lane(lane)} frees",
                fix="remove the free: an output lives to the end",
            )
        if buffers[output.name].layout.pending:
            raise _still_pending(program, lane, output, name, buffers[output.name])


def _still_pending(program: Program, lane: Lane, output: Output, name: str, buffer: Buffer) -> ProgramError:
    pending = buffer.layout.pending
    mesh = buffer.layout.mesh
    space = [axis for axis, _ in pending if mesh.axis(axis).kind is AxisKind.SPACE]
    time = [axis for axis, _ in pending if mesh.axis(axis).kind is AxisKind.TIME]
    remedies = [f"sennit.accumulate it over all coordinates of {', '.join(time)}"] if time else []
    remedies += [f"all_reduce it over {', '.join(space)}"] if space else []
    return Site(program, lane).error(
        f"{name} is still a pending {pending[0][1].value} over {', '.join(axis for axis, _ in pending)} on devices "
        f"{print_ranges(lane.devices)}: buffer %{output.name} of tensor %{buffer.tensor} is {buffer.layout}",
        fix=" and ".join(remedies) + " before the output",
    )


def _definitions(lane: Lane) -> Iterator[tuple[int | None, Buffer]]:
    """Every buffer with the step that defines it; inputs have none."""
    for item in lane.inputs:
        yield None, item.buffer
    for index, step in enumerate(lane.steps):
        for buffer in defines(step):
            yield index, buffer
