"""What the source of a lane calls: one rank's view of the mesh, on top of any communicator.

A split over an axis is a digit of a dim. Locally, a dim without the digit has size outer * inner; with it, outer * p *
inner. So gathering an axis puts p pieces between outer and inner, slicing takes one of p from there, and a plain block
split is the case outer = 1. Every method here is that reshaping around one primitive of the communicator.

A lane may have buffers on several meshes, as where an embedding lies on all devices and a layer on some of them.
`OnMesh` is a rank's place on one mesh; `Rank` is its place on the first, with what concerns no mesh (transfers,
exchanges), and `rank.on(k)` is its place on the k-th.

A communicator moves contiguous tensors between the members of a group and returns handles: `run/distributed.py` has the
one on torch.distributed, `run/threads.py` the one for all ranks in one process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Protocol

import torch
from torch import Tensor

from sennit.ir.layout import Reduction
from sennit.ir.mesh import Mesh
from sennit.ir.program import Collective, Lane, Program
from sennit.ir.program_exchange import Channel
from sennit.ir.region import Region
from sennit.kernels.attention_calls_torch import CudaAttention
from sennit.run.bucket import Bucket, GatherRun
from sennit.run.handles import Handle
from sennit.run.local_forms import LocalForms
from sennit.run.routes import Route, Routes, cut, paste, routes_of

__all__ = ["Communicator", "OnMesh", "Rank", "Seat", "groups_of", "meshes_of", "seat_of"]

Group = tuple[int, ...]


class Communicator(Protocol):
    """Primitives between the members of a group, this rank among them.

    Each returns at once; results come stacked in the order of the group. `device` is where tensors are.
    """

    @property
    def device(self) -> torch.device: ...
    def all_reduce(self, group: Group, tensor: Tensor, op: Reduction, *, in_place: bool = False) -> Handle: ...
    def all_gather(self, group: Group, tensor: Tensor) -> Handle: ...
    def reduce_scatter(self, group: Group, tensor: Tensor, op: Reduction) -> Handle: ...
    def all_to_all(self, group: Group, tensor: Tensor) -> Handle: ...
    def send(self, tensor: Tensor, to: int) -> None: ...
    def receive(self, shape: tuple[int, ...], dtype: torch.dtype, origin: int) -> Handle: ...
    def exchange(
        self,
        channel: Channel,
        number: int,
        sends: Sequence[tuple[Tensor, int]],
        receives: Sequence[tuple[Tensor, int]],
    ) -> Callable[[], None]:
        """Start messages to and from peers, all at once, under the number of the exchange; the result waits until what
        is received is in its tensors.
        """
        ...

    def finish(self) -> None: ...


@dataclass(frozen=True, slots=True)
class _Then:
    """A handle whose result is reshaped when it arrives."""

    handle: Handle
    after: Callable[[Tensor], Tensor]

    def wait(self) -> Tensor:
        return self.after(self.handle.wait())


@dataclass(frozen=True, slots=True)
class _Taking:
    """An exchange under way. Parts that could not be received in their place are put there when they are in."""

    arrive: Callable[[], None]
    result: Tensor
    apart: tuple[tuple[Region, Tensor], ...]

    def wait(self) -> Tensor:
        self.arrive()
        for region, part in self.apart:
            paste(self.result, region, part)
        return self.result


class OnMesh(LocalForms, CudaAttention):
    """A device on one mesh of its lane: its coordinates and its groups."""

    def __init__(self, mesh: Mesh, device: int, communicator: Communicator) -> None:
        self.mesh, self.device, self.communicator = mesh, device, communicator
        self.torch_device = communicator.device
        self.coordinate = dict(zip((axis.name for axis in mesh.space), mesh.coordinate(device), strict=True))

    def group(self, axis: str) -> Group:
        return self.mesh.group(self.device, (axis,))

    # ---- collectives -------------------------------------------------------------------------------------------------

    def all_reduce(self, x: Tensor, axis: str, op: str) -> Handle:
        return self.communicator.all_reduce(self.group(axis), x.contiguous(), Reduction(op))

    def all_gather(self, x: Tensor, axis: str, dim: int, inner: int) -> Handle:
        handle = self.communicator.all_gather(self.group(axis), x.contiguous())
        return _Then(handle, lambda stacked: _put_between(stacked, dim, inner))

    def reduce_scatter(self, x: Tensor, axis: str, dim: int, inner: int, op: str) -> Handle:
        pieces = _take_apart(x, dim, inner, self.mesh.size(axis)).contiguous()
        return self.communicator.reduce_scatter(self.group(axis), pieces, Reduction(op))

    def all_to_all(self, x: Tensor, axis: str, gather: tuple[int, int], split: tuple[int, int]) -> Handle:
        if gather[0] == split[0]:  # two digits of one dim: the whole dim is needed in between
            handle = self.communicator.all_gather(self.group(axis), x.contiguous())
            size, at = self.mesh.size(axis), self.coordinate[axis]
            return _Then(
                handle, lambda stacked: _take_apart(_put_between(stacked, *gather), *split, size)[at].contiguous()
            )
        pieces = _take_apart(x, *split, self.mesh.size(axis)).contiguous()
        handle = self.communicator.all_to_all(self.group(axis), pieces)
        return _Then(handle, lambda stacked: _put_between(stacked, *gather))

    def bucket(self, kind: str, axis: str, op: str, parts: int, elements: int) -> Bucket:
        """So many reductions in one: each is given to `add`, and the last one starts it."""
        group, how = self.group(axis), Reduction(op)
        if kind == "all_reduce":
            return Bucket(
                parts, elements, None, lambda flat: self.communicator.all_reduce(group, flat, how, in_place=True)
            )
        return Bucket(parts, elements, len(group), lambda flat: self.communicator.reduce_scatter(group, flat, how))

    def gathers(self, axis: str, parts: int, elements: int) -> GatherRun:
        """So many gathers in one: each piece is given to `add`, and the last one starts it."""
        group = self.group(axis)

        def whole(stacked: Tensor, dim: int, inner: int) -> Tensor:
            # copied also where pieces would be a view: what arrived is let go of with the last parameter
            return _put_between(stacked.contiguous(), dim, inner)

        return GatherRun(parts, elements, lambda flat: self.communicator.all_gather(group, flat), whole)

    def take_apart(self, x: Tensor, axis: str, dim: int, inner: int) -> Tensor:
        """The pieces that a reduce_scatter sends to the members of the group, stacked; a look at them where that is
        possible, which a bucket copies.
        """
        return _take_apart(x, dim, inner, self.mesh.size(axis))

    # ---- local -------------------------------------------------------------------------------------------------------

    def slice(
        self, x: Tensor, dim: int, inner: int, size: int, axis: str | None = None, at: int | None = None
    ) -> Tensor:
        if at is None:
            assert axis is not None
            at = self.coordinate[axis]
        # some kernels read their smaller operands as if they were contiguous (layer norm's mean and deviation do)
        return _unfold(x, dim, (-1, size, inner)).select(dim + 1, at).flatten(dim, dim + 1).contiguous()

    def partial(self, x: Tensor, axis: str, op: str) -> Tensor:
        if self.coordinate[axis] == 0:
            return x
        return torch.full_like(x, _identity(Reduction(op), x.dtype))

    def concat(self, *pieces: Tensor, dim: int, inner: int) -> Tensor:
        """The pieces of a time axis, in order: the whole."""
        return _put_between(torch.stack(pieces), dim, inner)

    def accumulate(self, total: Tensor, x: Tensor, fresh: bool) -> Tensor:
        """`total + x`, in place once the total is ours alone."""
        return total + x if fresh else total.add_(x)

    def add_product(self, total: Tensor, a: Tensor, b: Tensor, fresh: bool) -> Tensor:
        """`total + a b`, in place once the total is ours alone."""
        return torch.addmm(total, a, b) if fresh else total.addmm_(a, b)

    @staticmethod
    def softmax_gradient(grad: Tensor, y: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
        """The gradient of a softmax with result `y`, in the memory of `grad` where that lies plainly: the kernel writes
        as if it did.
        """
        backward = torch.ops.aten._softmax_backward_data
        made: Tensor = (
            backward.out(grad, y, dim, dtype, grad_input=grad)
            if grad.is_contiguous()
            else backward(grad, y, dim, dtype)
        )
        return made

    def present(self, results: tuple[Tensor | None, ...]) -> tuple[Tensor, ...]:
        return tuple(result for result in results if result is not None)


@dataclass(frozen=True, slots=True)
class Seat:
    """What a device needs to know of the program while it runs its lane: the lane's meshes, its peer in each lane, its
    routes.
    """

    device: int
    meshes: tuple[Mesh, ...]
    peers: Mapping[str, int]
    routes: Routes


def seat_of(program: Program, lane: Lane, device: int) -> Seat:
    position = lane.devices.index(device)
    peers = {other.name: other.devices[position] for other in program.lanes if position < len(other.devices)}
    return Seat(device, meshes_of(lane), peers, routes_of(program, lane, device))


class Rank(OnMesh):
    """One device of one lane, on the first mesh of the lane."""

    def __init__(self, seat: Seat, communicator: Communicator) -> None:
        first, *others = seat.meshes
        super().__init__(first, seat.device, communicator)
        self.places: tuple[OnMesh, ...] = (self, *(OnMesh(mesh, seat.device, communicator) for mesh in others))
        self.peers, self.routes = seat.peers, seat.routes

    def on(self, number: int) -> OnMesh:
        """This rank on one of its lane's meshes."""
        return self.places[number]

    def send(self, x: Tensor, lane: str) -> None:
        self.communicator.send(x.contiguous(), self.peers[lane])

    def receive(self, shape: list[int], dtype: torch.dtype, lane: str) -> Handle:
        return self.communicator.receive(tuple(shape), dtype, self.peers[lane])

    def exchange(self, label: str, x: Tensor | None = None) -> Handle:
        """Give this rank's piece, or take one, or both; what is taken is there when the handle is waited for."""
        route = self.routes.of[label]
        sends: list[tuple[Tensor, int]] = []
        for parcel in route.sends:
            assert x is not None
            sends.append((cut(x, parcel.region).contiguous(), parcel.peer))
        result, receives, apart = self._room(route, x)
        arrive = self.communicator.exchange(self.routes.channels[label], self.routes.numbers[label], sends, receives)
        return _Taking(arrive, result, apart)

    def _room(
        self, route: Route, x: Tensor | None
    ) -> tuple[Tensor, list[tuple[Tensor, int]], tuple[tuple[Region, Tensor], ...]]:
        """The tensor that is taken, with what is kept in its place; where each message goes; and which go elsewhere
        first.
        """
        if route.shape is None:
            return torch.empty(0, dtype=route.dtype, device=self.torch_device), [], ()
        if route.kept is not None and route.kept[1].shape == route.shape:  # nothing comes from others
            assert x is not None
            return cut(x, route.kept[0]).contiguous(), [], ()
        result = torch.empty(route.shape, dtype=route.dtype, device=self.torch_device)
        if route.kept is not None:
            assert x is not None
            paste(result, route.kept[1], cut(x, route.kept[0]))
        receives: list[tuple[Tensor, int]] = []
        apart: list[tuple[Region, Tensor]] = []
        for parcel in route.receives:
            place = cut(result, parcel.region) if parcel.region.is_box else None
            if place is None or not place.is_contiguous():
                place = result.new_empty(parcel.region.shape)
                apart.append((parcel.region, place))
            receives.append((place, parcel.peer))
        return result, receives, tuple(apart)

    def take(self, x: Tensor, name: str) -> Tensor:
        """The part of a piece that belongs to buffer `name`, on another mesh."""
        region = self.routes.taken[name]
        return x if region is None else cut(x, region).contiguous()


def groups_of(program: Program) -> tuple[Group, ...]:
    """Every group that the program's collectives use, in an order that all ranks share."""
    groups: dict[Group, None] = {}
    for lane in program.lanes:
        used = dict.fromkeys(
            (step.result.layout.mesh, step.axes) for step in lane.steps if isinstance(step, Collective)
        )
        for mesh, axes in used:
            for device in lane.devices:
                groups.setdefault(mesh.group(device, axes))
    return tuple(groups)


def meshes_of(lane: Lane) -> tuple[Mesh, ...]:
    """The meshes of a lane in space, in the order of first use: what `Rank.on` counts."""
    seen: dict[int, Mesh] = {}  # by identity: a lane has few meshes and many buffers, and a hash takes time per device
    for buffer in lane.buffers().values():
        seen.setdefault(id(buffer.layout.mesh), buffer.layout.mesh)
    return tuple(dict.fromkeys(mesh.in_space() for mesh in seen.values()))


def _put_between(stacked: Tensor, dim: int, inner: int) -> Tensor:
    """p pieces, stacked on dim 0, to one: p goes between the outer and inner part of `dim`."""
    parts = _unfold(stacked, dim + 1, (-1, inner))  # p, ..., outer, inner, ...
    return parts.movedim(0, dim + 1).flatten(dim, dim + 2)


def _take_apart(x: Tensor, dim: int, inner: int, size: int) -> Tensor:
    """The inverse: one tensor to p pieces, stacked on dim 0. They lie in the tensor's memory where they can."""
    parts = _unfold(x, dim, (-1, size, inner)).movedim(dim + 1, 0)  # p, ..., outer, inner, ...
    return parts.flatten(dim + 1, dim + 2)


def _unfold(x: Tensor, dim: int, sizes: tuple[int, ...]) -> Tensor:
    """One dim as several; -1 stands for what is left."""
    known = prod(size for size in sizes if size != -1)
    full = [x.shape[dim] // known if size == -1 else size for size in sizes]
    return x.reshape(*x.shape[:dim], *full, *x.shape[dim + 1 :])


def _identity(op: Reduction, dtype: torch.dtype) -> float:
    match op:
        case Reduction.SUM:
            return 0
        case Reduction.PROD:
            return 1
        case Reduction.MAX:
            return float("-inf") if dtype.is_floating_point else torch.iinfo(dtype).min
        case Reduction.MIN:
            return float("inf") if dtype.is_floating_point else torch.iinfo(dtype).max
