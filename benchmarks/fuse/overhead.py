"""What a step of `sennit.DataParallel` costs a processor beside the same step in eager torch, with nothing to
communicate: one rank alone.

    python benchmarks/fuse/overhead.py [--models gpt conv bert lstm] [--rounds 6]

Both in turns, by the thread's processor time, so that other work on the machine hardly shows; medians and least
milliseconds of a step, forward, backward, update and zero_grad. Ours packs gradients into buckets, as DDP does; eager
torch does not.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

BATCHES = {"gpt": 5, "conv": 61, "bert": 4, "lstm": 5}


def steps(model: Any, optimizer: Any, rows: tuple[Any, ...], count: int) -> list[float]:
    """Seconds of the thread's processor time; the first step is left out."""
    spent: list[float] = []
    for _ in range(count + 1):
        start = time.thread_time()
        model(*rows).backward()
        optimizer.step()
        optimizer.zero_grad()
        spent.append(time.thread_time() - start)
    return spent[1:]


def main() -> None:
    import torch
    import torch.distributed as dist
    from network_models import build

    from sennit.fuse.data_parallel_torch import DataParallel
    from sennit.fuse.tune_torch import Tuning

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=list(BATCHES))
    parser.add_argument("--rounds", type=int, default=6)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    for name in arguments.models:
        built = [build(name, 0, BATCHES[name]) for _ in range(2)]
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9) for model, _ in built]
        rows = built[0][1]
        ours = DataParallel(built[1][0], optimizers[1], sample=rows, tuning=Tuning(turns=0))
        times: dict[str, list[float]] = {"eager": [], "ours": []}
        for _ in range(arguments.rounds):
            times["eager"] += steps(built[0][0], optimizers[0], rows, 4)
            times["ours"] += steps(ours, optimizers[1], rows, 4)
        shown = ", ".join(
            f"{title} {1e3 * statistics.median(spent):.1f} ms ({1e3 * min(spent):.1f} least)"
            for title, spent in times.items()
        )
        ratio = statistics.median(times["ours"]) / statistics.median(times["eager"])
        print(f"{name}, batch {BATCHES[name]}: {shown}; {ratio:.3f} of eager", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
