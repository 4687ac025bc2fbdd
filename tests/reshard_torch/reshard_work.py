"""What the ranks of the tests run. No pytest here: every rank imports this."""

from __future__ import annotations

import numpy as np
import torch
from reshard_problems import piece_of, random_problem, whole_array

from sennit.ir.layout import Layout
from sennit.reshard.execute_torch import Executor
from sennit.reshard.groups_torch import Transport
from sennit.reshard.planner import Mode, plan


def local_piece(layout: Layout, rank: int, seed: int) -> torch.Tensor:
    if rank not in layout.mesh.devices:
        return torch.empty(0, dtype=torch.float64)
    whole = whole_array(layout, seed)
    return torch.from_numpy(np.ascontiguousarray(piece_of(layout, layout.mesh.coordinate(rank), whole, seed)))


def mismatch(target: Layout, rank: int, seed: int, got: torch.Tensor) -> str | None:
    if rank not in target.mesh.devices:
        return None if got.shape == (0,) else f"shape {got.shape} outside the mesh"
    want = whole_array(target, seed)[np.ix_(*target.region(target.mesh.coordinate(rank)).indices())]
    return None if np.array_equal(want, got.numpy()) else f"want {want.tolist()}, got {got.tolist()}"


def run_problems(
    rank: int, world: int, kind: str, seeds: range, mode: Mode, staging: int, transport: Transport
) -> list[str]:
    """Problems that came out wrong on this rank."""
    executor = Executor(staging=staging, timeout=20.0, transport=transport, check=False)
    wrong: list[str] = []
    for seed in seeds:
        source, target = random_problem(kind, seed, world)
        redistribution = plan(source, target, itemsize=8, mode=mode)
        if transport is Transport.GROUPS and seed < 8:  # starting a gloo group is slow
            executor.groups.prepare(redistribution)
        if rank not in source.mesh.devices and rank not in target.mesh.devices:
            continue
        local = local_piece(source, rank, seed)
        before = local.clone()
        got = executor.run(redistribution, local)
        fault = mismatch(target, rank, seed, got)
        if not torch.equal(before, local):
            fault = "the input changed"
        if fault is not None:
            wrong.append(f"{kind} {seed}: {source} on {source.mesh} -> {target} on {target.mesh}: {fault}")
    return wrong
