"""Run a redistribution on local gloo ranks and check it: what `sennit reshard --run` does.

Each rank makes its own piece of the source from the indices that it holds, runs the plan, and compares its piece of the target
with what the indices there say; no process ever holds the whole array. Element i of part k of a pending value is a small integer
that depends on both, so that a piece out of place, a part that is missing and a part that counts twice all show.
"""

from __future__ import annotations

import datetime
import multiprocessing
import multiprocessing.connection
import os
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import product
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from sennit.errors import RunError
from sennit.ir.dtype import DType
from sennit.ir.layout import Layout, Pending, Reduction
from sennit.ir.layout_numpy import Array, identity_of, reduce_arrays
from sennit.ir.mesh import Point
from sennit.reshard.execute_torch import Executor
from sennit.reshard.redistribution import Redistribution

__all__ = ["RankRun", "run_on_ranks"]


@dataclass(frozen=True, slots=True)
class RankRun:
    """The seconds of each repetition, the slowest rank's; and the ranks whose piece of the target was wrong."""

    ranks: int
    seconds: tuple[float, ...]
    wrong: tuple[int, ...]

    @property
    def median(self) -> float:
        return sorted(self.seconds)[len(self.seconds) // 2]


def run_on_ranks(redistribution: Redistribution, dtype: DType, *, repeats: int = 5, timeout: float = 120.0) -> RankRun:
    """Run a plan on as many gloo processes as its devices need; device d is rank d."""
    count = 1 + max(redistribution.source.mesh.devices + redistribution.target.mesh.devices)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])  # so that torch is loaded once, not once a rank
    with tempfile.TemporaryDirectory(prefix="sennit-reshard-") as folder:
        pipes: list[Connection[Any, Any]] = []
        processes: list[BaseProcess] = []
        try:
            for rank in range(count):
                ours, theirs = context.Pipe()
                arguments = (
                    rank,
                    count,
                    str(Path(folder) / "store"),
                    theirs,
                    str(redistribution),
                    dtype,
                    repeats,
                    timeout,
                )
                processes.append(context.Process(target=_rank, args=arguments, daemon=True))
                processes[-1].start()
                theirs.close()
                pipes.append(ours)
            answers = _collect(pipes, processes, timeout)
        finally:
            for process in processes:
                process.join(5.0)
                if process.is_alive():
                    process.kill()
                    process.join()
            for pipe in pipes:
                pipe.close()
    seconds = tuple(max(times) for times in zip(*(times for times, _ in answers), strict=True))
    return RankRun(count, seconds, tuple(rank for rank, (_, right) in enumerate(answers) if not right))


def _collect(
    pipes: Sequence[Connection[Any, Any]], processes: Sequence[BaseProcess], timeout: float
) -> list[tuple[list[float], bool]]:
    """One answer from each rank; the first failure ends all."""
    answers: dict[int, tuple[list[float], bool]] = {}
    deadline = time.monotonic() + timeout
    while len(answers) < len(pipes):
        waiting = [rank for rank in range(len(pipes)) if rank not in answers]
        ready = multiprocessing.connection.wait(
            [pipes[rank] for rank in waiting], max(0.0, deadline - time.monotonic())
        )
        if not ready:
            raise RunError(f"ranks {waiting} did not answer within {timeout:.0f} s", fix="use a smaller array")
        for rank in waiting:
            if pipes[rank] in ready:
                try:
                    kind, answer = pipes[rank].recv()
                except EOFError:
                    processes[rank].join(1.0)
                    raise RunError(f"rank {rank} died with exit status {processes[rank].exitcode}") from None
                if kind == "error":
                    raise RunError(f"rank {rank} failed:\n{answer}")
                answers[rank] = answer
    return [answers[rank] for rank in range(len(pipes))]


def _rank(
    rank: int, count: int, store: str, pipe: Connection[Any, Any], text: str, dtype: DType, repeats: int, timeout: float
) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all ranks are on this host
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // count))
    try:
        limit = datetime.timedelta(seconds=timeout)
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=count, timeout=limit)
        pipe.send(("done", _run(Redistribution.parse(text), rank, dtype, repeats)))
        dist.barrier()
        dist.destroy_process_group()
    except Exception:  # whatever a rank raises is reported to the process that started it
        pipe.send(("error", traceback.format_exc()))


def _run(redistribution: Redistribution, rank: int, dtype: DType, repeats: int) -> tuple[list[float], bool]:
    kind = getattr(torch, dtype.torch_name)
    source, target = redistribution.source, redistribution.target
    given = torch.empty(0, dtype=kind)
    if rank in source.mesh.devices:
        given = torch.from_numpy(_given(source, source.mesh.coordinate(rank))).to(kind)
    executor = Executor()
    found = executor.run(redistribution, given)  # the first run plans and agrees
    seconds: list[float] = []
    for _ in range(repeats):
        dist.barrier()
        begin = time.perf_counter()
        found = executor.run(redistribution, given)
        seconds.append(time.perf_counter() - begin)
    if rank not in target.mesh.devices:
        return seconds, True
    wanted = torch.from_numpy(_wanted(source, target, target.mesh.coordinate(rank), dtype)).to(kind)
    return seconds, found.shape == wanted.shape and bool(torch.equal(found, wanted))


# ---- values ----------------------------------------------------------------------------------------------------------


def _values(layout: Layout, point: Point, part: int) -> Array:
    """What one part of the array holds at the indices of a piece: 0 and 1, or -1 and 1 where they are multiplied."""
    flat = np.zeros((1,) * len(layout.shape), dtype=np.int64)
    for dim in range(len(layout.shape)):
        indices = layout.indices(dim, point).reshape([-1 if other == dim else 1 for other in range(len(layout.shape))])
        flat = flat * layout.shape[dim] + indices
    mixed = (flat + 1) * 2654435761 + (part + 1) * 40503 * (flat + 7)
    return np.asarray((mixed >> 7) % 2)


def _given(source: Layout, point: Point) -> Array:
    values = _values(source, point, _part(source, point))
    return _for_product(values) if any(op is Reduction.PROD for _, op in source.pending) else values


def _part(layout: Layout, point: Point) -> int:
    part = 0
    for name, _ in layout.pending:
        part = part * layout.mesh.size(name) + point[layout.mesh.index(name)]
    return part


def _wanted(source: Layout, target: Layout, point: Point, dtype: DType) -> Array:
    """The piece of the target: parts reduced over the axes that are resolved, the own part of those that stay pending."""
    stay = {
        name for name, entry in source.pending if source.mesh == target.mesh and target.entry(name) == Pending(entry)
    }
    choices = [
        [point[target.mesh.index(name)]] if name in stay else list(range(source.mesh.size(name)))
        for name, _ in source.pending
    ]
    sizes = [source.mesh.size(name) for name, _ in source.pending]
    parts = [
        reduce(lambda part, pair: part * pair[0] + pair[1], zip(sizes, c, strict=True), 0) for c in product(*choices)
    ]
    ops = [op for _, op in source.pending]
    arrays = [_values(target, point, part) for part in parts]
    if Reduction.PROD in ops:
        arrays = [_for_product(array) for array in arrays]
    whole = reduce(lambda left, right: reduce_arrays(ops[0], left, right), arrays)
    for name, op in target.pending:
        if name not in stay and point[target.mesh.index(name)] != 0:
            kind = np.dtype(np.float64) if dtype.is_float else np.dtype(np.int64)
            whole = np.full(whole.shape, identity_of(op, kind), dtype=kind)
    return whole


def _for_product(values: Array) -> Array:
    return np.asarray(1 - 2 * values)
