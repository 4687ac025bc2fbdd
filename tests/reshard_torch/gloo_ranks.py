"""Gloo processes that run functions of test modules: started once, used by many tests.

A function is `def work(rank: int, *arguments)` of an importable module; its results come back in the order of the ranks. A rank that
raises ends the test with its traceback, and the next use starts new processes, since the old group is lost.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import shutil
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any


class GlooRanks:
    def __init__(self, count: int, *, timeout: float = 120.0) -> None:
        self.count, self.timeout = count, timeout
        self.processes: list[Any] = []
        self.pipes: list[Any] = []
        self.folder: Path | None = None

    def run(self, work: Callable[..., Any], *arguments: Any) -> list[Any]:
        if not self.processes:
            self._start()
        for pipe in self.pipes:
            pipe.send((work, arguments))
        answers: dict[int, Any] = {}
        deadline = time.monotonic() + self.timeout
        failures: dict[int, str] = {}
        while len(answers) + len(failures) < self.count:
            waiting = {self.pipes[r]: r for r in range(self.count) if r not in answers and r not in failures}
            limit = 3.0 if failures else max(0.0, deadline - time.monotonic())
            ready = multiprocessing.connection.wait(list(waiting), limit)
            if not ready:
                failures |= dict.fromkeys(waiting.values(), "no answer")
            for pipe in ready:
                rank = waiting[pipe]  # type: ignore[index]
                try:
                    kind, answer = self.pipes[rank].recv()
                except EOFError:
                    kind, answer = "error", "the process died"
                (failures if kind == "error" else answers)[rank] = answer
        if failures:
            self.stop()
            raise AssertionError("\n".join(f"rank {rank}: {text}" for rank, text in sorted(failures.items())))
        return [answers[rank] for rank in range(self.count)]

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["sennit.reshard.serve_torch", "gloo_ranks"])
        self.folder = Path(tempfile.mkdtemp(prefix="sennit-test-ranks-"))
        for rank in range(self.count):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, self.count, str(self.folder / "store"), theirs), daemon=True
            )
            process.start()
            theirs.close()
            self.processes.append(process)
            self.pipes.append(ours)

    def stop(self) -> None:
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


def _serve(rank: int, count: int, store: str, pipe: Any) -> None:
    import datetime

    import torch
    import torch.distributed as dist

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=count,
        timeout=datetime.timedelta(seconds=60),
    )
    while True:
        try:
            work, arguments = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send(("done", work(rank, *arguments)))
        except Exception:  # whatever a rank raises is the test's to show
            pipe.send(("error", traceback.format_exc()))
