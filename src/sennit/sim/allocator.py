"""What torch's caching allocator takes from the driver for what a step allocates: memory that is reserved beside memory
that is live.

The rules, those of `c10/cuda/CUDACachingAllocator.cpp` under its default settings:

    rounded(size)  = size up to a multiple of 512
    pool(size)     = small up to 1 MiB, else large
    segment(size)  = 2 MiB in the small pool; in the large one 20 MiB below 10 MiB, else size up to a multiple of 2 MiB

An allocation takes the smallest free block of its pool that holds it, of several the one of the lowest address; where
there is none, a new segment. What is left of the block stays free, split off, if it is at least 512 bytes (small pool)
or more than 1 MiB (large); else the allocation gets all of it. A freed block joins free neighbours of its segment.
Segments are kept: `reserved` only grows.

So *reserved* exceeds *live* by what lies free between live blocks (fragmentation) and what was live before and is not
now. It is what has to fit into the device. `benchmarks/sim/accuracy.py --only allocator` replays what an H200 recorded.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field

__all__ = ["CachingAllocator", "rounded", "segment_size"]

GRAIN = 512
SMALL = 1 << 20
SMALL_SEGMENT = 2 << 20
LARGE_SEGMENT = 20 << 20
LARGE_ALONE = 10 << 20  # from here on a segment is made for one allocation
ROUND_LARGE = 2 << 20


def rounded(size: int) -> int:
    return max(GRAIN, -(-size // GRAIN) * GRAIN)


def segment_size(size: int) -> int:
    """Of a segment that is taken for a rounded size."""
    if size <= SMALL:
        return SMALL_SEGMENT
    return LARGE_SEGMENT if size < LARGE_ALONE else -(-size // ROUND_LARGE) * ROUND_LARGE


@dataclass(slots=True)
class _Block:
    """A part of a segment; neighbours are of the same segment."""

    address: int
    size: int
    small: bool
    free: bool = False
    before: _Block | None = None
    after: _Block | None = None


@dataclass(slots=True)
class CachingAllocator:
    """`allocate` and `release` by a key; `live` and `reserved` are bytes, `most_*` the greatest so far."""

    live: int = 0
    reserved: int = 0
    most_live: int = 0
    most_reserved: int = 0
    segments: int = 0
    held: dict[object, _Block] = field(default_factory=dict)
    # by pool, (size, address) of free blocks in order, and the blocks by address
    small: list[tuple[int, int]] = field(default_factory=list)
    large: list[tuple[int, int]] = field(default_factory=list)
    blocks: dict[int, _Block] = field(default_factory=dict)

    def cache(self, size: int) -> None:
        """Begin with a free block of the large pool, as an allocator has that was used before."""
        self.reserved += size
        self.most_reserved = max(self.most_reserved, self.reserved)
        self.segments += 1
        self._put(_Block(self.segments << 44, size, False, True))

    def allocate(self, key: object, size: int) -> None:
        wanted = rounded(size)
        block = self._best(wanted) or self._segment(wanted)
        rest = block.size - wanted
        if rest >= GRAIN if block.small else rest > SMALL:
            other = _Block(block.address + wanted, rest, block.small, True, block, block.after)
            if block.after is not None:
                block.after.before = other
            block.size, block.after = wanted, other
            self._put(other)
        self.held[key] = block
        self.live += block.size
        self.most_live = max(self.most_live, self.live)

    def release(self, key: object) -> None:
        block = self.held.pop(key)
        self.live -= block.size
        block.free = True
        for near in (block.before, block.after):
            if near is not None and near.free:
                self._take(near)
                block = self._joined(near, block) if near.address < block.address else self._joined(block, near)
        self._put(block)

    def _joined(self, left: _Block, right: _Block) -> _Block:
        left.size += right.size
        left.after = right.after
        if right.after is not None:
            right.after.before = left
        return left

    def _pool(self, small: bool) -> list[tuple[int, int]]:
        return self.small if small else self.large

    def _put(self, block: _Block) -> None:
        insort(self._pool(block.small), (block.size, block.address))
        self.blocks[block.address] = block

    def _take(self, block: _Block) -> None:
        pool = self._pool(block.small)
        del pool[bisect_left(pool, (block.size, block.address))]
        del self.blocks[block.address]

    def _best(self, size: int) -> _Block | None:
        pool = self._pool(size <= SMALL)
        place = bisect_left(pool, (size, -1))
        if place == len(pool):
            return None
        block = self.blocks[pool[place][1]]
        self._take(block)
        block.free = False
        return block

    def _segment(self, size: int) -> _Block:
        """Segments lie far apart: blocks of two never join."""
        taken = segment_size(size)
        self.reserved += taken
        self.most_reserved = max(self.most_reserved, self.reserved)
        self.segments += 1
        return _Block(self.segments << 44, taken, size <= SMALL)
