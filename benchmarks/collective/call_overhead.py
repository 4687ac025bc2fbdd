"""What a collective call costs in Python: `dist.all_reduce` of four elements in a group of one rank, where nothing is moved.

    python benchmarks/collective/call_overhead.py

Torch's own part of the call is included, and measured by itself: the same call in a group whose backend returns at once. In a group of several ranks that share memory, a call that was made before
takes the short way (`express_torch.py`); what that costs is measured with the call of the core left out. The least of several batches, on sennit and on gloo.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

import sennit.backend
from sennit.cluster.ranks_torch import GlooRanks

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
    print(f"  torch's own part of a synchronous call: {torch_alone() * 1e6:6.1f} us")
    with GlooRanks(2, preload=("sennit.collective.runtime.group_torch",)) as ranks:
        whole, python = ranks.call(short_way)[0]
    print(
        f"  the short way, two ranks, without the core: {python * 1e6:6.1f} us, of which torch has its part; with it {whole * 1e6:6.1f} us"
    )
    return 0


def least(call: Callable[[], object]) -> float:
    """Seconds of a call."""
    seconds = []
    for _ in range(BATCHES):
        start = time.perf_counter()
        for _ in range(CALLS):
            call()
        seconds.append((time.perf_counter() - start) / CALLS)
    return min(seconds)


def torch_alone() -> float:
    """Of a call that the backend answers at once."""
    dist.init_process_group("sennit", store=dist.HashStore(), rank=0, world_size=1)
    group, x = dist.group.WORLD, torch.ones(4)
    assert group is not None
    done = group._nothing_left  # type: ignore[attr-defined]
    group.allreduce = lambda *_: done  # type: ignore[method-assign]
    found = least(lambda: dist.all_reduce(x))
    dist.destroy_process_group()
    return found


def short_way(rank: int) -> tuple[float, float]:
    """On one of two ranks: of a whole call, and of one in which the core is not called."""
    sennit.backend.register()
    torch.set_num_threads(1)
    group, x = dist.new_group(backend="sennit"), torch.ones(4)
    whole = least(lambda: dist.all_reduce(x, group=group))
    express = group._express
    start, express._start = express._start, lambda *_: 0
    python = least(lambda: dist.all_reduce(x, group=group))
    express._start = start
    dist.destroy_process_group(group)
    return whole, python


if __name__ == "__main__":
    sys.exit(main())
