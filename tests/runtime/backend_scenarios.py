"""What a rank does in the tests in which ranks die: each scenario runs in a process of its own and sends what it saw."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import sennit.backend
from sennit.collective.runtime import group_torch

LIMIT = 20.0
VICTIM = 1


def start(folder: Path, name: str, rank: int, size: int, limit: float = LIMIT) -> None:
    store = dist.FileStore(str(folder / name), size)
    dist.init_process_group("sennit", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=limit))


def caught(call: Callable[[], Any]) -> tuple[str, float]:
    """What it raised, and after how many seconds."""
    begin = time.monotonic()
    try:
        call()
    except RuntimeError as error:
        return str(error), time.monotonic() - begin
    return "", time.monotonic() - begin


def go_on(folder: Path, rank: int, size: int) -> float:
    """After a failure: destroy the group, and make a new one of those that are left."""
    dist.destroy_process_group()
    left = rank - (rank > VICTIM)
    start(folder, "second", left, size - 1)
    x = torch.full((1000,), 1.0)
    dist.all_reduce(x)
    dist.destroy_process_group()
    return float(x[0])


def killed_between(folder: Path, rank: int, size: int) -> dict[str, Any]:
    """One rank is gone when the others call."""
    start(folder, "first", rank, size)
    x = torch.ones(1 << 18)
    dist.all_reduce(x)
    if rank == VICTIM:
        os.kill(os.getpid(), signal.SIGKILL)
    error, seconds = caught(lambda: dist.all_reduce(x))
    again, _ = caught(lambda: dist.all_reduce(x))
    return {"error": error, "again": again, "seconds": seconds, "sum": go_on(folder, rank, size)}


def killed_inside(folder: Path, rank: int, size: int) -> dict[str, Any]:
    """One rank is killed while collectives run one after another."""
    start(folder, "first", rank, size)
    x = torch.ones(1 << 20)
    dist.all_reduce(x)
    if rank == VICTIM:
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGKILL)).start()

    def many() -> None:
        while True:
            dist.all_reduce(x)

    error, seconds = caught(many)
    return {"error": error, "again": error, "seconds": seconds, "sum": go_on(folder, rank, size)}


def killed_while_awaited(folder: Path, rank: int, size: int) -> dict[str, Any]:
    """One rank is killed while others wait for an asynchronous call and for a message of it."""
    start(folder, "first", rank, size)
    x = torch.ones(100)
    dist.barrier()
    if rank == VICTIM:
        os.kill(os.getpid(), signal.SIGKILL)
    message = dist.irecv(torch.empty(5), VICTIM)
    work = dist.all_reduce(x, async_op=True)
    error, seconds = caught(lambda: work.get_future().wait())
    again, _ = caught(message.wait)
    return {"error": error, "again": again, "seconds": seconds, "sum": go_on(folder, rank, size)}


def never_joins(folder: Path, rank: int, size: int) -> dict[str, Any]:
    if rank == VICTIM:
        return {}
    error, seconds = caught(lambda: start(folder, "first", rank, size, limit=1.0))
    return {"error": error, "seconds": seconds}


def late(folder: Path, rank: int, size: int) -> dict[str, Any]:
    """One rank lives, and does not call."""
    start(folder, "first", rank, size, limit=1.0)
    dist.barrier()
    if rank == VICTIM:
        while not (folder / "done").exists():
            time.sleep(0.02)
        return {}
    error, seconds = caught(lambda: dist.all_reduce(torch.ones(3)))
    if rank == 0:
        time.sleep(0.5)
        (folder / "done").touch()
    return {"error": error, "seconds": seconds}


def other_call(folder: Path, rank: int, size: int) -> dict[str, Any]:
    """One rank calls another collective, or another size."""
    start(folder, "first", rank, size)
    dist.barrier()
    call = (lambda: dist.broadcast(torch.ones(7), 0)) if rank == VICTIM else (lambda: dist.all_reduce(torch.ones(3)))
    error, seconds = caught(call)
    return {"error": error, "seconds": seconds}


def forks(folder: Path, rank: int, size: int) -> dict[str, Any]:
    """A child made by fork, as data loaders make them: it has no part in the group, and the group goes on."""
    start(folder, "first", rank, size)
    x = torch.ones(10)
    dist.all_reduce(x)
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        error, _ = caught(lambda: dist.all_reduce(x))
        os.write(write, error.encode())
        os._exit(0)
    os.waitpid(child, 0)
    said = os.read(read, 1000).decode()
    dist.all_reduce(x)
    message = torch.zeros(1)
    if rank == 0:
        dist.send(x[:1], 1)
    if rank == 1:
        dist.recv(message, 0)
    dist.destroy_process_group()
    return {"error": said, "sum": float(x[0])}


def play(scenario: str, rank: int, size: int, folder: str, hosts: tuple[str, ...], pipe: Any) -> None:
    """The process of one rank."""
    if hosts:
        group_torch.host_identity = lambda: hosts[rank]
    sennit.backend.register()
    torch.set_num_threads(1)
    pipe.send(globals()[scenario](Path(folder), rank, size))
