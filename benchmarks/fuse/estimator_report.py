"""Errors of estimators of fused groups, as lines of text: by size, by the parts of a group, and by how sure the
estimate was (`train_estimator.py`).

A line of predictions has the model that a group is of, its seconds, whether its operators were measured (`known`),
whether it has several, the seconds that each estimator gave, and the deviation.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from sennit.fuse.compiled_parts import parts_of
from sennit.ir.graph import Graph
from sennit.ir.strategy_check import Kernel

KNOWN = {False: "no operator of it measured", True: "its operators measured one by one"}
SIZES = ("below 3 us", "3 to 10 us", "above 10 us")


def line(name: str, error: Any) -> str:
    within = 100 * float((error <= 0.14).mean())
    return f"  {name:16s} median {100 * np.median(error):6.1f} %   p90 {100 * np.quantile(error, 0.9):6.1f} %   within 14 %: {within:5.1f} %"


def size_class(seconds: float) -> str:
    return SIZES[(seconds >= 3e-6) + (seconds >= 1e-5)]


def show_by_size(lines: list[dict[str, Any]], name: str) -> None:
    """Errors of one estimator by how long groups take, and their share of all seconds; and of groups that are more than
    one operator, which none of the measurements is of.
    """
    for known in sorted({item["known"] for item in lines}):
        mine = [item for item in lines if item["known"] is known]
        classes = {size: [item for item in mine if size_class(item["seconds"]) == size] for size in SIZES}
        classes["several operators"] = [item for item in mine if item["several"]]
        for size, those in classes.items():
            share = sum(item["seconds"] for item in those) / sum(item["seconds"] for item in mine)
            print(f" {name}, {KNOWN[known]}, {size}, {len(those)} groups, {100 * share:.1f} % of the time")
            print(line("", np.array([abs(item[name] / item["seconds"] - 1) for item in those])), flush=True)


def parts_in(text: str) -> str:
    """The sorts of parts that a group becomes."""
    graph = Graph.parse(text)
    found = parts_of(Kernel(graph.ops), frozenset(output.name for output in graph.outputs), graph.types())
    return " and ".join(sorted({part.sort.name for part in found}))


def show_by_parts(lines: list[dict[str, Any]], name: str, least: int = 80) -> None:
    """Errors of groups of several operators by the sorts of parts that they become."""
    several = [item for item in lines if item["several"]]
    sorts = {text: parts_in(text) for text in {item["group"] for item in several}}
    for known in sorted({item["known"] for item in several}):
        classes: dict[str, list[dict[str, Any]]] = {}
        for item in several:
            if item["known"] is known:
                classes.setdefault(sorts[item["group"]], []).append(item)
        for sort, those in sorted(classes.items(), key=lambda pair: -len(pair[1])):
            if len(those) >= least:
                print(f" {name}, {KNOWN[known]}, {sort}, {len(those)} groups")
                print(line("", np.array([abs(item[name] / item["seconds"] - 1) for item in those])), flush=True)


def show_surest(lines: list[dict[str, Any]]) -> None:
    """What is left if the groups with the widest deviation are measured, as the search has it done; and how many of the
    errors above 8 % are among them.
    """
    for known in sorted({item["known"] for item in lines}):
        mine = [item for item in lines if item["known"] is known]
        error = np.array([abs(item["trees and network"] / item["seconds"] - 1) for item in mine])
        order = np.argsort([item["deviation"] for item in mine], kind="stable")
        print(f" trees and network, {KNOWN[known]}, by deviation")
        for share in (1.0, 0.95, 0.9, 0.8):
            print(line(f"surest {100 * share:.0f} %", error[order[: int(share * len(order))]]))
        for share in (0.02, 0.05):
            rest = np.where(np.arange(len(order)) < int((1 - share) * len(order)), error[order], 0.0)
            print(line(f"{100 * share:.0f} % measured", rest))
        for share in (0.1, 0.2):
            wide = error[order[int((1 - share) * len(order)) :]]
            found = 100 * (wide > 0.08).sum() / max(1, (error > 0.08).sum())
            print(f"  of errors above 8 %, {found:.0f} % are in the widest {100 * share:.0f} %")
        fifths = np.array_split(order, 5)
        deviations = np.array([item["deviation"] for item in mine])
        means = [
            f"{100 * deviations[part].mean():.1f} and {100 * np.minimum(error[part], 1).mean():.1f} %"
            for part in fifths
        ]
        print(f"  fifths by deviation, its mean and that of errors: {', '.join(means)}", flush=True)


def show_several_without_products(lines: list[dict[str, Any]], of: str) -> None:
    """Errors on groups of several operators that no library does a part of."""
    several = [item for item in lines if item["several"]]
    sorts = {text: parts_in(text) for text in {item["group"] for item in several}}
    mine = [item for item in several if "LIBRARY" not in sorts[item["group"]]]
    for known in sorted({item["known"] for item in mine}):
        those = [item for item in mine if item["known"] is known]
        print(f" {of}, {KNOWN[known]}, groups of several operators without products, {len(those)} groups")
        for name in ("by parts", "boosted trees", "trees and network"):
            if name in those[0]:
                print(line(name, np.array([abs(item[name] / item["seconds"] - 1) for item in those])), flush=True)
