"""Two labels of a group become one: the shorter, which is what tuning was after.

    python benchmarks/fuse/merge_labels.py first.jsonl.gz second.jsonl.gz [...] --out merged.jsonl.gz

A label is made from the start each time, with Inductor's choice of configurations, and that choice is sometimes the wrong one: two labels of one group are mostly a percent apart, and now and then by a factor of two. What the device did beside it
can only lengthen a time, too. So of two labels the shorter counts. `labels` of a line of the result has the seconds of both. A group or operator whose inputs are indices (`look_up_indices.py`) has labels of the files behind the first alone: the first was made with zeros for indices, if `--look-ups-anew` says so.

Lines are matched by what was timed (`signature.py`), so that names of values do not matter; a line that the first file does not have is added.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

from label_groups import drawn_of, rows_of
from look_up_indices import index_limits

from sennit.fuse.signature import signature


def key_of(row: dict[str, Any]) -> tuple[str, bool]:
    """What was timed, and whether it looks something up."""
    drawn = drawn_of(row["graph"])
    looks_up = any(limit > 1 for limit in index_limits(drawn.kernel, drawn.types).values())
    return signature(drawn.kernel, drawn.written, drawn.types), looks_up


def merged(paths: list[Path], anew: bool) -> list[dict[str, Any]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for place, path in enumerate(paths):
        for row in rows_of(path):
            key, looks_up = key_of(row)
            mine = found.setdefault(key, [])
            if place == 1 and anew and looks_up:
                mine.clear()
            mine.append(row)
    rows = []
    for labels in found.values():
        shortest = min(labels, key=lambda row: row["seconds"])
        seconds = [float(f"{row['seconds']:.4g}") for row in labels]
        rows.append({**labels[0], **shortest, "graph": labels[0]["graph"], "labels": seconds})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("labels", type=Path, nargs="+")
    parser.add_argument("--look-ups-anew", action="store_true", help="the first file's look-ups are not to be used")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    rows = merged(arguments.labels, arguments.look_ups_anew)
    with gzip.open(arguments.out, "wt") as out:
        out.writelines(json.dumps(row) + "\n" for row in rows)
    twice = sum(len(row["labels"]) > 1 for row in rows)
    print(f"{len(rows)} lines, {twice} of them with several labels")


if __name__ == "__main__":
    main()
