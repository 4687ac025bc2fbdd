"""Where parameters and buffers live: as the training program reads them, in DTensors.

A tensor's *homes* are the lanes that read it. Lanes that hold it under one layout hold it together, as one DTensor over the mesh of
that layout: an embedding split over all devices is one tensor, though the devices run several lanes. A tied weight of two stages
with meshes of their own has a home on each; the first is its *owner*, which speaks for it where it must count once. What no
operator reads (a pooler that the loss does not see) lives replicated on the first mesh of the first lane. The piece of each
device follows from the layout, and the same is said to torch as placements on a `DeviceMesh`, so that optimizers, norms and
checkpoints see the whole tensor.

A digit that is not the major one of its dim (a fused query, key and value weight split inside each of its three parts) is a
`_StridedShard`. `torch.distributed.checkpoint` has no such chunks: `plain` is the same tensor in blocks, for saving.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from sennit.ir.graph import Role
from sennit.ir.layout import Layout, Split
from sennit.ir.layout_torch import to_placements
from sennit.ir.program import Lane, Program
from sennit.reshard.dtensor_torch import redistribute
from sennit.reshard.private_torch import local_of
from sennit.run.groups import ProcessGroups, spread
from sennit.run.pieces import piece_of
from sennit.run.skeleton import Slot

__all__ = [
    "Home",
    "Homes",
    "Move",
    "as_dtensor",
    "device_meshes",
    "fill",
    "homes_of",
    "is_strided",
    "place",
    "plain",
]


@dataclass(frozen=True, slots=True)
class Home:
    """A tensor on a lane."""

    lane: str
    layout: Layout


@dataclass(frozen=True, slots=True)
class Move:
    """A tensor that a program reads in another layout than it lives in."""

    path: str
    source: Layout
    target: Layout


@dataclass(frozen=True, slots=True)
class Homes:
    """Every tensor of the model by path, its owner first."""

    of: Mapping[str, tuple[Home, ...]]

    def here(self, path: str, lane: Lane) -> Home | None:
        return next((home for home in self.of[path] if home.lane == lane.name), None)

    def owners(self, path: str) -> tuple[int, ...]:
        """The devices that hold the owner's tensor together."""
        return self.of[path][0].layout.mesh.devices

    def speaks(self, path: str, device: int) -> bool:
        """Whether this device is the one among its replicas that counts."""
        home = self.of[path][0]
        mesh = home.layout.mesh
        if device not in mesh.devices:
            return False
        coordinate = zip(mesh.space, mesh.coordinate(device), strict=True)
        return all(digit == 0 or home.layout.split(axis.name) is not None for axis, digit in coordinate)


def homes_of(program: Program, slots: tuple[Slot, ...], shapes: Mapping[str, tuple[int, ...]]) -> Homes:
    """The homes of every parameter and buffer under a program."""
    found: dict[str, list[Home]] = {slot.path: [] for slot in slots}
    for lane in program.lanes:
        for item in lane.inputs:
            if item.role in (Role.PARAM, Role.BUFFER) and item.path in found:  # else a constant of the model's code
                found[item.path].append(Home(lane.name, item.buffer.layout))
    mesh = next(iter(program.lanes[0].buffers().values())).layout.mesh
    unread = [lane.name for lane in program.lanes if set(lane.devices) <= set(mesh.devices)]
    return Homes(
        {
            path: tuple(homes) or tuple(Home(name, Layout(mesh, shapes[path])) for name in unread)
            for path, homes in found.items()
        },
    )


def device_meshes(program: Program, groups: ProcessGroups) -> None:
    """Make the groups of every lane's mesh; all ranks call this alike."""
    for mesh in dict.fromkeys(mesh.in_space() for mesh in program.meshes()):
        groups.make(spread(mesh))


def place(whole: Tensor, home: Home, rank: int, device: torch.device, groups: ProcessGroups) -> DTensor:
    """This rank's piece of a whole tensor, as a DTensor. A tensor on `meta` gives a piece of memory without values."""
    layout = home.layout
    mesh = layout.mesh
    point = mesh.coordinate(rank) + (0,) * len(mesh.time)
    if whole.device.type == "meta":
        local = torch.empty(layout.local_shape(point), dtype=whole.dtype, device=device)
    else:
        local = piece_of(whole, layout, point).to(device).clone(memory_format=torch.contiguous_format)
    return as_dtensor(local, layout, groups.device_mesh(mesh, device.type))


def as_dtensor(local: Tensor, layout: Layout, mesh: DeviceMesh) -> DTensor:
    placements: tuple[Placement, ...] = to_placements(layout) or (Replicate(),)
    stride = torch.empty(layout.shape, device="meta").stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(layout.shape), stride=stride)


def fill(target: DTensor, value: Tensor, layout: Layout, rank: int) -> None:
    """Give a DTensor the values of a whole tensor, or of a DTensor in any placements on the same mesh."""
    if isinstance(value, DTensor):
        if value.placements != target.placements or value.device_mesh != target.device_mesh:
            value = redistribute(value, target.placements, target.device_mesh)
        local_of(target).copy_(local_of(value))
        return
    point = layout.mesh.coordinate(rank) + (0,) * len(layout.mesh.time)
    local_of(target).copy_(piece_of(value, layout, point))


def is_strided(tensor: DTensor) -> bool:
    return any(isinstance(placement, _StridedShard) for placement in tensor.placements)


def plain(tensor: DTensor, layout: Layout) -> DTensor:
    """The same tensor with every split dim in blocks, as checkpoints want it: a copy where that is another layout."""
    if not is_strided(tensor):
        return tensor
    dims: dict[int, list[str]] = {}
    for axis in layout.mesh.space:
        entry = layout.entry(axis.name)
        if isinstance(entry, Split):
            dims.setdefault(entry.dim, []).append(axis.name)
    blocks = Layout.block(layout.mesh, layout.shape, dims)
    return redistribute(tensor, to_placements(blocks))
