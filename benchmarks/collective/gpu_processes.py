"""One process of several that share a GPU through CUDA IPC: what `gpu.py` has each of them do."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
from gpu_cases import code_of

from sennit.collective.runtime.gpu_peers_torch import GpuRank, arena_of, ipc_memory
from sennit.collective.runtime.shm_group import ShmGroup
from sennit.ir.dtype import DType


def process_work(rank: int, name: str, count: int, nbytes: int) -> tuple[float, int]:
    """The median seconds of an all-reduce on this rank, and its number of phases; the result is checked."""

    def exchange(told: bytes) -> list[bytes]:
        found: list[Any] = [None] * count
        dist.all_gather_object(found, told)
        return found

    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    code, n = code_of(name, count), nbytes // 4
    arena = arena_of(code, n, DType.F32)
    host = ShmGroup.create(rank, count, exchange, timeout=60.0)
    memory = ipc_memory(arena, rank, exchange, device)
    peer = GpuRank(code, rank, n, DType.F32, arena, memory, exchange, barrier=host.barrier)
    draws = [torch.Generator().manual_seed(7 * r + 1) for r in range(count)]
    everyone = [torch.randn(n, generator=draw) for draw in draws]
    peer.input.copy_(everyone[rank])
    peer.output.fill_(float("nan"))
    times = []
    for _ in range(8):
        torch.cuda.synchronize()
        host.barrier()
        start = time.perf_counter()
        peer.run()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    peer.check()
    goal = torch.stack(everyone).to(torch.float64).sum(0)
    assert torch.allclose(peer.output.cpu().to(torch.float64), goal, rtol=2e-5, atol=2e-5)
    exchange(b"done")
    host.close()
    return statistics.median(times[2:]), len(peer.walks)
