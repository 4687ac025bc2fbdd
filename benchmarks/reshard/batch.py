"""Random even problems: bytes received over the minimum, pieces above the memory bound, and how long planning takes.

    python benchmarks/reshard/batch.py [--count 10000] [--seed 0]

Each problem is planned cold in each mode. `--write FILE` writes the problems as JSON lines for `sennit reshard --batch
FILE` instead. Plans only; what moving takes is measured by the benchmarks of the executors.
"""

from __future__ import annotations

import argparse
import json
import platform
from dataclasses import dataclass, field
from math import exp, log
from pathlib import Path
from time import perf_counter

from problems import Pair, pairs

from sennit.ir.layout import Layout
from sennit.ir.mesh import Mesh
from sennit.reshard import Mode, plan


@dataclass(slots=True)
class Tally:
    """What was seen of one mode."""

    ratios: list[float] = field(default_factory=list)
    milliseconds: list[float] = field(default_factory=list)
    above: int = 0
    candidates: dict[str, int] = field(default_factory=dict)

    def add(self, pair: Pair, mode: Mode) -> None:
        begin = perf_counter()
        found = plan(pair.source, pair.target, mode=mode).certificate
        self.milliseconds.append((perf_counter() - begin) * 1e3)
        if found.received_bound:
            self.ratios.append(found.received / found.received_bound)
        else:
            assert found.received == 0
        self.above += found.peak > found.peak_bound
        self.candidates[found.candidate.value] = self.candidates.get(found.candidate.value, 0) + 1


def row(name: str, value: str, target: str) -> None:
    print(f"  {name:<38} {value:>24}   {target}")


def report(mode: Mode, tally: Tally, count: int) -> None:
    mean = exp(sum(map(log, tally.ratios)) / len(tally.ratios))
    least = sum(ratio < 1 + 1e-9 for ratio in tally.ratios) / len(tally.ratios)
    times = sorted(tally.milliseconds)
    goal = {Mode.DIRECT: "1.000", Mode.COLLECTIVE: "at most 1.03"}.get(mode, "-")
    print(f"mode {mode.value}: {', '.join(f'{name} {n}' for name, n in sorted(tally.candidates.items()))}")
    row("received over minimum, geometric mean", f"{mean:.4f}", goal)
    row("received over minimum, at most", f"{max(tally.ratios):.3f}", "1.000" if mode is Mode.DIRECT else "-")
    row("problems at the minimum", f"{least:.1%}", "-")
    row("pieces above max(in, out)", f"{tally.above} of {count}", "0")
    row("planning, median", f"{times[len(times) // 2]:.2f} ms", "1 ms")
    row("planning, 99th percentile", f"{times[len(times) * 99 // 100]:.2f} ms", "20 ms")
    row("planning, at most", f"{times[-1]:.2f} ms", "-")


def twelve_axes() -> None:
    names = [f"a{position}" for position in range(12)]
    mesh = Mesh.make(dict.fromkeys(names, 2))
    source = Layout.block(mesh, (4096, 4096, 96), {0: names[:5], 1: names[5:9]})
    target = Layout.block(mesh, (4096, 4096, 96), {0: names[::-2], 2: names[::4]})
    times = []
    for _ in range(5):
        begin = perf_counter()
        plan(source, target)
        times.append((perf_counter() - begin) * 1e3)
    row("12 prime axes (4096 devices), median of 5", f"{sorted(times)[2]:.1f} ms", "50 ms")


def write(path: Path, count: int, seed: int, elements: int | None) -> None:
    with path.open("w", encoding="utf-8") as file:
        for pair in pairs(count, seed=seed, elements=elements):
            problem = {
                "mesh": [axis.size for axis in pair.source.mesh.axes],
                "axes": list(pair.source.mesh.names),
                "shape": list(pair.source.shape),
                "dtype": "f32",
            }
            for name, layout in (("src", pair.source), ("dst", pair.target)):
                problem[name] = [[digit.axis for digit in layout.digits(dim)] for dim in range(len(layout.shape))]
            file.write(json.dumps(problem) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--elements", type=int, default=4 << 20, help="of the arrays, about; 4 Mi elements are 16 MiB")
    parser.add_argument("--write", type=Path, help="write the problems as JSON lines instead")
    options = parser.parse_args()
    if options.write is not None:
        write(options.write, options.count, options.seed, options.elements)
        return
    print(f"{options.count} even problems, seed {options.seed}, about {options.elements} elements, at most 16 devices")
    print(f"Python {platform.python_version()}, {platform.machine()}")
    print(f"  {'':<38} {'':>24}   target")
    tallies = {mode: Tally() for mode in (Mode.COLLECTIVE, Mode.DIRECT, Mode.AUTO)}
    for pair in pairs(options.count, seed=options.seed, elements=options.elements):
        for mode, tally in tallies.items():
            tally.add(pair, mode)
    for mode, tally in tallies.items():
        report(mode, tally, options.count)
    twelve_axes()


if __name__ == "__main__":
    main()
