"""When a step is where: the time of each kernel as it runs in the step.

Operators are measured one by one, each with a result of its own (`profile_torch.py`). In the step they cost less or
more: sums go over an operand, products into their total, values are in the cache or are not. So a step without
communication is run whole, and notes the time where a parameter is first read and where a gradient is there. These are
the places that the clock asks for. What lies between two of them is a *stretch* of operators:

    |-- stretch --|-- stretch --|-- ... --|          seconds of an operator  =  alone * (seconds of its stretch / sum of those alone in it)
    start      first use     gradient    end

A stretch takes the median of the quicker half of the rounds: the sum of the least of a hundred of them is less than any
step takes. One factor for all of a step, as before, put the first gradient of an LSTM, whose backward pass gains most,
10 ms of 20 too early.

The step fills its buckets and does not send them. One that keeps gradients in new tensors, as a step inside `no_sync`
does, takes longer: their memory is touched for the first time, and what a product could write into its bucket is
written elsewhere (an LSTM: 63 ms to its first gradient and 186 in all, beside 52 and 149 in the step that runs).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from sennit.fuse.channel_torch import GradientChannel
from sennit.fuse.gradients_torch import Gradients
from sennit.fuse.looked_up import parameter_of
from sennit.fuse.moments_torch import wall
from sennit.fuse.row_blocks import row_products
from sennit.ir.graph import OutputKind
from sennit.ir.strategy import Bucket, Part, Strategy, WaitAt

if TYPE_CHECKING:
    from sennit.fuse.data_parallel_torch import DataParallel

__all__ = ["Stretch", "in_stretches", "messages_of", "rate_beside", "stretches"]

_MESSAGE, _LEAST_MESSAGE = 1 << 20, 1 << 17  # bytes
_FIRST = 2  # turns that do not count: memory is touched for the first time, and products compare their bits

Stretch = tuple[int, int]  # the first of its operators, and the one behind its last


def in_stretches(alone: Mapping[str, float], names: list[str], seconds: Mapping[Stretch, float]) -> dict[str, float]:
    """Seconds of each operator such that every stretch takes its own."""
    found = dict(alone)
    for (start, stop), length in seconds.items():
        inside = names[start:stop]
        total = sum(alone[name] for name in inside)
        for name in inside:
            found[name] = alone[name] * length / total if total else length / len(inside)
    return found


def stretches(owner: DataParallel, inputs: Mapping[str, Tensor], rounds: int) -> dict[Stretch, float]:
    """The stretches of a step that sends no gradients with their seconds on the wall, medians over the quicker half of
    the rounds and those of the rank that is slowest in all, while the other ranks do the same: they may share this
    rank's cores.
    """
    owner.use(_every_gradient_apart(owner))
    step = _Marks(owner)
    turns: list[dict[Stretch, float]] = []
    for _ in range(_FIRST + rounds):
        dist.barrier(owner.group)
        turns.append(step.run(inputs))
    # a moment in which the machine did something else is not what a step takes
    quick = sorted(turns[_FIRST:], key=lambda turn: sum(turn.values()))[: rounds // 2 + 1]
    own = torch.tensor([median(turn[stretch] for turn in quick) for stretch in quick[0]], dtype=torch.float64)
    own = own.to(owner.device)
    ranks = [torch.empty_like(own) for _ in range(owner.group.size())]
    dist.all_gather(ranks, own, group=owner.group)
    slowest = max(ranks, key=lambda seconds: float(seconds.sum()))
    return dict(zip(quick[0], slowest.tolist(), strict=True))


def rate_beside(owner: DataParallel, inputs: Mapping[str, Tensor], rounds: int, nbytes: int) -> tuple[float, float]:
    """How fast such a step computes while the channel carries so many bytes, 1 as alone, and the bytes of a message, on
    average. The rate is the median over rounds of a turn alone and one beside them, of the rank that loses most. The
    two turns of a round follow each other: what the machine does in one minute and not in the next is in both. Two
    medians of minutes apart had anything between 0.74 and 1.00 for a step whose rate was 0.8. The messages are what the
    step fills, some of it at a time: one small buffer again and again would stay in a cache, which gradients do not.
    """
    owner.use(_every_gradient_apart(owner))
    step = _Marks(owner)
    buffers = [slot.buffer for slot in step.gradients.channel.slots]
    messages = messages_of(buffers, nbytes)
    rates: list[float] = []
    for turn in range(_FIRST + rounds):
        dist.barrier(owner.group)
        alone = sum(step.run(inputs).values())
        dist.barrier(owner.group)
        # not in the first turn: there the ranks tell each other their indices
        sent = messages if turn else []
        works = [dist.all_reduce(message, group=owner.group, async_op=True) for message in sent]
        rates.append(alone / sum(step.run(inputs).values()))
        for work in works:
            assert work is not None
            work.wait()
    rate = torch.tensor([median(rates[_FIRST:])], dtype=torch.float64)
    dist.all_reduce(rate, dist.ReduceOp.MIN, group=owner.group)
    return float(rate), sum(message.nbytes for message in messages) / len(messages)


def messages_of(buffers: Sequence[Tensor], nbytes: int) -> list[Tensor]:
    """So many bytes of these buffers, in messages as large as buckets are, again and again; ranks sum up what happens
    to be in them. Where all are smaller, one buffer of zeros stands for those that a bucket would put together.
    """
    pieces = [part for buffer in buffers for part in torch.tensor_split(buffer, -(-buffer.nbytes // _MESSAGE))]
    pieces = [part for part in pieces if part.nbytes >= _LEAST_MESSAGE] or [torch.zeros(_MESSAGE // 4)]
    found: list[Tensor] = []
    for piece in itertools.cycle(pieces):
        if nbytes <= 0:
            break
        found.append(piece)
        nbytes -= piece.nbytes
    return found


def _every_gradient_apart(owner: DataParallel) -> Strategy:
    wait = WaitAt.STEP if owner.optimizer is None else WaitAt.NEXT
    return Strategy("alone", (), tuple(Bucket((Part(path),), wait) for path in owner.sent))


class _Unsent(GradientChannel):
    """Buckets that are filled as in any step, and stay. The ranks tell each other their indices once."""

    def begin(self, indices: Mapping[str, Tensor] | None = None, whole: Collection[str] = ()) -> None:
        known = self.unions
        super().begin(None if known else indices, whole)
        self._hear()
        self.unions = self.unions or known

    def _start(self, slot: Any) -> None:
        pass


class _Marks:
    """A step that notes the time. Places count operators: place 3 is behind the third."""

    def __init__(self, owner: DataParallel) -> None:
        self.owner, graph = owner, owner.graph
        self.program: Any = owner.program
        shapes = {path: (parameter.shape, parameter.dtype) for path, parameter in owner.sent.items()}
        channel = _Unsent(owner.strategy.buckets, shapes, owner.device, owner.group, owner.packed)
        self.gradients = Gradients(owner.trained, owner.sent, channel)
        self.count = len(graph.ops)
        place = {value.name: number for number, op in enumerate(graph.ops) for value in op.results}
        products, names = row_products(graph), [op.name for op in graph.ops]
        self.made: dict[str, int] = {}
        for output in graph.outputs:
            if output.kind is OutputKind.GRADIENT and output.name in place:
                self.made[output.path] = place[output.name] + 1
        for path, product in products.items():  # it is made where the product stands, and views behind it are none
            if f"product({path!r}, " in self.program.source:
                self.made[path] = names.index(product.product) + 1
        for path, item in owner.packed.items():
            if f"rows({path!r}, " in self.program.source:
                self.made[path] = names.index(item.table) + 1
        first = {item.path: item.value.name for item in graph.inputs}
        self.used: dict[int, int] = {}  # by bucket, which is a gradient
        for number, path in enumerate(owner.sent):
            readers = [at for at, op in enumerate(graph.ops) if first.get(parameter_of(path)) in op.reads]
            if readers:
                self.used[number] = readers[0]

    def run(self, inputs: Mapping[str, Tensor]) -> dict[Stretch, float]:
        owner, gradients, device = self.owner, self.gradients, self.owner.device
        noted: dict[int, float] = {}

        def note(place: int) -> None:
            noted[place] = wall(device)

        def noting(take: Callable[..., None]) -> Callable[..., None]:
            def taken(path: str, *what: Any) -> None:
                take(path, *what)
                note(self.made[path])

            return taken

        values = owner.values_of(inputs)
        note(0)
        self.program.forward(values, lambda number: note(self.used[number]))
        values[self.program.tangent] = self.program.one()
        gradients.begin(values)
        self.program.backward(
            values, noting(gradients.take), noting(gradients.take_product), noting(gradients.take_rows)
        )
        note(self.count)
        places = sorted(noted)
        return {stretch: noted[stretch[1]] - noted[stretch[0]] for stretch in pairwise(places)}
