"""The moves of the search on operators, as functions of groupings; `kernel_set.py` has their mathematics.

| move | from | to |
|---|---|---|
| fuse | two kernels, one reads from the other | one kernel; other readers wait for all of it |
| repeat | a kernel that reads a cheap operator of another | the same kernel, which computes that operator again itself |
| cut | a kernel | two: its first operators, and the rest |
| undo | a kernel | its operators alone |

A kernel is legal if its operators are of one phase, none is opaque, at most one is a matrix product or convolution
(libraries make that kernel, with what is pointwise before and after it), a product has no reduction beside it, there
are at most `size` of them, and the kernels still have an order. With `Limits.regions` a group may be anything of one
phase that a compiler takes: it then makes several kernels of it itself.
"""

from __future__ import annotations

import random
from collections.abc import Mapping

from sennit.fuse.kernel_set import KernelSet, Limits, is_legal
from sennit.fuse.model import Grouping, Numbers, StepModel

__all__ = ["AS_COMPILED", "Limits", "fused_by_cost", "fused_greedily", "has_detour", "is_legal", "random_move"]


AS_COMPILED = Limits(
    size=1 << 20, around_products=False
)  # fusion as a compiler does it that leaves products to libraries


def has_detour(model: StepModel, home: Mapping[int, Numbers], first: Numbers, second: Numbers) -> bool:
    """Whether a path leads out of the union of two kernels and back: then they cannot be one.

    Looks at the whole graph; the oracle of `KernelSet.fuse`.
    """
    union = first | second
    # readers stand behind what they read, so only a kernel with an earlier operator leads back: nothing behind the last
    # of those matters
    last = max(max(union), max(home, default=0))
    waiting = [reader for place in union for reader in model.readers[place] if reader not in union]
    seen: set[int] = set()
    while waiting:
        place = waiting.pop()
        kernel = home.get(place, frozenset((place,)))
        if min(kernel) in seen:
            continue
        seen.add(min(kernel))
        for member in kernel:
            for reader in model.readers[member]:
                if reader in union:
                    return True
                if reader not in kernel and reader <= last:
                    waiting.append(reader)
    return False


def random_move(model: StepModel, grouping: Grouping, draw: random.Random, limits: Limits) -> Grouping | None:
    """One random move, or None where the one that was drawn is not legal."""
    kernels = KernelSet(model, grouping, limits)
    return kernels.grouping() if kernels.random_move(draw) else None


def fused_greedily(model: StepModel, limits: Limits) -> Grouping:
    """Every operator with what it reads, wherever that is legal, in graph order: fusion that does not look at costs."""
    kernels = KernelSet(model, Grouping(), limits)
    for reader in range(len(model.ops)):
        for read in model.reads[reader]:
            kernels.fuse(read, reader)
    return kernels.grouping()


def fused_by_cost(model: StepModel, limits: Limits, start: Grouping | None = None, rounds: int = 8) -> Grouping:
    """Every operator with what it reads, wherever the estimate of one kernel is below that of two; again until nothing
    changes.

    What a round may try is estimated together, since estimators answer many questions faster than one at a time.
    """
    kernels = KernelSet(model, start or Grouping(), limits)
    for _ in range(rounds):
        pairs = [
            (read, reader)
            for reader in range(len(model.ops))
            for read in model.reads[reader]
            if kernels.home[read] != kernels.home[reader]
        ]
        model.seconds_of({union for pair in pairs if (union := kernels.union(*pair)) is not None})
        changed = False
        for read, reader in pairs:
            if kernels.home[read] == kernels.home[reader] or (union := kernels.union(read, reader)) is None:
                continue
            parts = [model.seconds_of([kernels.kernel(place)]) for place in (read, reader)]
            # a view is worth having for what lies behind it, though it saves nothing itself
            limit = sum(parts) * (1 + 1e-9 if 0.0 in parts else 1 - 1e-9)
            if model.is_known(union) and model.seconds_of([union]) <= limit:
                changed |= kernels.fuse(read, reader)
        if not changed:
            break
    return kernels.grouping()
