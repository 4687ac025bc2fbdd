"""The proof that a program computes what its graph does: every step's type follows from the types of what it reads.

A buffer's type is its layout: which piece of which logical tensor it holds. `ir/program_check.py` proves it for every movement
of data (collectives, transfers, slices, sums over micro-batches), and that the lanes cannot wait for each other forever. Here it
is proved for every operator: along each axis, its reads and results form a strategy of its rule (`capture/rules.py`), and its
arguments are those of the local pieces. A rule is exact by its meaning, so by induction over the steps each buffer holds what
its type says: a consumer's region is tiled exactly by what was produced, and value parts sum to the whole once.

What is refused here would have computed something else: a sum that is still pending where a whole is read, a bias added on every
rank, a size that is not the piece's.
"""

from __future__ import annotations

from sennit.capture.rules import localize, propose
from sennit.errors import PlanError
from sennit.ir.dtype import TensorType
from sennit.ir.graph import Arg, Graph, Op, OutputKind, Ref, Role, refs
from sennit.ir.layout import Entry, Pending, Split
from sennit.ir.mesh import AxisKind
from sennit.ir.program import Buffer, Compute, Lane, Program
from sennit.ir.program_check import check_program

__all__ = ["verify"]


def verify(program: Program, graph: Graph) -> None:
    """Raise unless the program computes the outputs of the graph and cannot deadlock."""
    check_program(program)
    producers, types = graph.producers(), graph.types()
    for lane in program.lanes:
        buffers = lane.buffers()
        for step in lane.steps:
            if isinstance(step, Compute) and not step.kind.startswith("sennit."):
                _check_step(lane, step, buffers, producers, types)
    _check_edges(program, graph)


def _check_step(
    lane: Lane, step: Compute, buffers: dict[str, Buffer], producers: dict[str, Op], types: dict[str, TensorType]
) -> None:
    op = producers.get(step.op)
    where = f"lane {lane.name}, devices {list(lane.devices)}"
    if op is None or op.kind != step.kind or len(op.results) != len(step.results):
        raise PlanError(
            f"{step.kind} stands for %{step.op}, which the graph has not", where=where, fix="lower the plan again"
        )
    read = [buffers[name] for name in refs((*step.args, *(arg for _, arg in step.kwargs)))]
    for buffer, name in zip((*read, *step.results), (*op.reads, *(value.name for value in op.results)), strict=True):
        if buffer.tensor != name:
            raise PlanError(
                f"{op.describe()} reads %{buffer.tensor} as %{buffer.name} where it needs %{name}",
                where=where,
                fix=f"read a buffer of %{name}",
            )
    mesh = step.results[0].layout.mesh
    for axis in mesh.axes:
        have = tuple(buffer.layout.entry(axis.name) for buffer in read)
        made = tuple(buffer.layout.entry(axis.name) for buffer in step.results)
        strategies = propose(op, types, axis.size, have)
        if not any(strategy.reads == have and strategy.results == made for strategy in strategies):
            if not have and _is_free(op, made):
                continue
            _refuse(op, lane, axis.name, axis.kind, read, step.results)
    args, kwargs = localize(op, [buffer.layout.local_shape() for buffer in step.results])
    if _without_names(step.args) != _without_names(args) or _without_names(step.kwargs) != _without_names(kwargs):
        raise PlanError(
            f"{op.describe()} has arguments {list(step.args)} that are not those of its local pieces",
            where=where,
            fix=f"use {list(args)}",
        )


def _is_free(op: Op, made: tuple[Entry | None, ...]) -> bool:
    """An operator that reads nothing and fills with one value may make any piece."""
    return op.kind.split(".")[1] in ("ones", "zeros", "full") and all(isinstance(entry, Split) for entry in made)


def _refuse(op: Op, lane: Lane, axis: str, kind: AxisKind, read: list[Buffer], results: tuple[Buffer, ...]) -> None:
    where = f"lane {lane.name}, devices {list(lane.devices)}"
    for buffer in read:
        entry = buffer.layout.entry(axis)
        if isinstance(entry, Pending):
            how = "all_reduce" if kind is AxisKind.SPACE else "accumulate"
            raise PlanError(
                f"{op.describe()} reads %{buffer.tensor}, which is still a pending {entry.op.value} over {axis!r} "
                f"(buffer {buffer.describe()})",
                where=where,
                fix=f"{how} it over {axis!r} first",
            )
    have = ", ".join(buffer.describe() for buffer in read) or "nothing"
    make = ", ".join(buffer.describe() for buffer in results)
    raise PlanError(
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
        parameters = {item.path: item.buffer for item in lane.inputs if item.role is Role.PARAM}
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
            parameter = parameters.get(output.path)
            if output.kind is OutputKind.GRADIENT and parameter is not None and buffer.layout != parameter.layout:
                raise PlanError(
                    f"the gradient of {output.path!r} lies as {buffer.layout}, its parameter as {parameter.layout}",
                    where=f"lane {lane.name}, devices {list(lane.devices)}",
                    fix="redistribute the gradient to the parameter's layout",
                )
            returned.add(key)
        for path in parameters:
            if (OutputKind.GRADIENT, path) in values and not any(output.path == path for output in lane.outputs):
                raise PlanError(
                    f"parameter {path!r} is held here but its gradient is not returned",
                    where=f"lane {lane.name}, devices {list(lane.devices)}",
                    fix="send the gradient to every lane that holds the parameter",
                )
    for kind, path in values:
        if (kind, path) not in returned:
            raise PlanError(f"no lane returns {kind.value} {path!r}", fix="return every output of the graph")
