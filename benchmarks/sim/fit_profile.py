"""Fits a profile to what profile_h200.py measured, and writes it into the package.

    python benchmarks/sim/fit_profile.py h200-profile.json --cluster h200x8 --out src/sennit/cost/profiles/h200.json

All rows are used, of the grid and of the operators of whole steps; accuracy.py fits without those that it predicts.
Prints each family with the number of its points and the error of leaving one out.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from math import exp, log
from pathlib import Path
from typing import Any

import msgspec
from measured_rows import Reader

from sennit.cluster import load
from sennit.cost.profile import Family, Reference, fit_family, lower_bound
from sennit.cost.work import Work, works

FEWEST = 3  # points of a family
UNSURE = ("index_put", "index_put_", "_index_put_impl_", "index", "gather", "scatter_add")  # indices were all 0


@dataclass(frozen=True, slots=True)
class Point:
    """A measured call: `key` names it, as a step's calls are named."""

    key: str
    work: Work
    seconds: float


def measured(rows: list[dict[str, Any]], reader: Reader) -> Iterator[Point]:
    """The rows that are one work each. Those whose indices the profiler could not choose well are left out."""
    for row in rows:
        if "args" not in row or row.get("tf32") or "seconds" not in row or row["op"].split(".")[1] in UNSURE:
            continue
        call = reader.call(row["op"], row["args"], row.get("kwargs"), row.get("causal"))
        if call is None or not call.step.results:
            continue
        found = works(call.step, call.types, call.orders)
        if len(found) == 1:
            yield Point(json.dumps([row["op"], row["args"], row.get("kwargs")]), found[0], row["seconds"])


def fit(
    points: list[Point], reference: Reference, like: Mapping[str, Family] | None = None, only: Set[str] | None = None
) -> list[Family]:
    """A family for each name with enough points; `like` gives lengths and noises, `only` the names that are wanted."""
    families: dict[str, dict[tuple[float, ...], list[float]]] = defaultdict(lambda: defaultdict(list))
    own = {point.work.family for point in points}
    for point in points:
        work = point.work
        ratio = point.seconds / lower_bound(work, reference)
        families[work.family][work.features].append(ratio)
        if work.general is not None and work.general not in own:  # a pool of several families
            families[work.general][work.features].append(ratio)
    fitted = []
    for name, found in sorted(families.items()):
        if only is not None and name not in only:
            continue
        if len(found) >= FEWEST and len({len(key) for key in found}) == 1:
            # several members at one place: their geometric mean
            ratios = [float(_mean(values)) for values in found.values()]
            fitted.append(fit_family(name, list(found), ratios, (like or {}).get(name)))
    return fitted


def _mean(values: list[float]) -> float:
    return exp(sum(map(log, values)) / len(values))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measured", type=Path)
    parser.add_argument("--cluster", default="h200x8")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    result = json.loads(options.measured.read_text(encoding="utf-8"))
    device = load(options.cluster).device
    reference = Reference.of(device)
    points = list(measured([*result["rows"], *result["replayed"]], Reader()))
    families = fit(points, reference)
    print(f"{result['about']['device']}, torch {result['about']['torch']}: {len(points)} points")
    print("| family | points | half within | nine tenths within | length |\n|---|---|---|---|---|")
    for item in families:
        print(
            f"| {item.name} | {len(item.points)} | {item.median_error:.1%} | {item.most_error:.0%} | {item.length:g} |"
        )
    if options.out is not None:
        about = result["about"]
        where = f"{about['device']}, torch {about['torch']}, CUDA {about['cuda']}, benchmarks/sim/profile_h200.py"
        file = {"device": device.kind, "where": where, "reference": reference, "families": families}
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_bytes(msgspec.json.encode(file))
        print(f"{options.out}: {options.out.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
