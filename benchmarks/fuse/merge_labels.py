"""Labels of a group become one: the median of those that are near the shortest.

    python benchmarks/fuse/merge_labels.py first.jsonl.gz second.jsonl.gz [...] --out merged.jsonl.gz

A label is made from the start each time, with Inductor's choice of configurations, and that choice is sometimes the
wrong one: two labels of one group are mostly a percent apart, and now and then by a factor of two. So the label is the
median of those that are within `APART` of the shortest, which is what tuning was after; of two the geometric mean.
`labels` of a line of the result has the seconds of all, and a file that was merged before counts with all that it has.
With `--look-ups-anew` a group or operator whose inputs are indices (`look_up_indices.py`) has the labels of the files
behind the first alone: those of the first were made with zeros for indices.

Lines are matched by what was timed (`signature.py`), so that names of values do not matter; a line that the first file
does not have is added, but not with `--known`.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import sys
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

from label_groups import drawn_of, rows_of
from look_up_indices import index_limits

from sennit.fuse.signature import signature

APART = 0.15


def key_of(row: dict[str, Any]) -> tuple[str, bool]:
    """What was timed, and whether it looks something up."""
    drawn = drawn_of(row["graph"])
    looks_up = any(limit > 1 for limit in index_limits(drawn.kernel, drawn.types).values())
    return signature(drawn.kernel, drawn.written, drawn.types), looks_up


def merged(paths: list[Path], anew: bool, known: bool) -> list[dict[str, Any]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for place, path in enumerate(paths):
        for row in rows_of(path):
            key, looks_up = key_of(row)
            if known and place > 0 and key not in found:
                continue
            mine = found.setdefault(key, [])
            if place == 1 and anew and looks_up:
                mine.clear()
            mine.append(row)
    rows = []
    for labels in found.values():
        shortest = min(labels, key=lambda row: row["seconds"])
        times = [seconds for row in labels for seconds in row.get("labels", (row["seconds"],))]
        near = [seconds for seconds in times if seconds <= (1 + APART) * min(times)]
        factor = math.exp(median(map(math.log, near))) / shortest["seconds"]
        row = {**labels[0], **shortest, "graph": labels[0]["graph"], "seconds": factor * shortest["seconds"]}
        row["quartiles"] = [factor * seconds for seconds in shortest["quartiles"]]
        rows.append({**row, "labels": [float(f"{seconds:.4g}") for seconds in times]})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("labels", type=Path, nargs="+")
    parser.add_argument("--look-ups-anew", action="store_true", help="the first file's look-ups are not to be used")
    parser.add_argument("--known", action="store_true", help="only what the first file has")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    rows = merged(arguments.labels, arguments.look_ups_anew, arguments.known)
    with gzip.open(arguments.out, "wt") as out:
        out.writelines(json.dumps(row) + "\n" for row in rows)
    twice = sum(len(row["labels"]) > 1 for row in rows)
    print(f"{len(rows)} lines, {twice} of them with several labels")


if __name__ == "__main__":
    main()
