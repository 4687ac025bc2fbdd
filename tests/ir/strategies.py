"""Hypothesis strategies for the values of `ir/`: small, valid by construction, with every form their text can take.

Programs are valid in structure only: buffers are defined before they are read and lie on meshes of their lane's
devices. Their layouts and communications need not make sense, as no more than their text is tested with them.
"""

from __future__ import annotations

import string
from math import prod

from hypothesis import strategies as st

from sennit.ir.dtype import DType, TensorType
from sennit.ir.graph import Arg, Graph, Input, Op, Output, OutputKind, Phase, Ref, Repeat, Role, Value
from sennit.ir.layout import Entry, Layout, Pending, Reduction, Split
from sennit.ir.mesh import Axis, AxisKind, Mesh
from sennit.ir.program import (
    Buffer,
    Collective,
    CollectiveKind,
    Compute,
    Free,
    Lane,
    LaneInput,
    Program,
    Receive,
    Send,
    Step,
    Times,
)
from sennit.ir.timeline import Category, Event, Memory, MemoryKind, Origin, Timeline

__all__ = ["args", "graphs", "layouts", "meshes", "programs", "tensor_types", "texts", "timelines", "value_names"]

_WORDS = string.ascii_letters + "_"

words = st.builds(str.__add__, st.sampled_from(_WORDS), st.text(_WORDS + string.digits, max_size=4))
kinds = st.lists(words, min_size=1, max_size=3).map(".".join)
value_names = st.text(string.ascii_letters + string.digits + "_.~", min_size=1, max_size=5)
texts = st.text(st.characters(codec="utf-8"), max_size=8)  # quotes, backslashes, line ends and "#" among them
finite = st.floats(allow_nan=False)  # infinities have a text form; nan has one too, but does not equal itself
tensor_types = st.builds(TensorType, st.lists(st.integers(0, 64), max_size=4).map(tuple), st.sampled_from(list(DType)))


def args(names: list[str]) -> st.SearchStrategy[Arg]:
    """Arguments that name some of the values, or none of them where there are none yet."""
    leaves: st.SearchStrategy[Arg] = st.one_of(
        st.none(), st.booleans(), st.integers(), finite, texts, st.sampled_from(list(DType))
    )
    if names:
        leaves = st.one_of(leaves, st.sampled_from(names).map(Ref))
    return st.recursive(leaves, lambda inner: st.lists(inner, max_size=3).map(tuple), max_leaves=4)


def _calls(names: list[str]) -> st.SearchStrategy[tuple[tuple[Arg, ...], tuple[tuple[str, Arg], ...]]]:
    return st.tuples(
        st.lists(args(names), max_size=3).map(tuple),
        st.lists(st.tuples(words, args(names)), max_size=2).map(tuple),
    )


def _outputs(names: list[str]) -> st.SearchStrategy[tuple[Output, ...]]:
    if not names:
        return st.just(())
    outputs = st.builds(Output, st.sampled_from(OutputKind), st.sampled_from(names), texts)
    return st.lists(outputs, max_size=4, unique_by=lambda output: output.key).map(tuple)


# ---- graphs ----------------------------------------------------------------------------------------------------------


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    names = draw(st.lists(value_names, unique=True, max_size=8))
    cut = draw(st.integers(0, len(names)))
    roles = st.sampled_from([role for role in Role if role is not Role.SEED])
    inputs = tuple(Input(draw(roles), Value(name, draw(tensor_types)), draw(texts)) for name in names[:cut])
    if draw(st.booleans()):  # longer than any other name
        inputs += (Input(Role.SEED, Value("the.one.seed", TensorType((2,), DType.I64)), draw(texts)),)
    ops: list[Op] = []
    while cut < len(names):
        stop = draw(st.integers(cut + 1, min(len(names), cut + 2)))
        positional, keyword = draw(_calls(names[:cut]))
        results = tuple(Value(name, draw(tensor_types)) for name in names[cut:stop])
        seq = draw(st.none() | st.integers())
        phase = draw(st.sampled_from(Phase))
        call = draw(st.integers(0, 3))
        ops.append(Op(draw(kinds), positional, keyword, results, phase, draw(texts), draw(texts), seq, call))
        cut = stop
    repeats = [Repeat(draw(texts), draw(st.integers(0, 9)), start, 1, 1) for start in range(len(ops))]
    return Graph(draw(texts), inputs, tuple(ops), draw(_outputs(names)), tuple(repeats))


# ---- meshes and layouts ----------------------------------------------------------------------------------------------


@st.composite
def meshes(draw: st.DrawFn, devices: tuple[int, ...] | None = None) -> Mesh:
    """Any small mesh, or one of just these devices: an axis of all of them beside axes of size 1."""
    names = draw(st.lists(words, unique=True, max_size=4))
    cut = draw(st.integers(0, len(names)))
    sizes = [draw(st.integers(1, 3)) for _ in names]
    if devices is not None:
        if cut == 0 and len(devices) > 1:
            names, cut, sizes = ["all", *(name for name in names if name != "all")], 1, [1, *sizes]
        sizes[:cut] = [len(devices)] + [1] * (cut - 1) if cut else []
    axes = tuple(
        Axis(name, size, AxisKind.SPACE if position < cut else AxisKind.TIME)
        for position, (name, size) in enumerate(zip(names, sizes, strict=False))
    )
    if devices is None:
        count = prod(axis.size for axis in axes if axis.kind is AxisKind.SPACE)
        devices = tuple(draw(st.lists(st.integers(0, 99), min_size=count, max_size=count, unique=True)))
    return Mesh(axes, draw(st.permutations(devices).map(tuple)))


@st.composite
def layouts(draw: st.DrawFn, mesh: Mesh) -> Layout:
    """Axes split dims, plain or strided, or are pending, or say nothing. Strides are laid minor to major per dim."""
    shape = draw(st.lists(st.integers(0, 24), max_size=3).map(tuple))
    free = [1] * len(shape)  # the least stride that a further axis of the dim may take
    entries: dict[str, Entry | None] = {}
    for axis in draw(st.permutations(mesh.axes)):
        choice = draw(st.sampled_from(["split", "pending", "none"]))
        if choice == "split" and shape:
            dim = draw(st.integers(0, len(shape) - 1))
            stride = free[dim] * draw(st.integers(1, 3))
            entries[axis.name], free[dim] = Split(dim, stride), stride * axis.size
        elif choice == "pending":
            entries[axis.name] = Pending(draw(st.sampled_from(Reduction)))
    if draw(st.booleans()):
        return Layout.make(mesh, shape, entries)
    dims: dict[int, list[str]] = {}
    for name, entry in entries.items():
        if isinstance(entry, Split):
            dims.setdefault(entry.dim, []).append(name)
    pending = {name: entry.op for name, entry in entries.items() if isinstance(entry, Pending)}
    return Layout.block(mesh, shape, dims, pending)


# ---- programs --------------------------------------------------------------------------------------------------------


@st.composite
def _buffers(draw: st.DrawFn, name: str, choices: list[Mesh]) -> Buffer:
    mesh = draw(st.sampled_from(choices))
    layout = draw(layouts(mesh))
    times: Times = tuple(
        (axis.name, tuple(draw(st.lists(st.integers(0, axis.size - 1), min_size=1, unique=True))))
        for axis in mesh.time
        if layout.entry(axis.name) is not None
    )
    return Buffer(name, draw(value_names), draw(st.sampled_from(DType)), layout, times)


@st.composite
def _steps(draw: st.DrawFn, known: list[str], fresh: list[str], choices: list[Mesh], peers: list[str]) -> Step:
    """A step that reads among the known buffers and takes the names of those it defines from the fresh ones."""
    forms = ["compute", "receive"] if fresh else []
    forms += ["collective"] if fresh and known else []
    forms += ["send", "free"] if known else []
    match draw(st.sampled_from(forms)):
        case "compute":
            positional, keyword = draw(_calls(known))
            count = draw(st.integers(1, min(2, len(fresh))))
            results = tuple(draw(_buffers(fresh.pop(), choices)) for _ in range(count))
            op = draw(st.just("") | value_names)
            module = draw(texts) if op else ""  # the text form has a module only beside an operator
            return Compute(draw(kinds), positional, keyword, results, draw(st.sampled_from(Phase)), module, op)
        case "collective":
            axes = tuple(draw(st.lists(words, min_size=1, max_size=2)))
            result = draw(_buffers(fresh.pop(), choices))
            return Collective(draw(st.sampled_from(CollectiveKind)), draw(st.sampled_from(known)), result, axes)
        case "send":
            return Send(draw(st.sampled_from(known)), draw(st.sampled_from(peers)))
        case "receive":
            return Receive(draw(_buffers(fresh.pop(), choices)), draw(st.sampled_from(peers)))
        case _:
            return Free(draw(st.sampled_from(known)))


@st.composite
def programs(draw: st.DrawFn) -> Program:
    names = draw(st.lists(words, unique=True, min_size=1, max_size=3))
    lanes: list[Lane] = []
    for number, name in enumerate(names):
        devices = tuple(range(4 * number, 4 * number + draw(st.integers(1, 4))))
        choices = draw(st.lists(meshes(devices), min_size=1, max_size=2))
        fresh = draw(st.lists(value_names, unique=True, max_size=6))
        inputs = [
            LaneInput(draw(st.sampled_from(Role)), draw(_buffers(fresh.pop(), choices)), draw(texts))
            for _ in range(draw(st.integers(0, min(2, len(fresh)))))
        ]
        known = [item.buffer.name for item in inputs]
        steps: list[Step] = []
        for _ in range(draw(st.integers(0, 5))):
            if not fresh and not known:
                break
            before = list(fresh)
            steps.append(draw(_steps(known, fresh, choices, names)))
            known += [buffer for buffer in before if buffer not in fresh]
        lanes.append(
            Lane(name, draw(st.permutations(devices).map(tuple)), tuple(inputs), tuple(steps), draw(_outputs(known)))
        )
    return Program(draw(texts), tuple(lanes))


# ---- timelines -------------------------------------------------------------------------------------------------------


@st.composite
def timelines(draw: st.DrawFn) -> Timeline:
    """Events that follow each other on their streams, listed in any order."""
    events: list[Event] = []
    seconds = st.floats(0, 1e3, allow_subnormal=True)
    for device, stream in draw(st.lists(st.tuples(st.integers(0, 9), texts), unique=True, max_size=3)):
        edges = sorted(draw(st.lists(seconds, max_size=6)))
        for start, stop in zip(edges[::2], edges[1::2], strict=False):
            size = draw(st.integers(0, 1 << 40))
            events.append(Event(device, stream, draw(st.sampled_from(Category)), draw(texts), start, stop, size))
    after = st.none() | st.integers(0, max(0, len(events) - 1))
    listed = tuple(
        Event(e.device, e.stream, e.category, e.name, e.start, e.stop, e.bytes, draw(after))
        for e in draw(st.permutations(events))
    )
    live = st.lists(st.tuples(st.sampled_from(MemoryKind), st.integers(0, 1 << 40)), max_size=3).map(tuple)
    memory = draw(st.lists(st.builds(Memory, st.integers(0, 9), seconds, live), max_size=3).map(tuple))
    return Timeline(draw(texts), draw(st.sampled_from(Origin)), listed, memory)
