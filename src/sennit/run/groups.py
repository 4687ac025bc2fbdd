"""Process groups by the ranks they join: each is made once, however many programs and meshes ask for it.

`torch.distributed.new_group` must be called by all ranks of the world, in one order. So groups are asked for by lists
that all ranks compute alike (from the program, which they share), before anything runs. A group of torch numbers its
members by ascending rank; a group of a program by their coordinates on a mesh. `run/distributed.py` translates. A
DeviceMesh cannot: where its ranks do not ascend along an axis, it gets groups in its own order.

**Transfers.** On NCCL the messages of one communicator run on one stream, in the order in which they were posted. Two
stages that send to each other would wait for each other there, each with its receive behind its send. So each direction
between two ranks gets a communicator of its own, and so do the exchanges from the same ranks to the same ranks, which
all of them run in one order (a rule of `ir/program_exchange.py`). Gloo and our own backend match messages by their tags
and need none of this.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from sennit.errors import RunError
from sennit.ir.mesh import Mesh
from sennit.ir.program import Exchange, Program, Send
from sennit.ir.program_exchange import Channel, exchange_meetings
from sennit.run.rank import Group, groups_of

__all__ = ["GroupsNeeded", "ProcessGroups", "groups_needed", "spread"]


@dataclass(frozen=True, slots=True)
class GroupsNeeded:
    """Of a program: the groups of its collectives, the pairs that it sends between, the ranks of each channel.

    All ranks have them in one order.
    """

    groups: tuple[Group, ...]
    transfers: tuple[tuple[int, int], ...]
    channels: Mapping[Channel, Group]


def groups_needed(program: Program) -> GroupsNeeded:
    return GroupsNeeded(groups_of(program), _transfers(program), _channels(program))


class ProcessGroups:
    """The groups of this process. Every method that makes groups is called by all ranks of the world alike."""

    def __init__(self) -> None:
        self.made: dict[Group, dist.ProcessGroup] = {}
        self.directed: dict[tuple[int, int], dist.ProcessGroup] = {}
        self.channels: dict[Channel, dist.ProcessGroup] = {}
        self.ordered: dict[Group, dist.ProcessGroup] = {}  # those whose members do not ascend
        self.meshes: dict[tuple[Mesh, str], DeviceMesh] = {}

    def make(self, groups: Iterable[Group]) -> None:
        """Make those that are not there yet."""
        everyone = tuple(range(dist.get_world_size()))
        for group in groups:
            ranks = tuple(sorted(group))
            if ranks not in self.made:
                world = dist.group.WORLD
                made = world if ranks == everyone else dist.new_group(list(ranks))
                assert made is not None  # torch gives None only where there is no world
                self.made[ranks] = made

    def make_mesh(self, mesh: Mesh) -> None:
        """What a DeviceMesh of this mesh needs."""
        groups = spread(mesh.in_space())
        self.make(group for group in groups if list(group) == sorted(group))
        for group in groups:
            if list(group) != sorted(group) and group not in self.ordered:
                if "sort_ranks" not in inspect.signature(dist.new_group).parameters:
                    raise RunError(
                        f"a tensor is split over ranks {list(group)} in this order, and torch {torch.__version__} has groups in "
                        "ascending order only",
                        where=f"mesh {mesh}",
                        fix="list the devices of the stage in ascending order, or use torch 2.13",
                    )
                made = dist.new_group(list(group), sort_ranks=False)
                assert made is not None  # as in `make`
                self.ordered[group] = made

    def make_for(self, needed: GroupsNeeded) -> None:
        """What a program's collectives and transfers need."""
        self.make(needed.groups)
        if dist.get_backend() == "nccl":
            for pair in needed.transfers:
                if pair not in self.directed:
                    self.directed[pair] = dist.new_group(sorted(pair))
            for channel, ranks in needed.channels.items():
                if channel not in self.channels:
                    self.channels[channel] = dist.new_group(list(ranks))
                    if dist.get_rank() in ranks:
                        # NCCL joins a communicator at its first call, and not every rank has a message in every
                        # exchange
                        here = torch.device("cuda", torch.cuda.current_device())
                        dist.all_reduce(torch.zeros(1, device=here), group=self.channels[channel])

    def of(self, group: Group) -> dist.ProcessGroup:
        return self.made[tuple(sorted(group))]

    def between(self, source: int, target: int) -> dist.ProcessGroup | None:
        """The group that carries messages this way; None is the world."""
        return self.directed.get((source, target))

    def channel(self, channel: Channel) -> dist.ProcessGroup | None:
        """The group that carries the exchanges from these ranks to those; None is the world."""
        return self.channels.get(channel)

    def device_mesh(self, mesh: Mesh, device_type: str) -> DeviceMesh:
        """The space axes of a mesh that this rank is in, as torch's DeviceMesh; axes of size 1 stay, in groups of one."""
        mesh = mesh.in_space()
        key = (mesh, device_type)
        if key not in self.meshes:
            rank = dist.get_rank()
            names = mesh.names or ("device",)
            shape = [axis.size for axis in mesh.axes] or [1]
            lines = [mesh.group(rank, (axis,)) for axis in mesh.names] or [(rank,)]
            groups = [self.ordered.get(line) or self.of(line) for line in lines]
            ranks = torch.tensor(mesh.devices, dtype=torch.int).reshape(shape)
            self.meshes[key] = DeviceMesh.from_group(
                groups if len(groups) > 1 else groups[0], device_type, ranks, mesh_dim_names=names
            )
        return self.meshes[key]


def spread(mesh: Mesh) -> tuple[Group, ...]:
    """The groups along each space axis of a mesh; where it has none, one group per device."""
    groups: dict[Group, None] = {}
    for device in mesh.devices:
        if not mesh.space:
            groups.setdefault((device,))
        for axis in mesh.space:
            groups.setdefault(mesh.group(device, (axis.name,)))
    assert prod(axis.size for axis in mesh.space) == len(mesh.devices)
    return tuple(groups)


def _transfers(program: Program) -> tuple[tuple[int, int], ...]:
    pairs: dict[tuple[int, int], None] = {}
    for lane in program.lanes:
        for name in dict.fromkeys(step.to for step in lane.steps if isinstance(step, Send)):
            for pair in zip(lane.devices, program.lane(name).devices, strict=True):
                pairs.setdefault(pair)
    return tuple(pairs)


def _channels(program: Program) -> dict[Channel, Group]:
    found: dict[Channel, Group] = {}
    if any(isinstance(step, Exchange) for lane in program.lanes for step in lane.steps):
        for meeting in exchange_meetings(program).values():
            channel = meeting.channel
            found.setdefault(channel, tuple(sorted({*channel[0], *channel[1]})))
    return found
