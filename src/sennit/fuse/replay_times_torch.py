"""Seconds that a call takes on a GPU, without the host's part in it.

Many calls are captured as one CUDA graph, and the graph is replayed several times. Three things would count that are not the call's:

    the host's launch of the graph   5 to 30 us, more where other processes want the cores. With an idle device it lies between the first event and the first kernel, and a graph of forty calls of 1 us is
                                     longer by as much. So the device first waits in a kernel that spins, until all replays and events are queued behind it.
    the graph's own beginning        one gap for each replay, so a graph is made long: `_LENGTH` seconds, up to `_MOST` calls.
    what another process does        a context that loads a module takes the device for a moment: a replay in between is longer, and the median of replays is not.

`captured` may run beside other processes that measure; `replayed` and `queued_seconds` want the device for themselves.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

__all__ = ["Captured", "Replays", "calls_of", "captured", "queued_seconds", "replayed"]

_LENGTH = 4e-4
_MOST = 200
_SPIN = 2_000_000  # cycles: about a millisecond, in which the host queues what is timed


@dataclass(frozen=True, slots=True)
class Captured:
    """So many calls as one CUDA graph."""

    graph: Any
    calls: int


@dataclass(frozen=True, slots=True)
class Replays:
    """Seconds a call, of each replay; `clock` is the device's in Hz, by the cycles that it spun before."""

    times: tuple[float, ...]
    clock: float

    @property
    def quartiles(self) -> tuple[float, float, float]:
        low, middle, high = statistics.quantiles(self.times, n=4, method="inclusive")
        return low, middle, high


def _event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _spin() -> None:
    torch.cuda._sleep(_SPIN)  # type: ignore[no-untyped-call]


def queued_seconds(run: Callable[[], Any], calls: int = 4) -> float:
    """Of one run, from a few behind a spin: the host is done with all of them when the device begins, if they are not many. Without a graph, so where there can be none too."""
    run()
    torch.cuda.synchronize()
    start, end = _event(), _event()
    _spin()
    start.record()
    for _ in range(calls):
        run()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) / 1e3 / calls


def calls_of(rough: float, turns: int = 1) -> int:
    """How many calls of so many seconds make a graph: all turns as often, if each has its turn at all."""
    calls = max(1, min(_MOST, int(_LENGTH / max(rough, 1e-7))))
    return calls - calls % turns if calls > turns else calls


def captured(call: Callable[..., Any], turns: Sequence[Sequence[Tensor]], rough: float) -> Captured:
    """A graph of calls on the inputs of `turns`, one after the other; `rough` seconds each. With one turn, they find their inputs where the call before left them."""
    calls = calls_of(rough, len(turns))
    graph: Any = torch.cuda.CUDAGraph()
    # other threads and processes may allocate meanwhile
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for place in range(calls):
            call(*turns[place % len(turns)])
    return Captured(graph, calls)


def replayed(found: Captured, rounds: int = 9) -> Replays:
    before, events = _event(), [_event() for _ in range(rounds + 1)]
    found.graph.replay()  # what it reads and writes is mapped and, if it fits, in the cache
    torch.cuda.synchronize()
    before.record()
    _spin()
    events[0].record()
    for event in events[1:]:
        found.graph.replay()
        event.record()
    torch.cuda.synchronize()
    times = (first.elapsed_time(second) for first, second in pairwise(events))
    return Replays(
        tuple(float(time) / 1e3 / found.calls for time in times), _SPIN / (before.elapsed_time(events[0]) / 1e3)
    )
