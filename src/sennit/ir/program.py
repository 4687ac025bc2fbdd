"""A program: for each device an ordered list of steps. This is what the simulator times and the ranks run.

    program := "program" STRING "{" mesh* lane* "}"
    mesh    := "mesh" NAME "=" mesh                                  the meshes that layouts below lie on
    lane    := "lane" NAME "on" devices "{" input* step* output* "}"
    input   := role buffer STRING                                    as in a graph
    buffer  := %name ":" dtype layout "of" %tensor "on" NAME ("at" axis "=" times ("&" axis "=" times)*)?
    times   := INT ("+" INT)*
    step    := phase buffer ("," buffer)* "=" KIND "(" args ")" origin?    compute
             | collective buffer "=" %name "over" AXIS ("," AXIS)*
             | "send" %name "to" LANE
             | "receive" buffer "from" LANE
             | "exchange" STRING (buffer "=")? (%name | "nothing") "among" LANE ("," LANE)*
             | "free" %name
    collective := "all_reduce" | "all_gather" | "reduce_scatter" | "all_to_all"
    output  := "loss" STRING? %name | "gradient" STRING %name | "buffer" STRING %name | "result" STRING %name

**Lanes.** Devices that run the same steps share a *lane*: a data- and tensor-parallel program has one, a pipeline one
per stage, whatever the number of devices. What differs between the devices of a lane follows from their coordinates on
the mesh: groups, regions, peers. The i-th device of a lane sends to the i-th device of the other lane.

**Buffers.** A buffer holds, on each device of its lane, that device's piece of a logical tensor under a layout. Time
axes that split or leave pending the tensor are fixed by `times`: the coordinates that the buffer covers (one
micro-batch, or those accumulated so far). A buffer is written once, by the step that defines it.

**Exchanges.** An exchange moves one tensor from the layout A in which the lanes with a source hold it together to the
layout B in which those with a result want it. The two meshes may be disjoint, overlap, or be the same devices in
another order or with other axes; a lane may give, take, or do both. Which device sends which indices to which follows
from the two buffers (`program_exchange.py`), so all ranks know it without a word. The label names the exchange: each
lane of `lanes` has exactly one with it.

**Local operators**, which move no data between devices:

- `sennit.slice(%x)`: replicated axes become split;
- `sennit.take(%x)`: any part, also on another mesh: on every device the region of the result lies in that of the
  source;
- `sennit.partial(%x)`: replicated axes become pending (the identity of the reduction off coordinate 0);
- `sennit.accumulate(%sum, %x)`: a pending time axis, the times of both; the axis is resolved once all times are in;
- `sennit.concat(%x0, %x1, ...)`: the pieces of a split time axis, in order; the axis becomes replicated;
- `sennit.pack`, `sennit.parts`, `sennit.join`: several tensors in one flat one, for one collective, and out of it again
  (`flat_numpy.py`).

**Streams.** A device issues its steps in order. Compute steps run on one stream in that order; each collective or
transfer runs on the stream that `stream_of` names, starts once its input is there, and is waited for by the first step
that reads its result. `free` never waits: the memory is given back once the steps that still use the buffer are done.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from sennit.errors import ParseError, ProgramError
from sennit.ir.dtype import DType, TensorType
from sennit.ir.graph import Arg, Output, OutputKind, Phase, Role, print_call, read_call, refs
from sennit.ir.layout import Layout
from sennit.ir.mesh import Mesh, Point, print_ranges, read_ranges
from sennit.ir.text import Scanner, quote

__all__ = [
    "Buffer",
    "Collective",
    "CollectiveKind",
    "Compute",
    "Exchange",
    "Free",
    "Lane",
    "LaneInput",
    "Program",
    "Receive",
    "Send",
    "Step",
    "Times",
    "defines",
    "reads",
    "stream_of",
]

Times = tuple[tuple[str, tuple[int, ...]], ...]


class CollectiveKind(Enum):
    ALL_REDUCE = "all_reduce"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_TO_ALL = "all_to_all"


@dataclass(frozen=True, slots=True)
class Buffer:
    """A device's piece of a logical tensor:

    `tensor` names it, `layout` says which piece, `times` which micro-batches.
    """

    name: str
    tensor: str
    dtype: DType
    layout: Layout
    times: Times = ()

    @property
    def type(self) -> TensorType:
        """The type of the whole logical tensor."""
        return TensorType(self.layout.shape, self.dtype)

    def point(self, device: int) -> Point:
        """Where the piece of `device` lies. A buffer that covers several times lies at the first of them."""
        times = dict(self.times)
        mesh = self.layout.mesh
        return mesh.coordinate(device) + tuple(times[axis.name][0] if axis.name in times else 0 for axis in mesh.time)

    def local_shape(self, device: int) -> tuple[int, ...]:
        return self.layout.local_shape(None if self.layout.is_even else self.point(device))

    def bytes(self, device: int) -> int:
        return TensorType(self.local_shape(device), self.dtype).bytes

    def describe(self) -> str:
        at = "".join(f" at {axis}={'+'.join(map(str, covered))}" for axis, covered in self.times)
        return f"%{self.name} : {self.dtype.value}{self.layout}{at}"


@dataclass(frozen=True, slots=True)
class Compute:
    """One operator on local pieces. `op` names the graph operator it is part of, for messages and pictures."""

    kind: str
    args: tuple[Arg, ...]
    kwargs: tuple[tuple[str, Arg], ...]
    results: tuple[Buffer, ...]
    phase: Phase
    module: str = ""
    op: str = ""


@dataclass(frozen=True, slots=True)
class Collective:
    """A change of layout over some axes; the layouts of both buffers say which."""

    kind: CollectiveKind
    source: str
    result: Buffer
    axes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Send:
    source: str
    to: str


@dataclass(frozen=True, slots=True)
class Receive:
    result: Buffer
    origin: str


@dataclass(frozen=True, slots=True)
class Exchange:
    """One tensor from the lanes with a source to those with a result.

    `lanes` names all that take part, this one too.
    """

    label: str
    source: str | None
    result: Buffer | None
    lanes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Free:
    source: str


Step = Compute | Collective | Send | Receive | Exchange | Free


@dataclass(frozen=True, slots=True)
class LaneInput:
    """A buffer that is there when the program starts: a piece of a graph input."""

    role: Role
    buffer: Buffer
    path: str


@dataclass(frozen=True, slots=True)
class Lane:
    name: str
    devices: tuple[int, ...]
    inputs: tuple[LaneInput, ...]
    steps: tuple[Step, ...]
    outputs: tuple[Output, ...]

    def buffers(self) -> dict[str, Buffer]:
        """Every buffer by name, inputs and those that steps define."""
        found = {item.buffer.name: item.buffer for item in self.inputs}
        for step in self.steps:
            found.update((buffer.name, buffer) for buffer in defines(step))
        return found


@dataclass(frozen=True, slots=True)
class Program:
    name: str
    lanes: tuple[Lane, ...]

    @property
    def devices(self) -> tuple[int, ...]:
        return tuple(sorted(device for lane in self.lanes for device in lane.devices))

    def lane(self, name: str) -> Lane:
        for lane in self.lanes:
            if lane.name == name:
                return lane
        raise ProgramError(f"there is no lane {name!r}", where=f"program {self.name!r}")

    def lane_of(self, device: int) -> Lane:
        for lane in self.lanes:
            if device in lane.devices:
                return lane
        raise ProgramError(f"no lane runs on device {device}", where=f"program {self.name!r}")

    def meshes(self) -> tuple[Mesh, ...]:
        """The meshes of all layouts, in order of first use."""
        seen: dict[Mesh, None] = {}
        for lane in self.lanes:
            for buffer in lane.buffers().values():
                seen.setdefault(buffer.layout.mesh)
        return tuple(seen)

    def __str__(self) -> str:
        return _print_program(self)

    @classmethod
    def read(cls, scanner: Scanner) -> Program:
        return _read_program(scanner)

    @classmethod
    def parse(cls, text: str) -> Program:
        return Scanner.whole(text, cls.read)


def reads(step: Step) -> tuple[str, ...]:
    """The buffers that a step needs before it can start. `free` reads nothing: it ends a buffer."""
    match step:
        case Compute(args=args, kwargs=kwargs):
            return tuple(dict.fromkeys([*refs(args), *refs(tuple(arg for _, arg in kwargs))]))
        case Collective(source=source) | Send(source=source):
            return (source,)
        case Exchange(source=given):
            return () if given is None else (given,)
        case Receive() | Free():
            return ()


def defines(step: Step) -> tuple[Buffer, ...]:
    """The buffers that a step writes."""
    match step:
        case Compute(results=results):
            return results
        case Collective(result=result) | Receive(result=result):
            return (result,)
        case Exchange(result=taken):
            return () if taken is None else (taken,)
        case Send() | Free():
            return ()


def stream_of(step: Step) -> str:
    """The stream of its device that a step runs on: one for compute, one per set of axes, one per peer and direction,
    one per set of lanes and side of their exchanges.
    """
    match step:
        case Compute() | Free():
            return "compute"
        case Collective(axes=axes):
            return "collective " + ",".join(axes)
        case Send(to=to):
            return f"send {to}"
        case Receive(origin=origin):
            return f"receive {origin}"
        case Exchange(source=source, result=result, lanes=lanes):
            side = "take" if source is None else "give" if result is None else "give and take"
            return f"{side} among {','.join(lanes)}"


# ---- text ------------------------------------------------------------------------------------------------------------


def _print_program(program: Program) -> str:
    names = {mesh: f"m{position}" for position, mesh in enumerate(program.meshes())}

    def buffer(item: Buffer) -> str:
        text = f"%{item.name} : {item.dtype.value}{item.layout} of %{item.tensor} on {names[item.layout.mesh]}"
        times = " & ".join(f"{axis}={'+'.join(map(str, covered))}" for axis, covered in item.times)
        return f"{text} at {times}" if times else text

    def step(item: Step) -> str:
        match item:
            case Compute(kind, args, kwargs, results, phase, module, op):
                text = f"{phase.value} {', '.join(map(buffer, results))} = {print_call(kind, args, kwargs)}"
                return f"{text} for %{op} {quote(module)}" if op else text
            case Collective(kind=collective, source=source, result=result, axes=axes):
                return f"{collective.value} {buffer(result)} = %{source} over {', '.join(axes)}"
            case Send(source, to):
                return f"send %{source} to {to}"
            case Receive(result, origin):
                return f"receive {buffer(result)} from {origin}"
            case Exchange(label, given, taken, among):
                text = f"exchange {quote(label)} " + (f"{buffer(taken)} = " if taken is not None else "")
                return f"{text}{'nothing' if given is None else f'%{given}'} among {', '.join(among)}"
            case Free(source):
                return f"free %{source}"

    lines = [f"program {quote(program.name)} {{"]
    lines += [f"  mesh {name} = {mesh}" for mesh, name in names.items()]
    for lane in program.lanes:
        lines.append(f"  lane {lane.name} on {print_ranges(lane.devices)} {{")
        lines += [f"    {item.role.value} {buffer(item.buffer)} {quote(item.path)}" for item in lane.inputs]
        lines += [f"    {step(item)}" for item in lane.steps]
        lines += [f"    {output}" for output in lane.outputs]
        lines.append("  }")
    return "\n".join([*lines, "}"]) + "\n"


def _read_program(scanner: Scanner) -> Program:
    scanner.expect("program")
    name = scanner.string()
    scanner.expect("{")
    meshes: dict[str, Mesh] = {}
    while scanner.accept_word("mesh"):
        label = scanner.word("a mesh name")
        scanner.expect("=")
        meshes[label] = Mesh.read(scanner)
    lanes: list[Lane] = []
    while scanner.accept_word("lane"):
        lane_name = scanner.word("a lane name")
        scanner.expect("on")
        devices = read_ranges(scanner)
        scanner.expect("{")
        lanes.append(_read_lane(scanner, lane_name, devices, meshes))
    scanner.expect("}")
    return Program(name, tuple(lanes))


def _read_lane(scanner: Scanner, name: str, devices: tuple[int, ...], meshes: dict[str, Mesh]) -> Lane:
    inputs: list[LaneInput] = []
    steps: list[Step] = []
    outputs: list[Output] = []
    while not scanner.accept("}"):
        word = scanner.word("an input, a step or an output")
        if word in [role.value for role in Role] and not scanner.peek('"'):  # else an output: `buffer "path" %name`
            buffer = _read_buffer(scanner, meshes)
            inputs.append(LaneInput(Role(word), buffer, scanner.string()))
        elif word in [kind.value for kind in OutputKind]:
            outputs.append(Output.read(scanner, word))
        else:
            steps.append(_read_step(scanner, word, meshes))
    return Lane(name, devices, tuple(inputs), tuple(steps), tuple(outputs))


def _read_step(scanner: Scanner, word: str, meshes: dict[str, Mesh]) -> Step:
    if word in [phase.value for phase in Phase]:
        results = [_read_buffer(scanner, meshes)]
        while scanner.accept(","):
            results.append(_read_buffer(scanner, meshes))
        scanner.expect("=")
        kind, args, kwargs = read_call(scanner)
        op = module = ""
        if scanner.accept_word("for"):
            op, module = scanner.value_name(), scanner.string()
        return Compute(kind, args, kwargs, tuple(results), Phase(word), module, op)
    if word in [kind.value for kind in CollectiveKind]:
        result = _read_buffer(scanner, meshes)
        scanner.expect("=")
        source = scanner.value_name()
        scanner.expect("over")
        axes = [scanner.word("an axis")]
        while scanner.accept(","):
            axes.append(scanner.word("an axis"))
        return Collective(CollectiveKind(word), source, result, tuple(axes))
    match word:
        case "send":
            source = scanner.value_name()
            scanner.expect("to")
            return Send(source, scanner.word("a lane"))
        case "receive":
            result = _read_buffer(scanner, meshes)
            scanner.expect("from")
            return Receive(result, scanner.word("a lane"))
        case "exchange":
            return _read_exchange(scanner, meshes)
        case "free":
            return Free(scanner.value_name())
        case _:
            raise ParseError(f"unknown step {word!r}", where=scanner.here(), fix="see the grammar in ir/program.py")


def _read_exchange(scanner: Scanner, meshes: dict[str, Mesh]) -> Exchange:
    label = scanner.string()
    result: Buffer | None = None
    given: str | None = None
    if not scanner.accept_word("nothing"):
        start = scanner.position
        given = scanner.value_name()
        if scanner.peek(":"):  # it was the name of what is taken
            scanner.position = start
            result = _read_buffer(scanner, meshes)
            scanner.expect("=")
            given = None if scanner.accept_word("nothing") else scanner.value_name()
    scanner.expect("among")
    lanes = [scanner.word("a lane")]
    while scanner.accept(","):
        lanes.append(scanner.word("a lane"))
    return Exchange(label, given, result, tuple(lanes))


def _read_buffer(scanner: Scanner, meshes: dict[str, Mesh]) -> Buffer:
    name = scanner.value_name()
    scanner.expect(":")
    dtype = DType.read(scanner)
    start = scanner.position
    # the layout needs its mesh, which stands behind it: skip over, then come back
    depth = 0
    while not (depth == 0 and scanner.peek("of")):
        if scanner.at_end():
            raise scanner.expected("'of' after a layout")
        depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(scanner.text[scanner.position], 0)
        scanner.position += 1
    scanner.expect("of")
    tensor = scanner.value_name()
    scanner.expect("on")
    label = scanner.word("a mesh name")
    if label not in meshes:
        raise ParseError(
            f"unknown mesh {label!r}", where=scanner.here(), fix=f"the program names {', '.join(meshes) or 'none'}"
        )
    end, scanner.position = scanner.position, start
    layout = Layout.read(scanner, meshes[label])
    if not scanner.peek("of"):
        raise scanner.expected("'of' after a layout")
    scanner.position = end
    times: list[tuple[str, tuple[int, ...]]] = []
    if scanner.accept_word("at"):
        times.append(_read_times(scanner))
        while scanner.accept("&"):
            times.append(_read_times(scanner))
    return Buffer(name, tensor, dtype, layout, tuple(times))


def _read_times(scanner: Scanner) -> tuple[str, tuple[int, ...]]:
    axis = scanner.word("a time axis")
    scanner.expect("=")
    covered = [scanner.integer()]
    while scanner.accept("+"):
        covered.append(scanner.integer())
    return axis, tuple(covered)
