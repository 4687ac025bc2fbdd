"""A plan: the graph with each operator's split, place and order. Nothing is communicated yet.

Three functions make plans, each from a plan to a plan:

- `transform(plan, items, dim=, axis=)` splits: an operator on a letter of its rule (`capture/rules/`) over a space
  axis, or
  a model input on a dim over space and time axes (a time axis on the batch dim is micro-batches), or a parameter where it lives:
  operators still get the whole of it, and its gradient comes in its pieces (ZeRO);
- `place(plan, ops, mesh)` makes a stage: operators on a part of the mesh. Stages may share devices, in any order and
  with other
  axes: one device may hold several runs of layers, and one stage may lie on all devices, between stages that do not;
- `order(plan, pattern)` says in which order each lane runs the micro-batches of its stages, forward and backward.

A *lane* is the devices that hold the same stages: they run the same program. With one stage a device, lanes are stages.

What a plan leaves open is filled in by `propagate.py`: layouts follow the decided operators forward, to parameters and
to the backward pass; operators that no one placed follow their neighbours.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from sennit.capture.rules import decide
from sennit.errors import PlanError
from sennit.ir.dtype import TensorType
from sennit.ir.graph import Graph, Input, Op, Role
from sennit.ir.layout import Layout
from sennit.ir.mesh import Axis, AxisKind, Mesh
from sennit.plan.pattern import Pattern

__all__ = ["InputSplit", "OpSplit", "Plan", "PlanLane", "order", "place", "transform"]


@dataclass(frozen=True, slots=True)
class InputSplit:
    """A model input cut in blocks on a dim, over axes major to minor."""

    path: str
    dim: int
    axes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class OpSplit:
    """An operator split on a letter of its rule; `chunks` equal chunks of the dim are each split in blocks."""

    op: str
    axis: str
    letter: str
    chunks: int = 1


@dataclass(frozen=True, slots=True)
class PlanLane:
    """Devices that run the same program, and the stages that they hold, ascending."""

    devices: tuple[int, ...]
    stages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    name: str
    graph: Graph
    mesh: Mesh
    inputs: tuple[InputSplit, ...] = ()
    splits: tuple[OpSplit, ...] = ()
    parts: tuple[Mesh, ...] = ()  # of each stage
    places: tuple[tuple[str, int], ...] = ()  # operator, stage
    pattern: Pattern | None = None
    regather: bool = (
        False  # gather parameters that live in pieces for each task anew, and let go of the wholes after it
    )
    reduce_early: bool = False  # reduce gradients to their parameters' pieces at each micro-batch, not once at the end

    def __post_init__(self) -> None:
        if len(self.mesh.time) > 1:
            names = ", ".join(axis.name for axis in self.mesh.time)
            raise PlanError(f"mesh {self.mesh} has the time axes {names}", fix="use one time axis: micro-batches")

    @property
    def stages(self) -> tuple[Mesh, ...]:
        """The mesh of each stage; the whole mesh is the only one where nothing was placed."""
        return self.parts or (self.mesh,)

    @property
    def lanes(self) -> tuple[PlanLane, ...]:
        """The devices by the stages that they hold, in the order of the first stage that they are in."""
        held: dict[int, list[int]] = {}
        for number, mesh in enumerate(self.stages):
            for device in mesh.devices:
                held.setdefault(device, []).append(number)
        devices: dict[tuple[int, ...], list[int]] = {}
        for device, stages in held.items():
            devices.setdefault(tuple(stages), []).append(device)
        return tuple(PlanLane(tuple(members), stages) for stages, members in devices.items())

    @property
    def microbatches(self) -> int:
        """The size of the time axis; 1 without one."""
        return self.mesh.time[0].size if self.mesh.time else 1


def transform(
    plan: Plan,
    items: Iterable[Op | Input],
    *,
    dim: str | int,
    axis: str | tuple[str, ...],
    chunks: int = 1,
) -> Plan:
    """Split operators on the letter `dim`, or inputs on the dim number `dim`, over `axis`."""
    axes = (axis,) if isinstance(axis, str) else axis
    inputs, splits = list(plan.inputs), list(plan.splits)
    types, placed = plan.graph.types(), dict(plan.places)  # once: a deep model has many operators, and many are split
    for item in items:
        if isinstance(item, Input):
            inputs.append(_input_split(plan, item, dim, axes))
        else:
            splits.append(_op_split(plan, item, types, placed, dim, axes, chunks))
    return replace(plan, inputs=tuple(inputs), splits=tuple(splits))


def _input_split(plan: Plan, item: Input, dim: str | int, axes: tuple[str, ...]) -> InputSplit:
    shape = item.value.type.shape
    if not isinstance(dim, int) or not 0 <= dim < len(shape):
        raise PlanError(
            f"input {item.path!r} of shape {list(shape)} has no dim {dim!r}", fix=f"use 0 to {len(shape) - 1}"
        )
    if any(split.path == item.path for split in plan.inputs):
        raise PlanError(f"input {item.path!r} is split twice", fix="name all its axes in one transform")
    for axis in axes:
        _sizes(plan, axis)  # raises where no stage has it
    for mesh in dict.fromkeys((plan.mesh, *plan.parts)):
        here = tuple(axis for axis in axes if axis in mesh)
        if not Layout.block(mesh, shape, {dim: here}).is_even:
            sizes = " x ".join(f"{axis}={mesh.size(axis)}" for axis in here)
            raise PlanError(
                f"input {item.path!r}: dim {dim} of size {shape[dim]} does not divide over {sizes}",
                fix="change the batch size or the axis sizes so that it divides",
            )
    return InputSplit(item.path, dim, axes)


def _sizes(plan: Plan, axis: str) -> tuple[Axis, ...]:
    """An axis as the plan's mesh and its stages have it."""
    found = tuple(mesh.axis(axis) for mesh in (plan.mesh, *plan.parts) if axis in mesh)
    return found or (plan.mesh.axis(axis),)


def _op_split(
    plan: Plan,
    op: Op,
    types: Mapping[str, TensorType],
    placed: Mapping[str, int],
    dim: str | int,
    axes: tuple[str, ...],
    chunks: int,
) -> OpSplit:
    if not isinstance(dim, str) or len(axes) != 1:
        raise PlanError(
            f"{op.kind} split on {dim!r} over {list(axes)}", where=op.describe(), fix="name one letter and one axis"
        )
    part = plan.parts[placed[op.name]] if op.name in placed else plan.mesh
    axis = part.axis(axes[0]) if axes[0] in part else _sizes(plan, axes[0])[0]
    if axis.kind is AxisKind.TIME:
        raise PlanError(
            f"axis {axis.name!r} is a time axis", where=op.describe(), fix="split the model's inputs over it"
        )
    if any(split.op == op.name and split.axis == axis.name for split in plan.splits):
        raise PlanError(
            f"axis {axis.name!r} is used twice on one operator", where=op.describe(), fix="split it once over each axis"
        )
    decide(op, types, axis.size, dim, chunks)  # raises where the operator has no such split
    return OpSplit(op.name, axis.name, dim, chunks)


def place(plan: Plan, ops: Iterable[Op], mesh: Mesh, stage: int | None = None) -> Plan:
    """Put operators on a part of the mesh, as stage number `stage`.

    Left out: the first stage on that mesh, or a new one.
    """
    outside = sorted(set(mesh.devices) - set(plan.mesh.devices))
    if outside:
        raise PlanError(f"devices {outside} are not in the plan's mesh {plan.mesh}", fix="take parts with mesh.at(...)")
    if mesh.time != plan.mesh.time:
        raise PlanError(
            f"stage {mesh} has other time axes than the plan's mesh {plan.mesh}",
            fix="give all stages the same time axes",
        )
    if stage is None:
        stage = plan.parts.index(mesh) if mesh in plan.parts else len(plan.parts)
    if stage > len(plan.parts):
        raise PlanError(f"stage {stage} of {len(plan.parts)}", fix=f"the next stage is number {len(plan.parts)}")
    parts = plan.parts if stage < len(plan.parts) else (*plan.parts, mesh)
    if parts[stage] != mesh:
        raise PlanError(f"stage {stage} lies on {parts[stage]}, not on {mesh}", fix="give each stage one mesh")
    placed = dict(plan.places)
    for op in ops:
        if placed.setdefault(op.name, stage) != stage:
            raise PlanError(
                f"{op.describe()} is placed twice",
                where=f"in stage {placed[op.name]} on {parts[placed[op.name]]} and in stage {stage} on {mesh}",
                fix="place it once",
            )
    return replace(plan, parts=parts, places=tuple(placed.items()))


def order(plan: Plan, pattern: Pattern) -> Plan:
    """Run the micro-batches of each lane in this order."""
    lanes = plan.lanes
    if len(pattern.rows) != len(lanes) or pattern.microbatches != plan.microbatches:
        raise PlanError(
            f"a pattern of {len(pattern.rows)} lanes and {pattern.microbatches} micro-batches "
            f"for a plan of {len(lanes)} lanes and {plan.microbatches} micro-batches",
            fix="place first, give the mesh a time axis of that size, then order",
        )
    for number, (lane, stages) in enumerate(zip(lanes, pattern.stages, strict=True)):
        if lane.stages != stages:
            raise PlanError(
                f"row {number} of the pattern runs stages {list(stages)}, and its lane, devices {list(lane.devices)}, "
                f"holds stages {list(lane.stages)}",
                fix="give each lane a row with the tasks of all its stages",
            )
    return replace(plan, pattern=pattern)


def data_inputs(graph: Graph) -> tuple[Input, ...]:
    """The inputs that carry data, not parameters."""
    return tuple(item for item in graph.inputs if item.role is Role.INPUT)
