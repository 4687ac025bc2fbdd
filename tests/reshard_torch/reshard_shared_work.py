"""What ranks run in the tests of redistribution through shared memory. No pytest here: every rank imports this."""

from __future__ import annotations

import gc
import os
import random
import resource
import signal
import time
from pathlib import Path

import torch
from reshard_problems import random_problem
from reshard_work import local_piece, mismatch

from sennit.collective.runtime.shm_posts import HostMemory
from sennit.errors import RunError
from sennit.ir.layout import Layout
from sennit.ir.mesh import Mesh
from sennit.reshard.dtensor_torch import redistribute
from sennit.reshard.execute_torch import Executor
from sennit.reshard.planner import Mode, plan


def shared_executor(*, staging: int = 8 << 20, timeout: float = 20.0, check: bool = False) -> Executor:
    return Executor(staging=staging, timeout=timeout, check=check, shared=HostMemory)


def same_bits(rank: int, world: int, kind: str, seeds: range, mode: Mode, staging: int) -> list[str]:
    """Problems whose result through shared memory is wrong, or other than through messages: sums of fractions included, whose
    bits depend on their order."""
    shared, messages = shared_executor(staging=staging), Executor(staging=staging, timeout=20.0, check=False)
    wrong: list[str] = []
    for seed in seeds:
        source, target = random_problem(kind, seed, world)
        if rank not in source.mesh.devices and rank not in target.mesh.devices:
            continue
        redistribution = plan(source, target, itemsize=8, mode=mode)
        local = local_piece(source, rank, seed)
        fault = mismatch(target, rank, seed, shared.run(redistribution, local))
        participants = tuple(sorted({*source.mesh.devices, *target.mesh.devices}))
        assert shared.shared is not None
        if len(participants) > 1 and not shared.shared.reaches(participants, shared.wire):
            fault = "not through shared memory"
        fractions = torch.rand(local.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))
        if seed % 3 == 0 and fractions.dim() > 1:  # not contiguous
            fractions = fractions.transpose(0, -1).contiguous().transpose(0, -1)
        ours, theirs = shared.run(redistribution, fractions), messages.run(redistribution, fractions)
        if not torch.equal(ours, theirs):
            fault = f"other bits than messages: {ours.tolist()}, {theirs.tolist()}"
        if fault is not None:
            wrong.append(f"{kind} {seed}: {source} on {source.mesh} -> {target} on {target.mesh}: {fault}")
    return wrong


def many_under_way(rank: int, world: int, staging: int) -> list[str]:
    """Started in one order and waited for in another on each rank, with random delays; gradients between them."""
    executor = shared_executor(staging=staging, check=True)
    chance = random.Random(rank)
    wrong: list[str] = []
    for first in range(0, 24, 8):
        running = []
        for seed in range(first, first + 8):
            source, target = random_problem(("even", "partial", "uneven", "cross")[seed % 4], seed, world)
            if rank in source.mesh.devices or rank in target.mesh.devices:
                time.sleep(chance.random() * 2e-3)
                local = local_piece(source, rank, seed)
                running.append((seed, target, redistribute(local, source, target, async_op=True, executor=executor)))
        chance.shuffle(running)
        for seed, target, handle in running:
            fault = mismatch(target, rank, seed, handle.wait())
            if fault is not None:
                wrong.append(f"{seed}: {fault}")
    return wrong
