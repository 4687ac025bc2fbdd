"""Measuring a training step on the machine at hand: what each kernel takes, and what the process group's collectives take.

**Kernels.** A step is run kernel by kernel, on real values, `rounds` times; a kernel's time is the least of its rounds. On a CPU that is the thread's own time,
on a GPU the time until the device is done. `MeasuredCost` then answers for groups of operators: a group that runs its operators as they are takes the sum of them; a group that is
compiled is asked of an estimator.

**Collectives.** All-reduces of several sizes run on the group itself, one at a time and queued behind each other. The least squares line through the slowest ranks' times gives
latency and seconds per byte. Then several queue while this thread computes products: what a message takes longer there, and how much slower products are, is what the network's threads and ours
take from each other (`Sharing`). On one core a message waits for the scheduler at each of its stages, so that small ones cost some milliseconds each, which nothing shows when the core is idle.
All ranks end with the same figures.
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
_BUSY = {1 << 19: 8, 1 << 21: 4}  # bytes of a message -> how many queue, beside computing


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
    group: dist.ProcessGroup, *, rounds: int = 5, sizes: Sequence[int] = _SIZES, device: torch.device | str = "cpu"
) -> Channel:
    """What an all-reduce of the group takes, alone, behind another, and beside computing."""
    if group.size() == 1:
        return Channel(0.0, 0.0)
    alone = [slowest(group, _alone(group, size, rounds, device), device) for size in sizes]
    slope, latency = np.polyfit(np.array(sizes, dtype=float), np.array(alone), 1)
    latency, per_byte = max(float(latency), alone[0] / 2), max(float(slope), 1e-12)
    if torch.device(device).type != "cpu":  # collectives of a GPU do not share its cores with ours
        several, _ = _queued(group, sizes[0], rounds, 8, None)
        return Channel(
            latency, per_byte, sharing=Sharing(queued=max(0.0, slowest(group, several, device) / 8 - alone[0]))
        )
    return Channel(latency, per_byte, sharing=_sharing(group, rounds, latency, per_byte))


def _sharing(group: dist.ProcessGroup, rounds: int, latency: float, per_byte: float) -> Sharing:
    """Queued messages of two sizes beside products: a line a + b x for each message. The clock carries (latency + queued + per_byte x) / channel_rate."""
    left, right = torch.randn(256, 256), torch.randn(256, 256)
    busy = {size: _queued(group, size, rounds, count, (left, right)) for size, count in _BUSY.items()}
    (small, first), (large, second) = [
        (size, slowest(group, seconds, "cpu") / _BUSY[size]) for size, (seconds, _) in busy.items()
    ]
    slope = max((second - first) / (large - small), per_byte)
    rate = per_byte / slope
    queued = max(0.0, (first - slope * small) * rate - latency)
    compute = -slowest(group, -min(rate_of for _, rate_of in busy.values()), "cpu")
    return Sharing(min(1.0, max(compute, 0.25)), rate, queued)


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
    group: dist.ProcessGroup, size: int, rounds: int, count: int, factors: tuple[Tensor, Tensor] | None
) -> tuple[float, float]:
    """Seconds of `count` all-reduces behind each other, and the rate of computing beside them, if there are factors of a product."""
    buffers = [torch.zeros(size // 4) for _ in range(count)]
    spent: list[float] = []
    rates: list[float] = []
    unit = _product_seconds(factors) if factors is not None else 0.0
    for _ in range(rounds + 1):
        dist.barrier(group)
        start = time.perf_counter()
        works = [dist.all_reduce(buffer, group=group, async_op=True) for buffer in buffers]
        done = 0
        assert works[-1] is not None
        while factors is not None and not works[-1].is_completed():
            torch.mm(*factors)
            done += 1
        for work in works:
            assert work is not None
            work.wait()
        spent.append(time.perf_counter() - start)
        rates.append(done * unit / spent[-1])
    return float(np.median(spent[1:])), float(np.median(rates[1:]))


def _product_seconds(factors: tuple[Tensor, Tensor]) -> float:
    spent: list[float] = []
    for _ in range(30):
        start = time.perf_counter()
        torch.mm(*factors)
        spent.append(time.perf_counter() - start)
    return float(np.median(spent))


def slowest(group: dist.ProcessGroup, seconds: float, device: torch.device | str) -> float:
    """The greatest of all ranks' figures."""
    found = torch.tensor([seconds], dtype=torch.float64, device=device)
    dist.all_reduce(found, dist.ReduceOp.MAX, group=group)
    return float(found)
