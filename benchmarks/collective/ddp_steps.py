"""Training steps under DDP and FSDP2 on sennit and on gloo, each backend in processes of its own, with one to several
threads a rank.

    python benchmarks/collective/ddp_steps.py [--ranks 4 8] [--threads 1 2 4] [--steps 10]

Six linear layers of width 1024 (24 MiB of parameters), a batch of 4 a rank; each rank runs on its share of the cores.
`alone` is the same step without DDP. Milliseconds, the median of the steps of rank 0: forward, backward with its
all-reduces, optimizer; under FSDP2 (`fully_shard` of each layer) the forward pass gathers; `in memory of the group`: FSDP2 once more, with
`set_allocate_memory_from_process_group_for_comm`. Beside them one all-reduce of 24 MiB.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

WIDTH, LAYERS, BATCH, BEFORE, PATIENCE = 1024, 6, 4, 3, 120


def times_of_steps(model: Any, steps: int) -> list[tuple[float, float, float]]:
    import torch

    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x = torch.randn(BATCH, WIDTH)
    found = []
    for _ in range(BEFORE + steps):
        moments = [time.perf_counter()]
        optimizer.zero_grad()
        loss = model(x).square().mean()
        moments.append(time.perf_counter())
        loss.backward()
        moments.append(time.perf_counter())
        optimizer.step()
        moments.append(time.perf_counter())
        found.append((moments[1] - moments[0], moments[2] - moments[1], moments[3] - moments[2]))
    return found[BEFORE:]


def shown(found: list[tuple[float, float, float]]) -> str:
    parts = [1e3 * median(step[part] for step in found) for part in range(3)]
    return f"{parts[0]:6.2f} {parts[1]:6.2f} {parts[2]:6.2f}  sum {1e3 * median(map(sum, found)):6.2f}"


def rank_main(backend: str, rank: int, ranks: int, threads: int, store: str, steps: int) -> None:
    cores = sorted(os.sched_getaffinity(0))
    share = max(1, len(cores) // ranks)
    os.sched_setaffinity(0, cores[rank * share % len(cores) :][:share])
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import FSDPModule

    import sennit.backend

    sennit.backend.register()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(threads)
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=ranks)
    torch.manual_seed(1)
    layers = fresh_layers()
    model: Any = torch.nn.Sequential(*layers)
    alone = times_of_steps(model, steps)
    wrapped = times_of_steps(torch.nn.parallel.DistributedDataParallel(model), steps)
    sharded = times_of_steps(sharded_model(torch.nn.Sequential(*layers), ranks), steps)
    for layer in (model := sharded_model(torch.nn.Sequential(*fresh_layers()), ranks)).modules():
        if isinstance(layer, FSDPModule):
            layer.set_allocate_memory_from_process_group_for_comm(True)
    inside = times_of_steps(model, steps)
    flat, times = torch.zeros(LAYERS * WIDTH * (WIDTH + 1)), []
    for _ in range(steps):
        dist.barrier()
        start = time.perf_counter()
        dist.all_reduce(flat)
        times.append(time.perf_counter() - start)
    if rank == 0:
        reduce = 1e3 * median(times)
        print(
            f"{ranks:3} ranks {threads:2} threads {backend:7} alone {shown(alone)}   DDP {shown(wrapped)}   "
            f"FSDP2 {shown(sharded)}   in memory of the group {shown(inside)}   all-reduce {reduce:6.2f}",
            flush=True,
        )
    dist.barrier()
    os._exit(0)  # what was to be printed is; the ends of libraries are not measured


def fresh_layers() -> list[Any]:
    import torch

    return [torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.GELU()) for _ in range(LAYERS)]


def sharded_model(model: Any, ranks: int) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (ranks,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rank", nargs=5, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        backend, rank, ranks, threads, store = options.rank
        rank_main(backend, int(rank), int(ranks), int(threads), store, options.steps)
        return
    print("milliseconds: forward, backward, optimizer")
    for ranks in options.ranks:
        for threads in options.threads:
            for backend in ("gloo", "sennit"):
                with tempfile.TemporaryDirectory() as folder:
                    command = [sys.executable, __file__, "--steps", str(options.steps), "--rank", backend]
                    rest = [str(ranks), str(threads), f"{folder}/store"]
                    processes = [subprocess.Popen([*command, str(rank), *rest]) for rank in range(ranks)]
                    try:
                        for process in processes:
                            process.wait(PATIENCE)
                    finally:
                        for process in processes:
                            process.kill()


if __name__ == "__main__":
    main()
