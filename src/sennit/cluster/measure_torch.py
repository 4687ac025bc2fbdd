"""The `laptop` cluster with the figures of the machine at hand, measured in about a second.

- **Compute, memory, dispatch**: threads, as many as ranks can run at once (the smaller of ranks and cores), each with
  one
  torch thread, do the same work at the same time: f32 products, large copies, additions in the cache, gelu, tiny operators. The figure is the mean of what
  one of them reaches while the others are busy too. Ranks beyond the cores are not in it: the simulator shares `[host] cores`
  among them as they come.
- **Link**: two gloo process groups in two threads of this process, over TCP on the loopback device: ping-pong for the
  latency,
  large messages for the bandwidth; what all-reduces take beyond that is `collective_start` and `reduction`. Where gloo
  cannot be set up, the preset's figures stay, and their source says so.
- **Collectives**: given the processes that will run, all-reduces of 256 KiB and of 4 MiB between all of them, which the
  two
  threads cannot tell: ranks that share cores wait for each other's turn. What the links do not explain is `collective_start`
  and `reduction`.

Torch is imported here, so this file is imported by name and not by `sennit.cluster`.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from sennit.cluster.catalog import load
from sennit.cluster.description import Basis, Cluster, Figure, Peak
from sennit.cluster.ranks_torch import GlooRanks

__all__ = ["measure_laptop", "time_all_reduce"]


def measure_laptop(ranks: int, processes: GlooRanks | None = None) -> Cluster:
    """The laptop cluster with `ranks` devices and this machine's figures; with `processes`, collectives are timed on
    them.
    """
    preset = load(f"laptop:{ranks}")
    # first of all: processes that are still starting would be in the way of what follows
    times = processes.call(time_all_reduce) if processes is not None and processes.count > 1 else None
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    together = min(ranks, cores)
    beside = f"{together} at once on {cores} cores, one thread each"

    def measured(value: float, what: str) -> Figure:
        return Figure(value, Basis.MEASURED, f"measured on this machine: {what}")

    assert preset.host is not None
    flops = _together(together, _product)
    cache = _cache() / together
    cache_figure = measured(cache, f"the last-level cache divided by {together} at once")
    if cache < 3 << 20:  # what the additions below move
        cache_figure = Figure(3 << 20, Basis.ESTIMATED, "the bytes of the additions that were measured in the cache")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / ranks
    device = msgspec.structs.replace(
        preset.device,
        memory=measured(memory, f"the physical memory divided by {ranks} ranks"),
        bandwidth=measured(_together(together, _copy), f"copies of 64 MB, bytes read and written, {beside}"),
        cache=cache_figure,
        cache_bandwidth=measured(_together(together, _add), f"additions of 1 MB arrays, {beside}"),
        special=measured(_together(together, _gelu), f"gelu of 1 MB arrays, {beside}"),
        launch=measured(1 / _together(1, _dispatch), "time of one eager operator on eight elements"),
        peak=Peak(
            f32=measured(flops, f"f32 products of 512 x 512, {beside}; ranks beyond the cores share them"),
            f64=Figure(flops / 2, Basis.ESTIMATED, "half of the f32 rate measured on this machine"),
        ),
    )
    host = msgspec.structs.replace(preset.host, cores=measured(cores, "cores that this process may use"))
    summary = f"{ranks} CPU ranks of this machine with {cores} cores, over gloo; one thread a rank"
    cluster = _with_gloo(msgspec.structs.replace(preset, summary=summary, device=device, host=host), measured)
    return cluster if times is None else _with_processes(cluster, times, measured)


def _with_processes(
    cluster: Cluster, times: list[tuple[float, float]], measured: Callable[[float, str], Figure]
) -> Cluster:
    """A ring of p ranks: 2 (p-1) hops, 2 (p-1)/p of the array over the wire, (p-1)/p of it added.

    The line goes through two sizes that steps have: gloo takes an array of a few bytes another way, in a fifth of the
    time where ranks share cores.
    """
    middle, large = (max(seconds) for seconds in zip(*times, strict=True))
    link, count = cluster.link[0], len(times)
    share = (count - 1) / count
    wire, more = 2 * share / link.bandwidth.value, _LARGE - _MIDDLE
    adding = max(1e-6, large - middle - wire * more) / (share * more)  # seconds a byte
    start = middle - 2 * (count - 1) * 2 * link.latency.value - (wire + share * adding) * _MIDDLE
    assert cluster.host is not None
    cores = cluster.host.cores.value
    had = min(1.0, cores / count)  # of a core, each rank meanwhile
    who = f"between {count} processes on {cores:g} cores"
    return msgspec.structs.replace(
        cluster,
        host=msgspec.structs.replace(cluster.host, starts_use_cores=True),
        collective_start=measured(
            max(0.0, had * start), f"a gloo all-reduce of 256 KiB {who}, less its hops and bytes, as work of one core"
        ),
        reduction=measured(
            1 / (had * adding),
            f"gloo all-reduces of 4 MiB and 256 KiB {who}, less the bytes on the wire, as work of one core",
        ),
    )


_MIDDLE, _LARGE = 256 << 10, 4 << 20  # bytes: about what a gradient has, and the largest bucket of a small model


def time_all_reduce(rank: int) -> tuple[float, float]:
    """On each rank: the seconds of an all-reduce of `_MIDDLE` bytes, and of `_LARGE`."""
    seconds = []
    for size, times in ((_MIDDLE, 8), (_LARGE, 4)):
        tensor = torch.zeros(size // 4)
        dist.barrier()
        seconds.append(_each(lambda tensor=tensor: dist.all_reduce(tensor), times, batches=3))  # type: ignore[misc]
    return seconds[0], seconds[1]


def _with_gloo(cluster: Cluster, measured: Callable[[float, str], Figure]) -> Cluster:
    link = cluster.link[0]
    try:
        gloo = _gloo()
    except (RuntimeError, OSError) as error:
        kept = f"preset figure: gloo could not be measured on this machine ({type(error).__name__})"
        link = msgspec.structs.replace(
            link,
            latency=msgspec.structs.replace(link.latency, source=kept),
            bandwidth=msgspec.structs.replace(link.bandwidth, source=kept),
        )
        return msgspec.structs.replace(cluster, link=(link,))
    wire = max(1e-6, gloo.push - gloo.way)
    link = msgspec.structs.replace(
        link,
        latency=measured(gloo.way / 2, "half of a gloo message's way on loopback, counted at both ends"),
        bandwidth=measured(_SIZE / wire, "gloo messages of 16 MB on loopback, between two threads"),
    )
    # an all-reduce of two ranks: two hops, the array once over the wire, half of it added
    start = max(0.0, gloo.small_reduce - 2 * gloo.way)
    adding = max(1e-6, gloo.large_reduce - gloo.small_reduce - wire)
    return msgspec.structs.replace(
        cluster,
        link=(link,),
        collective_start=measured(start, "a gloo all-reduce of 8 bytes between two ranks, less its two hops"),
        reduction=measured(
            _SIZE / 2 / adding, "a gloo all-reduce of 16 MB between two ranks, less its bytes on the wire"
        ),
    )


# ---- work, as amounts a second ---------------------------------------------------------------------------------------


def _together(count: int, work: Callable[[threading.Barrier], float]) -> float:
    """The mean rate of `count` threads that do the work at once."""
    barrier = threading.Barrier(count)

    def one(_: int) -> float:
        torch.set_num_threads(1)  # of this Python thread: OpenMP keeps the number for each
        return work(barrier)

    # also for one: the caller's own number of threads stays as it is
    with ThreadPoolExecutor(count) as pool:
        return sum(pool.map(one, range(count))) / count


def _rate(call: Callable[[], object], amount: float, barrier: threading.Barrier, seconds: float = 0.03) -> float:
    """The best of four spells, so that other work on the machine does not count."""
    call()
    best = 0.0
    for _ in range(4):
        barrier.wait()
        start = time.perf_counter()
        done = 0
        while (passed := time.perf_counter() - start) < seconds:
            call()
            done += 1
        best = max(best, done * amount / passed)
    return best


def _product(barrier: threading.Barrier) -> float:
    size = 512
    a, b, out = torch.rand(size, size), torch.rand(size, size), torch.empty(size, size)
    return _rate(lambda: torch.mm(a, b, out=out), 2.0 * size**3, barrier)


def _copy(barrier: threading.Barrier) -> float:
    source, target = torch.rand(1 << 24), torch.empty(1 << 24)
    return _rate(lambda: target.copy_(source), 2.0 * source.nbytes, barrier)


def _add(barrier: threading.Barrier) -> float:
    a, b, out = torch.rand(1 << 18), torch.rand(1 << 18), torch.empty(1 << 18)
    return _rate(lambda: torch.add(a, b, out=out), 3.0 * a.nbytes, barrier)


def _gelu(barrier: threading.Barrier) -> float:
    a = torch.rand(1 << 18)
    return _rate(lambda: torch.nn.functional.gelu(a), a.numel(), barrier)


def _cache() -> int:
    """Bytes of the last-level cache, or 0 where the system does not say (it does under Linux)."""
    sizes = [0]
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text(encoding="ascii").strip()
        if text.endswith("K") and text[:-1].isdigit():
            sizes.append(int(text[:-1]) << 10)
    return max(sizes)


def _dispatch(barrier: threading.Barrier) -> float:
    tiny = torch.rand(8)
    return _rate(lambda: tiny + tiny, 1.0, barrier, seconds=0.01)


# ---- the link --------------------------------------------------------------------------------------------------------

_SIZE = 16 << 20  # of a large message


@dataclass(frozen=True, slots=True)
class _Gloo:
    """Seconds: of a small message one way, of a large one, of a small and of a large all-reduce."""

    way: float
    push: float
    small_reduce: float
    large_reduce: float


def _gloo() -> _Gloo:
    bindings: Any = dist  # those of process groups and stores are not typed
    store = bindings.HashStore()

    def side(rank: int) -> _Gloo:
        torch.set_num_threads(1)
        gloo = bindings.ProcessGroupGloo
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname="127.0.0.1")]
        options._timeout = timedelta(seconds=20)
        link = gloo(store, rank, 2, options)
        small, large = torch.zeros(2), torch.zeros(_SIZE // 4)

        def ping() -> None:
            for turn in (0, 1):
                act = link.send if turn == rank else link.recv
                act([small], 1 - rank, turn).wait()

        def push() -> None:
            act = link.send if rank == 0 else link.recv
            act([large], 1 - rank, 2).wait()

        def reduce(tensor: torch.Tensor) -> None:
            link.allreduce([tensor]).wait()

        return _Gloo(
            _each(ping, 20) / 2, _each(push, 1), _each(lambda: reduce(small), 10), _each(lambda: reduce(large), 1)
        )

    with ThreadPoolExecutor(2) as pool:
        _, receiver = pool.map(side, range(2))
    return receiver


def _each(call: Callable[[], None], times: int, batches: int = 7) -> float:
    """Seconds of one call: the best of some batches, so that other work on the machine does not count."""
    call()
    seconds: list[float] = []
    for _ in range(batches):
        start = time.perf_counter()
        for _ in range(times):
            call()
        seconds.append((time.perf_counter() - start) / times)
    return min(seconds)
