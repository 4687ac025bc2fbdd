"""Process groups: never made behind one's back, the same on every rank, and the collectives over them.

Refined meshes have many sub-axes, and every subset of them is a possible group: a cache that makes a process group
whenever one is named grows without end, and each group of an accelerator's backend holds connections and memory. Making
one is also collective over the whole world (torch names groups by how many a rank has made, so members alone cannot
agree on a name). The rules here:

1. A step goes through a process group where one exists with exactly its members, else point to point, which needs none.
2. The default group exists. The groups of a `DeviceMesh` exist and are taken over (`adopt`): one per axis, already paid
   for.
3. Others are made by `prepare`, which all ranks of the world call in the same order with the same redistribution: worth
   it for one
   that runs in every step of a training loop. At most `limit` are made in all; the rest stays point to point.
4. On CPU tensors a step goes point to point, unless `calibrate` has found the backend's own collective quicker for its
   kind and size
   (`LinkCost.prefers_group`): sometimes it is, with many ranks (`benchmarks/reshard/gloo.py` prints both). A step that goes through
   shared memory never asks.

All of this depends on the set of members alone, so the members of a group decide alike. `collective` runs a step: parts
are packed side by side, the backend moves them, the results are put where they belong. Staging is the packed input and
output of the step, one piece each at most.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field
from datetime import timedelta
from enum import Enum
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from sennit.ir.layout import Reduction
from sennit.reshard.lower_torch import Together
from sennit.reshard.redistribution import Redistribution, StepKind
from sennit.reshard.timing import LinkCost, Timing
from sennit.reshard.wire_torch import wait_for

__all__ = ["Groups", "Transport", "collective", "received_by"]


class Transport(Enum):
    """How steps over groups are run.

    AUTO: CPU tensors through memory that the ranks share, else point to point or through a group that exists, as is
    cheaper; others through groups that exist.
    """

    AUTO = "auto"
    POINT_TO_POINT = "point_to_point"
    GROUPS = "groups"


@dataclass(slots=True)
class Groups:
    """The process groups of this rank, by their members."""

    timeout: float
    transport: Transport = Transport.AUTO
    timing: Timing | None = None
    limit: int = 64
    known: dict[frozenset[int], dist.ProcessGroup] = field(default_factory=dict)
    prepared: set[frozenset[int]] = field(default_factory=set)  # by all ranks, so it is the same on all

    def adopt(self, group: dist.ProcessGroup) -> None:
        """Use a group that exists. All its members must adopt it."""
        if group is dist.group.WORLD:
            return  # `serve` knows it, and a reference from here would keep it alive after it is destroyed
        self.known.setdefault(frozenset(dist.get_process_group_ranks(group)), group)

    def prepare(self, redistribution: Redistribution) -> int:
        """Make the groups of a redistribution's collectives.

        All ranks of the world call this; the answer is how many were made.
        """
        count = len(self.prepared)
        for step in redistribution.steps:
            if step.kind not in _OVER_GROUPS:
                continue
            for device in sorted(step.source.mesh.devices):
                ranks = frozenset(step.source.mesh.group(device, step.axes))
                if ranks in self.prepared or len(ranks) in (1, dist.get_world_size()):
                    continue
                if len(self.prepared) == self.limit:
                    return len(self.prepared) - count
                self.prepared.add(ranks)
                group = dist.new_group(sorted(ranks), timeout=timedelta(seconds=self.timeout))
                if isinstance(group, dist.ProcessGroup) and dist.get_rank() in ranks:
                    self.known[ranks] = group
        return len(self.prepared) - count

    def serve(self, step: Together, tensor: Tensor) -> dist.ProcessGroup | None:
        """The process group for a step, or None where it goes point to point. The same answer on all members."""
        if self.transport is Transport.POINT_TO_POINT or len(step.members) < 2:
            return None
        if self.transport is Transport.AUTO and tensor.device.type == "cpu" and not self._prefers_group(step, tensor):
            return None
        if len(step.members) == dist.get_world_size():
            return dist.group.WORLD
        return self.known.get(frozenset(step.members))

    def _prefers_group(self, step: Together, tensor: Tensor) -> bool:
        if not isinstance(self.timing, LinkCost):
            return False
        received = received_by(step.kind, len(step.members), prod(step.given), prod(step.shape))
        return self.timing.prefers_group(step.kind, len(step.members), received * tensor.element_size())


def received_by(kind: StepKind, members: int, given: int, result: int) -> float:
    """Elements that a member receives at least, of so many given and in the result."""
    match kind:
        case StepKind.ALL_GATHER:
            return result - given
        case StepKind.ALL_REDUCE:
            return 2 * given * (members - 1) / members
        case _:
            return given * (members - 1) / members


_OVER_GROUPS = (StepKind.REDUCE_SCATTER, StepKind.ALL_TO_ALL, StepKind.ALL_REDUCE, StepKind.ALL_GATHER)


def collective(
    step: Together, tensor: Tensor, group: dist.ProcessGroup, timeout: float
) -> Generator[None, None, Tensor]:
    """Run one step over a process group. Yields when it is posted."""
    tensor = tensor.reshape(step.given)
    # a group orders its members by rank, a step by axes
    order = sorted(range(len(step.members)), key=lambda place: step.members[place])
    match step.kind:
        case StepKind.ALL_REDUCE:
            output = tensor.clone(memory_format=torch.contiguous_format)
            work = dist.all_reduce(output, _op(step.op), group=group, async_op=True)
            parts: list[Tensor] = []
        case StepKind.ALL_GATHER:
            own = step.takes[0].take(tensor)
            output = tensor.new_empty(step.shape)
            parts = [_place(step, place, output, own) for place in order]
            work = dist.all_gather(parts, own, group=group, async_op=True)
        case StepKind.REDUCE_SCATTER:
            packed = [step.takes[place].take(tensor) for place in order]
            output = tensor.new_empty(step.shape)
            parts = [output.view(-1)]
            work = dist.reduce_scatter(parts[0], packed, _op(step.op), group=group, async_op=True)
        case StepKind.ALL_TO_ALL:
            sent = torch.cat([step.takes[place].take(tensor) for place in order])
            received = torch.empty_like(sent)
            output = tensor.new_empty(step.shape)
            work = dist.all_to_all_single(received, sent, group=group, async_op=True)
            parts = list(received.view(len(order), -1).unbind(0))
        case _:
            raise AssertionError(step.kind)
    yield
    assert work is not None
    wait_for(work, output, timeout, f"in a group with ranks {sorted(step.members)}", step.label)
    if step.kind in (StepKind.ALL_GATHER, StepKind.ALL_TO_ALL):
        for place, part in zip(order, parts, strict=True):
            if part.data_ptr() != step.puts[place].view(output).data_ptr() or not step.puts[place].is_dense:
                step.puts[place].put(output, part)
    return output


def _place(step: Together, place: int, output: Tensor, own: Tensor) -> Tensor:
    """Where the part of a member is received: in the output itself where it lies there in one run."""
    put = step.puts[place]
    return put.view(output).reshape(-1) if put.is_dense else torch.empty_like(own)


def _op(op: Reduction | None) -> dist.ReduceOp.RedOpType:
    match op:
        case Reduction.PROD:
            return dist.ReduceOp.PRODUCT
        case Reduction.MAX:
            return dist.ReduceOp.MAX
        case Reduction.MIN:
            return dist.ReduceOp.MIN
        case _:
            return dist.ReduceOp.SUM
