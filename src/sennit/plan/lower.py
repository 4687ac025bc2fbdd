"""Preserve every dependency: a plan to a program.

Each stage is a lane. For every operator of a stage, at its moment and micro-batch, each read is *obtained* in the layout
that the operator needs: as it is, or by moves (`reshard/`), or from another stage. What was obtained once is kept, so a
redistribution serves all its readers. A redistribution that communicates is made at the root of a chain of views, and the
views are applied again behind it: several views of one value share one collective.

Lanes are built together, operator by operator, like coroutines. An operator waits until what it reads from other stages has
been sent. A value is sent right after it is made; the receiver takes what the sender sent in that order. So sends and receives
match by construction, and a pattern that cannot be followed shows itself here, as stages that wait for each other.

Gradients: a value pending over the time axis is accumulated as each micro-batch makes it; when the last is in, the axis is
resolved. Outputs come last: each gradient in its parameter's layout, on every stage that holds the parameter.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from sennit.capture.rules import is_relabelling, local_kind, localize, through_view
from sennit.errors import LayoutError, PlanError
from sennit.ir.dtype import DType
from sennit.ir.graph import Arg, Input, Op, Output, OutputKind, Phase, Ref
from sennit.ir.layout import Entry, Layout, Pending
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
    defines,
    reads,
)
from sennit.plan.pattern import Pattern, Work, one_forward_one_backward
from sennit.plan.plan import Plan
from sennit.plan.propagate import Decisions, Entries, Moment
from sennit.reshard.moves import MoveKind, moves

__all__ = ["lower"]


def lower(decisions: Decisions) -> Program:
    """The program of a complete plan, not yet checked."""
    plan = decisions.plan
    index = _Index(decisions)
    builders = [_LaneBuilder(decisions, index, stage) for stage in range(len(plan.stages))]
    for builder in builders:
        builder.others = builders
    running = {builder.stage: builder.run() for builder in builders}
    while running:
        before = sum(builder.progress for builder in builders)
        for stage, lane in list(running.items()):
            if next(lane, _DONE) is _DONE:
                del running[stage]
        if running and sum(builder.progress for builder in builders) == before:
            stuck = "; ".join(f"stage {stage} waits for {builders[stage].waiting_for}" for stage in running)
            raise PlanError(
                "the stages wait for each other",
                where=stuck,
                fix="order the pattern so that producers come before consumers",
            )
    return Program(plan.name, tuple(builder.finish() for builder in builders))


_DONE = object()


class _Index:
    """Look-ups on the graph of a complete plan, made once."""

    def __init__(self, decisions: Decisions) -> None:
        graph = decisions.plan.graph
        self.types = graph.types()
        self.producers = graph.producers()
        self.inputs = {item.value.name: item for item in graph.inputs}
        self.holders: dict[str, set[int]] = {item.path: set() for item in graph.inputs}  # stages that hold an input
        self.readers: dict[str, dict[int, Entries]] = {}  # value -> stage -> how its first reader there needs it
        for op in graph.ops:
            stage = decisions.stage[op.name]
            for position, name in enumerate(op.reads):
                self.readers.setdefault(name, {}).setdefault(stage, decisions.need(op, position))
                if name in self.inputs:
                    self.holders[self.inputs[name].path].add(stage)
        self.outputs: dict[str, list[tuple[Output, Entries]]] = {}  # value -> outputs, and the layout they come in
        by_path = {item.path: item.value.name for item in graph.inputs}
        for output in graph.outputs:
            is_gradient = output.kind is OutputKind.GRADIENT
            need: Entries = decisions.values[by_path[output.path]] if is_gradient else {}
            self.outputs.setdefault(output.name, []).append((output, need))
            for stage in self.holders[output.path] if is_gradient else ():
                self.readers.setdefault(output.name, {}).setdefault(stage, need)

    def wants(self, output: Output, producer_stage: int) -> set[int]:
        """The stages that return an output: the holders of a gradient's parameter, or where the value is made."""
        return self.holders[output.path] if output.kind is OutputKind.GRADIENT else {producer_stage}


@dataclass(frozen=True, slots=True)
class _Key:
    """What a buffer holds: a tensor, laid out so, for this micro-batch (None: all of the batch)."""

    tensor: str
    entries: tuple[tuple[str, Entry], ...]
    microbatch: int | None


@dataclass(slots=True)
class _Sums:
    """A sum over micro-batches in the making: its buffer so far."""

    buffer: Buffer
    covered: tuple[int, ...]


@dataclass(slots=True)
class _LaneBuilder:
    decisions: Decisions
    index: _Index
    stage: int
    others: list[_LaneBuilder] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    inputs: dict[str, LaneInput] = field(default_factory=dict)
    outputs: list[Output] = field(default_factory=list)
    buffers: dict[_Key, Buffer] = field(default_factory=dict)
    native: dict[tuple[str, int | None], Buffer] = field(default_factory=dict)
    sums: dict[str, _Sums] = field(default_factory=dict)
    queues: dict[int, list[tuple[str, int | None, Buffer]]] = field(
        default_factory=dict
    )  # from stage -> what it sent here
    names: set[str] = field(default_factory=set)
    progress: int = 0
    waiting_for: str = ""

    # ---- the order of work -------------------------------------------------------------------------------------------

    @property
    def plan(self) -> Plan:
        return self.decisions.plan

    @property
    def mesh_axes(self) -> tuple[str, ...]:
        return self.plan.stages[self.stage].names

    def run(self) -> Iterator[None]:
        """Builds the lane; yields when it must wait for another stage."""
        decisions, graph = self.decisions, self.plan.graph
        mine = [op for op in graph.ops if decisions.stage[op.name] == self.stage]
        moments = {moment: [op for op in mine if decisions.moment[op.name] is moment] for moment in Moment}
        yield from self._emit_all(moments[Moment.BEFORE], None)
        split_in_time = any(axis.size > 1 for axis in self.plan.mesh.time)
        for task in _pattern(self.plan).rows[self.stage]:
            phase = Phase.FORWARD if task.work is Work.FORWARD else Phase.BACKWARD
            ops = [op for op in moments[Moment.DURING] if op.phase is phase]
            yield from self._emit_all(ops, task.microbatch if split_in_time else None)
        yield from self._emit_all(moments[Moment.AFTER], None)
        yield from self._emit_outputs()

    def _emit_all(self, ops: list[Op], microbatch: int | None) -> Iterator[None]:
        for op in ops:
            for name in op.reads:
                yield from self._await(name, microbatch, op.describe())
            self._emit(op, microbatch)
            self.progress += 1

    def _await(self, name: str, microbatch: int | None, reader: str) -> Iterator[None]:
        """Wait until a value of another stage has been sent, and receive everything up to it."""
        producer = self._producer(name)
        if producer is None or self.decisions.stage[producer.name] == self.stage:
            return
        origin = self.decisions.stage[producer.name]
        when = microbatch if self.decisions.moment[producer.name] is Moment.DURING and not self._is_late(name) else None
        queue = self.queues.setdefault(origin, [])
        while (name, when) not in self.native:
            self.waiting_for = f"%{name} of stage {origin}, which {reader} reads"
            if queue:
                tensor, index, buffer = queue.pop(0)
                self._receive(origin, tensor, index, buffer)
            else:
                yield

    def _producer(self, name: str) -> Op | None:
        return self.index.producers.get(name)

    def _is_late(self, name: str) -> bool:
        """Whether a value is a sum over micro-batches, had only after the last of them."""
        return any(isinstance(self.decisions.values[name].get(axis.name), Pending) for axis in self.plan.mesh.time)

    # ---- operators ---------------------------------------------------------------------------------------------------

    def _emit(self, op: Op, microbatch: int | None) -> None:
        sources = iter(
            [self.obtain(name, self.decisions.need(op, i), microbatch).name for i, name in enumerate(op.reads)]
        )
        layouts = [self._layout(value.type.shape, self.decisions.makes(op, i)) for i, value in enumerate(op.results)]
        results = tuple(
            self._new(value.name, value.name, value.type.dtype, layout, microbatch)
            for value, layout in zip(op.results, layouts, strict=True)
        )
        args, kwargs = localize(op, [layout.local_shape() for layout in layouts])
        args = tuple(_rename(arg, sources) for arg in args)
        kwargs = tuple((key, _rename(arg, sources)) for key, arg in kwargs)
        kind = local_kind(op, tuple(self.decisions.strategies[op.name].values()))
        self.steps.append(Compute(kind, args, kwargs, results, op.phase, op.module, op.name))
        for buffer in results:
            self._made(buffer, microbatch, op.phase)

    def _made(self, buffer: Buffer, microbatch: int | None, phase: Phase) -> None:
        """A value exists: keep it, add it to its sum over micro-batches, send it where it is read."""
        if any(isinstance(buffer.layout.entry(axis), Pending) for axis, _ in buffer.times):
            done = self._accumulate(buffer, phase)
            if done is None:
                return
            buffer, microbatch = done, None
        self._keep(buffer, microbatch)
        for output, need in self.index.outputs.get(buffer.tensor, ()):
            if self.stage in self.index.wants(output, self.stage):
                self.obtain(buffer.tensor, need, microbatch)  # now, so that it overlaps with what is still to compute
        for stage in sorted(self.index.readers.get(buffer.tensor, {})):
            if stage != self.stage:
                self._send(buffer.tensor, microbatch, stage)

    def _keep(self, buffer: Buffer, microbatch: int | None) -> None:
        self.native.setdefault((buffer.tensor, microbatch), buffer)
        self.buffers[_Key(buffer.tensor, buffer.layout.entries, microbatch)] = buffer

    def _accumulate(self, piece: Buffer, phase: Phase) -> Buffer | None:
        """Add a micro-batch to its sum; the sum itself once it is complete."""
        ((axis, (microbatch,)),) = piece.times
        if piece.tensor not in self.sums:
            self.sums[piece.tensor] = _Sums(piece, (microbatch,))
            return None
        so_far = self.sums[piece.tensor]
        so_far.covered = tuple(sorted((*so_far.covered, microbatch)))
        complete = len(so_far.covered) == piece.layout.mesh.size(axis)
        layout = piece.layout.with_entry(axis, None) if complete else piece.layout
        result = Buffer(
            self._unique(f"{piece.tensor}.sum" if complete else f"{piece.tensor}.sum~{microbatch}"),
            piece.tensor,
            piece.dtype,
            layout,
            () if complete else ((axis, so_far.covered),),
        )
        self.steps.append(
            Compute(
                "sennit.accumulate", (Ref(so_far.buffer.name), Ref(piece.name)), (), (result,), phase, "", piece.tensor
            )
        )
        so_far.buffer = result
        return result if complete else None

    # ---- obtaining a value in a layout -------------------------------------------------------------------------------

    def obtain(self, name: str, need: Entries, microbatch: int | None) -> Buffer:
        """A buffer that holds value `name` as `need` says."""
        entries = self._entries(need)
        times = {axis.name for axis in self.plan.mesh.time}
        in_time = any(axis in times for axis, _ in entries)
        key = _Key(name, entries, microbatch if in_time else None)
        if key in self.buffers:
            return self.buffers[key]
        source = self._native(name, microbatch)
        if source.times:
            key = replace(key, microbatch=microbatch)
            if key in self.buffers:
                return self.buffers[key]
        hoisted = self._through_views(name, need, source, microbatch)
        if hoisted is not None:
            self.buffers[key] = hoisted
            return hoisted
        return self._move(source, Layout(source.layout.mesh, source.layout.shape, entries), key)

    def _native(self, name: str, microbatch: int | None) -> Buffer:
        for when in (microbatch, None):
            if (name, when) in self.native:
                return self.native[name, when]
        return self._input(self.index.inputs[name])

    def _input(self, item: Input) -> Buffer:
        value = item.value
        layout = self._layout(value.type.shape, self.decisions.values[value.name])
        buffer = Buffer(self._unique(value.name), value.name, value.type.dtype, layout)
        self.inputs[value.name] = LaneInput(item.role, buffer, item.path)
        self._keep(buffer, None)
        return buffer

    def _through_views(self, name: str, need: Entries, source: Buffer, microbatch: int | None) -> Buffer | None:
        """Where the value is a view and getting it would communicate: redistribute what it is a view of, and view that."""
        op = self._producer(name)
        target = Layout(source.layout.mesh, source.layout.shape, self._entries(need))
        if op is None or not is_relabelling(op) or self.decisions.stage[op.name] != self.stage:
            return None
        if set(dict(target.entries)) & set(self._time_axes()) != set(dict(source.layout.entries)) & set(
            self._time_axes()
        ):
            return None  # a slice in time, which does not communicate
        if not any(move.kind.communicates for move in moves(source.layout, target)):
            return None
        types = self.index.types
        try:
            at_root = {
                axis: through_view(op, types, source.layout.mesh.size(axis), entry) for axis, entry in target.entries
            }
            root_layout = self._layout(types[op.reads[0]].shape, at_root)
        except (LookupError, LayoutError):
            return None
        if not root_layout.is_even:
            return None
        root = self.obtain(op.reads[0], at_root, microbatch)
        result = Buffer(self._unique(_label(name, "view", source.times)), name, source.dtype, target, source.times)
        args, kwargs = localize(op, [target.local_shape()])
        root_name = iter([root.name])
        args = tuple(_rename(arg, root_name) for arg in args)
        self.steps.append(Compute(op.kind, args, kwargs, (result,), op.phase, op.module, op.name))
        return result

    def _move(self, source: Buffer, target: Layout, key: _Key) -> Buffer:
        """Emit the moves from a buffer to a layout; every intermediate result can serve others too."""
        current = source
        for move in moves(source.layout, target):
            times = current.times
            if move.kind is MoveKind.SLICE and move.axis in self._time_axes():
                assert key.microbatch is not None
                times = (*times, (move.axis, (key.microbatch,)))
            label = _label(source.tensor, f"{move.kind.value}.{move.axis}", times)
            result = Buffer(self._unique(label), source.tensor, source.dtype, move.result, times)
            self.steps.append(_step(move.kind, move.axis, current, result, self._phase(source.tensor)))
            current = result
            self.buffers.setdefault(_Key(source.tensor, move.result.entries, key.microbatch if times else None), result)
        self.buffers[key] = current
        return current

    def _phase(self, tensor: str) -> Phase:
        op = self._producer(tensor)
        return op.phase if op is not None else Phase.FORWARD

    # ---- between stages ----------------------------------------------------------------------------------------------

    def _send(self, name: str, microbatch: int | None, to: int) -> None:
        """Send a value laid out as its first reader there needs it, so that it is redistributed once, here."""
        source = self._native(name, microbatch)
        in_time = {axis: entry for axis, entry in source.layout.entries if axis in self._time_axes()}
        in_space = {
            axis: entry for axis, entry in self.index.readers[name][to].items() if axis not in self._time_axes()
        }
        buffer = self.obtain(name, {**in_space, **in_time}, microbatch)
        self.steps.append(Send(buffer.name, f"stage{to}"))
        self.others[to].queues.setdefault(self.stage, []).append((name, microbatch, buffer))
        self.progress += 1

    def _receive(self, origin: int, name: str, microbatch: int | None, sent: Buffer) -> None:
        layout = sent.layout.on(self.plan.stages[self.stage])
        buffer = Buffer(self._unique(_label(name, "received", sent.times)), name, sent.dtype, layout, sent.times)
        self.steps.append(Receive(buffer, f"stage{origin}"))
        self._keep(buffer, microbatch)
        self.progress += 1

    # ---- outputs -----------------------------------------------------------------------------------------------------

    def _emit_outputs(self) -> Iterator[None]:
        for output in self.plan.graph.outputs:
            producer = self._producer(output.name)
            assert producer is not None
            if self.stage in self.index.wants(output, self.decisions.stage[producer.name]):
                yield from self._await(output.name, None, f"the {output.kind.value} of {output.path or 'the model'}")
                need = next(need for other, need in self.index.outputs[output.name] if other == output)
                self.outputs.append(Output(output.kind, self.obtain(output.name, need, None).name, output.path))
                self.progress += 1

    def finish(self) -> Lane:
        """The lane, with every buffer freed after its last use."""
        kept = {output.name for output in self.outputs} | {item.buffer.name for item in self.inputs.values()}
        last: dict[str, int] = {}
        for position, step in enumerate(self.steps):
            for name in (*reads(step), *(buffer.name for buffer in defines(step))):
                last[name] = position
        ending: dict[int, list[str]] = {}
        for name, position in last.items():
            if name not in kept:
                ending.setdefault(position, []).append(name)
        steps: list[Step] = []
        for position, step in enumerate(self.steps):
            steps.append(step)
            steps += [Free(name) for name in ending.get(position, [])]
        order = {item.path: position for position, item in enumerate(self.plan.graph.inputs)}
        inputs = tuple(sorted(self.inputs.values(), key=lambda item: order[item.path]))
        devices = self.plan.stages[self.stage].devices
        return Lane(f"stage{self.stage}", devices, inputs, tuple(steps), tuple(self.outputs))

    # ---- names and layouts -------------------------------------------------------------------------------------------

    def _time_axes(self) -> tuple[str, ...]:
        return tuple(axis.name for axis in self.plan.mesh.time)

    def _entries(self, need: Entries) -> tuple[tuple[str, Entry], ...]:
        """In the order of the mesh, without the axes that do nothing."""
        return tuple((axis, entry) for axis in self.mesh_axes if (entry := need.get(axis)) is not None)

    def _layout(self, shape: tuple[int, ...], entries: Entries) -> Layout:
        return Layout(self.plan.stages[self.stage], shape, self._entries(entries))

    def _new(self, name: str, tensor: str, dtype: DType, layout: Layout, microbatch: int | None) -> Buffer:
        times: Times = tuple(
            (axis, (microbatch,)) for axis, _ in layout.entries if axis in self._time_axes() and microbatch is not None
        )
        return Buffer(self._unique(_label(name, "", times)), tensor, dtype, layout, times)

    def _unique(self, name: str) -> str:
        candidate, count = name, 1
        while candidate in self.names:
            count += 1
            candidate = f"{name}.{count}"
        self.names.add(candidate)
        return candidate


def _pattern(plan: Plan) -> Pattern:
    return plan.pattern or one_forward_one_backward(len(plan.stages), plan.microbatches)


def _label(tensor: str, suffix: str, times: Times) -> str:
    label = f"{tensor}.{suffix}" if suffix else tensor
    return label + "".join(f"~{covered[0]}" for _, covered in times)


def _rename(arg: Arg, names: Iterator[str]) -> Arg:
    """The same argument with its references replaced, in order."""
    if isinstance(arg, Ref):
        return Ref(next(names))
    if isinstance(arg, tuple):
        return tuple(_rename(part, names) for part in arg)
    return arg


def _step(kind: MoveKind, axis: str, source: Buffer, result: Buffer, phase: Phase) -> Step:
    if kind.communicates:
        return Collective(CollectiveKind(kind.value), source.name, result, (axis,))
    return Compute(f"sennit.{kind.value}", (Ref(source.name),), (), (result,), phase, "", source.tensor)
