"""Where parameters and buffers live: as the training program reads them, in DTensors.

A tensor's *homes* are the lanes that read it. Lanes that hold it under one layout hold it together, as one DTensor over
the mesh of that layout: an embedding split over all devices is one tensor, though the devices run several lanes. A tied
weight of two stages with meshes of their own has a home on each, one on a lane; the first is its *owner*, which speaks
for it where it must count once. What no operator reads (a pooler that the loss does not see) lives replicated on the
first mesh of the first lane. The piece of each device follows from the layout, and the same is said to torch as
placements on a `DeviceMesh`, so that optimizers, norms and checkpoints see the whole tensor.

A digit that is not the major one of its dim (a fused query, key and value weight split inside each of its three parts)
is a `_StridedShard`. `torch.distributed.checkpoint` has no such chunks: `plain` is the same tensor in blocks, for
saving.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from sennit.ir.graph import Role
from sennit.ir.layout import Layout, Split
from sennit.ir.layout_torch import to_placements
from sennit.ir.program import Program
from sennit.ir.region import Region
from sennit.reshard.dtensor_torch import redistribute
from sennit.reshard.private_torch import local_of
from sennit.run.groups import ProcessGroups
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
    "in_space",
    "is_strided",
    "place",
    "plain",
]


@dataclass(frozen=True, slots=True)
class Home:
    """A tensor on a lane: the devices of the lane hold their pieces under `layout`, whose mesh may have more."""

    lane: str
    layout: Layout
    devices: tuple[int, ...]


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

    def here(self, path: str, lane: str) -> Home | None:
        return next((home for home in self.of[path] if home.lane == lane), None)

    def at(self, path: str, device: int) -> Home | None:
        """Where a device has a tensor, whichever program asks."""
        return next((home for home in self.of[path] if device in home.devices), None)

    def serves(self, path: str, wanted: Layout, devices: Sequence[int]) -> bool:
        """Whether each of these devices has what a layout (in space) wants of it in the piece that lives there."""
        first = self.at(path, devices[0])
        if first is not None and first.layout == wanted and set(devices) <= set(first.devices):
            return True
        return all(self.part(path, wanted, device) is not None for device in devices)

    def part(self, path: str, wanted: Layout, device: int) -> Region | None:
        """The local indices, in the piece that lives on a device, of what a layout wants there; None where some are
        missing.
        """
        home = self.at(path, device)
        if home is None:
            return None
        have = home.layout.region(home.layout.mesh.coordinate(device))
        need = wanted.region(wanted.mesh.coordinate(device))
        return need.within(have) if have.contains(need) else None

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
            known = found.get(item.path) if item.role in (Role.PARAM, Role.BUFFER) else None  # constants have no home
            if known is not None and all(home.lane != lane.name for home in known):
                known.append(Home(lane.name, in_space(item.buffer.layout), lane.devices))
    mesh = next(iter(program.lanes[0].buffers().values())).layout.mesh.in_space()
    unread = [lane for lane in program.lanes if set(lane.devices) <= set(mesh.devices)]
    return Homes(
        {
            path: tuple(homes) or tuple(Home(lane.name, Layout(mesh, shapes[path]), lane.devices) for lane in unread)
            for path, homes in found.items()
        },
    )


def in_space(layout: Layout) -> Layout:
    """The layout of a tensor that no time axis divides, without the mesh's time axes."""
    return replace(layout, mesh=layout.mesh.in_space())


def device_meshes(homes: Homes, groups: ProcessGroups) -> None:
    """Make the groups of every home's mesh; all ranks call this alike."""
    for mesh in dict.fromkeys(_shown(home.layout).mesh for path in homes.of for home in homes.of[path]):
        groups.make_mesh(mesh)


def _shown(layout: Layout) -> Layout:
    """The layout as torch is told it.

    Torch likes the ranks of a mesh to ascend, and where nothing is split their order means nothing.
    """
    mesh = layout.mesh
    if layout.entries or list(mesh.devices) == sorted(mesh.devices):
        return layout
    return replace(layout, mesh=replace(mesh, devices=tuple(sorted(mesh.devices))))


def place(whole: Tensor, home: Home, rank: int, device: torch.device, groups: ProcessGroups) -> DTensor:
    """This rank's piece of a whole tensor, as a DTensor. A tensor on `meta` gives a piece of memory without values."""
    layout = _shown(home.layout)
    mesh = layout.mesh
    point = mesh.coordinate(rank)
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
    point = layout.mesh.coordinate(rank)
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
