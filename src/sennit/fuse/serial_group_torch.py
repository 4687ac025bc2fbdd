"""A process group that runs its collectives one after another, in the order in which they are issued.

The order of buckets decides what arrives first (`channel_torch.py`), so no two may share the link.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["serial_group"]

_SERIAL = "sennit_serial_gloo"


def serial_group(ranks: Sequence[int] | None = None, device: torch.device | str = "cpu") -> dist.ProcessGroup:
    """A process group whose collectives on the device run one after another, in the order in which they are issued.

    A gloo group has two threads, and `new_group` passes no options on to it: two buckets would share the link, and one
    which is needed soon would arrive late because of one which is not. So a backend that is gloo with one thread is
    registered with torch. NCCL has a stream and sennit's backend a thread for each group: they are in order already.
    """
    default = dist.group.WORLD
    assert default is not None
    if isinstance(default._get_backend(torch.device(device)), dist.ProcessGroupGloo):
        if _SERIAL not in dist.Backend.backend_list:
            dist.Backend.register_backend(_SERIAL, _serial_gloo, devices=["cpu"])
        group = dist.new_group(ranks, backend=_SERIAL)
    else:
        group = dist.new_group(ranks)
    assert isinstance(group, dist.ProcessGroup)
    # its thread has a name from its first collective on: who looks for gloo's threads (`network_threads.py`) must not
    # miss it
    dist.barrier(group)
    return group


def _serial_gloo(store: Any, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroupGloo:
    default = dist.group.WORLD
    assert default is not None
    gloo: Any = dist.ProcessGroupGloo
    theirs: Any = default._get_backend(torch.device("cpu"))
    options = gloo._Options()
    options._threads = 1
    options._devices = theirs.options._devices  # the interface that gloo uses already
    options._timeout = timeout
    return dist.ProcessGroupGloo(store, rank, size, options)
