"""Faults at random: a right program with one thing changed, as a compiler's bug or a wrong edit would change it.

| fault | changes |
|---|---|
| drop | a collective, a transfer, an exchange, a local move or an operator is left out; what it made is read from what it read |
| swap | two neighbouring collectives, transfers or exchanges of one lane change places |
| order | a step moves to a random place of its lane |
| layout | an axis of a buffer gets another entry: split elsewhere, pending, or nothing |
| free | a buffer is freed before its last read, or freed twice |
| argument | a number of an operator, a size or a dim, is another number |
| read | a step reads another buffer of the same type |
| peer | a transfer or an exchange goes to another lane, or a collective runs over another axis |
| label | an exchange has the label of another, or one that no other lane has |
| side | an exchange gives nothing, or takes nothing |
| mesh | an exchange or a `sennit.take` brings a tensor to another mesh |
| output | an output names another buffer |

`random_fault(program, rng)` gives the changed program, or None where the drawn fault changes nothing. Most are wrong
and must be refused. Some change nothing that matters: a step that moves without passing what it depends on, another
buffer of the same value. Those may be accepted, and must then compute the same.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

from sennit.errors import LayoutError
from sennit.ir.graph import Arg, Ref
from sennit.ir.layout import Entry, Pending, Reduction, Split
from sennit.ir.program import (
    Buffer,
    Collective,
    Compute,
    Exchange,
    Free,
    Lane,
    Program,
    Receive,
    Send,
    Step,
    defines,
    reads,
)

__all__ = ["Fault", "random_fault"]


@dataclass(frozen=True, slots=True)
class Fault:
    kind: str
    program: Program
    what: str


_Maker = Callable[[Program, Lane, random.Random], tuple[Lane, str] | None]


def random_fault(program: Program, rng: random.Random) -> Fault | None:
    """One fault of a random kind in a random lane; None where it would change nothing."""
    makers: dict[str, _Maker] = {
        "drop": _drop,
        "swap": _swap,
        "order": _move,
        "layout": _layout,
        "free": _free,
        "argument": _argument,
        "read": _read,
        "peer": _peer,
        "label": _label,
        "side": _side,
        "mesh": _mesh,
        "output": _output,
    }
    kind = rng.choice(list(makers))
    position = rng.randrange(len(program.lanes))
    try:
        made = makers[kind](program, program.lanes[position], rng)
    except (LayoutError, IndexError, ValueError):
        return None  # no such layout, or nothing to choose from
    if made is None or made[0] == program.lanes[position]:
        return None
    lanes = list(program.lanes)
    lanes[position] = made[0]
    return Fault(kind, replace(program, lanes=tuple(lanes)), made[1])


def _drop(program: Program, lane: Lane, rng: random.Random) -> tuple[Lane, str] | None:
    position = rng.choice([i for i, step in enumerate(lane.steps) if not isinstance(step, Free)])
    step = lane.steps[position]
    made, read = defines(step), reads(step)
    renamed = {buffer.name: read[0] for buffer in made} if read else {}
    gone = {buffer.name for buffer in made}
    steps = [
        _renamed(other, renamed)
        for i, other in enumerate(lane.steps)
        if i != position and not (isinstance(other, Free) and other.source in gone | set(read))
    ]
    outputs = tuple(replace(output, name=renamed.get(output.name, output.name)) for output in lane.outputs)
    return replace(lane, steps=tuple(steps), outputs=outputs), f"dropped {step}"


def _renamed(step: Step, names: dict[str, str]) -> Step:
    def arg(item: Arg) -> Arg:
        if isinstance(item, Ref):
            return Ref(names.get(item.name, item.name))
        return tuple(map(arg, item)) if isinstance(item, tuple) else item

    match step:
        case Compute():
            return replace(step, args=tuple(map(arg, step.args)), kwargs=tuple((k, arg(v)) for k, v in step.kwargs))
        case Collective() | Send() | Free():
            return replace(step, source=names.get(step.source, step.source))
        case Exchange(source=source):
            return replace(step, source=None if source is None else names.get(source, source))
        case Receive():
            return step


def _swap(program: Program, lane: Lane, rng: random.Random) -> tuple[Lane, str] | None:
    moving = [i for i, step in enumerate(lane.steps) if isinstance(step, (Collective, Send, Receive, Exchange))]
    if len(moving) < 2:
        return None
    at = rng.randrange(len(moving) - 1)
    one, other = moving[at], moving[at + 1]
    steps = list(lane.steps)
    steps[one], steps[other] = steps[other], steps[one]
    return replace(lane, steps=tuple(steps)), f"swapped {lane.steps[one]} and {lane.steps[other]}"


def _move(program: Program, lane: Lane, rng: random.Random) -> tuple[Lane, str] | None:
    steps = list(lane.steps)
    source, target = rng.randrange(len(steps)), rng.randrange(len(steps))
    step = steps.pop(source)
    steps.insert(target, step)
    return replace(lane, steps=tuple(steps)), f"moved {step} by {target - source}"


def _layout(program: Program, lane: Lane, rng: random.Random) -> tuple[Lane, str] | None:
    position = rng.choice([i for i, step in enumerate(lane.steps) if defines(step)])
    step = lane.steps[position]
    buffer = rng.choice(defines(step))
    axis = rng.choice(buffer.layout.mesh.axes)
    shape = buffer.layout.shape
    choices: list[Entry | None] = [None, Pending(Reduction.SUM), Pending(Reduction.MAX)]
    choices += [Split(dim, max(1, size // axis.size)) for dim, size in enumerate(shape)]
    choices += [Split(dim, 1) for dim in range(len(shape))]
    layout = buffer.layout.with_entry(axis.name, rng.choice(choices))
    changed = replace(buffer, layout=layout)
    steps = list(lane.steps)
    steps[position] = _with_result(step, buffer, changed)
    return replace(lane, steps=tuple(steps)), f"{buffer.describe()} became {changed.describe()}"


def _with_result(step: Step, old: Buffer, new: Buffer) -> Step:
    match step:
        case Compute():
            return replace(step, results=tuple(new if item is old else item for item in step.results))
        case Collective() | Receive() | Exchange():
            return replace(step, result=new)
        case _:
            return step


def _free(program: Program, lane: Lane, rng: random.Random) -> tuple[Lane, str] | None:
    frees = [i for i, step in enumerate(lane.steps) if isinstance(step, Free)]
    position = rng.choice(frees)
    step = lane.steps[position]
    assert isinstance(step, Free)
    steps = list(lane.steps)
    if rng.random() < 0.5:
        steps.insert(rng.randrange(len(steps)), step)
        return replace(lane, steps=tuple(steps)), f"freed %{step.source} twice"
    readers = [i for i, other in enumerate(lane.steps) if step.source in reads(other)]
    makers = [i for i, other in enumerate(lane.steps) if step.source in [buffer.name for buffer in defines(other)]]
    if not readers or not makers:
        return None
    (made,), last = makers, max(readers)
    del steps[position]
    steps.insert(rng.randint(made + 1, last), step)
    return replace(lane, steps=tuple(steps)), f"freed %{step.source} early"


def _argument(program: Program, lane: Lane, rng: random.Random) -> tuple[Lane, str] | None:
    position = rng.choice([i for i, step in enumerate(lane.steps) if isinstance(step, Compute)])
    step = lane.steps[position]
    assert isinstance(step, Compute)
    numbers = [i for i, arg in enumerate(step.args) if _has_number(arg)]
    chosen = rng.choice(numbers)
    args = tuple(_another(arg, rng) if i == chosen else arg for i, arg in enumerate(step.args))
    steps = list(lane.steps)
    steps[position] = replace(step, args=args)
    return replace(lane, steps=tuple(steps)), f"{step.kind} has {args} for {step.args}"


def _has_number(arg: Arg) -> bool:
    return isinstance(arg, (int, float)) or (isinstance(arg, tuple) and any(map(_has_number, arg)))


def _another(arg: Arg, rng: random.Random) -> Arg:
    match arg:
        case bool():
            return not arg
        case int() | float():
            return arg + rng.choice([-1, 1]) if rng.random() < 0.5 else arg * 2 + 1
        case tuple():
            chosen = rng.choice([i for i, part in enumerate(arg) if _has_number(part)])
            return tuple(_another(part, rng) if i == chosen else part for i, part in enumerate(arg))
        case _:
            return arg


def _read(program: Program, lane: Lane, rng: random.Random) -> tuple[Lane, str] | None:
    position = rng.choice([i for i, step in enumerate(lane.steps) if reads(step) and not isinstance(step, Free)])
    step, buffers = lane.steps[position], lane.buffers()
    name = rng.choice(reads(step))
    mine = buffers[name]
    alike = [
        other
        for other in buffers.values()
        if other.name != name and (other.layout, other.dtype) == (mine.layout, mine.dtype)
    ]
    other = rng.choice(alike)
    steps = list(lane.steps)
    steps[position] = _renamed(step, {name: other.name})
    return replace(lane, steps=tuple(steps)), f"{step} reads %{other.name} for %{name}"


def _peer(program: Program, lane: Lane, rng: random.Random) -> tuple[Lane, str] | None:
    position = rng.choice(
        [i for i, step in enumerate(lane.steps) if isinstance(step, (Collective, Send, Receive, Exchange))]
    )
    step = lane.steps[position]
    lanes = [other.name for other in program.lanes]
    new: Step
    match step:
        case Collective(result=result):
            new = replace(step, axes=(rng.choice(result.layout.mesh.axes).name,))
        case Send():
            new = replace(step, to=rng.choice(lanes))
        case Receive():
            new = replace(step, origin=rng.choice(lanes))
        case Exchange(lanes=among):
            new = replace(step, lanes=(*among[:-1], rng.choice(lanes)) if rng.random() < 0.5 else among[:-1])
        case _:
            raise AssertionError(step)
    steps = list(lane.steps)
    steps[position] = new
    return replace(lane, steps=tuple(steps)), f"{step} became {new}"


def _label(program: Program, lane: Lane, rng: random.Random) -> tuple[Lane, str] | None:
    position, step = _some_exchange(lane, rng)
    labels = sorted({step.label for other in program.lanes for step in other.steps if isinstance(step, Exchange)})
    changed = replace(step, label=rng.choice([*labels, "nobody's"]))
    return _with_step(lane, position, changed), f"{step.label} became {changed.label}"


def _side(program: Program, lane: Lane, rng: random.Random) -> tuple[Lane, str] | None:
    position, step = _some_exchange(lane, rng)
    changed = replace(step, source=None) if rng.random() < 0.5 else replace(step, result=None)
    return _with_step(lane, position, changed), f"{step} became {changed}"


def _mesh(program: Program, lane: Lane, rng: random.Random) -> tuple[Lane, str] | None:
    moves = [
        i
        for i, step in enumerate(lane.steps)
        if defines(step) and (isinstance(step, Exchange) or (isinstance(step, Compute) and step.kind == "sennit.take"))
    ]
    position = rng.choice(moves)
    step = lane.steps[position]
    (buffer,) = defines(step)
    meshes = [mesh for mesh in program.meshes() if all(axis in mesh for axis, _ in buffer.layout.entries)]
    changed = replace(buffer, layout=buffer.layout.on(rng.choice(meshes)))
    return _with_step(lane, position, _with_result(step, buffer, changed)), f"{buffer.describe()} moved to another mesh"


def _some_exchange(lane: Lane, rng: random.Random) -> tuple[int, Exchange]:
    return rng.choice([(i, step) for i, step in enumerate(lane.steps) if isinstance(step, Exchange)])


def _with_step(lane: Lane, position: int, step: Step) -> Lane:
    return replace(lane, steps=(*lane.steps[:position], step, *lane.steps[position + 1 :]))


def _output(program: Program, lane: Lane, rng: random.Random) -> tuple[Lane, str] | None:
    position = rng.randrange(len(lane.outputs))
    other = rng.choice(list(lane.buffers()))
    outputs = tuple(replace(item, name=other) if i == position else item for i, item in enumerate(lane.outputs))
    return replace(lane, outputs=outputs), f"{lane.outputs[position]} became %{other}"
