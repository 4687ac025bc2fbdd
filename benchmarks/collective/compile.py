"""How long it takes to trace and compile collective algorithms, and how that grows with the ranks.

    python benchmarks/collective/compile.py [--largest 1024] [--repeat 3]

Four algorithms, each cut as finely as it needs: a ring AllReduce (n chunks, 2 n (n - 1) moves), an all-pairs AllReduce
(as many), a hierarchical AllReduce on nodes of 8 (rings inside and across), and a two-step AllToAll on nodes of 8
(gather inside the node, then one message to each other node). Times are CPU seconds of one core, the least of the
repetitions. `growth` is the exponent of the time of compiling in the number of moves, against the line above: 1 is
linear. msccl-tools' times were measured for this project on its own ring AllReduce; `ratio` is its time over ours for
compiling, `traced` over ours for tracing and compiling.
"""

from __future__ import annotations

import argparse
import math
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from sennit.collective import Builder, Chunk, Group, compile_algorithm, trace
from sennit.collective.compile_one_sided import compile_one_sided
from sennit.collective.library import (
    all_pairs_all_reduce,
    double_tree_all_reduce,
    hierarchical_all_reduce,
    ring_all_reduce,
    two_step_all_to_all,
)
from sennit.ir.collective import CollectiveName, CollectiveSpec
from sennit.ir.one_sided import Await, Signal

Result = TypeVar("Result")
NODE = 8  # ranks of a node
MSCCL_TOOLS_RING = {8: 0.02, 32: 0.45, 64: 5.1, 128: 134.0}  # seconds


def reduce_scatter(group: Group, data: Chunk) -> None:
    for i, part in enumerate(data.split(len(group))):
        for hop in range(i + 1, i + len(group)):
            part.on(group.at(hop)).reduce(into=part.on(group.at(hop + 1)))


def all_gather(group: Group, data: Chunk) -> None:
    for i, part in enumerate(data.split(len(group))):
        for hop in range(i, i + len(group) - 1):
            part.on(group.at(hop)).copy(to=group.at(hop + 1))


def ring(b: Builder) -> None:
    everyone = b.group(range(b.ranks))
    reduce_scatter(everyone, b.output(0))
    all_gather(everyone, b.output(0))


def all_pairs(b: Builder) -> None:
    for i, part in enumerate(b.output(0).split(b.ranks)):
        others = [rank for rank in range(b.ranks) if rank != i]
        for other in others:
            part.on(other).reduce(into=part.on(i))
        for other in others:
            part.on(i).copy(to=other)


def hierarchical(b: Builder) -> None:
    nodes = [b.group(range(first, first + NODE)) for first in range(0, b.ranks, NODE)]
    data = b.output(0)
    for node in nodes:
        reduce_scatter(node, data)
    for i, part in enumerate(data.split(NODE)):
        across = b.group(node.at(i) for node in nodes)
        reduce_scatter(across, part)
        all_gather(across, part)
    for node in nodes:
        all_gather(node, data)


def two_step(b: Builder) -> None:
    nodes = [b.group(range(first, first + NODE)) for first in range(0, b.ranks, NODE)]
    for rank in range(b.ranks):
        b.scratch(rank, "gathered", b.ranks)
    for here, node in enumerate(nodes):
        for there, goal in enumerate(nodes):
            for i, source in enumerate(node):
                for j, target in enumerate(goal):
                    chunk = b.chunk(source, "input", target)
                    if here == there:
                        chunk.copy(to=target, buffer="output", index=source)
                    else:
                        chunk.copy(to=node.at(j), buffer="gathered", index=there * NODE + i)
            if here != there:
                for j, target in enumerate(goal):
                    batch = b.chunk(node.at(j), "gathered", there * NODE, NODE)
                    batch.copy(to=target, buffer="output", index=here * NODE)


@dataclass(frozen=True)
class Case:
    title: str
    program: Callable[[Builder], None]
    collective: Callable[[int], CollectiveSpec]
    ranks: tuple[int, ...]


def all_reduce(ranks: int) -> CollectiveSpec:
    return CollectiveSpec(CollectiveName.ALL_REDUCE, ranks, ranks, in_place=True)


def all_to_all(ranks: int) -> CollectiveSpec:
    return CollectiveSpec(CollectiveName.ALL_TO_ALL, ranks, 1)


CASES = (
    Case("ring AllReduce", ring, all_reduce, (8, 16, 32, 64, 128, 256, 512)),
    Case("all-pairs AllReduce", all_pairs, all_reduce, (8, 16, 32, 64, 128, 256)),
    Case("hierarchical AllReduce", hierarchical, all_reduce, (16, 32, 64, 128, 256, 512, 1024)),
    Case("two-step AllToAll", two_step, all_to_all, (16, 32, 64, 128, 256, 512)),
)


@dataclass(frozen=True)
class Measured:
    """CPU seconds, and what came out."""

    moves: int
    steps: int
    slots: int
    channels: int
    trace: float
    compile: float
    one_sided: float


def measure(case: Case, ranks: int, repeat: int) -> Measured:
    traced, algorithm = cpu_seconds(lambda: trace(case.program, case.collective(ranks), case.title), repeat)
    compiled, schedule = cpu_seconds(lambda: compile_algorithm(algorithm), repeat)
    one_sided, _ = cpu_seconds(lambda: compile_one_sided(algorithm), repeat)
    blocks = [block for ranked in schedule.ranks for block in ranked.blocks]
    return Measured(
        len(algorithm.moves),
        sum(len(block.instructions) for block in blocks),
        schedule.slots,
        len({block.channel for block in blocks}),
        traced,
        compiled,
        one_sided,
    )


def cpu_seconds(work: Callable[[], Result], repeat: int) -> tuple[float, Result]:
    best = math.inf
    for _ in range(repeat):
        start = time.process_time()
        result = work()
        best = min(best, time.process_time() - start)
    return best, result


def signals() -> None:
    """How many signals the one-sided programs of the library hold, between operations and at the gates."""
    print("| algorithm | ranks | between operations | at gates |\n|---|---|---|---|")
    for algorithm in (
        ring_all_reduce(8),
        ring_all_reduce(128),
        hierarchical_all_reduce((4, 8)),
        double_tree_all_reduce(64),
        all_pairs_all_reduce(64),
        two_step_all_to_all(4, 8),
    ):
        program = compile_one_sided(algorithm)
        every = sum(isinstance(s, Signal) for ranked in program.ranks for steps in ranked.blocks for s in steps)
        gates = sum(isinstance(s, Signal | Await) for ranked in program.ranks for s in ranked.blocks[0])
        print(f"| {algorithm.name} | {algorithm.collective.ranks} | {every - gates} | {gates} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--largest", type=int, default=1024, help="leave out more ranks than these")
    parser.add_argument("--repeat", type=int, default=3, help="take the least of so many")
    parser.add_argument("--signals", action="store_true", help="count the signals of one-sided programs instead")
    options = parser.parse_args()
    if options.signals:
        signals()
        return
    print(f"Python {platform.python_version()}, {platform.machine()}, one core; CPU seconds, least of {options.repeat}")
    header = f"{'algorithm':23}{'ranks':>6}{'moves':>9}{'steps':>9}{'slots':>6}{'channels':>9}"
    print(
        f"{header}{'trace':>9}{'compile':>9}{'growth':>8}{'one-sided':>11}{'msccl-tools':>13}{'ratio':>7}{'traced':>8}"
    )
    for case in CASES:
        before: Measured | None = None
        for ranks in case.ranks:
            if ranks > options.largest:
                continue
            m = measure(case, ranks, options.repeat if ranks <= 128 else 1)
            growth = " " * 8
            if before is not None:
                growth = f"{math.log(m.compile / before.compile) / math.log(m.moves / before.moves):8.2f}"
            peer = MSCCL_TOOLS_RING.get(ranks) if case.program is ring else None
            beside = f"{peer:13.2f}{peer / m.compile:6.0f}x{peer / (m.trace + m.compile):7.0f}x" if peer else ""
            print(
                f"{case.title:23}{ranks:6}{m.moves:9}{m.steps:9}{m.slots:6}{m.channels:9}"
                f"{m.trace:9.3f}{m.compile:9.3f}{growth}{m.one_sided:11.3f}{beside}",
                flush=True,
            )
            before = m


if __name__ == "__main__":
    main()
