"""When a step is where: the time of each kernel as it runs in the step.

Operators are measured one by one, each with a result of its own (`profile_torch.py`). In the step they cost less or more: sums go over an operand, products into their total, values are in the cache or are not. So a step without
communication is run whole, and notes the time where a parameter is first read and where a gradient is there. These are the places that the clock asks for. What lies between two of them is a *stretch* of operators:

    |-- stretch --|-- stretch --|-- ... --|          seconds of an operator  =  alone * (seconds of its stretch / sum of those alone in it)
    start      first use     gradient    end

A stretch takes the median of its rounds: the sum of the least of a hundred of them is less than any step takes. One factor for all of a step, as before, put the first gradient of an LSTM, whose backward pass gains most, 10 ms of 20 too early.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from sennit.fuse.looked_up import parameter_of
from sennit.fuse.moments_torch import wall
from sennit.fuse.row_blocks import row_products
from sennit.ir.graph import OutputKind
from sennit.ir.strategy import Bucket, Part, Strategy, WaitAt

if TYPE_CHECKING:
    from sennit.fuse.data_parallel_torch import DataParallel

__all__ = ["MESSAGE", "Stretch", "in_stretches", "stretches"]

MESSAGE = 4 << 20

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


def stretches(
    owner: DataParallel, inputs: Mapping[str, Tensor], rounds: int, messages: int = 0
) -> dict[Stretch, float]:
    """The stretches of a step that sends no gradients with their median seconds on the wall, the slowest rank's, while the other ranks do the same: they may share this rank's cores. With `messages`, while the channel carries so many of `MESSAGE` bytes."""
    owner.use(_every_gradient_apart(owner))
    step = _Marks(owner)
    buffer = torch.zeros(MESSAGE // 4)
    found: dict[Stretch, list[float]] = {}
    with owner.no_sync():
        for turn in range(rounds + 1):
            dist.barrier(owner.group)
            works = [dist.all_reduce(buffer, group=owner.group, async_op=True) for _ in range(messages)]
            for stretch, spent in step.run(inputs).items():
                if turn:  # memory is touched for the first time, and products compare their bits
                    found.setdefault(stretch, []).append(spent)
            for parameter in owner.trained.values():
                parameter.grad = None
            for work in works:
                assert work is not None
                work.wait()
    slowest = torch.tensor([median(spent) for spent in found.values()], dtype=torch.float64, device=owner.device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX, group=owner.group)
    return dict(zip(found, slowest.tolist(), strict=True))


def _every_gradient_apart(owner: DataParallel) -> Strategy:
    wait = WaitAt.STEP if owner.optimizer is None else WaitAt.NEXT
    return Strategy("alone", (), tuple(Bucket((Part(path),), wait) for path in owner.sent))


class _Marks:
    """A step that notes the time. Places count operators: place 3 is behind the third."""

    def __init__(self, owner: DataParallel) -> None:
        self.owner, graph = owner, owner.graph
        self.program: Any = owner.program
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
        owner, gradients, device = self.owner, self.owner.gradients, self.owner.device
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
        self.program.backward(
            values, noting(gradients.keep), noting(gradients.keep_product), noting(gradients.keep_rows)
        )
        note(self.count)
        places = sorted(noted)
        return {stretch: noted[stretch[1]] - noted[stretch[0]] for stretch in pairwise(places)}
