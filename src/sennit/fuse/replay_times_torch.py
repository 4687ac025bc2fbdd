"""Seconds that a call takes on a GPU, without the host's part in it.

Many calls are captured as one CUDA graph, and the graph is replayed several times. Three things would count that are
not the call's:

    the host's launch of the graph   5 to 30 us, more where other processes want the cores. With an idle device it lies between the first event and the first kernel, and a graph of forty calls of 1 us is
                                     longer by as much. So the device first waits in a kernel that spins, until all replays and events are queued behind it.
    the graph's own beginning        one gap for each replay, so a graph is made long: `_LENGTH` seconds, up to `_MOST` calls.
    what another process does        a context that loads a module takes the device for a moment: a replay in between is longer, and the median of replays is not.

`captured` may run beside other processes that measure; `replayed`, `queued_seconds` and `graphed_seconds` want the
device for themselves.

A tuner that chooses between kernels has to see them in the same way (`graphed_seconds`): launched one by one from a
busy host, short kernels may take as long as their launches, and which of them is kept is chance.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

__all__ = ["Captured", "Replays", "calls_of", "captured", "graphed_seconds", "queued_seconds", "replayed"]

_LENGTH = 4e-4
_MOST = 200
_SPIN = 2_000_000  # cycles: about a millisecond, in which the host queues what is timed
_LONGER = (1, 2, 4, 8, 16)  # spins, if the host is not done after one
_FEW = 1e-5  # seconds that a run counts as at least: up to 40 of them in a graph


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


def _spin(times: int = 1) -> None:
    torch.cuda._sleep(times * _SPIN)  # type: ignore[no-untyped-call]


def queued_seconds(run: Callable[[], Any], calls: int = 4) -> float:
    """Of one run, from a few behind a spin.

    If the device began before the host was done with all of them, once more behind a longer one. Without a graph, so
    where there can be none too.
    """
    run()
    torch.cuda.synchronize()
    seconds = 0.0
    for times in _LONGER:
        start, end = _event(), _event()
        _spin(times)
        start.record()
        for _ in range(calls):
            run()
        is_late = start.query()
        end.record()
        torch.cuda.synchronize()
        seconds = float(start.elapsed_time(end)) / 1e3 / calls
        if not is_late:
            break
    return seconds


def graphed_seconds(run: Callable[[], Any], rounds: int = 5) -> float:
    """Of one run, by replays of a graph of up to 40: the gaps between its kernels are those of a graph.

    What launches on a stream that it found before is in the graph only if that is this stream, so on the default
    stream, which cannot be captured, runs are queued.
    """
    rough = queued_seconds(run)
    stream = torch.cuda.current_stream()
    if stream == torch.cuda.default_stream():
        return queued_seconds(run, 20)
    return replayed(captured(run, [()], max(rough, _FEW), stream), rounds).quartiles[1]


def calls_of(rough: float, turns: int = 1) -> int:
    """How many calls of so many seconds make a graph: all turns as often, if each has its turn at all."""
    calls = max(1, min(_MOST, int(_LENGTH / max(rough, 1e-7))))
    return calls - calls % turns if calls > turns else calls


def captured(call: Callable[..., Any], turns: Sequence[Sequence[Tensor]], rough: float, stream: Any = None) -> Captured:
    """A graph of calls on the inputs of `turns`, one after the other; `rough` seconds each.

    With one turn, they find their inputs where the call before left them. They are captured on `stream`, or one of its
    own.
    """
    calls = calls_of(rough, len(turns))
    graph: Any = torch.cuda.CUDAGraph()
    # other threads and processes may allocate meanwhile
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
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
