"""Schedules of the library in all shapes, what they must give, and the work of a gloo rank that runs them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from sennit.collective.compile import compile_algorithm
from sennit.collective.library import (
    all_pairs_all_reduce,
    candidates,
    ring_all_gather,
    ring_all_reduce,
    ring_reduce_scatter,
)
from sennit.collective.runtime.p2p_torch import run_schedule_p2p
from sennit.ir.collective import Algorithm, CollectiveName, CollectiveSpec
from sennit.ir.schedule import Schedule

Array = NDArray[np.int64]


def algorithms(nodes: int, per_node: int) -> Iterator[Algorithm]:
    """Every candidate of the library for a shape, and some in place."""
    ranks = nodes * per_node
    for name in CollectiveName:
        for candidate in candidates(name, nodes):
            if candidate.recipe.name.startswith("halving") and ranks & (ranks - 1):
                continue  # for powers of two alone
            yield candidate.recipe.build(nodes, per_node, candidate.options)
    yield ring_all_reduce(ranks, channels=2, in_place=True)
    yield all_pairs_all_reduce(ranks, in_place=True)
    yield ring_all_gather(ranks, in_place=True)
    yield ring_reduce_scatter(ranks, in_place=True)


def inputs_for(spec: CollectiveSpec, elements: int, seed: int) -> list[Array]:
    """Integers, so that any order of a sum gives the same."""
    draw = np.random.default_rng(seed)
    return [
        draw.integers(-1000, 1000, (spec.input_chunks(rank) // spec.chunks, elements)) for rank in range(spec.ranks)
    ]


def expected(spec: CollectiveSpec, inputs: Sequence[Array], rank: int) -> Array | None:
    """By the words of the collective, not by its chunks. None: anything."""
    match spec.name:
        case CollectiveName.ALL_REDUCE:
            return np.sum(inputs, axis=0)
        case CollectiveName.ALL_GATHER:
            return np.concatenate(inputs)
        case CollectiveName.REDUCE_SCATTER:
            return np.sum(inputs, axis=0)[rank : rank + 1]
        case CollectiveName.ALL_TO_ALL:
            return np.stack([item[rank] for item in inputs])
        case CollectiveName.BROADCAST:
            assert spec.root is not None
            return inputs[spec.root]
        case CollectiveName.REDUCE:
            return np.sum(inputs, axis=0) if rank == spec.root else None
        case CollectiveName.GATHER:
            return np.concatenate(inputs) if rank == spec.root else None
        case CollectiveName.SCATTER:
            assert spec.root is not None
            return inputs[spec.root][rank : rank + 1]
        case CollectiveName.ALL_TO_NEXT:
            return inputs[rank - 1] if rank else None


def tensors(schedule: Schedule, rank: int, inputs: Sequence[Array]) -> tuple[torch.Tensor, torch.Tensor]:
    """Input and output of a rank, one memory where the collective is in place."""
    spec = schedule.collective
    assert isinstance(spec, CollectiveSpec)
    mine = torch.from_numpy(inputs[rank].copy())
    parts, outputs = spec.input_chunks(rank) // spec.chunks, spec.output_chunks(rank) // spec.chunks
    if not spec.in_place:
        return mine, torch.full((outputs, mine.shape[1]), -7)
    part = spec.alias_offset(rank) // spec.chunks
    if parts >= outputs:
        return mine, mine[part : part + outputs]
    whole = torch.full((outputs, mine.shape[1]), -7)
    whole[part : part + parts] = mine
    return whole[part : part + parts], whole


def wrong_schedules(rank: int, nodes: int, per_node: int, sizes: Sequence[int], tiles: int) -> list[str]:
    """On a gloo rank: run every schedule of the shape at every size; the names of those with a wrong result."""
    wrong: list[str] = []
    for number, algorithm in enumerate(algorithms(nodes, per_node)):
        schedule = compile_algorithm(algorithm)
        spec = schedule.collective
        assert isinstance(spec, CollectiveSpec)
        for elements in sizes:
            inputs = inputs_for(spec, elements, seed=number)
            source, target = tensors(schedule, rank, inputs)
            kept = source.clone()
            run_schedule_p2p(schedule, source, target, tiles=tiles)
            wanted = expected(spec, inputs, rank)
            if wanted is not None and not np.array_equal(target.numpy(), wanted):
                wrong.append(f"{schedule.name} at {elements} elements")
            if not spec.in_place and not torch.equal(source, kept):
                wrong.append(f"{schedule.name} at {elements} elements changed its input")
    return wrong


def views_and_types(rank: int) -> list[str]:
    """On a gloo rank: tensors that are not contiguous, half precision, a sub-group that does not begin at rank 0."""
    wrong: list[str] = []
    size = dist.get_world_size()
    schedule = compile_algorithm(ring_all_reduce(size))
    strided = torch.arange(24.0).view(4, 6).t() + rank
    result = torch.empty(6, 4)
    run_schedule_p2p(schedule, strided, result)
    if not torch.equal(result, sum(torch.arange(24.0).view(4, 6).t() + r for r in range(size))):  # type: ignore[arg-type]
        wrong.append("strided")
    half = torch.full((7,), rank + 1.0, dtype=torch.bfloat16)
    total = torch.empty_like(half)
    run_schedule_p2p(schedule, half, total)
    if not torch.equal(total, torch.full((7,), size * (size + 1) / 2, dtype=torch.bfloat16)):
        wrong.append("bfloat16")
    members = list(range(1, size))
    group = dist.new_group(members)
    if rank in members:
        smaller = compile_algorithm(all_pairs_all_reduce(size - 1))
        x, y = torch.tensor([rank, 10 * rank]), torch.empty(2, dtype=torch.int64)
        run_schedule_p2p(smaller, x, y, group)
        if y.tolist() != [sum(members), 10 * sum(members)]:
            wrong.append("sub-group")
    return wrong
