"""Random redistribution problems, the same for a seed on every machine.

An even problem: 1 to 4 axes with sizes of factors 2, 3 and 5 and at most 16 devices, an array of 2 to 4 dims, and two
layouts in each of which every axis splits a random dim, in random order, or replicates. Dims are a product of what
either layout needs and a few more factors. `kinds` adds uneven sizes, pending sums and another mesh for the target.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from math import lcm, prod

from sennit.ir.layout import Layout, Reduction
from sennit.ir.mesh import Mesh

__all__ = ["Kind", "Pair", "even_pair", "pairs"]


class Kind(Enum):
    EVEN = "even"
    UNEVEN = "uneven"
    PARTIAL = "partial"
    CROSS_MESH = "cross-mesh"


@dataclass(frozen=True, slots=True)
class Pair:
    kind: Kind
    source: Layout
    target: Layout


def pairs(
    count: int, *, seed: int, kinds: Sequence[Kind] = (Kind.EVEN,), devices: int = 16, elements: int | None = None
) -> Iterator[Pair]:
    """`count` problems, the kinds in turn. `elements` scales the arrays to about that many; small ones otherwise."""
    generator = random.Random(seed)
    for position in range(count):
        kind = kinds[position % len(kinds)]
        match kind:
            case Kind.EVEN:
                yield Pair(kind, *even_pair(generator, devices, elements))
            case Kind.UNEVEN:
                yield Pair(kind, *_uneven_pair(generator, devices))
            case Kind.PARTIAL:
                yield Pair(kind, *_partial_pair(generator, devices, elements))
            case Kind.CROSS_MESH:
                yield Pair(kind, *_cross_pair(generator, devices))


def random_mesh(generator: random.Random, devices: int) -> dict[str, int]:
    while True:
        sizes = [generator.choice((2, 2, 3, 4, 5, 6, 8)) for _ in range(generator.randint(1, 4))]
        if 2 <= prod(sizes) <= devices:
            return dict(zip("xyzw", sizes, strict=False))


def _dims(generator: random.Random, axes: Sequence[str], rank: int) -> dict[int, list[str]]:
    """Axes on dims: each on a random one or, one time in four, on none."""
    dims: dict[int, list[str]] = {}
    for axis in generator.sample(list(axes), len(axes)):
        if generator.random() < 0.75:
            dims.setdefault(generator.randrange(rank), []).append(axis)
    return dims


def even_pair(generator: random.Random, devices: int = 16, elements: int | None = None) -> tuple[Layout, Layout]:
    mesh = random_mesh(generator, devices)
    rank = generator.randint(2, 4)
    while True:
        source, target = _dims(generator, list(mesh), rank), _dims(generator, list(mesh), rank)
        if source != target:
            break
    shape = []
    for dim in range(rank):
        needed = lcm(*(prod(mesh[axis] for axis in dims.get(dim, ())) for dims in (source, target)))
        shape.append(needed * generator.choice((1, 2, 3, 4)))
    if elements is not None:
        grown = generator.randrange(rank)
        shape[grown] *= max(1, round(elements / prod(shape)))
    return Layout.block(Mesh.make(mesh), shape, source), Layout.block(Mesh.make(mesh), shape, target)


def _uneven_pair(generator: random.Random, devices: int) -> tuple[Layout, Layout]:
    mesh = Mesh.make(random_mesh(generator, devices))
    shape = [generator.randint(1, 13) for _ in range(generator.randint(1, 3))]
    return (
        Layout.block(mesh, shape, _dims(generator, mesh.names, len(shape))),
        Layout.block(mesh, shape, _dims(generator, mesh.names, len(shape))),
    )


def _partial_pair(generator: random.Random, devices: int, elements: int | None) -> tuple[Layout, Layout]:
    source, target = even_pair(generator, devices, elements)
    for axis in source.mesh.names:
        if generator.random() < 0.5:
            source = source.with_entry(axis, None)
    free = [axis for axis in source.mesh.names if source.entry(axis) is None]
    pending = dict.fromkeys(generator.sample(free, generator.randint(0, len(free))), Reduction.SUM)
    dims = {dim: [digit.axis for digit in source.digits(dim)] for dim in range(len(source.shape))}
    return Layout.block(source.mesh, source.shape, dims, pending), target


def _cross_pair(generator: random.Random, devices: int) -> tuple[Layout, Layout]:
    here, there = random_mesh(generator, devices // 2), random_mesh(generator, devices // 2)
    first = generator.choice((0, prod(here.values()), prod(here.values()) // 2))  # the same, other or some devices
    shape = [generator.choice((4, 6, 8, 12, 7)) for _ in range(generator.randint(1, 3))]
    source, target = Mesh.make(here), Mesh.make(there, devices=tuple(range(first, first + prod(there.values()))))
    return (
        Layout.block(source, shape, _dims(generator, source.names, len(shape))),
        Layout.block(target, shape, _dims(generator, target.names, len(shape))),
    )
