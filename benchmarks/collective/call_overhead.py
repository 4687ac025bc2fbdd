"""What a collective call costs in Python: `dist.all_reduce` of four elements in a group of one rank, where nothing is moved.

    python benchmarks/collective/call_overhead.py

Torch's own part of the call is included. The least of several batches, on sennit and on gloo.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

import sennit.backend

BATCHES, CALLS = 7, 3000


def main() -> int:
    sennit.backend.register()
    torch.set_num_threads(1)
    dist.init_process_group("sennit", store=dist.HashStore(), rank=0, world_size=1)
    x = torch.ones(4)
    for name in ("sennit", "gloo"):
        group = dist.new_group(backend=name)
        for asynchronous in (False, True):
            seconds = []
            for _ in range(BATCHES):
                start = time.perf_counter()
                for _ in range(CALLS):
                    work = dist.all_reduce(x, group=group, async_op=asynchronous)
                    if work is not None:
                        work.wait()
                seconds.append((time.perf_counter() - start) / CALLS)
            print(
                f"{name:>7} {'async and wait' if asynchronous else 'synchronous':>15}: {min(seconds) * 1e6:6.1f} us a call"
            )
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
