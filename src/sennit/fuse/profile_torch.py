"""Measuring a training step on the machine at hand: what each kernel takes, and what the process group's collectives
take.

**Kernels.** A step is run kernel by kernel, on real values, `rounds` times; a kernel's time is the least of its rounds.
On a CPU that is the thread's own time, on a GPU the time until the device is done. `MeasuredCost` then answers for
groups of operators: a group that runs its operators as they are takes the sum of them; a group that is compiled is
asked of an estimator.

**Collectives.** All-reduces run on the group itself: a small one alone gives the latency of an idle channel. Then one
message, the same bytes in many messages behind each other, and twice the bytes in two:

    what one more message costs = (many - one) / (count - 1)        seconds per byte = (two - one - that cost) / bytes

Differences, because a link that is limited by a token bucket lets the first bytes of a stream pass at once. No message
has segments of 64 KiB: gloo cuts an all-reduce of p ranks in 2 p segments or more, and one of 64 to 65 KiB is a packet
as large as they get and a few bytes, which Linux holds back while packets before them are queued (`tcp_autocorking`).
With 4 ranks messages of 512 to 520 KiB then take up to twice as long as those around them, in most runs; with that
setting off none do (`benchmarks/fuse/message_sizes.py`). The same beside this thread computing products (`Sharing`)
says what a message takes longer there, and how many products it got done, each of them worth the time that it takes
alone, how much slower computing is there. The thread's processor time would not say it: what the kernel does for the
network in its name is counted in it, and so is waiting for memory that both use. A message also costs computing
something whatever its bytes: the call, and threads of the network that wake up on this core. Small messages are sent
off between products, a turn with them and a turn without:

    seconds of computing for a message = (turn with messages - turn without) / messages

All ranks end with the same figures.

**Blocks.** A product that is made in blocks, of rows or of columns, takes longer than in one piece. Each that may be is
timed both ways (`measure_blocks`), once the operators' own times are known.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from sennit.capture.element_types import torch_dtype
from sennit.fuse.clock import Sharing
from sennit.fuse.kernel_cost import Estimate
from sennit.fuse.kernel_torch import call_of, results_of
from sennit.fuse.model import Channel
from sennit.fuse.moments_torch import wall
from sennit.ir.graph import Graph, Op, Role
from sennit.ir.strategy_check import Kernel

__all__ = [
    "MeasuredCost",
    "Products",
    "measure_blocks",
    "measure_channel",
    "measure_operators",
    "now",
    "queued",
    "slowest",
]

_SMALL = 1 << 12
_BLOCKS, _BLOCK_ROUNDS = 8, 3
_ONE, _MANY = 9 << 16, 14  # bytes of a message, with segments that are not near 64 KiB: see above
_LARGE = _ONE * _MANY
_APART = 1e-3  # seconds of products between two small messages: the one before has arrived


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
    least: dict[str, float] = {}

    def timed(op: Op, call: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        start = now(device)
        result = call(*args, **kwargs)
        least[op.name] = min(least.get(op.name, float("inf")), now(device) - start)
        return result

    device = _device_of(model, sample)
    for _ in range(rounds + 1):
        _run_operators(graph, model, sample, timed)
    return MeasuredCost(least)


def measure_blocks(
    graph: Graph, model: nn.Module, sample: Mapping[str, Tensor], by_rows: Collection[str], by_columns: Collection[str]
) -> dict[str, float]:
    """Of products that may be made in blocks, of rows or of columns of their result: the seconds that each block but
    the first costs: a library that packs an operand for each call does so for each block. Those whose blocks have other
    bits than the whole are not among them: a step makes them in one piece (`products_torch.py`).
    """
    found: dict[str, float] = {}
    if not by_rows and not by_columns:
        return found

    def timed(op: Op, call: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        result = call(*args, **kwargs)
        if op.name in by_rows or op.name in by_columns:
            left, right = args[-2:]  # a bias may stand before them
            if (seconds := _block_seconds(left, right, 0 if op.name in by_rows else 1)) is not None:
                found[op.name] = seconds
        return result

    _run_operators(graph, model, sample, timed)
    return found


def _block_seconds(left: Tensor, right: Tensor, dim: int) -> float | None:
    """`dim` is that of the result which is cut. None where the bits differ."""
    whole, in_parts = (left.new_empty(left.shape[0], right.shape[1]) for _ in range(2))
    count = min(_BLOCKS, whole.shape[dim])
    if count < 2:
        return 0.0
    parts, outs = (left, right)[dim].tensor_split(count, dim), in_parts.tensor_split(count, dim)
    spent: list[tuple[float, float]] = []
    for _ in range(_BLOCK_ROUNDS + 1):
        start = time.thread_time()
        torch.mm(left, right, out=whole)
        between = time.thread_time()
        for part, out in zip(parts, outs, strict=True):
            torch.mm(*((part, right) if dim == 0 else (left, part)), out=out)
        spent.append((between - start, time.thread_time() - between))
    if not torch.equal(whole, in_parts):
        return None
    alone, in_blocks = (float(np.median(column)) for column in zip(*spent[1:], strict=True))
    return max(0.0, (in_blocks - alone) / (count - 1))


Look = Callable[
    [Op, Callable[..., Any], Sequence[Any], Mapping[str, Any]], Any
]  # makes the call, and returns its result


def _device_of(model: nn.Module, sample: Mapping[str, Tensor]) -> torch.device:
    state = itertools.chain(model.parameters(), model.buffers(), sample.values())
    return next((tensor.device for tensor in state), torch.device("cpu"))


def _run_operators(graph: Graph, model: nn.Module, sample: Mapping[str, Tensor], look: Look) -> None:
    """The graph operator by operator, on the model's own parameters and this sample."""
    state, device = (
        {**dict(model.named_parameters()), **dict(model.named_buffers()), **sample},
        _device_of(model, sample),
    )
    last = {name: place for place, op in enumerate(graph.ops) for name in (*op.reads, *(v.name for v in op.results))}
    values: dict[str, Tensor] = {}
    for item in graph.inputs:
        if item.role is Role.TANGENT:
            values[item.value.name] = torch.ones((), dtype=torch_dtype(item.value.type.dtype), device=device)
        else:
            values[item.value.name] = state[item.path].detach()
    for place, op in enumerate(graph.ops):
        values.update(results_of(op, look(op, *call_of(op, values, device))))
        for done in {*op.reads, *(value.name for value in op.results)}:
            if last[done] == place:
                del values[done]


def now(device: torch.device) -> float:
    """A clock of what this process computes on the device."""
    # on a CPU, what else runs on the machine does not count
    return wall(device) if device.type == "cuda" else time.thread_time()


def measure_channel(
    group: dist.ProcessGroup, *, rounds: int = 6, device: torch.device | str = "cpu", beside_computing: bool = True
) -> Channel:
    """What an all-reduce of the group takes: alone, behind another, and, on a CPU, beside computing."""
    if group.size() == 1:
        return Channel(0.0, 0.0)
    latency = slowest(group, _alone(group, _SMALL, rounds, device), device)
    each, per_byte, _ = _queues(group, rounds, None, device)
    channel = Channel(latency, per_byte, sharing=Sharing(queued=each - latency))
    # collectives of a GPU do not share its cores with ours
    if torch.device(device).type != "cpu" or not beside_computing:
        return channel
    products = Products.of(rounds)
    each, slope, share = _queues(group, rounds, products, device)
    rate = min(1.0, per_byte / slope)
    issued = slowest(group, _issued(group, rounds, products), device)
    # the clock carries (latency + queued + per_byte x) / channel_rate
    return replace(channel, sharing=Sharing(min(1.0, max(share, 0.25)), rate, each * rate - latency, issued))


@dataclass(frozen=True, slots=True)
class Products:
    """What this thread computes beside messages, and the seconds that each takes where there are none.

    A layer's product: its weight is as large as those of a small model, and does not stay in a core's own cache.
    """

    left: Tensor
    right: Tensor
    seconds: float

    @classmethod
    def of(cls, rounds: int) -> Products:
        left, right = torch.randn(64, 512), torch.randn(512, 512)
        spent: list[float] = []
        for _ in range(4 * rounds + 1):
            start = time.thread_time()
            torch.mm(left, right)
            spent.append(time.thread_time() - start)
        return cls(left, right, float(np.median(spent[1:])))

    def compute(self) -> None:
        torch.mm(self.left, self.right)


def _queues(
    group: dist.ProcessGroup, rounds: int, beside: Products | None, device: torch.device | str
) -> tuple[float, float, float]:
    """Of messages that queue: what each of them costs, seconds per byte, and how fast this thread computes meanwhile: 1
    as alone.
    """
    wanted = {"one": (_LARGE, 1), "many": (_ONE, _MANY), "two": (_LARGE, 2)}
    found = {key: queued(group, size, rounds, count, beside, device) for key, (size, count) in wanted.items()}
    seconds = {key: slowest(group, spent, device) for key, (spent, _) in found.items()}
    each = max(0.0, (seconds["many"] - seconds["one"]) / (_MANY - 1))
    per_byte = max((seconds["two"] - seconds["one"] - each) / _LARGE, seconds["one"] / _LARGE / 2)
    return each, per_byte, -slowest(group, -float(np.median([rate for _, rate in found.values()])), device)


def _alone(group: dist.ProcessGroup, size: int, rounds: int, device: torch.device | str) -> float:
    buffer = torch.zeros(size // 4, device=device)
    spent: list[float] = []
    for _ in range(rounds + 1):
        dist.barrier(group)
        start = wall(buffer.device)
        dist.all_reduce(buffer, group=group)
        spent.append(wall(buffer.device) - start)
    return float(np.median(spent[1:]))


def _issued(group: dist.ProcessGroup, rounds: int, products: Products) -> float:
    """Seconds that one small message takes from a thread that computes: the median over rounds of a turn without
    messages and one with them, which follow each other.
    """
    buffers = [torch.zeros(_SMALL // 4) for _ in range(_MANY)]
    apart = math.ceil(_APART / products.seconds)
    found: list[float] = []
    for _ in range(rounds + 1):
        turns: list[float] = []
        for sent in (False, True):
            dist.barrier(group)
            works: list[dist.Work | None] = []
            start = time.perf_counter()
            for buffer in buffers:
                if sent:
                    works.append(dist.all_reduce(buffer, group=group, async_op=True))
                for _ in range(apart):
                    products.compute()
            turns.append(time.perf_counter() - start)
            for work in works:
                assert work is not None
                work.wait()
        found.append((turns[1] - turns[0]) / _MANY)
    return max(0.0, float(np.median(found[1:])))


def queued(
    group: dist.ProcessGroup,
    size: int,
    rounds: int,
    count: int,
    beside: Products | None,
    device: torch.device | str = "cpu",
) -> tuple[float, float]:
    """Seconds of `count` all-reduces behind each other; and, if there is something to compute beside them, how fast
    that went: 1 as alone.
    """
    buffers = [torch.zeros(size // 4, device=device) for _ in range(count)]
    spent: list[float] = []
    rates: list[float] = []
    for _ in range(rounds + 1):
        dist.barrier(group)
        start = wall(buffers[0].device)
        works = [dist.all_reduce(buffer, group=group, async_op=True) for buffer in buffers]
        assert works[-1] is not None
        computed = 0
        if beside is not None:
            while not works[-1].is_completed():
                beside.compute()
                computed += 1
            rates.append(computed * beside.seconds / (time.perf_counter() - start))
        for work in works:
            assert work is not None
            work.wait()
        spent.append(wall(buffers[0].device) - start)
    return float(np.median(spent[1:])), float(np.median(rates[1:])) if rates else 1.0


def slowest(group: dist.ProcessGroup, seconds: float, device: torch.device | str) -> float:
    """The greatest of all ranks' figures."""
    found = torch.tensor([seconds], dtype=torch.float64, device=device)
    dist.all_reduce(found, dist.ReduceOp.MAX, group=group)
    return float(found)
