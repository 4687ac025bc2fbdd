"""Measuring what messages cost on the ranks at hand, for the choice between plans and between ways to run a step.

    executor = Executor(timing=calibrate())                              # messages of the backend, or its groups
    executor = Executor(timing=calibrate(shared=maker), shared=maker)    # memory that the ranks of one host share

    sennit.calibrate_redistribution()                                    # for `sennit.redistribute` and the other one-line uses

All ranks of the default process group call it together. Every rank exchanges messages with all others at once, as
redistributions do; small ones give the seconds per message, large ones the seconds per byte, strided copies the seconds
per byte copied; of shared memory, where all time is copying, they give the seconds per run of bytes. Where messages go
through the backend, each kind of collective is measured too, as messages and through the default group: `Executor`
takes the cheaper way of each step. Each figure is the median of a few rounds on the slowest rank, so all ranks end with
the same figures and make the same choices.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from sennit.ir.layout import Layout
from sennit.ir.mesh import Mesh
from sennit.reshard.execute_torch import EXECUTORS, Executor, current_executor
from sennit.reshard.groups_torch import Transport, received_by
from sennit.reshard.lower_torch import Message, Move
from sennit.reshard.planner import Mode, plan
from sennit.reshard.redistribution import StepKind
from sennit.reshard.selection_torch import Selection, combine
from sennit.reshard.shared import SharedMaker
from sennit.reshard.shared_torch import SharedWire
from sennit.reshard.timing import CollectiveCost, LinkCost, SharedCost
from sennit.reshard.wire_torch import Wire, traffic_of

__all__ = ["calibrate", "calibrate_redistribution"]

_SMALL, _LARGE = 16, 1 << 18  # elements of float32: 64 bytes, 1 MiB; of a message
_STAGING = 8 << 20

# source and target on one axis "x" of n ranks; a dim is n times a length
_COLLECTIVES = {
    StepKind.ALL_GATHER: ("[{long}{{x}}]", "[{long}]"),
    StepKind.ALL_TO_ALL: ("[{long}{{x}},{ranks}]", "[{long},{ranks}{{x}}]"),
    StepKind.REDUCE_SCATTER: ("[{long}]{{sum:x}}", "[{long}{{x}}]"),
    StepKind.ALL_REDUCE: ("[{long}]{{sum:x}}", "[{long}]"),
}


def calibrate(
    *,
    rounds: int = 7,
    timeout: float = 120.0,
    device: torch.device | str = "cpu",
    shared: SharedMaker | None = None,
    large: int = _LARGE,
) -> LinkCost | SharedCost:
    """The costs between the ranks of the default process group, the same figures on every rank.

    With `shared`, those of shared memory where all ranks can have it. A large message has `large` elements of 4 bytes.
    """
    rank, count = dist.get_rank(), dist.get_world_size()
    if count == 1:
        return LinkCost()
    each = 4 * large * (count - 1)
    if shared is not None and torch.device(device).type == "cpu":
        memory = SharedWire(rank, partial(shared, rank, count, _STAGING), timeout)
        if memory.reaches(tuple(range(count)), Wire(timeout)):
            little, much = (_exchange_seconds(memory, size, rounds, device) for size in (_SMALL, large))
            gamma = max(much - little, 1e-9) / (2 * each)  # into staging, and out of it
            return SharedCost(alpha=little / (count - 1), gamma=gamma, delta=_run_seconds(rounds, large))
    wire = Wire(timeout)
    little, much = (_exchange_seconds(wire, size, rounds, device) for size in (_SMALL, large))
    piece = torch.zeros(large, device=device)
    copying = _median(rounds, lambda: piece.view(512, -1).t().contiguous(), device)
    collectives: tuple[CollectiveCost, ...] = ()
    if torch.device(device).type == "cpu":
        collectives = tuple(_collective_cost(kind, rounds, timeout, large) for kind in _COLLECTIVES)
    return LinkCost(
        alpha=little / (count - 1),
        beta=max(much - little, 1e-9) / each,
        gamma=copying / (4 * large),
        collectives=collectives,
    )


def calibrate_redistribution(*, rounds: int = 7, large: int = _LARGE) -> LinkCost | SharedCost:
    """Measure what moving data costs between these ranks, once for each process group, and let `sennit.redistribute`,
    `serve_dtensor`, `stream_weights` and `load_checkpoint` choose their plans by it. All ranks call it together; it
    takes some tenths of a second. Without it plans are chosen by round figures.
    """
    executor = current_executor()
    found = calibrate(rounds=rounds, shared=EXECUTORS.shared, large=large)
    executor.use(found)
    return found


def _run_seconds(rounds: int, elements: int) -> float:
    """What each run of four elements takes, beyond the time of its bytes."""
    piece, output = torch.zeros(2 * elements), torch.empty(elements)
    in_runs, dense = piece.view(-1, 8)[:, :4], piece[:elements]
    strided = _median(rounds, lambda: _copied(output.view(-1, 4), in_runs), "cpu")
    return max(strided - _median(rounds, lambda: output.copy_(dense), "cpu"), 0.0) / (elements // 4)


def _copied(place: Tensor, values: Tensor) -> Tensor:
    combine(place, values, None)
    return place


def _exchange_seconds(wire: Wire | SharedWire, size: int, rounds: int, device: torch.device | str) -> float:
    """Every rank sends a part of its own to each other."""
    rank, count = dist.get_rank(), dist.get_world_size()
    others = [other for other in range(count) if other != rank]
    sends = tuple(
        Message(o, Selection.flat(size * count, o * size, (o + 1) * size), (0, 0, (o - rank) % count, rank))
        for o in others
    )
    receives = tuple(
        Message(o, Selection.flat(size * count, o * size, (o + 1) * size), (0, 0, (rank - o) % count, o))
        for o in others
    )
    by_key = sorted(sends, key=lambda m: m.key), sorted(receives, key=lambda m: m.key)
    move = Move("calibration", (size * count,), (size * count,), (), tuple(by_key[0]), tuple(by_key[1]))
    piece = torch.zeros(size * count, device=device)

    def exchange() -> Tensor:
        if isinstance(wire, SharedWire):
            return _finished(wire.run(move, piece, wire.open(traffic_of([move]), _STAGING)))
        return _finished(wire.run(move, piece, wire.open(traffic_of([move]))))

    return _median(rounds, exchange, device)


def _finished(running: Generator[None, None, Tensor]) -> Tensor:
    while True:
        try:
            next(running)
        except StopIteration as stop:
            result: Tensor = stop.value
            return result


def _collective_cost(kind: StepKind, rounds: int, timeout: float, elements: int) -> CollectiveCost:
    count = dist.get_world_size()
    constants: list[float] = []
    for transport in (Transport.GROUPS, Transport.POINT_TO_POINT):
        executor = Executor(timeout=timeout, transport=transport, check=False)
        (short, few), (long, many) = (_collective_seconds(executor, kind, n, rounds) for n in (_SMALL, elements))
        constants += [short / (count - 1), max(long - short, 1e-9) / (many - few)]
    return CollectiveCost(kind, *constants)


def _collective_seconds(executor: Executor, kind: StepKind, size: int, rounds: int) -> tuple[float, float]:
    """The seconds of one collective over all ranks, and the bytes that each receives."""
    count = dist.get_world_size()
    mesh = Mesh.make({"x": count})
    before, after = (Layout.parse(text.format(long=size * count, ranks=count), mesh) for text in _COLLECTIVES[kind])
    redistribution = plan(before, after, mode=Mode.COLLECTIVE)
    assert [step.kind for step in redistribution.steps] == [kind]
    piece = torch.zeros(before.local_shape())
    received = received_by(kind, count, before.local_elements(), after.local_elements())
    return _median(rounds, lambda: executor.run(redistribution, piece), "cpu"), 4 * received


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
