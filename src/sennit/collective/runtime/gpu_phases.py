"""Code cut at its waits: for ranks that cannot run at the same time.

Kernels of several processes on one GPU take turns, unless they share it through MPS: a kernel that waits in a loop for
another process holds the GPU until its time slice ends, so each wait costs a slice or more. Here nothing waits inside a
kernel. The transfers of all ranks are sorted into *phases*, each one launch a rank, with a barrier between one phase
and the next:

    phase(transfer) = max(phase of what stands before it in its block, 1 + phase of each signal that it waits for)

A signal is in the phase of what stands before it. Two transfers that touch the same memory are ordered by signals and
block order, as the program's proof shows; so they are in different phases, or in one block, in order.
"""

from __future__ import annotations

from sennit.collective.runtime.code import Code
from sennit.collective.runtime.gpu_code import (
    Flag,
    Home,
    Item,
    Transfer,
    Walk,
    block_items,
    join_transfers,
    walk_blocks,
)
from sennit.errors import CollectiveError

__all__ = ["phases_of"]


def phases_of(code: Code, *, join: bool = True) -> list[list[Walk]]:
    """By phase, by rank: what it does."""
    blocks: dict[Home, list[Item]] = {}
    for rank in range(code.ranks):
        for block in range(code.rank_block_count(rank)):
            items = block_items(code, rank, block)
            blocks[rank, block] = join_transfers(code, items) if join else items
    phase = _phases(code, blocks)
    last = max((number for numbers in phase.values() for number in numbers), default=-1)
    return [
        [walk_blocks(code, _part(rank, blocks, phase, number)) for rank in range(code.ranks)]
        for number in range(last + 1)
    ]


def _part(
    rank: int, blocks: dict[Home, list[Item]], phase: dict[Home, list[int]], number: int
) -> dict[Home, list[Item]]:
    return {
        home: [
            item
            for item, where in zip(items, phase[home], strict=True)
            if where == number and isinstance(item, Transfer)
        ]
        for home, items in blocks.items()
        if home[0] == rank
    }


def _phases(code: Code, blocks: dict[Home, list[Item]]) -> dict[Home, list[int]]:
    """By block: the phase of each item."""
    found: dict[Home, list[int]] = {home: [] for home in blocks}
    sent: dict[tuple[int, int], list[tuple[int, int]]] = {}  # (rank, flag): the value and phase of each signal
    parked: dict[tuple[int, int], Home] = {}
    ready = list(blocks)
    while ready:
        home = ready.pop()
        items, numbers = blocks[home], found[home]
        while len(numbers) < len(items):
            item, now = items[len(numbers)], numbers[-1] if numbers else 0
            if isinstance(item, Flag) and item.waits:
                key = home[0], item.flag
                reached = [where for value, where in sent.get(key, []) if value >= item.value]
                if not reached:
                    parked[key] = home
                    break
                now = max(now, 1 + reached[0])
            elif isinstance(item, Flag):
                key = item.rank, item.flag
                sent.setdefault(key, []).append((item.value, now))
                if key in parked:
                    ready.append(parked.pop(key))
            numbers.append(now)
    if parked:
        stuck = ", ".join(f"rank {rank} block {block}" for rank, block in parked.values())
        raise CollectiveError(f"code {code.name!r} deadlocks", where=stuck)
    return found
