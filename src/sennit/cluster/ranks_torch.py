"""Gloo processes on this machine that run functions: the `laptop` cluster for real.

And the same on its GPUs, with NCCL.

    with GlooRanks(4) as ranks:
        answers = ranks.call(work, 3)        # work(rank, 3) on every rank; the answers in the order of the ranks

`work` is a function of an importable module. The processes are started at the first call, by a fork server that imports
torch once, and serve any number of calls in one process group. A rank that raises or dies ends the call: the others get
a few seconds to fail or answer, then all are stopped, and the error names each rank with its traceback. The next call
starts new processes, since the old group is lost. Nothing is left behind: no process, no folder.

`NcclRanks` are dealt to the GPUs in turn. Where there are more ranks than GPUs, several share one: NCCL 2.30 allows it
when asked (2.28 does not).
"""

from __future__ import annotations

import contextlib
import datetime
import multiprocessing
import multiprocessing.connection
import os
import shutil
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from sennit.errors import RunError

__all__ = ["GlooRanks", "NcclRanks"]

T = TypeVar("T")
GRACE = 3.0  # seconds that other ranks have to say why they fail too


class GlooRanks:
    """`count` gloo processes. `preload` names modules that the fork server imports once for all of them."""

    backend = "gloo"

    def __init__(self, count: int, *, timeout: float = 120.0, preload: Sequence[str] = ()) -> None:
        self.count, self.timeout, self.preload = count, timeout, tuple(preload)
        self.folder: Path | None = None
        self.processes: list[BaseProcess] = []
        self.pipes: list[Connection[Any, Any]] = []

    def __enter__(self) -> GlooRanks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def call(self, work: Callable[..., T], *arguments: Any) -> list[T]:
        """Run `work(rank, *arguments)` on every rank."""
        self.start()
        answers: dict[int, Any] = {}
        failures: dict[int, str] = {}
        for rank, pipe in enumerate(self.pipes):
            try:
                pipe.send((work, arguments))
            except ConnectionError:
                failures[rank] = self._death(rank)
        deadline = time.monotonic() + self.timeout
        while len(answers) + len(failures) < self.count:
            waiting = [rank for rank in range(self.count) if rank not in answers and rank not in failures]
            limit = GRACE if failures else max(0.0, deadline - time.monotonic())
            ready = multiprocessing.connection.wait([self.pipes[rank] for rank in waiting], limit)
            for rank in waiting:
                if self.pipes[rank] in ready:
                    self._take(rank, answers, failures)
                elif not ready:
                    failures[rank] = "did not answer" + ("" if failures else f" within {self.timeout:.0f} s")
        if failures:
            self.stop()
            raise RunError("\n".join(f"rank {rank} {text}" for rank, text in sorted(failures.items())))
        return [answers[rank] for rank in range(self.count)]

    def _take(self, rank: int, answers: dict[int, Any], failures: dict[int, str]) -> None:
        try:
            kind, answer = self.pipes[rank].recv()
        except (EOFError, ConnectionError):  # reset, not ended, where it died with work unread in its pipe
            failures[rank] = self._death(rank)
            return
        if kind == "error":
            failures[rank] = f"failed:\n{answer}"
        else:
            answers[rank] = answer

    def _death(self, rank: int) -> str:
        self.processes[rank].join(1.0)
        return f"died with exit status {self.processes[rank].exitcode}"

    @property
    def working_folder(self) -> Path:
        """A folder for files between this process and the ranks; it goes with them."""
        self.start()
        assert self.folder is not None
        return self.folder

    def start(self) -> None:
        """Start the processes, unless they are there."""
        if self.processes:
            return
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__, *self.preload])
        self.folder = Path(tempfile.mkdtemp(prefix="sennit-ranks-"))
        for rank in range(self.count):
            ours, theirs = context.Pipe()
            arguments = (self.backend, rank, self.count, str(self.folder / "store"), theirs, self.timeout)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self.processes.append(process)
            self.pipes.append(ours)

    def stop(self) -> None:
        """End the processes and remove their folder."""
        for pipe in self.pipes:
            pipe.close()  # a rank that waits for work ends
        for process in self.processes:
            process.join(1.0)
            if process.is_alive():
                process.kill()
                process.join()
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
        self.processes, self.pipes, self.folder = [], [], None


class NcclRanks(GlooRanks):
    """`count` processes on the GPUs of this machine."""

    backend = "nccl"


def _serve(backend: str, rank: int, count: int, store: str, pipe: Connection[Any, Any], timeout: float) -> None:
    """A rank: joins the group, then runs what comes through the pipe until it is closed."""
    # all ranks are on this host, and share its cores
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // count))
    try:
        if backend == "nccl":
            torch.cuda.set_device(rank % torch.cuda.device_count())
            if count > torch.cuda.device_count():
                os.environ.setdefault("NCCL_MULTI_RANK_GPU_ENABLE", "1")
        limit = datetime.timedelta(seconds=timeout)
        dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=count, timeout=limit)
    except Exception:  # whatever a rank raises is reported to the process that started it
        _answer(pipe, ForkingPickler.dumps(("error", traceback.format_exc())))
        return
    while True:
        try:
            work, arguments = pipe.recv()
        except (EOFError, ConnectionError):
            break
        try:
            answer = ForkingPickler.dumps(("done", work(rank, *arguments)))
        except Exception:  # likewise
            answer = ForkingPickler.dumps(("error", traceback.format_exc()))
        _answer(pipe, answer)
    dist.destroy_process_group()


def _answer(pipe: Connection[Any, Any], answer: memoryview[int]) -> None:
    # a process that has given the ranks up has closed its end: there is nobody to tell
    with contextlib.suppress(ConnectionError):
        pipe.send_bytes(answer)
