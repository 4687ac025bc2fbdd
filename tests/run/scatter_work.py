"""What ranks run for `test_scatter_bits.py`."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

import sennit.kernels.buckets
from sennit.cluster.ranks_torch import GlooRanks
from sennit.ir.layout import Reduction
from sennit.ir.program import Program
from sennit.run import emit_lane
from sennit.run.distributed import ProcessCommunicator
from sennit.run.groups import ProcessGroups, groups_needed
from sennit.run.load import load_source
from sennit.run.pieces import inputs_of
from sennit.run.rank import Rank, seat_of

SIZES = {"small": [5, 7, 64], "odd and large": [10_007, 3, 25_000]}


class SennitRanks(GlooRanks):
    backend = "sennit"


def step_of(program: Program, rank: int, communicator: ProcessCommunicator, state: dict[str, Tensor]):
    lane = program.lane_of(rank)
    source = emit_lane(program, lane)
    with torch.no_grad():
        outputs = load_source(source, program.name)(
            Rank(seat_of(program, lane, rank), communicator), inputs_of(lane, rank, state)
        )
    communicator.finish()
    return {key: value.clone() for key, value in outputs.items()}, source.count("rank.bucket(")


def both_ways(rank: int, text: str, state: dict[str, Tensor]) -> tuple[list[str], int, int]:
    """Outputs whose bits differ between buckets and one by one; how many buckets there are in each."""
    program = Program.parse(text)
    groups = ProcessGroups()
    groups.make_for(groups_needed(program))
    communicator = ProcessCommunicator(groups)
    joined, many = step_of(program, rank, communicator, state)
    terms = sennit.kernels.buckets._terms
    sennit.kernels.buckets._terms = lambda lane: set()
    try:
        alone, few = step_of(program, rank, communicator, state)
    finally:
        sennit.kernels.buckets._terms = terms
    return [key for key, value in alone.items() if not torch.equal(value, joined[key])], many, few


class World:
    def of(self, group: tuple[int, ...]) -> dist.ProcessGroup | None:
        return dist.group.WORLD


def scattered(rank: int, sizes: list[int], dtype: torch.dtype, op: Reduction) -> tuple[list[bool], list[bool]]:
    """Of each tensor: whether it has the same bits in a flat one, and whether they are those of a sum in the order of
    the group.
    """
    members = dist.get_world_size()
    group, communicator = tuple(range(members)), ProcessCommunicator(World())  # type: ignore[arg-type]
    made = [torch.Generator().manual_seed(member) for member in group]
    given = [
        [torch.randn(members, size, generator=rng).mul(10.0 ** (member - 1)).to(dtype) for size in sizes]
        for member, rng in enumerate(made)
    ]
    alone = [communicator.reduce_scatter(group, tensor, op) for tensor in given[rank]]
    flat = communicator.reduce_scatter(group, torch.cat(given[rank], 1), op).wait().split(sizes)
    communicator.finish()
    parts = [handle.wait() for handle in alone]
    combine = {Reduction.SUM: torch.add, Reduction.MAX: torch.maximum}[op]
    expected = [given[0][number][rank] for number in range(len(sizes))]
    for member in group[1:]:
        expected = [combine(total, given[member][number][rank]) for number, total in enumerate(expected)]
    same = [torch.equal(part, other) for part, other in zip(parts, flat, strict=True)]
    return same, [torch.equal(part, other) for part, other in zip(parts, expected, strict=True)]
