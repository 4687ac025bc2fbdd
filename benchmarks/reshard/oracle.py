"""Uneven, partial and cross-mesh problems: every plan, run on numpy arrays, gives the pieces that the target's layout
says.

    python benchmarks/reshard/oracle.py [--count 10000] [--seed 0]

Each problem is planned in one of the modes in turn, every fourth with a byte budget, and run by the reference executor.
"""

from __future__ import annotations

import argparse
from collections import Counter
from math import prod

import numpy as np
from problems import Kind, pairs

from sennit.errors import LayoutError
from sennit.ir.layout import Layout
from sennit.ir.layout_numpy import Array, assemble
from sennit.ir.mesh import Point
from sennit.reshard import Mode, plan
from sennit.reshard.execute_numpy import trace_numpy

KINDS = (Kind.UNEVEN, Kind.PARTIAL, Kind.CROSS_MESH)
MOST_ELEMENTS = 4096


def random_pieces(layout: Layout, generator: np.random.Generator) -> dict[Point, Array]:
    """Pieces whose replicas agree and whose parts of a sum are all different."""
    pending = [layout.mesh.index(name) for name, _ in layout.pending]
    parts: dict[Point, Array] = {}
    pieces: dict[Point, Array] = {}
    for point in layout.mesh.points():
        part = tuple(point[axis] for axis in pending)
        if part not in parts:
            parts[part] = generator.integers(-99, 99, size=layout.shape)
        pieces[point] = parts[part][np.ix_(*layout.region(point).indices())]
    return pieces


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    generator = np.random.default_rng(options.seed)
    seen: Counter[str] = Counter()
    modes = list(Mode)
    drawn = pairs(4 * options.count, seed=options.seed, kinds=KINDS, devices=12)
    small = (pair for pair in drawn if prod(pair.source.shape) <= MOST_ELEMENTS)
    for position, pair in zip(range(options.count), small, strict=False):
        pieces = random_pieces(pair.source, generator)
        budget = 256 if position % 4 == 3 else None
        try:
            found = plan(pair.source, pair.target, mode=modes[position % 3], budget=budget)
        except LayoutError as error:
            if budget is None or "least possible" not in str(error):
                raise
            seen["refused: budget below the least possible"] += 1
            continue
        run = trace_numpy(found, pieces)
        right = np.array_equal(assemble(pair.target, run.pieces), assemble(pair.source, pieces))
        seen[f"{pair.kind.value}: {'right' if right else 'WRONG'}"] += 1
        seen["wrong"] += not right
        seen["peak not as certified"] += run.peak != found.certificate.peak
    for name, count in sorted(seen.items()):
        print(f"  {name:<44} {count:>6}{'   target 0' if name in ('wrong', 'peak not as certified') else ''}")


if __name__ == "__main__":
    main()
