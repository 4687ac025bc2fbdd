"""Real processes on this machine, joined by gloo: the way the demo and the tests run a program.

    with LocalRanks(4) as ranks:
        result = ranks.run(program, state, repeats=5)

The processes are started once, by a fork server that imports torch once, and run any number of programs. A rank that raises or
dies ends the run: the others are stopped, the error names the rank and carries its traceback, nothing is left behind.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import shutil
import tempfile
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from sennit.errors import RunError
from sennit.ir.program import Program
from sennit.run.pieces import assemble_outputs

__all__ = ["LocalRanks", "RunResult"]


@dataclass(frozen=True, slots=True)
class RunResult:
    """Whole outputs by path (the loss by `loss`), and the seconds of each repeated step: the slowest rank's."""

    outputs: dict[str, Tensor]
    seconds: tuple[float, ...]


class LocalRanks:
    """A context manager that holds `count` gloo processes on this machine."""

    def __init__(self, count: int, *, timeout: float = 120.0) -> None:
        self.count, self.timeout = count, timeout
        self.folder: Path | None = None
        self.processes: list[BaseProcess] = []
        self.pipes: list[Connection[Any, Any]] = []

    def __enter__(self) -> LocalRanks:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["sennit.run.processes", "sennit.run.distributed", "sennit.run.threads"])
        self.folder = Path(tempfile.mkdtemp(prefix="sennit-ranks-"))
        for rank in range(self.count):
            ours, theirs = context.Pipe()
            arguments = (rank, self.count, str(self.folder / "store"), theirs, self.timeout)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self.processes.append(process)
            self.pipes.append(ours)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for pipe, process in zip(self.pipes, self.processes, strict=True):
            if kind is None and process.is_alive():
                pipe.send(None)
        for process in self.processes:
            process.join(5.0 if kind is None else 0.0)
            if process.is_alive():
                process.kill()
                process.join()
        for pipe in self.pipes:
            pipe.close()
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)

    def run(self, program: Program, state: Mapping[str, Tensor], *, repeats: int = 1) -> RunResult:
        """Run the program on all ranks, `repeats` times from the same state. Returns the outputs of the last time."""
        if program.devices != tuple(range(self.count)):
            raise RunError(
                f"program {program.name!r} is for devices {list(program.devices)}, but there are {self.count} ranks",
                fix=f"plan on a mesh of {self.count} devices, or start {len(program.devices)} ranks",
            )
        assert self.folder is not None
        path = self.folder / "state.pt"
        torch.save({key: value.detach().contiguous() for key, value in state.items()}, path)
        for pipe in self.pipes:
            pipe.send((str(program), str(path), repeats))
        answers = self._collect()
        seconds = tuple(max(times) for times in zip(*(answer[1] for answer in answers), strict=True))
        pieces = {rank: torch.load(answer[0]) for rank, answer in enumerate(answers)}
        return RunResult(assemble_outputs(program, pieces), seconds)

    def _collect(self) -> list[Any]:
        """One answer from each rank; the first failure ends all."""
        answers: dict[int, Any] = {}
        deadline = time.monotonic() + self.timeout
        while len(answers) < self.count:
            waiting = {self.pipes[rank]: rank for rank in range(self.count) if rank not in answers}
            ready = multiprocessing.connection.wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                raise RunError(f"ranks {sorted(waiting.values())} did not answer within {self.timeout:.0f} s")
            for pipe in ready:
                rank = waiting[pipe]  # type: ignore[index]
                try:
                    kind, *answer = self.pipes[rank].recv()
                except EOFError:
                    self.processes[rank].join(1.0)
                    raise RunError(f"rank {rank} died with exit status {self.processes[rank].exitcode}") from None
                if kind == "error":
                    raise RunError(f"rank {rank} failed:\n{answer[0]}")
                answers[rank] = answer
        return [answers[rank] for rank in range(self.count)]


def _serve(rank: int, count: int, store: str, pipe: Connection[Any, Any], timeout: float) -> None:
    """A rank: joins the group, then runs what comes through the pipe until told to stop."""
    import datetime

    import torch.distributed as dist

    # all ranks are on this host, and share its cores
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // count))
    try:
        limit = datetime.timedelta(seconds=timeout)
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=count, timeout=limit)
        while (job := pipe.recv()) is not None:
            program, state, repeats = job
            path, seconds = _run(rank, Program.parse(program), Path(state), repeats)
            pipe.send(("done", path, seconds))
        dist.destroy_process_group()
    except Exception:  # whatever a rank raises is reported to the process that started it
        pipe.send(("error", traceback.format_exc()))


def _run(rank: int, program: Program, state: Path, repeats: int) -> tuple[str, list[float]]:
    import torch.distributed as dist

    from sennit.run.distributed import ProcessCommunicator
    from sennit.run.emit import emit_lane
    from sennit.run.load import load_source
    from sennit.run.pieces import inputs_of
    from sennit.run.rank import Rank, groups_of

    lane = program.lane_of(rank)
    step = load_source(emit_lane(program, lane), f"<{program.name} {lane.name}>")
    communicator = ProcessCommunicator(groups_of(program))
    handle = Rank(program, lane, rank, communicator)
    inputs = inputs_of(lane, rank, torch.load(state))
    seconds: list[float] = []
    outputs: Mapping[str, Tensor] = {}
    with torch.no_grad():
        for _ in range(repeats):
            dist.barrier()
            start = time.perf_counter()
            outputs = step(handle, inputs)
            communicator.finish()
            seconds.append(time.perf_counter() - start)
    path = str(state.with_name(f"outputs{rank}.pt"))
    torch.save({key: value.contiguous().clone() for key, value in outputs.items()}, path)
    dist.barrier()
    return path, seconds
