"""The proof that a program computes what its graph does: every step's type follows from the types of what it reads.

A buffer's type is its layout: which piece of which logical tensor it holds. `ir/program_check.py` proves it for every
movement of data (collectives, transfers, exchanges, slices, sums over micro-batches), and that the lanes cannot wait
for each other forever; for exchanges the table of messages itself is checked, that it tiles what every device takes.
Here it is proved for every operator: it reads and writes on one mesh, along each axis, its reads and results form a
strategy of its rule (`capture/rules/`), it is the local form that the strategy names (none for most), its arguments are
those of the local pieces, and with them it makes the shapes of the local pieces. A rule is exact by its meaning, so by
induction over the steps each buffer holds what its type says: a consumer's region is tiled exactly by what was
produced, and value parts sum to the whole once.

What is refused here would have computed something else: a sum that is still pending where a whole is read, a bias added
on every rank, a size that is not the piece's.
"""

from __future__ import annotations

from collections.abc import Sequence

from sennit.capture.rules import RuleBook, Source, Strategy, local_kind, localize, making, propose
from sennit.capture.rules.certify import Certifier
from sennit.capture.rules.shape_check import ShapeCheck
from sennit.errors import PlanError
from sennit.ir.dtype import DType, TensorType
from sennit.ir.graph import Arg, Graph, Op, OutputKind, Ref, Role, refs
from sennit.ir.layout import Entry, Layout, Pending
from sennit.ir.mesh import Axis, AxisKind
from sennit.ir.operators import is_local_form, is_local_move
from sennit.ir.program import Buffer, Compute, Exchange, Lane, Program
from sennit.ir.program_check import check_program
from sennit.ir.program_exchange import check_tiling, exchange_meetings, moves_alike

__all__ = ["verify"]


def verify(program: Program, graph: Graph, sources: Sequence[Source] = (), certifier: Certifier | None = None) -> None:
    """Raise unless the program computes the outputs of the graph and cannot deadlock.

    `sources` are those that it was planned with. A `certifier` executes every rule that the proof relies on, once;
    without one, rules are taken at their word.
    """
    check_program(program)
    proof = _Proof(graph, RuleBook(graph.types(), sources), certifier)
    for lane in program.lanes:
        buffers = lane.buffers()
        for step in lane.steps:
            if isinstance(step, Compute) and not is_local_move(step.kind):
                proof.check(lane, step, buffers)
    _check_exchanges(program)
    _check_edges(program, graph)
    _check_whole(program)
    if certifier is not None:
        certifier.save()


class _Proof:
    """The steps of one program against the operators of one graph.

    Layers repeat: what was proved once is remembered.
    """

    def __init__(self, graph: Graph, book: RuleBook, certifier: Certifier | None) -> None:
        self.certifier = certifier
        self.producers, self.types, self.book = graph.producers(), book.types, book
        self.shapes = ShapeCheck()
        self.found: dict[tuple[object, ...], Strategy | None] = {}
        self.pieces: dict[tuple[int, DType], TensorType] = {}
        self.alike: set[tuple[int, int]] = set()  # meshes that are equal and not one object

    def check(self, lane: Lane, step: Compute, buffers: dict[str, Buffer]) -> None:
        op = self._operator(lane, step)
        read = [buffers[name] for name in refs((*step.args, *(arg for _, arg in step.kwargs)))]
        _check_names(op, lane, step, read)
        self._check_mesh(op, lane, (*read, *step.results))
        strategies = [self._strategy(op, lane, axis, read, step.results) for axis in step.results[0].layout.mesh.axes]
        expected = local_kind(op, strategies)
        where = f"lane {lane.name}, devices {list(lane.devices)}"
        if step.kind != expected:
            raise PlanError(
                f"{op.describe()} is computed by {step.kind}, and on these pieces it is {expected}",
                where=where,
                fix=f"use {expected}",
            )
        args, kwargs = localize(op, [self._local(buffer).shape for buffer in step.results])
        if _without_names(step.args) != _without_names(args) or _without_names(step.kwargs) != _without_names(kwargs):
            raise PlanError(
                f"{op.describe()} has arguments {list(step.args)} that are not those of its local pieces",
                where=where,
                fix=f"use {list(args)}",
            )
        if not is_local_form(step.kind):
            self.shapes.check(
                step, [self._local(item) for item in read], [self._local(item) for item in step.results], where
            )

    def _check_mesh(self, op: Op, lane: Lane, buffers: Sequence[Buffer]) -> None:
        """All pieces lie on one mesh: axes of one name on two meshes have nothing to do with each other."""
        first = buffers[-1].layout.mesh
        for buffer in buffers:
            mesh = buffer.layout.mesh
            if mesh is not first and (id(mesh), id(first)) not in self.alike:
                if mesh != first:
                    raise PlanError(
                        f"{op.describe()} reads or makes %{buffer.tensor} on mesh {mesh} and %{buffers[-1].tensor} on mesh {first}",
                        where=f"lane {lane.name}, devices {list(lane.devices)}",
                        fix=f"bring %{buffer.tensor} to one mesh with the others: sennit.take or an exchange",
                    )
                self.alike.add((id(mesh), id(first)))  # the program keeps both alive

    def _local(self, buffer: Buffer) -> TensorType:
        """The type of a buffer's piece."""
        key = (id(buffer.layout), buffer.dtype)  # the program keeps its layouts alive while it is proved
        if key not in self.pieces:
            self.pieces[key] = TensorType(buffer.layout.local_shape(), buffer.dtype)
        return self.pieces[key]

    def _operator(self, lane: Lane, step: Compute) -> Op:
        op = self.producers.get(step.op)
        if (
            op is None
            or (op.kind != step.kind and not is_local_form(step.kind))
            or len(op.results) != len(step.results)
            or len(op.reads) != len(list(refs((*step.args, *(arg for _, arg in step.kwargs)))))
        ):
            raise PlanError(
                f"{step.kind} stands for %{step.op}, which the graph has not",
                where=f"lane {lane.name}, devices {list(lane.devices)}",
                fix="lower the plan again",
            )
        return op

    def _strategy(self, op: Op, lane: Lane, axis: Axis, read: list[Buffer], results: tuple[Buffer, ...]) -> Strategy:
        have = tuple(buffer.layout.entry(axis.name) for buffer in read)
        made = tuple(buffer.layout.entry(axis.name) for buffer in results)
        key = (self.book.signature(op), axis.size, have, made)
        if key not in self.found:
            self.found[key] = self._search(op, axis.size, have, made)
        strategy = self.found[key]
        if strategy is None:
            raise _refusal(op, lane, axis.name, axis.kind, read, results)
        return strategy

    def _search(
        self, op: Op, size: int, have: tuple[Entry | None, ...], made: tuple[Entry | None, ...]
    ) -> Strategy | None:
        """The strategy of the operator's rule that reads and makes these entries."""
        rule = self.book.rule(op)
        candidates = list(propose(op, self.types, size, have, rule))
        candidates += [
            found
            for position, entry in enumerate(made)
            if (found := making(op, self.types, size, position, entry, rule)) is not None
        ]
        for strategy in candidates:
            if strategy.reads == have and strategy.results == made:
                if self.certifier is not None:
                    self.certifier.require(op, self.types, rule, strategy, size)
                return strategy
        return None


def _check_names(op: Op, lane: Lane, step: Compute, read: list[Buffer]) -> None:
    for buffer, name in zip((*read, *step.results), (*op.reads, *(value.name for value in op.results)), strict=True):
        if buffer.tensor != name:
            raise PlanError(
                f"{op.describe()} reads %{buffer.tensor} as %{buffer.name} where it needs %{name}",
                where=f"lane {lane.name}, devices {list(lane.devices)}",
                fix=f"read a buffer of %{name}",
            )


def _refusal(
    op: Op, lane: Lane, axis: str, kind: AxisKind, read: list[Buffer], results: tuple[Buffer, ...]
) -> PlanError:
    where = f"lane {lane.name}, devices {list(lane.devices)}"
    for buffer in read:
        entry = buffer.layout.entry(axis)
        if isinstance(entry, Pending):
            how = "all_reduce" if kind is AxisKind.SPACE else "accumulate"
            return PlanError(
                f"{op.describe()} reads %{buffer.tensor}, which is still a pending {entry.op.value} over {axis!r} "
                f"(buffer {buffer.describe()})",
                where=where,
                fix=f"{how} it over {axis!r} first",
            )
    have = ", ".join(buffer.describe() for buffer in read) or "nothing"
    make = ", ".join(buffer.describe() for buffer in results)
    return PlanError(
        f"{op.describe()} cannot make {make} from {have}: no strategy of its rule does that over {axis!r}",
        where=where,
        fix="redistribute what it reads, or state the layout that it really makes",
    )


def _without_names(arg: Arg | tuple[tuple[str, Arg], ...]) -> object:
    match arg:
        case Ref():
            return Ref
        case tuple():
            return tuple(_without_names(part) for part in arg)
        case _:
            return arg


def _check_edges(program: Program, graph: Graph) -> None:
    """Inputs are those of the graph; every output is returned, gradients as their parameters lie."""
    known = {item.path: item for item in graph.inputs}
    returned: set[tuple[OutputKind, str]] = set()
    values = {(output.kind, output.path): output.name for output in graph.outputs}
    for lane in program.lanes:
        buffers = lane.buffers()
        held = {item.path: item.buffer for item in lane.inputs if item.role in (Role.PARAM, Role.BUFFER)}
        for item in lane.inputs:
            if item.path not in known or known[item.path].value.name != item.buffer.tensor:
                raise PlanError(f"input {item.path!r} is not one of the graph's", where=f"lane {lane.name}")
        for position, output in enumerate(lane.outputs):
            key, buffer = (output.kind, output.path), buffers[output.name]
            if any((other.kind, other.path) == key for other in lane.outputs[:position]):
                raise PlanError(f"{output.kind.value} {output.path!r} is returned twice", where=f"lane {lane.name}")
            if values.get(key) != buffer.tensor:
                raise PlanError(
                    f"{output.kind.value} {output.path!r} returns %{buffer.tensor}, not %{values.get(key)}",
                    where=f"lane {lane.name}, devices {list(lane.devices)}",
                )
            home = held.get(output.path)
            stays = output.kind in (OutputKind.GRADIENT, OutputKind.BUFFER)
            if stays and home is not None and buffer.layout != home.layout:
                what = "gradient" if output.kind is OutputKind.GRADIENT else "new value"
                raise PlanError(
                    f"the {what} of {output.path!r} lies as {buffer.layout}, its parameter as {home.layout}",
                    where=f"lane {lane.name}, devices {list(lane.devices)}",
                    fix=f"redistribute the {what} to the parameter's layout",
                )
            returned.add(key)
        for path in held:
            if (OutputKind.GRADIENT, path) in values and not any(output.path == path for output in lane.outputs):
                raise PlanError(
                    f"parameter {path!r} is held here but its gradient is not returned",
                    where=f"lane {lane.name}, devices {list(lane.devices)}",
                    fix="send the gradient to every lane that holds the parameter",
                )
    for kind, path in values:
        if (kind, path) not in returned:
            raise PlanError(f"no lane returns {kind.value} {path!r}", fix="return every output of the graph")


def _check_exchanges(program: Program) -> None:
    """What every device takes is tiled exactly by what the givers send."""
    seen: set[object] = set()
    if any(isinstance(step, Exchange) for lane in program.lanes for step in lane.steps):
        for meeting in exchange_meetings(program).values():
            alike = moves_alike(meeting.source, meeting.result)
            if alike not in seen:
                seen.add(alike)
                check_tiling(meeting.source, meeting.result)


def _check_whole(program: Program) -> None:
    """A tensor that lies on a mesh is there on all its devices: parameters in every lane, outputs in every piece."""
    held: dict[tuple[str, Layout], set[int]] = {}
    returned: dict[tuple[str, Layout], set[int]] = {}
    for lane in program.lanes:
        buffers = lane.buffers()
        for item in lane.inputs:
            if item.role is Role.PARAM:
                held.setdefault((item.path, item.buffer.layout), set()).update(lane.devices)
        for output in lane.outputs:
            returned.setdefault((output.key, buffers[output.name].layout), set()).update(lane.devices)
    for (path, layout), devices in held.items():
        if absent := sorted(set(layout.mesh.devices) - devices):
            raise PlanError(
                f"parameter {path!r} lies on mesh {layout.mesh}, and devices {absent} do not hold it",
                where=f"program {program.name!r}",
                fix="give it to every lane of the mesh",
            )
    for (key, layout), devices in returned.items():
        if absent := sorted(_without_piece(layout, devices)):
            raise PlanError(
                f"output {key!r} is {layout} on mesh {layout.mesh}, and nobody returns the pieces of devices {absent}",
                where=f"program {program.name!r}",
                fix="return it in every lane that has a piece",
            )


def _without_piece(layout: Layout, devices: set[int]) -> set[int]:
    """The devices of a layout whose piece none of `devices` has."""
    mesh = layout.mesh
    if devices >= set(mesh.devices):
        return set()
    split = [position for position, axis in enumerate(mesh.space) if layout.split(axis.name) is not None]

    def piece(device: int) -> tuple[int, ...]:
        point = mesh.coordinate(device)
        return tuple(point[position] for position in split)

    there = {piece(device) for device in devices}
    return {device for device in mesh.devices if piece(device) not in there}
