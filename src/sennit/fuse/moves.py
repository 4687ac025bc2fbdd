"""The moves of the search on operators, and which groups are legal.

| move | from | to |
|---|---|---|
| fuse | two kernels, one reads from the other | one kernel; other readers wait for all of it |
| repeat | a kernel that reads a cheap operator of another | the same kernel, which computes that operator again itself |
| undo | a group | its operators alone |

A group is legal if its operators are of one phase, none is opaque, at most one is a matrix product or convolution (libraries make that kernel, with what is
pointwise before and after it), a product has no reduction beside it, there are at most `size` of them, and the kernels still have an order. Fusing kernels
A and B makes a cycle exactly if a path leads from one to the other through a third: `has_detour` looks for it among the kernels that stand between them.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass

from sennit.fuse.model import Class, Grouping, Numbers, StepModel

__all__ = ["Limits", "fused_greedily", "has_detour", "is_legal", "random_move"]


@dataclass(frozen=True, slots=True)
class Limits:
    """Operators in a group at most, and bytes' worth of work that may be repeated: operators in `again` at most."""

    size: int = 48
    repeats: int = 4


def is_legal(model: StepModel, group: Numbers, limits: Limits) -> bool:
    """Whether these operators may be one kernel, as far as they themselves say."""
    if len(group) > limits.size or len({model.phase[place] for place in group}) > 1:
        return False
    kinds = [model.kind[place] for place in group]
    products = kinds.count(Class.PRODUCT)
    if Class.OTHER in kinds or products > 1:
        return False
    return not (products and Class.REDUCTION in kinds)


def has_detour(model: StepModel, home: Mapping[int, Numbers], first: Numbers, second: Numbers) -> bool:
    """Whether a path leads out of the union of two kernels and back: then they cannot be one."""
    union = first | second
    # readers stand behind what they read, so only a kernel with an earlier operator leads back: nothing behind the last of those matters
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


def _homes(grouping: Grouping) -> dict[int, Numbers]:
    return {place: group for group in grouping.groups for place in group}


def fuse(model: StepModel, grouping: Grouping, reader: int, read: int, limits: Limits) -> Grouping | None:
    """The kernels of two operators as one."""
    home = _homes(grouping)
    first, second = home.get(read, frozenset((read,))), home.get(reader, frozenset((reader,)))
    union = first | second
    if first == second or not is_legal(model, union, limits) or has_detour(model, home, first, second):
        return None
    repeats = grouping.repeats()
    again = (repeats.pop(first, frozenset()) | repeats.pop(second, frozenset())) - union
    if len(again) > limits.repeats:
        return None
    if again:
        repeats[union] = again
    return Grouping((grouping.groups - {first, second}) | {union}, frozenset(repeats.items()))


def repeat(model: StepModel, grouping: Grouping, reader: int, read: int, limits: Limits) -> Grouping | None:
    """Compute `read` again inside the kernel of `reader`."""
    home = _homes(grouping)
    kernel = home.get(reader, frozenset((reader,)))
    if read in kernel or model.kind[read] not in (Class.POINTWISE, Class.VIEW):
        return None
    if model.kind[reader] is Class.OTHER or model.phase[read] is not model.phase[reader]:
        return None
    repeats = grouping.repeats()
    again = repeats.get(kernel, frozenset()) | {read}
    if len(again) > limits.repeats:
        return None
    repeats[kernel] = again
    changed = Grouping(grouping.groups | {kernel}, frozenset(repeats.items()))
    return changed if model.order(changed) is not None else None


def undo(grouping: Grouping, group: Numbers) -> Grouping:
    repeats = grouping.repeats()
    repeats.pop(group, None)
    return Grouping(grouping.groups - {group}, frozenset(repeats.items()))


def random_move(model: StepModel, grouping: Grouping, draw: random.Random, limits: Limits) -> Grouping | None:
    """One random move, or None where the one that was drawn is not legal."""
    if grouping.groups and draw.random() < 0.1:
        return undo(grouping, draw.choice(sorted(grouping.groups, key=min)))
    reader = draw.randrange(len(model.ops))
    if not model.reads[reader]:
        return None
    read = draw.choice(model.reads[reader])
    if draw.random() < 0.2:
        return repeat(model, grouping, reader, read, limits)
    return fuse(model, grouping, reader, read, limits)


def fused_greedily(model: StepModel, limits: Limits) -> Grouping:
    """Every operator with what it reads, wherever that is legal, in graph order: fusion that does not look at communication."""
    grouping = Grouping()
    for reader in range(len(model.ops)):
        for read in model.reads[reader]:
            grouping = fuse(model, grouping, reader, read, limits) or grouping
    return grouping
