"""Measuring a training step on the machine at hand: what each kernel takes, and what the process group's collectives take.

**Kernels.** A step is run kernel by kernel, on real values, `rounds` times; a kernel's time is the least of its rounds. On a CPU that is the thread's own time,
on a GPU the time until the device is done. `MeasuredCost` then answers for groups of operators: a group that runs its operators as they are takes the sum of them; a group that is
compiled is asked of an estimator.

**Collectives.** All-reduces of several sizes run on the group itself, one at a time and queued behind each other; the line through the slowest ranks' times, by relative error, gives
latency and seconds per byte. Then several queue while this thread computes products (`Sharing`): the line through those times says what a message takes longer there, and what this thread's processor time lacks to the
time on the wall is what the network's threads took of its core: nothing, where they have another. All ranks end with the same figures.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from sennit.fuse.clock import Sharing
from sennit.fuse.kernel_cost import Estimate
from sennit.fuse.kernel_torch import call_of, results_of
from sennit.fuse.model import Channel
from sennit.ir.graph import Graph, Role
from sennit.ir.strategy_check import Kernel

__all__ = ["MeasuredCost", "measure_channel", "measure_operators", "now", "slowest"]

_SIZES = (1 << 12, 1 << 16, 1 << 19, 1 << 21, 1 << 23)
_QUEUED = {1 << 19: 10, 1 << 21: 4, 1 << 23: 2}  # bytes of a message -> how many queue


@dataclass(frozen=True, slots=True)
class MeasuredCost:
    """Seconds of each operator by name; a group takes the sum: its operators run one after another as they are."""

    seconds: Mapping[str, float]
    known: dict[frozenset[str], float] = field(default_factory=dict)  # groups that were measured whole

    def estimate(self, kernel: Kernel, written: frozenset[str]) -> Estimate:
        names = frozenset(op.name for op in kernel.body)
        if names in self.known:
            return Estimate(self.known[names])
        return Estimate(sum(self.seconds[name] for name in names))


def measure_operators(graph: Graph, model: nn.Module, sample: Mapping[str, Tensor], rounds: int = 5) -> MeasuredCost:
    """Run the graph operator by operator on the model's own parameters and this sample."""
    state = {**dict(model.named_parameters()), **dict(model.named_buffers()), **sample}
    device = next((tensor.device for tensor in state.values()), torch.device("cpu"))
    last = {name: place for place, op in enumerate(graph.ops) for name in (*op.reads, *(v.name for v in op.results))}
    least: dict[str, float] = {}
    for _ in range(rounds + 1):
        values: dict[str, Tensor] = {}
        for item in graph.inputs:
            is_tangent = item.role is Role.TANGENT
            values[item.value.name] = torch.ones((), device=device) if is_tangent else state[item.path].detach()
        for place, op in enumerate(graph.ops):
            target, args, kwargs = call_of(op, values, device)
            start = now(device)
            result = target(*args, **kwargs)
            least[op.name] = min(least.get(op.name, float("inf")), now(device) - start)
            values.update(results_of(op, result))
            for done in {*op.reads, *(value.name for value in op.results)}:
                if last[done] == place:
                    del values[done]
    return MeasuredCost(least)


def now(device: torch.device) -> float:
    """A clock of what this process computes on the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        return time.perf_counter()
    return time.thread_time()  # what else runs on the machine does not count


def measure_channel(
    group: dist.ProcessGroup,
    *,
    rounds: int = 5,
    sizes: Sequence[int] = _SIZES,
    device: torch.device | str = "cpu",
    beside_computing: bool = True,
) -> Channel:
    """What an all-reduce of the group takes: alone, behind another, and, on a CPU, beside computing."""
    if group.size() == 1:
        return Channel(0.0, 0.0)
    alone = [slowest(group, _alone(group, size, rounds, device), device) for size in sizes]
    latency, per_byte = _line(sizes, alone)
    latency, per_byte = max(latency, alone[0] / 2), max(per_byte, 1e-12)
    if torch.device(device).type != "cpu":  # collectives of a GPU do not share its cores with ours
        several = slowest(group, _queued(group, sizes[0], rounds, 8, None, device)[0], device) / 8
        return Channel(latency, per_byte, sharing=Sharing(queued=max(-latency, several - alone[0])))
    return Channel(latency, per_byte, sharing=_sharing(group, rounds, latency, per_byte, beside=beside_computing))


def _line(sizes: Sequence[int], seconds: Sequence[float]) -> tuple[float, float]:
    """(at no bytes, per byte) of the line with the least squares of relative errors: a long message's noise is not a short one's latency."""
    slope, start = np.polyfit(np.array(sizes, dtype=float), np.array(seconds), 1, w=1.0 / np.array(seconds))
    return float(start), float(slope)


def _sharing(group: dist.ProcessGroup, rounds: int, latency: float, per_byte: float, *, beside: bool) -> Sharing:
    """Queued messages of several sizes: a line a + b x for each message. The clock carries (latency + queued + per_byte x) / channel_rate."""
    factors = (torch.randn(256, 256), torch.randn(256, 256)) if beside else None
    found = {size: _queued(group, size, rounds, count, factors) for size, count in _QUEUED.items()}
    each = [slowest(group, seconds, "cpu") / _QUEUED[size] for size, (seconds, _) in found.items()]
    start, slope = _line(list(_QUEUED), each)
    rate = min(1.0, per_byte / max(slope, 1e-12)) if beside else 1.0
    queued = max(-latency, start * rate - latency)
    compute = -slowest(group, -float(np.median([rate_of for _, rate_of in found.values()])), "cpu")
    return Sharing(min(1.0, max(compute, 0.25)) if beside else 1.0, rate, queued)


def _alone(group: dist.ProcessGroup, size: int, rounds: int, device: torch.device | str) -> float:
    buffer = torch.zeros(size // 4, device=device)
    spent: list[float] = []
    for _ in range(rounds + 1):
        dist.barrier(group)
        start = time.perf_counter()
        dist.all_reduce(buffer, group=group)
        spent.append(time.perf_counter() - start)
    return float(np.median(spent[1:]))


def _queued(
    group: dist.ProcessGroup,
    size: int,
    rounds: int,
    count: int,
    factors: tuple[Tensor, Tensor] | None,
    device: torch.device | str = "cpu",
) -> tuple[float, float]:
    """Seconds of `count` all-reduces behind each other; and, if there are factors of a product to compute beside them, the share of the time in which this thread had a core."""
    buffers = [torch.zeros(size // 4, device=device) for _ in range(count)]
    spent: list[float] = []
    shares: list[float] = []
    for _ in range(rounds + 1):
        dist.barrier(group)
        start, own = time.perf_counter(), time.thread_time()
        works = [dist.all_reduce(buffer, group=group, async_op=True) for buffer in buffers]
        assert works[-1] is not None
        while factors is not None and not works[-1].is_completed():
            torch.mm(*factors)
        shares.append((time.thread_time() - own) / (time.perf_counter() - start))
        for work in works:
            assert work is not None
            work.wait()
        spent.append(time.perf_counter() - start)
    return float(np.median(spent[1:])), float(np.median(shares[1:]))


def slowest(group: dist.ProcessGroup, seconds: float, device: torch.device | str) -> float:
    """The greatest of all ranks' figures."""
    found = torch.tensor([seconds], dtype=torch.float64, device=device)
    dist.all_reduce(found, dist.ReduceOp.MAX, group=group)
    return float(found)
