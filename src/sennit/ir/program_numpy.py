"""The reference interpreter of a program: all devices of all lanes in one process, on numpy arrays.

Each lane has a program counter, and a step runs for all devices of its lane at once. A send never waits. A receive
waits for the send: transfers from one lane to another arrive in the order in which they were sent, from the i-th device
to the i-th. A collective waits for every lane that has a device in one of its groups; to give in an exchange never
waits, to take waits for all givers. If no lane can go on, or a transfer is left over, the program is wrong: also where
streams that overlap might let it through.

- A compute step is `aten_numpy.apply` on the pieces of one device: sizes among its arguments are those of the piece.
- A local operator is `move_numpy.move` on the pieces of one device, a local form `local_forms_numpy.apply_form`.
- An exchange puts the tensor together from the givers' pieces and cuts it as the takers' layout says: what it means,
  without
  a word on who sends what to whom.
- A collective is `layout_numpy.regroup` on the pieces of its groups, from the layout of one buffer to that of the
  other.

Every piece is checked against the shape and type that its buffer declares, and replicas of outputs against each other.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from sennit.errors import GraphError, LayoutError, ProgramError
from sennit.ir.aten_numpy import apply, bind
from sennit.ir.dtype_numpy import numpy_dtype
from sennit.ir.graph import refs
from sennit.ir.layout import Layout
from sennit.ir.layout_numpy import Array, assemble, distribute, regroup
from sennit.ir.local_forms_numpy import apply_form
from sennit.ir.mesh import AxisKind, Point
from sennit.ir.move_numpy import move
from sennit.ir.operators import is_local_form, is_local_move
from sennit.ir.program import Buffer, Collective, Compute, Exchange, Free, Lane, Program, Receive, Send, Step

__all__ = ["run_program"]

Local = dict[int, Array]  # device -> its piece


def run_program(program: Program, inputs: Mapping[str, Array]) -> dict[str, Array]:
    """Whole outputs, by path or as "loss"; `inputs` holds a whole array for the path of each lane input."""
    lanes = {lane.name: _start(lane, inputs) for lane in program.lanes}
    transit = _Transit(_givers(program))
    while not all(state.done for state in lanes.values()):
        if not any(_advance(program, lanes, state, transit) for state in lanes.values()):
            raise ProgramError(
                f"program {program.name!r} deadlocks: no lane can go on",
                where="; ".join(state.where() for state in lanes.values()),
                fix="bring the steps that wait for each other into one order on all lanes",
            )
    for (origin, to), queue in transit.mail.items():
        if queue:
            names = ", ".join(f"%{buffer.name}" for buffer, _ in queue)
            raise ProgramError(f"lane {to!r} never receives {names} from lane {origin!r}")
    return _outputs(list(lanes.values()))


@dataclass(slots=True, eq=False)
class _Transit:
    """What is under way between lanes."""

    givers: dict[str, set[str]]  # label of an exchange -> the lanes that give in it
    gifts: defaultdict[str, dict[str, tuple[Buffer, Local]]] = field(default_factory=lambda: defaultdict(dict))
    mail: defaultdict[tuple[str, str], deque[tuple[Buffer, Local]]] = field(default_factory=lambda: defaultdict(deque))


@dataclass(slots=True, eq=False)
class _LaneState:
    """One lane under way: where it stands, which buffers it wrote, and what its devices still hold of them."""

    lane: Lane
    position: int = 0
    buffers: dict[str, Buffer] = field(default_factory=dict)
    pieces: dict[str, Local] = field(default_factory=dict)

    @property
    def done(self) -> bool:
        return self.position == len(self.lane.steps)

    @property
    def step(self) -> Step | None:
        return None if self.done else self.lane.steps[self.position]

    def where(self) -> str:
        step = "at its end" if self.step is None else f"at step {self.position}: {_describe(self.step)}"
        return f"lane {self.lane.name!r} {step}"

    def read(self, name: str) -> Local:
        if name not in self.pieces:
            fault = "is used after it was freed" if name in self.buffers else "is used before it is defined"
            raise ProgramError(f"buffer %{name} {fault}", where=self.where())
        return self.pieces[name]

    def write(self, buffer: Buffer, local: Local) -> None:
        if buffer.name in self.buffers:
            raise ProgramError(f"buffer %{buffer.name} is written twice", where=self.where())
        for device, piece in local.items():
            shape, dtype = buffer.local_shape(device), numpy_dtype(buffer.dtype)
            if piece.shape != shape or piece.dtype != dtype:
                raise ProgramError(
                    f"{buffer.describe()} is {dtype}{list(shape)} on device {device}, "
                    f"and its piece is {piece.dtype}{list(piece.shape)}",
                    where=self.where(),
                )
        self.buffers[buffer.name], self.pieces[buffer.name] = buffer, local


def _start(lane: Lane, inputs: Mapping[str, Array]) -> _LaneState:
    state = _LaneState(lane)
    for item in lane.inputs:
        if item.path not in inputs:
            raise ProgramError(f"no array is given for {item.role.value} {item.path!r}", where=f"lane {lane.name!r}")
        pieces = distribute(inputs[item.path], item.buffer.layout)
        state.write(item.buffer, {device: pieces[item.buffer.point(device)] for device in lane.devices})
    return state


def _advance(program: Program, lanes: Mapping[str, _LaneState], state: _LaneState, transit: _Transit) -> bool:
    """Run a lane until it waits; whether it went on at all."""
    before = state.position
    while (step := state.step) is not None:
        finished = [state]
        match step:
            case Compute():
                for buffer, local in zip(step.results, _compute(state, step), strict=True):
                    state.write(buffer, local)
            case Collective():
                finished = _members(program, lanes, state, step)
                calls = [(other, found) for other in finished if (found := _met(step, other.step)) is not None]
                if len(calls) < len(finished):
                    break
                _collective(calls)
            case Exchange(label, source, result, _):
                if source is not None:
                    transit.gifts[label][state.lane.name] = (state.buffers[source], state.read(source))
                if result is not None:
                    if not transit.givers[label] <= transit.gifts[label].keys():
                        break
                    state.write(result, _taken(state, result, list(transit.gifts[label].values())))
            case Send(sent, to):
                transit.mail[state.lane.name, to].append((state.buffers[sent], state.read(sent)))
            case Receive(received, origin):
                queue = transit.mail[origin, state.lane.name]
                if not queue:
                    break
                state.write(received, _received(state, received, program.lane(origin), *queue.popleft()))
            case Free(ended):
                state.read(ended)
                del state.pieces[ended]
        for other in finished:
            other.position += 1
    return state.position > before


def _compute(state: _LaneState, step: Compute) -> list[Local]:
    names = [*refs(step.args), *refs(tuple(arg for _, arg in step.kwargs))]
    held = {name: state.read(name) for name in names}
    sources = [state.buffers[name] for name in names]
    results: list[Local] = [{} for _ in step.results]
    for device in state.lane.devices:
        arrays = {name: local[device] for name, local in held.items()}
        try:
            if is_local_move(step.kind):
                parts: tuple[Array, ...] = (
                    move(step.kind, sources, step.results[0], [arrays[name] for name in names], device),
                )
            else:
                args, kwargs = bind(step.args, arrays), {key: bind(arg, arrays) for key, arg in step.kwargs}
                if is_local_form(step.kind):
                    parts = apply_form(step.kind, args, kwargs, sources, step.results, device)
                else:
                    parts = apply(step.kind, args, kwargs)
        except (GraphError, LayoutError) as error:
            raise ProgramError(error.what, where=f"device {device} of {state.where()}", fix=error.fix) from error
        if len(parts) != len(results):
            raise ProgramError(f"{len(parts)} results where {len(results)} are declared", where=state.where())
        for local, part in zip(results, parts, strict=True):
            local[device] = part
    return results


# ---- between devices -------------------------------------------------------------------------------------------------


def _members(
    program: Program, lanes: Mapping[str, _LaneState], state: _LaneState, step: Collective
) -> list[_LaneState]:
    """The lanes that take part: those with a device in a group of a lane that does."""
    members = [state]
    for member in members:  # grows while it is read
        for device in member.lane.devices:
            for peer in step.result.layout.mesh.group(device, step.axes):
                other = lanes[program.lane_of(peer).name]
                if other not in members:
                    members.append(other)
    return members


def _met(mine: Collective, other: Step | None) -> Collective | None:
    """The step that a peer stands at, if it is the same collective."""

    def key(step: Collective) -> tuple[object, ...]:
        return step.kind, step.axes, step.result.tensor, step.result.layout, step.result.times

    return other if isinstance(other, Collective) and key(mine) == key(other) else None


def _collective(calls: list[tuple[_LaneState, Collective]]) -> None:
    pieces: dict[Point, Array] = {}
    before: set[Layout] = set()
    for state, step in calls:
        local, source = state.read(step.source), state.buffers[step.source]
        _check_axes(state, source.layout, step)
        before.add(source.layout)
        pieces |= {source.point(device): piece for device, piece in local.items()}
    if len(before) > 1:
        raise ProgramError(
            f"lanes bring different layouts to one collective: {', '.join(sorted(map(str, before)))}",
            where="; ".join(state.where() for state, _ in calls),
        )
    moved = regroup(before.pop(), step.result.layout, step.axes, pieces)
    for state, step in calls:
        source = state.buffers[step.source]
        state.write(step.result, {device: moved[source.point(device)] for device in state.lane.devices})


def _check_axes(state: _LaneState, source: Layout, step: Collective) -> None:
    """Only the named axes may change, and only in space; else `regroup` has no meaning."""
    mesh, target = source.mesh, step.result.layout
    fixed = [axis.name for axis in mesh.axes if axis.name not in step.axes or axis.kind is AxisKind.TIME]
    if mesh != target.mesh or any(source.entry(axis) != target.entry(axis) for axis in fixed):
        raise ProgramError(
            f"a collective over {list(step.axes)} goes from {source} on {mesh} to {target} on {target.mesh}",
            where=state.where(),
            fix="keep the mesh, and change only the entries of the axes that it names",
        )


def _givers(program: Program) -> dict[str, set[str]]:
    """The lanes that give in each exchange, by its label."""
    found: dict[str, set[str]] = {}
    for lane in program.lanes:
        for step in lane.steps:
            if isinstance(step, Exchange):
                found.setdefault(step.label, set()).update([lane.name] if step.source is not None else [])
    return found


def _taken(state: _LaneState, result: Buffer, given: list[tuple[Buffer, Local]]) -> Local:
    """Put together what the givers hold, and cut it as the taker wants it."""
    if not given:
        raise ProgramError("no lane gives anything", where=state.where())
    if any((source.tensor, dict(source.times)) != (result.tensor, dict(result.times)) for source, _ in given):
        raise ProgramError(f"what is given is not %{result.tensor} {dict(result.times)}", where=state.where())
    whole = np.zeros(result.layout.shape, numpy_dtype(result.dtype))
    held = np.zeros(result.layout.shape, np.bool_)
    for source, local in given:
        for device, piece in local.items():
            where = np.ix_(*source.layout.region(source.point(device)).indices())
            whole[where], held[where] = piece, True
    pieces: Local = {}
    for device in state.lane.devices:
        where = np.ix_(*result.layout.region(result.point(device)).indices())
        if not held[where].all():
            raise ProgramError(f"no lane gives all of what device {device} takes", where=state.where())
        pieces[device] = np.asarray(whole[where])
    return pieces


def _received(state: _LaneState, result: Buffer, origin: Lane, sent: Buffer, local: Local) -> Local:
    if (sent.tensor, sent.times) != (result.tensor, result.times) or len(origin.devices) != len(state.lane.devices):
        raise ProgramError(
            f"{len(origin.devices)} devices send {sent.describe()} of %{sent.tensor}, "
            f"{len(state.lane.devices)} receive {result.describe()} of %{result.tensor}",
            where=state.where(),
        )
    return {mine: local[theirs] for mine, theirs in zip(state.lane.devices, origin.devices, strict=True)}


# ---- outputs ---------------------------------------------------------------------------------------------------------


def _outputs(lanes: list[_LaneState]) -> dict[str, Array]:
    found: dict[str, dict[tuple[str, Layout], Local]] = {}  # two lanes on one mesh may return parts of one output
    for state in lanes:
        for output in state.lane.outputs:
            local, buffer = state.read(output.name), state.buffers[output.name]
            if any(axis.size > 1 and buffer.layout.entry(axis.name) for axis in buffer.layout.mesh.time):
                raise ProgramError(
                    f"output {buffer.describe()} is not whole in time",
                    where=state.where(),
                    fix="accumulate or concatenate it before it is returned",
                )
            found.setdefault(output.key, {}).setdefault((buffer.tensor, buffer.layout), {}).update(local)
    results: dict[str, Array] = {}
    for key, parts in found.items():
        for (_, layout), local in parts.items():
            whole = _whole(key, layout, local)
            if not np.array_equal(results.setdefault(key, whole), whole, equal_nan=whole.dtype.kind == "f"):
                raise ProgramError("lanes return different values", where=f"output {key!r}")
    return results


def _whole(output: str, layout: Layout, local: Local) -> Array:
    """Where a lane of the mesh does not return the output, replicas speak for it."""
    mesh = layout.mesh
    holder: dict[Point, int] = {}
    for point in mesh.points():
        if mesh.device(point) in local:
            holder.setdefault(_without_replicas(layout, point), mesh.device(point))
    absent = sorted({mesh.device(p) for p in mesh.points() if _without_replicas(layout, p) not in holder})
    if absent:
        raise ProgramError(f"devices {absent} do not return their pieces of {layout}", where=f"output {output!r}")
    pieces = {
        point: local[device if (device := mesh.device(point)) in local else holder[_without_replicas(layout, point)]]
        for point in mesh.points()
    }
    try:
        return assemble(layout, pieces)
    except LayoutError as error:
        raise ProgramError(error.what, where=f"output {output!r}") from error


def _without_replicas(layout: Layout, point: Point) -> Point:
    names = layout.mesh.names
    return tuple(0 if layout.entry(axis) is None else digit for axis, digit in zip(names, point, strict=True))


def _describe(step: Step) -> str:
    match step:
        case Compute(kind=kind, results=results):
            return f"{kind} %{results[0].name}"
        case Collective(collective, source, result, axes):
            return f"{collective.value} %{result.name} = %{source} over {', '.join(axes)}"
        case Send(source, to):
            return f"send %{source} to {to}"
        case Receive(result, origin):
            return f"receive %{result.name} from {origin}"
        case Exchange(label, _, _, lanes):
            return f"exchange {label!r} among {', '.join(lanes)}"
        case Free(source):
            return f"free %{source}"
