"""Real processes for tests: started once, they run functions that are named by module, and gather small bytes through
the parent.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

Exchange = Callable[[bytes], list[bytes]]
Job = Callable[..., Any]  # rank, size, exchange, then what is passed


@dataclass(frozen=True)
class Failed:
    """What a job raised. Only texts and plain attributes travel."""

    kind: str
    text: str
    ranks: tuple[int, ...] = ()
    cause: str = ""


def _serve(pipe: Connection) -> None:
    while (order := pipe.recv()) is not None:
        job, rank, size, arguments = order

        def exchange(data: bytes) -> list[bytes]:
            pipe.send(("exchange", data))
            gathered: list[bytes] = pipe.recv()
            return gathered

        try:
            pipe.send(("result", job(rank, size, exchange, *arguments)))
        except Exception as error:  # it goes to the test
            cause = getattr(getattr(error, "cause", None), "value", "")
            text = str(error) if cause else traceback.format_exc()
            pipe.send(("result", Failed(type(error).__name__, text, getattr(error, "ranks", ()), cause)))


class Ranks:
    """`count` processes; a job may take the first few of them only."""

    def __init__(self, count: int) -> None:
        context = multiprocessing.get_context("spawn")
        pairs = [context.Pipe() for _ in range(count)]
        self.pipes = [near for near, _ in pairs]
        self.processes = [context.Process(target=_serve, args=(far,), daemon=True) for _, far in pairs]
        for process in self.processes:
            process.start()
        for _, far in pairs:
            far.close()

    def run(self, size: int, job: Job, *arguments: Any, timeout: float = 120.0) -> list[Any]:
        """What each rank returned, a `Failed`, or None where its process died."""
        for rank in range(size):
            self.pipes[rank].send((job, rank, size, arguments))
        results: dict[int, Any] = {}
        waiting: dict[int, bytes] = {}
        while len(results) < size:
            alive = [self.pipes[rank] for rank in range(size) if rank not in results and rank not in waiting]
            ready = multiprocessing.connection.wait(alive, timeout)
            assert ready, f"ranks {sorted(set(range(size)) - set(results) - set(waiting))} do not answer"
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = self.pipes.index(pipe)
                try:
                    kind, said = pipe.recv()
                except (EOFError, ConnectionResetError):
                    results[rank] = None
                    continue
                if kind == "result":
                    results[rank] = said
                else:
                    waiting[rank] = said
            if len(waiting) == size:
                gathered = [waiting[rank] for rank in range(size)]
                waiting.clear()
                for rank in range(size):
                    self.pipes[rank].send(gathered)
        return [results[rank] for rank in range(size)]

    def close(self) -> None:
        for pipe, process in zip(self.pipes, self.processes, strict=True):
            if process.is_alive():
                pipe.send(None)
        for pipe, process in zip(self.pipes, self.processes, strict=True):
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()
            process.close()
            pipe.close()


def good(results: Sequence[Any]) -> list[Any]:
    """The results, none of which may be a failure."""
    for rank, result in enumerate(results):
        assert not isinstance(result, Failed), f"rank {rank}: {result.text}"
    return list(results)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def segments() -> list[str]:
    """Names of ours in /dev/shm."""
    return [name for name in os.listdir("/dev/shm") if name.startswith("sennit")]
