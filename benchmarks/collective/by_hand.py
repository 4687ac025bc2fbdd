"""The collectives of `by_hand.c`, run and kept: what programs reach that are written for one machine, one size and one
way.

    python benchmarks/collective/by_hand.py [--ranks 8 4] [--collectives all] [--more] [--json F]

Prints, for each collective and size, the least of the ways that any program has, which of them it was, the least of
each kind, and `open`: arrays that all ranks map, which users do not bring. Each runs alone, its arrays in the cache
where they fit: `peers.py` runs the same programs in turns with other libraries.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent


class Row(NamedTuple):
    ranks: int
    collective: str
    bytes: int
    way: str
    microseconds: float

    @property
    def is_open(self) -> bool:
        """Not to be had with arrays of users: shared by all ranks, or in huge pages where theirs are not."""
        return self.way.startswith(("open", "pulled_"))


def measured(program: Path, ranks: int, more: bool, only: str) -> Iterator[Row]:
    done = subprocess.run(
        [program, str(ranks), str(int(more)), only], capture_output=True, text=True, timeout=600, check=True
    )
    for line in done.stdout.splitlines():
        if line.startswith("#"):
            print("   " + line)
            continue
        name, size, way, microseconds = line.split()
        yield Row(ranks, name, int(size), way, float(microseconds))


def least(rows: list[Row], prefix: str = "") -> Row | None:
    found = [row for row in rows if row.way.startswith(prefix)]
    return min(found, key=lambda row: row.microseconds) if found else None


def show(rows: list[Row]) -> None:
    print(f"\n{rows[0].ranks} ranks, microseconds")
    print(f"{'':16}{'':12}{'least':>9}  {'by':26}{'staged':>9}{'pulled':>9}{'summed':>9}{'open':>9}")
    for name, size in dict.fromkeys((row.collective, row.bytes) for row in rows):
        here = [row for row in rows if (row.collective, row.bytes) == (name, size)]
        best = least([row for row in here if not row.is_open])
        assert best is not None
        pulled = least([row for row in here if not row.is_open], "pulled")
        kinds = [least(here, "staged"), pulled, least(here, "summed"), least(here, "open")]
        cells = "".join(f"{kind.microseconds:9.1f}" if kind else f"{'-':>9}" for kind in kinds)
        print(f"{name:16}{size >> 10:8d} KiB{best.microseconds:9.1f}  {best.way:26}{cells}")


def main() -> int:
    parser = argparse.ArgumentParser(description="Collectives written by hand.")
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 4])
    parser.add_argument("--collectives", nargs="+", default=["all"], help="names of by_hand.c, or all")
    parser.add_argument("--more", action="store_true", help="more kinds of staging")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    print(f"{len(os.sched_getaffinity(0))} cores, {platform.machine()}, load before {os.getloadavg()[0]:.1f}")
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="sennit-by-hand-") as folder:
        program = Path(folder) / "by_hand"
        subprocess.run(["cc", "-O3", "-march=native", "-o", program, HERE / "by_hand.c"], check=True)
        for ranks in options.ranks:
            found = [row for only in options.collectives for row in measured(program, ranks, options.more, only)]
            show(found)
            rows += found
    if options.json is not None:
        options.json.write_text(json.dumps([row._asdict() for row in rows], indent=1), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
