"""Which operators become one compiled kernel, on the machine at hand: measured, from the whole to its parts.

    best(group) = the least of   its operators as they are
                                 the group, compiled
                                 best(first half) + best(second half)      looked at where compiling the whole gains nothing

Both are timed alike: on the same inputs, which lie in the cache by then. The step finds them elsewhere, so what counts
is the ratio: a compiled group takes that part of what its operators take in the step.

It starts with groups of greedy fusion in which products stay alone: they are library calls with or without a compiler,
and one that makes a gradient can leave block by block (`row_blocks.py`). A group's halves are its first operators and
its last, so they are legal where the group is. Groups of one structure are compiled and timed once, and no more than
`most` structures are. The first rank measures; all ranks take its groups.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from sennit.fuse.kernel_torch import compile_kernel, kernel_module, sample_inputs, signature
from sennit.fuse.model import Grouping, Numbers, StepModel
from sennit.fuse.moves import Limits, fused_greedily
from sennit.fuse.profile_torch import MeasuredCost, now
from sennit.ir.dtype import TensorType
from sennit.ir.operators import is_view
from sennit.ir.strategy_check import Kernel

if TYPE_CHECKING:
    from sennit.fuse.data_parallel_torch import DataParallel

__all__ = ["compiled_groups"]


def compiled_groups(owner: DataParallel, model: StepModel, most: int) -> Grouping:
    """Groups that run faster compiled than operator by operator. Their times are the model's from now on."""
    assert isinstance(model.cost, MeasuredCost)
    told: list[Any] = [None]
    if owner.group.rank() == 0:
        search = _Search(model, owner.graph.types(), owner.device, most)
        found = [
            item
            for group in sorted(fused_greedily(model, Limits(around_products=False)).groups, key=min)
            for item in search.best(group)[1]
        ]
        told = [[(sorted(group), seconds) for group, seconds in found]]
    dist.broadcast_object_list(told, dist.get_global_rank(owner.group, 0), group=owner.group)
    for group, seconds in told[0]:
        model.cost.known[frozenset(model.ops[place].name for place in group)] = seconds
    model.forget()
    return Grouping(frozenset(frozenset(group) for group, _ in told[0]))


@dataclass(slots=True)
class _Search:
    model: StepModel
    types: Mapping[str, TensorType]
    device: torch.device
    left: int  # structures that may still be compiled
    ratios: dict[str, float] = field(default_factory=dict)  # by structure: seconds compiled over seconds as they are

    def best(self, group: Numbers) -> tuple[float, list[tuple[Numbers, float]]]:
        """The least seconds of these operators, and the groups among them that are compiled."""
        apart = sum(self.model.estimate(frozenset((place,))).seconds for place in group)
        if sum(not is_view(self.model.ops[place].kind) for place in group) < 2:
            return apart, []
        whole = apart * self._ratio(group)
        if whole < apart:
            return whole, [(group, whole)]
        places = sorted(group)
        halves = [self.best(frozenset(part)) for part in (places[: len(places) // 2], places[len(places) // 2 :])]
        return sum(seconds for seconds, _ in halves), [item for _, found in halves for item in found]

    def _ratio(self, group: Numbers) -> float:
        kernel, written = self.model.question(group)
        key = signature(kernel, written, self.types)
        if key not in self.ratios:
            if self.left <= 0:
                return math.inf
            self.left -= 1
            self.ratios[key] = _ratio(kernel, written, self.types, self.device)
        return self.ratios[key]


def _ratio(kernel: Kernel, written: frozenset[str], types: Mapping[str, TensorType], device: torch.device) -> float:
    module, reads, _ = kernel_module(kernel, written, device)
    inputs = sample_inputs(reads, types, device)
    with torch.no_grad():
        return _seconds(compile_kernel(module, inputs), inputs, device) / _seconds(module.forward, inputs, device)


def _seconds(run: Callable[..., Any], inputs: Sequence[Tensor], device: torch.device) -> float:
    spent: list[float] = []
    for _ in range(8):
        start = now(device)
        run(*inputs)
        spent.append(now(device) - start)
    return min(spent)
