"""Preserve every dependency: a plan to a program.

Each lane is built from the tasks of its stages. For every operator of a stage, at its moment and micro-batch, each read
is *obtained* in the layout that the operator needs: as it is, or by moves (`reshard/`), or from another stage. What was
obtained once is kept, so a redistribution serves all its readers. A redistribution that communicates is made at the
root of a chain of views, and the views are applied again behind it: several views of one value share one collective.

Lanes are built together, operator by operator, like coroutines. An operator waits until what it reads from other stages
has been sent. A value leaves right after it is made (`plan/crossing.py` says how); the receiver takes what the sender
sent in that order. So transfers match by construction, and a pattern that cannot be followed shows itself here, as
lanes that wait for each other.

Stages on one mesh are one *site*. Where a value of one site is read on another that shares its lane, it is taken there;
a stage on several lanes is built once in each of them, from the same operators in the same order, and so are its
collectives.

What is made with each task (`plan/propagate_time.py`) is made there where it is obtained first, and forgotten when the
task ends: the next that reads it makes it again.

Gradients: a value pending over the time axis is accumulated as each micro-batch makes it, unless the next operator
takes it as it is; when the last is in, the axis is resolved. Outputs come last: each gradient in its parameter's
layout, on every site that holds the parameter; a result of micro-batches as their concatenation.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from sennit.capture.rules import is_relabelling, localize, through_view
from sennit.errors import LayoutError, PlanError
from sennit.ir.dtype import DType
from sennit.ir.graph import Input, Op, Output, Phase, Ref
from sennit.ir.layout import Entry, Layout, Pending, Split
from sennit.ir.program import (
    Buffer,
    Compute,
    Exchange,
    Lane,
    LaneInput,
    Program,
    Receive,
    Send,
    Step,
    Times,
    defines,
)
from sennit.kernels.lane_code import with_frees
from sennit.plan.crossing import Way
from sennit.plan.lower_index import LowerIndex, Placed
from sennit.plan.lower_parts import Key, Letter, Mail, Sums, label_of, rename, step_of
from sennit.plan.pattern import Work
from sennit.plan.plan import Plan
from sennit.plan.propagate import Decisions, Entries, Moment
from sennit.reshard.moves import MoveKind, moves

__all__ = ["lower"]


def lower(decisions: Decisions) -> Program:
    """The program of a complete plan, not yet checked."""
    index = LowerIndex(decisions)
    builders = [_LaneBuilder(decisions, index, lane) for lane in range(len(index.lanes))]
    for builder in builders:
        builder.others = builders
    running = {builder.lane: builder.run() for builder in builders}
    while running:
        before = sum(builder.progress for builder in builders)
        for number, lane in list(running.items()):
            if next(lane, _DONE) is _DONE:
                del running[number]
        if running and sum(builder.progress for builder in builders) == before:
            stuck = "; ".join(f"{index.lane_names[lane]} waits for {builders[lane].waiting_for}" for lane in running)
            raise PlanError(
                "the stages wait for each other",
                where=stuck,
                fix="order the pattern so that producers come before consumers",
            )
    return Program(decisions.plan.name, tuple(builder.finish() for builder in builders))


_DONE = object()


@dataclass(slots=True)
class _LaneBuilder:
    decisions: Decisions
    index: LowerIndex
    lane: int
    others: list[_LaneBuilder] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    inputs: dict[str, LaneInput] = field(default_factory=dict)
    outputs: list[Output] = field(default_factory=list)
    buffers: dict[Key, Buffer] = field(default_factory=dict)
    native: dict[tuple[str, int, int | None], Buffer] = field(default_factory=dict)  # by tensor, site and micro-batch
    sums: dict[str, Sums] = field(default_factory=dict)
    mail: Mail = field(default_factory=Mail)
    gathered: set[Key] = field(default_factory=set)  # wholes of parameters that live in pieces
    passing: set[Key] = field(default_factory=set)  # what is made with each task
    phase: Phase = Phase.FORWARD  # of the task
    names: set[str] = field(default_factory=set)
    progress: int = 0
    waiting_for: str = ""

    # ---- the order of work -------------------------------------------------------------------------------------------

    @property
    def plan(self) -> Plan:
        return self.decisions.plan

    def run(self) -> Iterator[None]:
        """Builds the lane; yields when it must wait for another."""
        decisions, stages = self.decisions, self.index.lanes[self.lane].stages
        mine = [op for op in self.plan.graph.ops if decisions.stage[op.name] in stages]
        moments = {moment: [op for op in mine if decisions.moment[op.name] is moment] for moment in Moment}
        yield from self._emit_all(moments[Moment.BEFORE], None)
        split_in_time = any(axis.size > 1 for axis in self.plan.mesh.time)
        during: dict[int, list[Op]] = {stage: [] for stage in stages}
        for op in moments[Moment.DURING]:
            during[decisions.stage[op.name]].append(op)
        self._check_work(during)
        for task in self.index.pattern.rows[self.lane]:
            ops = self.index.ops_of(during[task.stage], task)
            self.phase = Phase.FORWARD if task.work is Work.FORWARD else Phase.BACKWARD
            yield from self._emit_all(ops, task.microbatch if split_in_time else None)
            if self.plan.regather:
                self._let_go()
        yield from self._emit_all(moments[Moment.AFTER], None)
        yield from self._emit_outputs()

    def _check_work(self, during: dict[int, list[Op]]) -> None:
        for stage, ops in during.items():
            tasks = [
                task for task in self.index.pattern.rows[self.lane] if task.stage == stage and task.microbatch == 0
            ]
            covered = {op.name for task in tasks for op in self.index.ops_of(ops, task)}
            left = [op for op in ops if op.name not in covered]
            if left:
                raise PlanError(
                    f"the pattern has no task for {left[0].describe()}",
                    where=f"stage {stage} runs {' '.join(map(str, tasks))} for micro-batch 0",
                    fix="give a stage with backward operators its B tasks",
                )

    def _emit_all(self, ops: list[Op], microbatch: int | None) -> Iterator[None]:
        for op in ops:
            site = self.index.site[op.name]
            for name in self.index.template(op).reads:
                if self.index.site_of.get(name, site) != site:
                    yield from self._await(name, microbatch, op.describe(), site)
            self._emit(op, microbatch, op.phase)
            self.progress += 1
        self._forget()

    def _await(self, name: str, microbatch: int | None, reader: str, site: int) -> Iterator[None]:
        """Wait until a value of another site has come, and take everything that was sent before it."""
        producer = self._producer(name)
        if producer is None or self.index.site[producer.name] == site:
            return
        origin = self.index.site[producer.name]
        when = microbatch if self.decisions.moment[producer.name] is Moment.DURING and not self._is_late(name) else None
        while (name, site, when) not in self.native:
            stage = self.decisions.stage[producer.name]
            self.waiting_for = f"%{name} of stage {stage}, which {reader} reads"
            if not self._open_mail(self.index.sites[origin]):
                yield

    def _open_mail(self, lanes: tuple[int, ...]) -> bool:
        """Take the next letter from these lanes; whether there was one."""
        letter = self.mail.take(lanes)
        if letter is not None:
            self._receive(letter)
        return letter is not None

    def _producer(self, name: str) -> Op | None:
        return self.index.producers.get(name)

    def _is_late(self, name: str) -> bool:
        """Whether a value is a sum over micro-batches, had only after the last of them."""
        return any(isinstance(self.decisions.values[name].get(axis.name), Pending) for axis in self.plan.mesh.time)

    # ---- operators ---------------------------------------------------------------------------------------------------

    def _emit(self, op: Op, microbatch: int | None, phase: Phase) -> None:
        site, template = self.index.site[op.name], self.index.template(op)
        sources = [
            self.obtain(name, need, microbatch, site).name
            for name, need in zip(template.reads, template.needs, strict=True)
        ]
        results = tuple(
            self._new(value.name, value.type.dtype, layout, microbatch)
            for value, layout in zip(op.results, template.layouts, strict=True)
        )
        names = iter(sources)
        args = tuple(rename(arg, names) for arg in template.args)
        kwargs = tuple((key, rename(arg, names)) for key, arg in template.kwargs)
        self.steps.append(Compute(template.kind, args, kwargs, results, phase, op.module, op.name))
        for buffer in results:
            self._made(buffer, microbatch, phase, site)

    def _made(self, buffer: Buffer, microbatch: int | None, phase: Phase, site: int) -> None:
        """A value exists: keep it, add it to its sum over micro-batches, give it to where it is read."""
        pending = any(isinstance(buffer.layout.entry(axis), Pending) for axis, _ in buffer.times)
        if pending and buffer.tensor not in self.index.passed_on:
            done = self._accumulate(self._in_pieces(buffer, microbatch, site), phase)
            if done is None:
                return
            buffer, microbatch = done, None
        self._keep(buffer, microbatch, site)
        for _, wanted in self.index.outputs.get(buffer.tensor, ()):
            if site in wanted:  # now, so that it overlaps with what is still to compute
                need = self._placed({**wanted[site], **self._in_time(buffer)}, site)
                self.obtain(buffer.tensor, need, microbatch, site)
        for to in sorted(self.index.readers.get(buffer.tensor, {})):
            if to != site:
                self._give(buffer.tensor, microbatch, site, to)

    def _keep(self, buffer: Buffer, microbatch: int | None, site: int) -> None:
        self.native.setdefault((buffer.tensor, site, microbatch), buffer)
        key = Key(buffer.tensor, site, buffer.layout.entries, microbatch)
        self.buffers[key] = buffer
        if buffer.tensor in self.index.each:
            self.passing.add(key)

    def _in_pieces(self, piece: Buffer, microbatch: int | None, site: int) -> Buffer:
        """What a micro-batch adds to a gradient, in the pieces of the parameter, where the plan reduces early."""
        if not self.plan.reduce_early or piece.tensor not in self.index.early:
            return piece
        entries = self._placed({**self.index.early[piece.tensor], **self._in_time(piece)}, site)
        target = self.index.layout(piece.layout.shape, entries, site)
        return self._move(piece, target, Key(piece.tensor, site, entries, microbatch))

    def _accumulate(self, piece: Buffer, phase: Phase) -> Buffer | None:
        """Add a micro-batch to its sum; the sum itself once it is complete."""
        ((axis, (microbatch,)),) = piece.times
        if piece.tensor not in self.sums:
            self.sums[piece.tensor] = Sums(piece, (microbatch,))
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

    def obtain(self, name: str, need: Placed, microbatch: int | None, site: int) -> Buffer:
        """A buffer that holds value `name` as `need` says, on a site."""
        in_time = any(axis in self.index.time for axis, _ in need)
        key = Key(name, site, need, microbatch if in_time else None)
        if key in self.buffers:
            return self.buffers[key]
        source = self._native(name, microbatch, site)
        if source.times:
            key = replace(key, microbatch=microbatch)
            if key in self.buffers:
                return self.buffers[key]
        hoisted = self._through_views(name, need, source, microbatch, site)
        if hoisted is not None:
            self._remember(key, hoisted)
            return hoisted
        return self._move(source, self.index.layout(source.layout.shape, need, site), key)

    def _remember(self, key: Key, buffer: Buffer) -> None:
        if self.buffers.setdefault(key, buffer) is buffer and key.tensor in self.index.cut:
            self.gathered.add(key)
        if key.tensor in self.index.each:
            self.passing.add(key)

    def _let_go(self) -> None:
        """Forget the wholes of parameters that live in pieces: the next task gathers them again."""
        for key in self.gathered:
            del self.buffers[key]
        self.gathered.clear()

    def _forget(self) -> None:
        """Forget what is made with each task."""
        for key in self.passing:
            del self.buffers[key]
            self.native.pop((key.tensor, key.site, None), None)
        self.passing.clear()

    def _native(self, name: str, microbatch: int | None, site: int) -> Buffer:
        for when in (microbatch, None):
            if (name, site, when) in self.native:
                return self.native[name, site, when]
        if name in self.index.each:
            self._emit(self.index.producers[name], None, self.phase)
            return self.native[name, site, None]
        return self._input(self.index.inputs[name], site)

    def _input(self, item: Input, site: int) -> Buffer:
        value = item.value
        entries = self._placed(self.index.home(value.name, site), site)
        layout = self.index.layout(value.type.shape, entries, site)
        buffer = Buffer(self._unique(value.name), value.name, value.type.dtype, layout)
        if (value.name, site) in self.index.shared:
            held = self._native(value.name, None, self.index.shared[value.name, site])
            self.steps.append(Compute("sennit.take", (Ref(held.name),), (), (buffer,), Phase.FORWARD, "", value.name))
        else:
            self.inputs[buffer.name] = LaneInput(item.role, buffer, item.path)
        self._keep(buffer, None, site)
        return buffer

    def _through_views(
        self, name: str, need: Placed, source: Buffer, microbatch: int | None, site: int
    ) -> Buffer | None:
        """Where the value is a view and getting it would communicate: redistribute what it is a view of, and view that."""
        op = self._producer(name)
        if op is None or not is_relabelling(op) or self.index.site[op.name] != site:
            return None
        target = self.index.layout(source.layout.shape, need, site)
        times = set(self.index.time)
        if set(dict(target.entries)) & times != set(dict(source.layout.entries)) & times:
            return None  # a slice in time, which does not communicate
        if not any(move.kind.communicates for move in moves(source.layout, target)):
            return None
        types = self.index.types
        try:
            at_root = {
                axis: through_view(op, types, source.layout.mesh.size(axis), entry) for axis, entry in target.entries
            }
            root_need = self._placed(at_root, site)
            root_layout = self.index.layout(types[op.reads[0]].shape, root_need, site)
        except (LookupError, LayoutError):
            return None
        if not root_layout.is_even:
            return None
        root = self.obtain(op.reads[0], root_need, microbatch, site)
        result = Buffer(self._unique(label_of(name, "view", source.times)), name, source.dtype, target, source.times)
        args, kwargs = localize(op, [target.local_shape()])
        root_name = iter([root.name])
        args = tuple(rename(arg, root_name) for arg in args)
        self.steps.append(Compute(op.kind, args, kwargs, (result,), op.phase, op.module, op.name))
        return result

    def _move(self, source: Buffer, target: Layout, key: Key) -> Buffer:
        """Emit the moves from a buffer to a layout; every intermediate result can serve others too."""
        current = source
        for move in moves(source.layout, target):
            times = current.times
            if move.kind is MoveKind.SLICE and move.axis in self.index.time:
                assert key.microbatch is not None
                times = (*times, (move.axis, (key.microbatch,)))
            label = label_of(source.tensor, f"{move.kind.value}.{move.axis}", times)
            result = Buffer(self._unique(label), source.tensor, source.dtype, move.result, times)
            self.steps.append(step_of(move.kind, move.axis, current, result, self._phase(source.tensor)))
            current = result
            self._remember(
                replace(key, entries=move.result.entries, microbatch=key.microbatch if times else None), result
            )
        self._remember(key, current)
        return current

    def _phase(self, tensor: str) -> Phase:
        op = self._producer(tensor)
        return op.phase if op is not None else Phase.FORWARD

    # ---- between sites -----------------------------------------------------------------------------------------------

    def _give(self, name: str, microbatch: int | None, site: int, to: int) -> None:
        """Bring a value to another site, laid out as its first reader there needs it, so that it is redistributed once."""
        source = self._native(name, microbatch, site)
        in_space = {axis: e for axis, e in self.index.readers[name][to].items() if axis not in self.index.time}
        entries = self._placed({**in_space, **self._in_time(source)}, to)
        crossing = self.index.crossing(source.layout, site, self.index.layout(source.layout.shape, entries, to), to)
        given = self.obtain(name, crossing.given.entries, microbatch, site)
        givers, takers = self.index.sites[site], self.index.sites[to]
        landed = Buffer("", name, given.dtype, crossing.landed, given.times)
        if crossing.way is Way.TAKE:
            if self.lane in takers:
                landed = replace(landed, name=self._unique(label_of(name, "taken", given.times)))
                self.steps.append(
                    Compute("sennit.take", (Ref(given.name),), (), (landed,), self._phase(name), "", name)
                )
                self._keep(landed, microbatch, to)
            return
        label = label_of(f"{name}.{site}>{to}", "", given.times)
        plain = crossing.way is Way.SEND
        if plain:
            self.steps.append(Send(given.name, self.index.lane_names[takers[0]]))
        elif self.lane in takers:
            landed = replace(landed, name=self._unique(label_of(name, "taken", given.times)))
            self.steps.append(Exchange(label, given.name, landed, self._among(site, to)))
            self._keep(landed, microbatch, to)
        else:
            self.steps.append(Exchange(label, given.name, None, self._among(site, to)))
        letter = Letter(label, givers, name, microbatch, to, crossing.landed, given.dtype, given.times, plain)
        for lane in takers:
            if lane not in givers:
                self.others[lane].mail.put(self.lane, letter)
        self.progress += 1

    def _among(self, site: int, to: int) -> tuple[str, ...]:
        # givers first: exchanges from other lanes get a stream of their own, so that takers need not agree on their
        # order
        lanes = dict.fromkeys((*self.index.sites[site], *self.index.sites[to]))
        return tuple(self.index.lane_names[lane] for lane in lanes)

    def _receive(self, letter: Letter) -> None:
        name = self._unique(label_of(letter.tensor, "received", letter.times))
        buffer = Buffer(name, letter.tensor, letter.dtype, letter.landed, letter.times)
        if letter.is_plain:
            self.steps.append(Receive(buffer, self.index.lane_names[letter.givers[0]]))
        else:
            site = self.index.site[self.index.producers[letter.tensor].name]
            self.steps.append(Exchange(letter.label, None, buffer, self._among(site, letter.site)))
        self._keep(buffer, letter.microbatch, letter.site)
        self.progress += 1

    # ---- outputs -----------------------------------------------------------------------------------------------------

    def _emit_outputs(self) -> Iterator[None]:
        for output in self.plan.graph.outputs:
            wanted = next(wanted for other, wanted in self.index.outputs[output.name] if other == output)
            for site, need in wanted.items():
                if self.lane not in self.index.sites[site]:
                    continue
                yield from self._await(
                    output.name, None, f"the {output.kind.value} of {output.path or 'the model'}", site
                )
                buffer = self._concat(output.name, need, site)
                buffer = buffer or self.obtain(output.name, self._placed(need, site), None, site)
                self.outputs.append(Output(output.kind, buffer.name, output.path))
                self.progress += 1

    def _concat(self, name: str, need: Entries, site: int) -> Buffer | None:
        """A value that each micro-batch makes its part of, put together; None where it is made at once."""
        axes = [axis for axis in self.plan.mesh.time if isinstance(self.decisions.values[name].get(axis.name), Split)]
        if not axes or (name, site, None) in self.native:
            return None
        (axis,) = axes
        split = self.decisions.values[name][axis.name]
        placed = self._placed({**need, axis.name: split}, site)
        parts = [self.obtain(name, placed, number, site) for number in range(axis.size)]
        layout = self.index.layout(parts[0].layout.shape, self._placed(need, site), site)
        result = Buffer(self._unique(f"{name}.whole"), name, parts[0].dtype, layout)
        args = tuple(Ref(part.name) for part in parts)
        self.steps.append(Compute("sennit.concat", args, (), (result,), self._phase(name), "", name))
        return result

    def finish(self) -> Lane:
        """The lane, with every buffer freed after its last use."""
        kept = {output.name for output in self.outputs} | {item.buffer.name for item in self.inputs.values()}
        made = {buffer.name for step in self.steps for buffer in defines(step)}
        steps = with_frees(self.steps, made - kept)
        order = {item.path: position for position, item in enumerate(self.plan.graph.inputs)}
        inputs = tuple(sorted(self.inputs.values(), key=lambda item: order[item.path]))
        devices = self.index.lanes[self.lane].devices
        return Lane(self.index.lane_names[self.lane], devices, inputs, tuple(steps), tuple(self.outputs))

    # ---- names and layouts -------------------------------------------------------------------------------------------

    def _in_time(self, buffer: Buffer) -> dict[str, Entry]:
        return {axis: entry for axis, entry in buffer.layout.entries if axis in self.index.time}

    def _placed(self, need: Entries, site: int) -> Placed:
        return self.index.placed(need, site)

    def _new(self, tensor: str, dtype: DType, layout: Layout, microbatch: int | None) -> Buffer:
        """A buffer for what an operator makes of a tensor."""
        times: Times = ()
        if microbatch is not None:
            times = tuple((axis, (microbatch,)) for axis, _ in layout.entries if axis in self.index.time)
        return Buffer(self._unique(label_of(tensor, "", times)), tensor, dtype, layout, times)

    def _unique(self, name: str) -> str:
        candidate, count = name, 1
        while candidate in self.names:
            count += 1
            candidate = f"{name}.{count}"
        self.names.add(candidate)
        return candidate
