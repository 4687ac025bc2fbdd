"""What ranks run in the tests of redistribution through shared memory. No pytest here: every rank imports this."""

from __future__ import annotations

import gc
import logging
import os
import random
import signal
import time
from collections.abc import Iterable
from pathlib import Path

import torch
import torch.distributed as dist
from reshard_problems import random_problem
from reshard_work import local_piece, mismatch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import sennit
from sennit.collective.runtime.shm_posts import HostMemory
from sennit.errors import RunError
from sennit.ir.layout import Layout
from sennit.ir.mesh import Mesh
from sennit.reshard.calibrate_torch import calibrate
from sennit.reshard.dtensor_torch import redistribute
from sennit.reshard.execute_torch import Executor, current_executor
from sennit.reshard.lower_torch import Together
from sennit.reshard.planner import Mode, plan
from sennit.reshard.redistribution import StepKind
from sennit.reshard.timing import CollectiveCost, LinkCost, Timing


def shared_executor(*, staging: int = 8 << 20, timeout: float = 20.0, check: bool = False) -> Executor:
    return Executor(staging=staging, timeout=timeout, check=check, shared=HostMemory)


def same_bits(rank: int, world: int, kind: str, seeds: range, mode: Mode, staging: int) -> list[str]:
    """Problems whose result through shared memory is wrong, or other than through messages: sums of fractions included,
    whose bits depend on their order.
    """
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


def never_comes(rank: int) -> str:
    """Rank 1 greets, so that memory is shared, and then does not come. A second call is refused."""
    mesh = Mesh.make({"x": 3})
    source, target = Layout.parse("[6{x}]", mesh), Layout.parse("[6]", mesh)
    executor = shared_executor()
    redistribute(torch.zeros(2), source, target, executor=executor)
    if rank == 1:
        time.sleep(2.0)
        return ""
    assert executor.shared is not None
    executor.shared.timeout = 0.5
    said = []
    for _ in range(2):
        try:
            redistribute(torch.zeros(2), source, target, executor=executor)
        except RunError as error:
            said.append(str(error))
    return "\n".join(said)


def dies(rank: int) -> str:
    """Rank 1 is killed while its peers wait for it. It is named long before the time limit."""
    mesh = Mesh.make({"x": 3})
    source, target = Layout.parse("[6{x}]", mesh), Layout.parse("[6]", mesh)
    executor = shared_executor(timeout=60.0)
    redistribute(torch.zeros(2), source, target, executor=executor)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        redistribute(torch.zeros(2), source, target, executor=executor)
    except RunError as error:
        raise RuntimeError(f"named: {error.what}") from error
    return "no error"


def falls_back(rank: int, world: int) -> tuple[list[str], int]:
    """Rank 1 has no shared memory: nobody uses it, the results are right, and one line of the log says why."""
    lines: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    def make(mine: int, ranks: int, staging: int) -> HostMemory:
        if mine == 1:
            raise RunError("none today")
        return HostMemory(mine, ranks, staging)

    logger = logging.getLogger("sennit.reshard.shared_torch")
    handler = Keep()
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    executor = Executor(timeout=20.0, shared=make)
    mesh = Mesh.make({"x": world})
    source, target = Layout.parse(f"[{world}{{x}},4]", mesh), Layout.parse(f"[{world},4]", mesh)
    wrong = 0
    for _ in range(3):
        got = redistribute(torch.full((1, 4), float(rank)), source, target, executor=executor)
        wrong += not torch.equal(got[:, 0], torch.arange(float(world)))
    logger.removeHandler(handler)
    return lines, wrong


def staged_at_most(rank: int, world: int) -> list[str]:
    """A redistribution of 24 times its staging: what lies in the own area is never more than the staging, a lower
    budget included; and nothing is left open or mapped when the executor has gone.
    """
    mesh = Mesh.make({"x": world})
    rows = 64 * world
    source, target = Layout.parse(f"[{rows}{{x}},192]", mesh), Layout.parse(f"[{rows},192{{x}}]", mesh)
    whole = torch.arange(float(rows * 192)).reshape(rows, 192)
    wrong: list[str] = []
    gc.collect()
    before = _open_areas()
    for budget in (None, 2048):
        executor = shared_executor(staging=4096)
        most = _watch_staging(executor, Layout.parse("[6{x}]", mesh))
        got = redistribute(whole.chunk(world)[rank], source, target, budget=budget, executor=executor)
        if not torch.equal(got, whole.chunk(world, 1)[rank]):
            wrong.append(f"budget {budget}: wrong")
        if not 0 < most[0] <= (4096 if budget is None else budget):
            wrong.append(f"budget {budget}: {most[0]} bytes were staged")
        del executor, most
    gc.collect()
    after = _open_areas()
    if after > before:
        wrong.append(f"{before} areas before, {after} after")
    return wrong


def _watch_staging(executor: Executor, small: Layout) -> list[int]:
    """The most bytes that were ever staged, from now on."""
    redistribute(torch.zeros(small.local_shape()), small, Layout.parse("[6]", small.mesh), executor=executor)
    assert executor.shared is not None
    memory = executor.shared._shared
    assert isinstance(memory, HostMemory)
    most, post = [0], memory.post

    def watched(peers: Iterable[int], place: int, nbytes: int) -> None:
        post(peers, place, nbytes)
        most[0] = max(most[0], memory._used)

    memory.post = watched  # type: ignore[method-assign]
    return most


def _open_areas() -> int:
    """Areas that this process has open or mapped, its own and those of others."""
    mapped = sum("memfd:sennit" in line for line in Path("/proc/self/maps").read_text().splitlines())
    opened = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
    return mapped + sum("memfd:sennit" in os.readlink(path) for path in opened if os.path.islink(path))


def public_face(rank: int, world: int) -> list[str]:
    """`sennit.redistribute` uses shared memory where the process group's ranks are on one host; so does what it serves."""
    import sennit
    from sennit.reshard.execute_torch import current_executor

    mesh = DeviceMesh("cpu", torch.arange(world))
    x = distribute_tensor(torch.arange(4.0 * world).reshape(world, 4), mesh, [Shard(0)])
    x.requires_grad_()
    y = sennit.redistribute(x, [Replicate()])
    y.to_local().sum().backward()
    wrong = [] if torch.equal(y.to_local(), x.full_tensor()) else ["wrong"]
    shared = current_executor().shared
    if shared is None or not shared.knows(tuple(range(world))) or not shared._reached[tuple(range(world))]:
        wrong.append("not through shared memory")
    return wrong


def calibrated_for_all(rank: int) -> tuple[Timing, bool, bool]:
    """What the public face measured; whether its executor uses it; and whether a redistribution is right after it."""
    found = sennit.calibrate_redistribution(rounds=1, large=1 << 12)
    executor = current_executor()
    size = dist.get_world_size()
    mesh = DeviceMesh("cpu", list(range(size)))
    whole = torch.arange(size * size * 6.0).view(size, size * 6)
    given = distribute_tensor(whole, mesh, [Shard(0)])
    moved = sennit.redistribute(given, [Shard(1)])
    right = torch.equal(moved.to_local(), whole.chunk(size, 1)[rank])
    return found, executor.timing is found and executor.groups.timing is found, right


def calibrated(rank: int) -> tuple[Timing, Timing]:
    """The figures of shared memory and of messages."""
    return calibrate(rounds=1, shared=HostMemory, large=1 << 12), calibrate(rounds=1, large=1 << 12)


def through_the_cheaper(rank: int, world: int) -> list[str]:
    """A gather whose group is said to be cheaper sends no message; one whose messages are, does. Both are right."""
    mesh = Mesh.make({"x": world})
    source, target = Layout.parse(f"[{world}{{x}},4]", mesh), Layout.parse(f"[{world},4]", mesh)
    redistribution = plan(source, target, mode=Mode.COLLECTIVE)
    wrong: list[str] = []
    for group, messages in ((1.0, 2.0), (2.0, 1.0)):
        cost = CollectiveCost(StepKind.ALL_GATHER, group, 0.0, messages, 0.0)
        executor = Executor(timeout=20.0, check=False, timing=LinkCost(collectives=(cost,)))
        served = []
        for step in executor.lowered(redistribution, 4).operations:
            assert isinstance(step, Together)
            served.append(executor.groups.serve(step, torch.empty(0)) is not None)
        got = executor.run(redistribution, torch.full((1, 4), float(rank)))
        if served != [group < messages] or not torch.equal(got[:, 0], torch.arange(float(world))):
            wrong.append(f"{group} {messages}: {served} {got.tolist()}")
    return wrong
