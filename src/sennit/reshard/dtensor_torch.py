"""Redistribution of DTensors, and the one call for DTensors and plain tensors.

    y = redistribute(x, [Replicate(), Shard(1)])                 # DTensor in, DTensor out
    y = redistribute(x, [Shard(0)], other_mesh)                  # to another DeviceMesh: all ranks of both call it
    y = redistribute(local, source_layout, target_layout)        # plain tensors: this rank's pieces
    h = redistribute(x, placements, async_op=True); ...; y = h.wait()

**How DTensors lie.** Placements become layouts (`ir/layout_torch.py`) wherever a layout says the same as DTensor. Where
several axes shard one uneven dim, DTensor nests its chunks and no layout says that: these pieces are taken as they are,
as boxes (`dtensor_boxes`). Pending sums are then reduced on whole pieces and one exchange of boxes does the rest:
right, if not always the cheapest. What neither says is refused with a `LayoutError`: an uneven `_StridedShard`, a
masked Partial. A pending average is a pending sum, scaled once it is reduced.

**Another mesh.** A rank that is in one mesh only has a DTensor on the other all the same, with an empty piece, as
DTensor itself does it (`DTensor.from_local(torch.empty(0), mesh, placements, run_check=False, shape=..., stride=...)`).
Every rank of either mesh calls `redistribute`; all are in one default process group.

**Gradients** follow DTensor's convention: the gradient is an array like any other, so backward redistributes it to the
placements of the input, with Replicate in place of Partial.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any, overload

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from sennit.errors import LayoutError, MeshError
from sennit.ir.exchange import Transfer
from sennit.ir.layout import Layout, Reduction
from sennit.ir.layout_torch import from_placements
from sennit.ir.mesh import Axis, Mesh
from sennit.ir.region import Region
from sennit.reshard.autograd_torch import RunningTensor, redistribute_tensor
from sennit.reshard.execute_torch import Executor, Lowered, Running, chunk_of, current_executor, make_lowered
from sennit.reshard.lower_torch import Cut, Fill, Operation, lower_all_reduce, lower_transfers
from sennit.reshard.private_torch import DTensorSpec, local_of, make_dtensor, make_spec, meta_of, spec_of

__all__ = [
    "RunningDTensor",
    "Served",
    "boxes_of",
    "dtensor_boxes",
    "layout_of",
    "lower_specs",
    "mesh_of",
    "redistribute",
]


@overload
def redistribute(
    x: DTensor,
    placements: Sequence[Placement],
    mesh: DeviceMesh | None = None,
    *,
    budget: int | None = None,
    executor: Executor | None = None,
) -> DTensor: ...
@overload
def redistribute(
    x: Tensor, placements: Layout, mesh: Layout, *, budget: int | None = None, executor: Executor | None = None
) -> Tensor: ...
@overload
def redistribute(
    x: Tensor,
    placements: Sequence[Placement] | Layout,
    mesh: DeviceMesh | Layout | None = None,
    *,
    budget: int | None = None,
    async_op: bool,
    executor: Executor | None = None,
) -> Any: ...


def redistribute(
    x: Tensor,
    placements: Sequence[Placement] | Layout,
    mesh: DeviceMesh | Layout | None = None,
    *,
    budget: int | None = None,
    async_op: bool = False,
    executor: Executor | None = None,
) -> Any:
    """Move an array to other placements: a DTensor, or this rank's piece of one layout (second) to its piece of another
    (third).

    `budget` is what a rank may use beside its pieces of source and target, in bytes. With `async_op` the messages are
    posted and the answer is a handle whose `wait()` returns the result; `x` must not change until then.
    """
    executor = current_executor() if executor is None else executor
    running: RunningDTensor | RunningTensor
    if isinstance(x, DTensor):
        if isinstance(placements, Layout) or isinstance(mesh, Layout):
            raise LayoutError("a DTensor has placements, not layouts", fix="redistribute(x, placements, mesh=None)")
        running = _start_dtensor(x, placements, mesh, budget, executor)
    else:
        if not isinstance(placements, Layout) or not isinstance(mesh, Layout):
            raise LayoutError(
                "a plain tensor needs two layouts, of what it is and of what it becomes",
                fix="redistribute(local, source_layout, target_layout), or pass a DTensor",
            )
        running = redistribute_tensor(x, placements, mesh, budget=budget, executor=executor)
    return running if async_op else running.wait()


@dataclass(frozen=True, slots=True)
class RunningDTensor:
    """A redistribution under way; `wait` returns the DTensor, with its gradient recorded."""

    x: DTensor
    target: DTensorSpec
    budget: int | None
    executor: Executor
    running: Running
    scale: float

    def wait(self) -> DTensor:
        local = self.running.wait()
        if self.scale != 1:
            local = local * self.scale
        if not (self.x.requires_grad and torch.is_grad_enabled()):
            return make_dtensor(local, self.target)
        applied: DTensor = _Redistribute.apply(self.x, self, local.detach())  # type: ignore[no-untyped-call]
        return applied


def _start_dtensor(
    x: DTensor, placements: Sequence[Placement], mesh: DeviceMesh | None, budget: int | None, executor: Executor
) -> RunningDTensor:
    source = spec_of(x)
    target = make_spec(source, mesh if mesh is not None else x.device_mesh, _positive(placements, x.dim()))
    served = lower_specs(executor, source, target, budget)
    running = executor.start_lowered(served.lowered, local_of(x))
    return RunningDTensor(x, target, budget, executor, running, served.scale)


def _positive(placements: Sequence[Placement], dims: int) -> tuple[Placement, ...]:
    return tuple(
        Shard(placement.dim + dims) if type(placement) is Shard and placement.dim < 0 else placement
        for placement in placements
    )


class _Redistribute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: DTensor, running: RunningDTensor, local: Tensor) -> DTensor:
        ctx.source, ctx.budget, ctx.executor = spec_of(x), running.budget, running.executor
        return make_dtensor(local, running.target, requires_grad=x.requires_grad)

    @staticmethod
    def backward(ctx: Any, *gradients: DTensor) -> tuple[DTensor, None, None]:
        back = tuple(Replicate() if placement.is_partial() else placement for placement in ctx.source.placements)
        mesh = ctx.source.mesh
        return (
            redistribute(gradients[0], back, mesh, budget=ctx.budget, executor=ctx.executor),
            None,
            None,
        )


# ---- what a rank runs between two specs ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Served:
    """What a rank runs, and the factor that pending averages leave."""

    lowered: Lowered
    scale: float


def lower_specs(executor: Executor, source: DTensorSpec, target: DTensorSpec, budget: int | None = None) -> Served:
    """What this rank runs to get from one DTensorSpec to another, computed once.

    Refuses with a LayoutError what neither layouts nor boxes say; the refusal depends on the specs alone, so it is the
    same on all ranks.
    """
    found = executor.kept((source, target, budget), lambda: _lower_specs(executor, source, target, budget))
    assert isinstance(found, Served)
    return found


def _lower_specs(executor: Executor, source: DTensorSpec, target: DTensorSpec, budget: int | None) -> Served:
    for mesh in {source.mesh, target.mesh}:
        if mesh.get_coordinate() is not None:
            for group in mesh.get_all_groups():
                executor.groups.adopt(group)
    meta = meta_of(source)
    shape, itemsize = tuple(meta.shape), meta.dtype.itemsize
    scale, have, need = _without_averages(source, target)
    try:
        layouts = [
            from_placements(mesh_of(spec.mesh), shape, placements)
            for spec, placements in ((source, have), (target, need))
        ]
    except LayoutError:
        if not all(_is_nested(placement) for placement in (*have, *need)):
            raise
        ends = [_Boxes.of(spec.mesh, shape, placements) for spec, placements in ((source, have), (target, need))]
        return Served(_lower_boxes(executor, ends[0], ends[1], itemsize, budget), scale)
    redistribution = executor.planned(layouts[0], layouts[1], itemsize, budget)
    return Served(executor.lowered(redistribution, itemsize, budget), scale)


def _without_averages(
    source: DTensorSpec, target: DTensorSpec
) -> tuple[float, tuple[Placement, ...], tuple[Placement, ...]]:
    """Averages as sums, and the factor by which the result of those that are resolved must be scaled."""

    def is_average(placement: Placement) -> bool:
        return type(placement) is Partial and placement.reduce_op == "avg"

    def sums(placements: Sequence[Placement]) -> tuple[Placement, ...]:
        return tuple(Partial("sum") if is_average(placement) else placement for placement in placements)

    same = source.mesh == target.mesh
    scale = 1.0
    for axis, placement in enumerate(source.placements):
        kept = same and target.placements[axis] == placement
        if is_average(placement) and not kept:
            scale /= source.mesh.size(axis)
    for axis, placement in enumerate(target.placements):
        kept = same and source.placements[axis] == placement
        if is_average(placement) and not kept:
            scale *= target.mesh.size(axis)
    return scale, sums(source.placements), sums(target.placements)


def mesh_of(device_mesh: DeviceMesh) -> Mesh:
    """The same mesh; axes without a usable name are called d0, d1, ... by their place."""
    names = device_mesh.mesh_dim_names or ()
    axes: list[Axis] = []
    for place, size in enumerate(device_mesh.shape):
        try:
            axes.append(Axis(names[place], size))
        except (IndexError, MeshError):
            axes.append(Axis(f"d{place}", size))
    return Mesh(tuple(axes), tuple(device_mesh.mesh.flatten().tolist()))


def layout_of(x: DTensor) -> Layout:
    """The layout of a DTensor; refuses what no layout says."""
    return from_placements(mesh_of(x.device_mesh), tuple(x.shape), x.placements)


def boxes_of(x: DTensor) -> dict[int, Region]:
    """What each rank of its mesh holds of a DTensor, as regions; refuses what neither a layout nor boxes say."""
    try:
        layout = layout_of(x)
    except LayoutError:
        if not all(_is_nested(placement) for placement in x.placements):
            raise
        return dtensor_boxes(mesh_of(x.device_mesh), tuple(x.shape), x.placements)
    return {layout.mesh.device(point): layout.region(point) for point in layout.mesh.points()}


# ---- pieces that no layout says --------------------------------------------------------------------------------------


def dtensor_boxes(mesh: Mesh, shape: Sequence[int], placements: Sequence[Placement]) -> dict[int, Region]:
    """What each device holds under plain Shard placements: DTensor cuts once per axis, left to right, what is left."""
    boxes: dict[int, Region] = {}
    for point in mesh.points():
        start, stop = [0] * len(shape), list(shape)
        for (axis, coordinate), placement in zip(enumerate(point), placements, strict=True):
            if isinstance(placement, Shard):
                dim = placement.dim % len(shape)
                length = -(-(stop[dim] - start[dim]) // mesh.axes[axis].size)
                start[dim], stop[dim] = (
                    min(start[dim] + coordinate * length, stop[dim]),
                    min(start[dim] + (coordinate + 1) * length, stop[dim]),
                )
        boxes[mesh.device(point)] = Region.box(start, stop)
    return boxes


def _is_nested(placement: Placement) -> bool:
    plain_partial = type(placement) is Partial and placement.reduce_op in ("sum", "max", "min", "product")
    return type(placement) in (Shard, Replicate) or plain_partial


@dataclass(frozen=True, slots=True)
class _Boxes:
    """One end of a redistribution of boxes."""

    mesh: Mesh
    shape: tuple[int, ...]
    placements: tuple[Placement, ...]
    boxes: dict[int, Region]

    @classmethod
    def of(cls, device_mesh: DeviceMesh, shape: tuple[int, ...], placements: tuple[Placement, ...]) -> _Boxes:
        mesh = mesh_of(device_mesh)
        return cls(mesh, shape, placements, dtensor_boxes(mesh, shape, placements))

    @property
    def pending(self) -> dict[str, Reduction]:
        names = {"sum": Reduction.SUM, "max": Reduction.MAX, "min": Reduction.MIN, "product": Reduction.PROD}
        return {
            axis.name: names[placement.reduce_op]
            for axis, placement in zip(self.mesh.axes, self.placements, strict=True)
            if isinstance(placement, Partial)
        }

    def __str__(self) -> str:
        return f"{list(self.placements)} of {list(self.shape)} on {self.mesh}"


def _lower_boxes(executor: Executor, source: _Boxes, target: _Boxes, itemsize: int, budget: int | None) -> Lowered:
    """All pending values are reduced on whole pieces, one exchange moves the boxes, what becomes pending is filled in."""
    device, staging = executor.rank, executor.staged(budget)
    cut = Cut(chunk_of(staging, itemsize))
    kept = {
        axis for axis, op in source.pending.items() if source.mesh == target.mesh and target.pending.get(axis) is op
    }
    operations: list[Operation] = []
    resolved = tuple(axis for axis in source.pending if axis not in kept)
    ops = {source.pending[axis] for axis in resolved}
    if len(ops) > 1:
        raise LayoutError(f"{source} mixes reductions", fix="resolve one of them first: they do not commute")
    label = f"{source} -> {target}"
    if resolved and device in source.boxes:
        members = source.mesh.group(device, resolved)
        shape = source.boxes[device].shape
        operations.append(lower_all_reduce(f"all_reduce of {label}", members, device, shape, ops.pop(), cut))
    moved = box_transfers(source, target, tuple(kept))
    operations.append(lower_transfers(f"exchange of {label}", [moved], source.boxes, target.boxes, device, cut))
    if device in target.boxes:
        point = dict(zip(target.mesh.names, target.mesh.coordinate(device), strict=True))
        for axis, op in target.pending.items():
            if axis not in kept:
                operations.append(Fill(f"partial over {axis} of {label}", op, keeps=point[axis] == 0))
    participants = tuple(sorted({*source.boxes, *target.boxes}))
    given, result = (end.boxes[device].shape if device in end.boxes else None for end in (source, target))
    text = f"{label}, as boxes, {itemsize} bytes an item, staging {staging}"
    return make_lowered(tuple(operations), participants, text, staging, given, result)


def box_transfers(source: _Boxes, target: _Boxes, kept: tuple[str, ...]) -> tuple[Transfer, ...]:
    """Who sends what.

    Boxes of a source are equal or disjoint; of equal ones a receiver takes its own, else that of the holder that sends
    least so far. Axes that stay pending keep their parts apart.
    """

    def part(end: _Boxes, device: int) -> tuple[int, ...]:
        point = dict(zip(end.mesh.names, end.mesh.coordinate(device), strict=True))
        return tuple(point[axis] for axis in kept)

    holders: dict[tuple[Region, tuple[int, ...]], list[int]] = {}
    for device in sorted(source.boxes):
        holders.setdefault((source.boxes[device], part(source, device)), []).append(device)
    sent = dict.fromkeys(source.boxes, 0)
    found: list[Transfer] = []
    for (receiver, need), ((box, side), those) in product(sorted(target.boxes.items()), holders.items()):
        shared = need.intersect(box)
        if shared.size == 0 or side != part(target, receiver):
            continue
        sender = receiver if receiver in those else min(those, key=lambda holder: (sent[holder], holder))
        if sender != receiver:
            sent[sender] += prod(shared.shape)
        found.append(Transfer(sender, receiver, shared))
    return tuple(found)
