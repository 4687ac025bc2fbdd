"""The random problems of `xla.py`: even ones on CPU devices of one process.

`draw` gives powers of two alone, on a fixed number of devices; `draw_mixed` the problems of `problems.py`, on 6 to 16
devices with factors 2, 3 and 5. Both leave out meshes of one axis, on which every problem is one collective, the same
for all.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from problems import even_pair

from sennit.ir.layout import Layout

__all__ = ["FEWEST", "MESHES", "MOST", "Problem", "draw", "draw_mixed"]

MESHES = {
    8: ((2, 4), (4, 2), (2, 2, 2)),
    16: ((4, 4), (2, 8), (8, 2), (2, 2, 4), (2, 4, 2), (4, 2, 2), (2, 2, 2, 2)),
}
FEWEST, MOST = 6, 16

Dims = tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class Problem:
    mesh: tuple[int, ...]
    shape: tuple[int, ...]
    before: Dims
    after: Dims

    def __str__(self) -> str:
        return f"{dict(zip('xyzw', self.mesh, strict=False))} {self._print(self.before)} -> {self._print(self.after)}"

    def _print(self, dims: Dims) -> str:
        return (
            "["
            + ",".join(f"{n}{{{','.join(a)}}}" if a else str(n) for n, a in zip(self.shape, dims, strict=True))
            + "]"
        )


def draw(rng: random.Random, devices: int, size: int) -> Problem:
    """2 to 4 dims, each divisible by the number of devices; each axis on any dim or none, in any order."""
    mesh = rng.choice(MESHES[devices])
    rank = rng.choice((2, 2, 3, 3, 4))
    least = devices.bit_length() - 1
    exponents = [least] * rank
    for _ in range((size // 4).bit_length() - 1 - least * rank):
        exponents[rng.randrange(rank)] += 1

    def dims() -> Dims:
        found: list[list[str]] = [[] for _ in range(rank)]
        for axis in rng.sample("xyzw"[: len(mesh)], len(mesh)):
            dim = rng.randrange(rank + 1)
            if dim < rank:
                found[dim].append(axis)
        return tuple(map(tuple, found))

    before = after = dims()
    while after == before:
        after = dims()
    return Problem(mesh, tuple(2**exponent for exponent in exponents), before, after)


def draw_mixed(rng: random.Random, size: int) -> Problem:
    """An even problem of `problems.py` on two axes and more."""
    while True:
        before, after = even_pair(rng, MOST, size // 4)
        if len(before.mesh.axes) > 1 and len(before.mesh.devices) >= FEWEST:
            break

    def dims(layout: Layout) -> Dims:
        return tuple(tuple(digit.axis for digit in layout.digits(dim)) for dim in range(len(layout.shape)))

    return Problem(tuple(axis.size for axis in before.mesh.axes), before.shape, dims(before), dims(after))
