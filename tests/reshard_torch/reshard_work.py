"""What the ranks of the tests run. No pytest here: every rank imports this."""

from __future__ import annotations

import random
import time

import numpy as np
import torch
from reshard_problems import piece_of, random_problem, whole_array
from torch.distributed.tensor import Replicate

from sennit.errors import LayoutError, RunError
from sennit.ir.layout import Layout
from sennit.ir.mesh import Mesh
from sennit.reshard.dtensor_torch import redistribute
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


def run_with_gradient(rank: int, world: int, kind: str, seeds: range) -> list[dict[str, np.ndarray]]:
    """Pieces and random cotangents in, results and gradients out, for problems with sums."""
    executor = Executor(timeout=20.0, staging=512)
    answers = []
    for seed in seeds:
        source, target = random_problem(kind, seed, world)
        answer: dict[str, np.ndarray] = {}
        if rank in source.mesh.devices or rank in target.mesh.devices:
            local = local_piece(source, rank, seed).requires_grad_()
            got = redistribute(local, source, target, executor=executor)
            generator = torch.Generator().manual_seed(1000 * seed + rank)
            cotangent = torch.randint(-9, 9, got.shape, generator=generator).double()
            got.backward(cotangent)
            assert local.grad is not None
            answer = {"in": local.detach(), "out": got.detach(), "cotangent": cotangent, "gradient": local.grad}
        answers.append({key: value.numpy() for key, value in answer.items()})
    return answers


def second_derivative(rank: int) -> bool:
    mesh = Mesh.make({"x": 2, "y": 3})
    source, target = Layout.parse("[6{x},4]{sum:y}", mesh), Layout.parse("[6,4]", mesh)
    local = (torch.arange(12, dtype=torch.float64).reshape(3, 4) + rank).requires_grad_()
    y = redistribute(local, source, target)
    (gradient,) = torch.autograd.grad((y**3).sum(), local, create_graph=True)
    (again,) = torch.autograd.grad(gradient.sum(), local)
    # every rank has the whole y, and its part enters all of them: 6 losses, each 3 y^2, then 6 y summed over 3 parts
    # and 6 losses
    mine = target.region((0, 0)).intersect(source.region(mesh.coordinate(rank))).indices()[0]
    part = y.detach()[torch.from_numpy(mine)]
    return torch.allclose(gradient, 18 * part**2) and torch.allclose(again, 6 * 18 * part)


def run_async(rank: int, world: int) -> list[str]:
    """Many under way at once, started in one order and waited for in another on each rank, with random delays."""
    executor = Executor(timeout=20.0, staging=2048)
    chance = random.Random(rank)
    wrong: list[str] = []
    for first in range(0, 40, 8):
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


def disagree(rank: int, world: int) -> str:
    """Rank 2 plans another target; then all agree and the executor still works."""
    executor = Executor(timeout=20.0)
    mesh = Mesh.make({"x": world})
    source, whole = Layout.parse("[12{x},6]", mesh), Layout.parse("[12,6]", mesh)
    other = Layout.parse("[12,6{x}]", mesh)
    local = torch.full((2, 6), float(rank))
    try:
        redistribute(local, source, other if rank == 2 else whole, executor=executor)
    except RunError as error:
        text = str(error)
    else:
        return "not found"
    got = redistribute(local, source, other, executor=executor)
    return text if torch.equal(got.flatten(), torch.arange(6.0).repeat_interleave(2)) else "wrong after"


def never_comes(rank: int) -> str:
    """Rank 1 does not call."""
    mesh = Mesh.make({"x": 2})
    if rank == 1:
        time.sleep(3.0)
        return ""
    started = time.monotonic()
    try:
        redistribute(
            torch.zeros(2),
            Layout.parse("[4{x}]", mesh),
            Layout.parse("[4]", mesh),
            executor=Executor(timeout=0.5, check=False),
        )
    except RunError as error:
        return f"{error} after {time.monotonic() - started:.0f} s"
    return "no error"


def bad_inputs(rank: int) -> list[str]:
    mesh = Mesh.make({"x": 2})
    source, target = Layout.parse("[4{x}]", mesh), Layout.parse("[4]", mesh)
    far = Layout.parse("[4{x}]", Mesh.make({"x": 2}, devices=(0, 77)))
    calls = [
        lambda: redistribute(torch.zeros(3), source, target),
        lambda: redistribute(torch.zeros(2), source, far),
        lambda: redistribute(torch.zeros(2), [Replicate()]),  # type: ignore[call-overload]
        lambda: redistribute(
            torch.zeros(2, requires_grad=True), Layout.parse("[2]{max:x}", mesh), Layout.parse("[2]", mesh)
        ).backward(torch.zeros(2)),
    ]
    found: list[str] = []
    for call in calls if rank < 2 else []:
        try:
            call()
        except LayoutError as error:
            found.append(error.what)
        else:
            found.append("no error")
    return found
