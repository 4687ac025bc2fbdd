"""Times messages between the ranks of a running process group: the measuring half of `sennit probe`.

Every rank calls `probe_ranks`; rank 0 gets the `Probe`. With gloo, messages are tensors of the CPU; with NCCL, of each
rank's GPU, and the device is synchronised around every time that is taken. A pair plays ping-pong while the other ranks
wait at a barrier, so that nothing disturbs it; then all disjoint pairs of a class send at once.

At most `most_pairs` pairs of a class are measured, spread over the ranks: the time grows with that and not with the
cluster. Torch is imported here, so this file is imported by name and not by `sennit.cluster`.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist

from sennit.cluster.probe import PairClass, Probe, Times, estimate, estimate_burst
from sennit.errors import ClusterError

__all__ = ["joined_ranks", "probe_ranks"]

Pair = tuple[int, int]
BETWEEN = "between nodes"


@contextmanager
def joined_ranks(backend: str | None) -> Iterator[None]:
    """The process group that torchrun describes, joined where it is not yet, and left again."""
    if dist.is_initialized():
        yield
        return
    if not dist.is_torchelastic_launched():
        raise ClusterError(
            "a probe needs ranks, and none were started here",
            fix="torchrun --nproc-per-node 2 --no-python sennit probe, or --topology FILE to read nvidia-smi's matrix",
        )
    chosen = backend or ("nccl" if torch.cuda.is_available() else "gloo")
    if chosen == "nccl":
        if not torch.cuda.is_available():
            raise ClusterError(
                "NCCL joins GPUs, and torch finds none on this machine",
                fix="probe with --backend gloo, or --topology FILE to read the matrix of nvidia-smi",
            )
        torch.cuda.set_device(dist.get_node_local_rank(fallback_rank=0) % torch.cuda.device_count())
    dist.init_process_group(chosen)
    try:
        yield
    finally:
        dist.destroy_process_group()


def probe_ranks(
    sizes: Sequence[int] | None = None,
    repeats: int = 15,
    most_pairs: int = 6,
    progress: Callable[[str], None] | None = None,
    host: str | None = None,
) -> Probe | None:
    """Measure on all ranks; the result on rank 0, None on the others. `host` names this rank's, where the machine's own
    name does not tell hosts apart."""
    rank, world = dist.get_rank(), dist.get_world_size()
    if world < 2:
        raise ClusterError("one rank has no links to probe", fix="start at least two, as torchrun --nproc-per-node 2")
    say = progress if progress is not None and rank == 0 else _quiet
    backend = dist.get_backend()
    device = torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("cpu")
    largest = 256 << 20 if backend == "nccl" else 16 << 20
    wanted = tuple(sizes) if sizes is not None else (8, 64 << 10, largest // 8, largest)
    hosts = _hosts(world, host or socket.gethostname())
    ranks = _Ranks(rank, device, wanted, repeats, torch.zeros(wanted[-1], dtype=torch.uint8, device=device))
    say("pairs within a node")
    inside = _class(ranks, "within a node", _pairs_inside(hosts), most_pairs)
    say("pairs between nodes")
    between = _class(ranks, BETWEEN, _pairs_between(hosts), most_pairs)
    say("all-reduces of all ranks")
    small, _ = ranks.all_reduce(8)
    timed = {size: ranks.all_reduce(size) for size in _all_reduce_sizes(wanted)}
    large, busy = timed[wanted[-1]]
    opposite = None
    if backend == "gloo":
        say("messages in opposite directions")
        opposite = ranks.opposite((_pairs_between(hosts) or _pairs_inside(hosts))[0], wanted[-2])
    if rank:
        return None
    kind = torch.cuda.get_device_name() if device.type == "cuda" else "CPU ranks"
    return Probe(
        len(hosts),
        len(hosts[0]),
        backend,
        kind,
        inside,
        between,
        small,
        large,
        wanted[-1],
        tuple((size, seconds) for size, (seconds, _) in timed.items()),
        busy if backend == "gloo" else None,
        opposite,
    )


def _all_reduce_sizes(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Those of the messages, but for the smallest, and one more among them."""
    return tuple(sorted({*sizes[1:], min(4 * sizes[1], sizes[-1])}))


def _quiet(message: str) -> None:
    return None


def _hosts(world: int, host: str) -> list[list[int]]:
    """Ranks by host, in order; hosts with unequal numbers of ranks are refused."""
    names: list[str] = [""] * world
    dist.all_gather_object(names, host)
    hosts: dict[str, list[int]] = {}
    for rank, name in enumerate(names):
        hosts.setdefault(name, []).append(rank)
    sizes = {name: len(ranks) for name, ranks in hosts.items()}
    if len(set(sizes.values())) > 1:
        raise ClusterError(
            f"hosts have unequal numbers of ranks: {sizes}", fix="start the same number on each, one for each device"
        )
    return list(hosts.values())


def _pairs_inside(hosts: list[list[int]]) -> list[Pair]:
    """Neighbours first, then the farthest: they may be on different sockets."""
    near = [(host[i], host[i + 1]) for host in hosts for i in range(0, len(host) - 1, 2)]
    far = [(host[0], host[-1]) for host in hosts if len(host) > 2]
    return list(dict.fromkeys([*near, *far]))


def _pairs_between(hosts: list[list[int]]) -> list[Pair]:
    near = [
        (a, b) for left, right in zip(hosts[::2], hosts[1::2], strict=False) for a, b in zip(left, right, strict=True)
    ]
    far = [(hosts[0][0], hosts[-1][0])] if len(hosts) > 2 else []
    return list(dict.fromkeys([*near, *far]))


def _class(ranks: _Ranks, name: str, pairs: list[Pair], most: int) -> PairClass | None:
    if not pairs:
        return None
    step = max(1, len(pairs) // most)
    chosen = pairs[::step][:most]
    seconds: list[list[float]] = [[] for _ in ranks.sizes]
    for pair in chosen:
        for position, row in enumerate(ranks.ping_pong(pair)):
            seconds[position] += row
    times = Times(ranks.sizes, tuple(tuple(row) for row in seconds))
    latency, bandwidth = estimate(times)
    burst = estimate_burst(times) if name == BETWEEN else None
    disjoint: list[Pair] = []
    for pair in pairs:
        if not any(set(pair) & set(other) for other in disjoint):
            disjoint.append(pair)
    alone = sorted(seconds[-1])[len(seconds[-1]) // 2]
    together = ranks.at_once(disjoint) if len(disjoint) > 1 else alone
    ways = len(disjoint) * alone / together
    return PairClass(name, len(chosen), latency, bandwidth, ways, len(disjoint), burst)


class _Ranks:
    """One rank's part in the measurements; every method is called on all ranks."""

    def __init__(
        self, rank: int, device: torch.device, sizes: tuple[int, ...], repeats: int, buffer: torch.Tensor
    ) -> None:
        self.rank, self.device, self.sizes, self.repeats, self.buffer = rank, device, sizes, repeats, buffer

    def ping_pong(self, pair: Pair) -> list[list[float]]:
        """By size, the seconds of a message one way; the same on all ranks.

        The smallest is timed beside each of the others: work of others that comes and goes then meets a part of its
        times only.
        """
        rows: list[list[float]] = [[] for _ in self.sizes]
        for number, size in enumerate(self.sizes):
            dist.barrier()
            if self.rank in pair:
                rows[0] += self._rounds(pair, self.sizes[0])
                rows[number] += self._rounds(pair, size) if number else []
        dist.broadcast_object_list(rows, src=pair[0])
        return rows

    def _rounds(self, pair: Pair, size: int) -> list[float]:
        for _ in range(2):
            self._round(pair, size)
        return [self._timed(lambda: self._round(pair, size)) / 2 for _ in range(self.repeats)]

    def _round(self, pair: Pair, size: int) -> None:
        message = self.buffer[:size]
        first, second = pair
        if self.rank == first:
            dist.send(message, second)
            dist.recv(message, second)
        else:
            dist.recv(message, first)
            dist.send(message, first)

    def at_once(self, pairs: list[Pair]) -> float:
        """Seconds of the largest message one way while all pairs send: the median over repetitions of the slowest pair."""
        mine = next((pair for pair in pairs if self.rank in pair), None)
        taken: list[float] = []
        for _ in range(max(3, self.repeats // 3)):
            dist.barrier()
            seconds = 0.0
            if mine is not None:
                seconds = self._timed(lambda: self._round(mine, self.sizes[-1])) / 2
            slowest = torch.tensor([seconds], device=self.device, dtype=torch.float32)
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
            taken.append(float(slowest.item()))
        return sorted(taken)[len(taken) // 2]

    def all_reduce(self, size: int) -> tuple[float, float]:
        """Seconds, the lower quartile (other work on the machine only adds), and the part of a core that was busy."""
        tensor = torch.zeros(max(1, size // 4), device=self.device)
        taken: list[float] = []
        cores = 0.0
        for turn in range(max(3, self.repeats // 2) + 2):
            dist.barrier()
            processor = time.process_time()
            seconds = self._timed(lambda: dist.all_reduce(tensor))
            if turn >= 2:
                taken.append(seconds)
                cores += time.process_time() - processor
        return sorted(taken)[len(taken) // 4], cores / sum(taken)

    def opposite(self, pair: Pair, size: int) -> float:
        """A message from the first of the pair and, a quarter of its time later, one from the second: how many times as
        long as one alone they take together. The least of some (other work only adds), the same on all ranks.
        """
        there, back = self.buffer[:size], torch.zeros_like(self.buffer[:size])
        ratios: list[float] = []
        for _ in range(max(3, self.repeats // 3)):
            dist.barrier()
            if self.rank not in pair:
                continue
            alone = self._timed(lambda: self._round(pair, size)) / 2
            first, other = self.rank == pair[0], pair[1] if self.rank == pair[0] else pair[0]

            def both(first: bool = first, other: int = other, pause: float = alone / 4) -> None:
                early = dist.isend(there, other, tag=1) if first else dist.irecv(there, other, tag=1)
                time.sleep(pause)
                late = dist.irecv(back, other, tag=2) if first else dist.isend(back, other, tag=2)
                assert early is not None
                assert late is not None
                early.wait()
                late.wait()

            ratios.append(self._timed(both) / alone)
        shared: list[float] = [min(ratios)] if ratios else [0.0]
        dist.broadcast_object_list(shared, src=pair[0])
        return shared[0]

    def _timed(self, call: Callable[[], object]) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start
