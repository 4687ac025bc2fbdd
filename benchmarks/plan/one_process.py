"""A training step on one rank, without links: our data-parallel step beside eager torch's, in processor time and in
memory that the step makes.

    python benchmarks/plan/one_process.py [--cases gpt-256] [--steps 6]

One thread. Models are those of `special_models.py`. Contenders take turns, step by step, so that other work on the
machine falls on all of them alike; least and median of the processor seconds of forward and backward, and of the
optimizer (AdamW, fused). `peak` is the most that tensors made in one step take at once (`StorageMeter`).
"""

from __future__ import annotations

import argparse
import copy
import os
import socket
import sys
import time
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
import torch.distributed as dist
from special_models import CASES, build
from torch import nn

import sennit
from sennit.plan import zoo
from sennit.run.memory import StorageMeter


def alone() -> None:
    """A world of one rank."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": "0", "WORLD_SIZE": "1"}
    os.environ.update(world, GLOO_SOCKET_IFNAME="lo")
    dist.init_process_group("gloo")


def step(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: dict[str, torch.Tensor]
) -> tuple[float, float, float]:
    begin = time.process_time()
    result = model(**batch)
    loss = getattr(result, "loss", result)
    loss.backward()
    middle = time.process_time()
    optimizer.step()
    optimizer.zero_grad()
    return middle - begin, time.process_time() - middle, float(loss.detach())


def compare(name: str, steps: int) -> None:
    model, batch = build(CASES[name])
    models = {"eager": copy.deepcopy(model)}
    for title, fused in (("ours", True), ("ours, attention as written", False)):
        models[title] = sennit.parallelize(
            copy.deepcopy(model), batch, plan=zoo.data_parallel, mesh="dp=1", fused_attention=fused
        )
    optimizers = {title: torch.optim.AdamW(item.parameters(), lr=1e-3, fused=True) for title, item in models.items()}
    rows: dict[str, list[tuple[float, float, float]]] = {title: [] for title in models}
    for _ in range(steps + 1):
        for title, item in models.items():
            rows[title].append(step(item, optimizers[title], batch))
    print(f"\n{name}: {CASES[name].shape}")
    print(f"  {'':28s} {'least s':>8s} {'median':>8s} {'x eager':>8s} {'optimizer':>10s} {'peak MB':>8s}  loss")
    for title, item in models.items():
        timed = rows[title][1:]
        least, eager = min(row[0] for row in timed), min(row[0] for row in rows["eager"][1:])
        with StorageMeter() as meter:
            result = item(**batch)
            getattr(result, "loss", result).backward()
        print(
            f"  {title:28s} {least:8.3f} {median(row[0] for row in timed):8.3f} {least / eager:8.3f} "
            f"{min(row[1] for row in timed):10.4f} {meter.peak / 1e6:8.1f}  {timed[-1][2]:.7f}"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=["gpt-256"], choices=list(CASES), metavar="CASE")
    parser.add_argument("--steps", type=int, default=6)
    options = parser.parse_args()
    torch.set_num_threads(1)
    alone()
    print(f"torch {torch.__version__}, one thread, load {os.getloadavg()[0]:.1f}")
    for name in options.cases:
        compare(name, options.steps)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
