"""Process groups that begin their collectives in the order in which they are issued, and carry one or several of them at once.

The order of buckets decides what arrives first (`channel_torch.py`). One at a time, each has the link for itself and arrives as early as it can. But a collective is a chain of hops, and a hop waits for a thread of the next
rank: where such threads have to wait for a core, the link is idle meanwhile. Two at once fill each other's gaps, and each takes longer, since they share the link. Which is better is measured (`tune_torch.py`): of a queue of messages of 0.5 MiB beside computing, at
1 Gbit/s, each took (`benchmarks/fuse/thread_policies.py`, milliseconds):

| ranks | gloo's threads | one at a time | two at once |
|---|---|---|---|
| 2 | real time | 4.4 | 4.4 |
| 2 | nice and short | 5.3 | 4.8 |
| 2 | as they come | 7.5 | 5.1 |
| 4 | nice and short | 7.7 | 6.8 |
| 4 | as they come | 12.1 | 10.4 |
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from sennit.fuse.network_threads import gloo_threads

__all__ = ["ordered_group", "ordered_groups"]

_AT_ONCE = (1, 2)
_PATIENCE = 1.0  # seconds until threads that a group has started bear their names


def ordered_group(
    ranks: Sequence[int] | None = None, device: torch.device | str = "cpu", *, at_once: int = 1
) -> dist.ProcessGroup:
    """A process group whose collectives on the device begin in the order in which they are issued, each when fewer than `at_once` of those before it are under way.

    A gloo group has two threads, and `new_group` passes no options on to it; so a backend that is gloo with `at_once` threads is registered with torch. NCCL has a stream and sennit's backend a thread for each group: they carry one at a time.
    """
    default = dist.group.WORLD
    assert default is not None
    if isinstance(default._get_backend(torch.device(device)), dist.ProcessGroupGloo):
        name, before = f"sennit_ordered_gloo_{at_once}", len(gloo_threads())
        if name not in dist.Backend.backend_list:
            dist.Backend.register_backend(name, partial(_gloo, at_once), devices=["cpu"])
        group = dist.new_group(ranks, backend=name)
    else:
        assert at_once == 1, "one at a time"
        name, before, group = "", 0, dist.new_group(ranks)
    assert isinstance(group, dist.ProcessGroup)
    dist.barrier(group)
    # who looks for gloo's threads (`network_threads.py`) must not miss one that has just begun
    patience = time.monotonic() + _PATIENCE
    while name and before and len(gloo_threads()) < before + at_once and time.monotonic() < patience:
        time.sleep(1e-3)
    return group


def ordered_groups(device: torch.device | str = "cpu") -> dict[int, dist.ProcessGroup]:
    """Groups of all ranks by how many collectives they carry at once: those that are worth trying on this device."""
    default = dist.group.WORLD
    assert default is not None
    has_threads = isinstance(default._get_backend(torch.device(device)), dist.ProcessGroupGloo) and default.size() > 1
    return {at_once: ordered_group(device=device, at_once=at_once) for at_once in (_AT_ONCE if has_threads else (1,))}


def _gloo(threads: int, store: Any, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroupGloo:
    default = dist.group.WORLD
    assert default is not None
    gloo: Any = dist.ProcessGroupGloo
    theirs: Any = default._get_backend(torch.device("cpu"))
    options = gloo._Options()
    options._threads = threads
    options._devices = theirs.options._devices  # the interface that gloo uses already
    options._timeout = timeout
    return dist.ProcessGroupGloo(store, rank, size, options)
