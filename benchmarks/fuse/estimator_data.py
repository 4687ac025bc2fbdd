"""Measured groups as rows that an estimator is trained on: the labels of a file, the features of each group, and what
is to be predicted.

Groups whose middle half of timings spreads over more than a tenth of the median are left out, and counted. With times
of lone operators every group is there twice, with its operators measured and without.
"""

from __future__ import annotations

import gzip
import json
import math
import multiprocessing
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from estimator_report import line, size_class
from workloads import root_of

from sennit.cluster import Device, load
from sennit.cost import OperatorCosts
from sennit.fuse.features import GroupFeatures, features_of
from sennit.fuse.kernel_cost import Roofline, Staged
from sennit.fuse.operator_class import moves_nothing
from sennit.fuse.signature import signature
from sennit.ir.graph import Graph
from sennit.ir.strategy_check import Kernel


@dataclass(frozen=True)
class Row:
    """`target` is log(seconds / seconds by parts), what the network predicts; `text` the group; `known` says that its
    operators were measured, `several` that it has more than one that computes.
    """

    model: str
    known: bool
    several: bool
    text: str
    group: GroupFeatures
    seconds: float
    target: float


@cache
def described(cluster: str) -> tuple[Device, OperatorCosts]:
    """Read once in a process."""
    device = load(cluster).device
    return device, OperatorCosts.of(device)


@cache
def lone_operators(path: Path | None) -> dict[str, float]:
    """Seconds by signature, compiled where that was measured."""
    found: dict[str, float] = {}
    if path is None:
        return found
    with gzip.open(path, "rt") as lines:
        for row in map(json.loads, lines):
            graph = Graph.parse(row["graph"])
            key = signature(Kernel(graph.ops), frozenset(output.name for output in graph.outputs), graph.types())
            if row.get("compiled", True) or key not in found:
                found[key] = row["seconds"]
    return found


def row_of(job: tuple[str, str, Path | None]) -> Row | None:
    line, cluster, operators = job
    found = json.loads(line)
    low, high = found["quartiles"]
    if high - low > 0.1 * found["seconds"]:
        return None
    graph = Graph.parse(found["graph"])
    written = frozenset(output.name for output in graph.outputs)
    device, costs = described(cluster)
    staged = Staged(Roofline.of(graph, device), costs, lone_operators(operators))
    group = features_of(Kernel(graph.ops), written, staged)
    target = math.log(found["seconds"] / group.compiled) if group.compiled > 0 else 0.0
    several = sum(not moves_nothing(op) for op in graph.ops) > 1
    return Row(root_of(found["from"]), operators is not None, several, found["graph"], group, found["seconds"], target)


def lines_of(path: Path) -> dict[str, str]:
    """Lines of a file of labels by group."""
    with gzip.open(path, "rt") as lines:
        return {json.loads(line)["graph"]: line for line in lines}


def read(paths: list[Path], operators: Path | None, cluster: str, limit: int | None, jobs: int) -> list[Row]:
    """Of a group that several files have, the label of the last. With operators, every group twice."""
    lines: dict[str, str] = {}
    for path in paths:
        lines.update(lines_of(path))
    wanted = list(lines.values())
    if limit is not None:
        wanted = wanted[:: max(1, len(wanted) // limit)]
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        found = pool.map(row_of, [(line, cluster, None) for line in wanted], chunksize=64)
        if operators is not None:
            found += pool.map(row_of, [(line, cluster, operators) for line in wanted], chunksize=64)
    rows = [row for row in found if row is not None and row.group.compiled > 0]
    models, groups = sorted({row.model for row in rows}), sum(not row.known for row in rows)
    print(f"{groups} groups of {', '.join(models)}; {len(wanted) - groups} unsteady ones left out", flush=True)
    return rows


def noise(path: Path) -> None:
    """How far two labels of one group are apart (`merge_labels.py` keeps all): no estimator can be better than about
    that. And what a third says of those that are far apart.
    """
    by_size: dict[str, list[float]] = {}
    thirds: list[tuple[float, float]] = []
    for row in map(json.loads, lines_of(path).values()):
        if len(row.get("labels", ())) > 1:
            first, second = row["labels"][:2]
            for size in (size_class(row["seconds"]), "all"):
                by_size.setdefault(size, []).append(abs(first / second - 1))
            if len(row["labels"]) > 2:
                thirds.append((abs(math.log(first / second)), math.log(row["labels"][2] / min(first, second))))
    for size, errors in sorted(by_size.items()):
        print(f"two labels of one group, {size}, {len(errors)}:")
        print(line("", np.array(errors)), flush=True)
    apart, third = np.array(thirds).reshape(-1, 2).T
    for least in (1.04, 1.3):
        far = math.log(least)
        mine = third[apart > far]
        print(
            f"{len(mine)} of {len(third)} with first labels {least} times apart: the third is as much longer than the shorter for {(mine > far).sum()}; of all, for {(third > far).sum()}, and as much shorter than both for {(third < -far).sum()}"
        )
