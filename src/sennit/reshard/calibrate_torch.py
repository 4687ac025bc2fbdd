"""Measuring what messages cost on the ranks at hand, for the choice between plans.

    executor = Executor(timing=calibrate())

All ranks of the default process group call it together. Every rank exchanges messages with all others at once, as redistributions do;
small ones give the seconds per message, large ones the seconds per byte, strided copies the seconds per byte copied. Each is the
median of a few rounds on the slowest rank, so all ranks end with the same figures and make the same choices.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from sennit.reshard.lower_torch import Message, Move
from sennit.reshard.selection_torch import Selection
from sennit.reshard.timing import LinkCost
from sennit.reshard.wire_torch import Wire, traffic_of

__all__ = ["calibrate"]

_SMALL, _LARGE = 16, 1 << 18  # elements of float32: 64 bytes, 1 MiB


def calibrate(*, rounds: int = 7, timeout: float = 120.0, device: torch.device | str = "cpu") -> LinkCost:
    """The costs between the ranks of the default process group, the same figures on every rank."""
    count = dist.get_world_size()
    if count == 1:
        return LinkCost()
    small, large = (_exchange_seconds(size, rounds, timeout, device) for size in (_SMALL, _LARGE))
    piece = torch.zeros(_LARGE, device=device)
    copying = _median(rounds, lambda: piece.view(512, -1).t().contiguous(), device)
    alpha, each, gamma = small / (count - 1), 4 * _LARGE * (count - 1), copying / (4 * _LARGE)
    return LinkCost(alpha=alpha, beta=max(large - small, 1e-9) / each, gamma=gamma)


def _exchange_seconds(size: int, rounds: int, timeout: float, device: torch.device | str) -> float:
    rank, count = dist.get_rank(), dist.get_world_size()
    others = [other for other in range(count) if other != rank]
    sends = tuple(Message(o, Selection.flat(size, 0, size), (0, 0, (o - rank) % count, rank)) for o in others)
    receives = tuple(
        Message(o, Selection.flat(size * count, o * size, (o + 1) * size), (0, 0, (rank - o) % count, o))
        for o in others
    )
    move = Move("calibration", (size,), (size * count,), (), sends, receives)
    wire = Wire(timeout)
    piece = torch.zeros(size, device=device)

    def exchange() -> Tensor:
        running = wire.run(move, piece, wire.open(traffic_of([move])))
        while True:
            try:
                next(running)
            except StopIteration as stop:
                result: Tensor = stop.value
                return result

    return _median(rounds, exchange, device)


def _median(rounds: int, work: Callable[[], Tensor], device: torch.device | str) -> float:
    seconds = torch.zeros(rounds + 1, dtype=torch.float64)
    for place in range(rounds + 1):
        dist.barrier()
        start = time.perf_counter()
        work()
        if torch.device(device).type == "cuda":
            torch.cuda.synchronize(device)
        seconds[place] = time.perf_counter() - start
    slowest = seconds.to(device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(slowest[1:].median())  # the first is warming up
