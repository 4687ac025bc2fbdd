"""Torch's own tests of c10d backends on gloo and on sennit: which pass on both, and why the others do not.

    python benchmarks/collective/torch_suite.py [--ranks 3 4 8] [--jobs 4]

`tests/runtime/torch_suite.py` runs the tests, and says what is other than in torch's own run of them. `moved` are tests of
GPUs, on the CPU. A test that fails on both alike, or passes on sennit alone, is listed with the end of what it said on
gloo. With two ranks, most tests of sub-groups fail: they name
rank 2. Takes two minutes for each number of ranks; ends with status 1 if a test passes on gloo and not on sennit, and
no reason is known.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "runtime"))

import torch
import torch_suite

Found = dict[str, dict[str, str]]  # by test: what `torch_suite.py` prints
OUTCOMES = ("passed", "failed", "skipped")
WIDTH = 110


def run(backend: str, ranks: int, moved: bool, jobs: int) -> Found:
    command = [sys.executable, torch_suite.__file__, "--backend", backend]
    command += ["--ranks", str(ranks), "--jobs", str(jobs), *(["--moved"] if moved else [])]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return {found["test"]: found for found in map(json.loads, done.stdout.splitlines())}


def differences(gloo: Found, sennit: Found) -> Iterator[tuple[str, bool]]:
    """A line for each test that did not pass on both, or skip on both; and whether its reason is unknown."""
    for name in sorted(gloo):
        one, other = gloo[name]["outcome"], sennit[name]["outcome"]
        if one == other != "failed":
            continue
        if one == "failed":
            why = f"gloo: {_last_words(gloo[name]['why'])}"
        else:
            why = torch_suite.DIFFERENCES.get(name, f"NOT KNOWN: {_last_words(sennit[name]['why'])}")
        yield (
            f"    {name}: {one} on gloo, {other} on sennit; {why}",
            one == "passed" and name not in torch_suite.DIFFERENCES,
        )


def _last_words(why: str) -> str:
    before_hints = why.split("\nTo execute this test")[0]
    return before_hints.strip().splitlines()[-1][:WIDTH]


def main() -> int:
    parser = argparse.ArgumentParser(description="Run torch's tests of c10d backends on gloo and on sennit.")
    parser.add_argument("--ranks", type=int, nargs="+", default=[3, 4, 8], help="processes of each test")
    parser.add_argument("--jobs", type=int, default=4, help="tests at a time")
    arguments = parser.parse_args()
    unknown = 0
    print(f"torch {torch.__version__}; outcomes on gloo / on sennit")
    for ranks in arguments.ranks:
        for moved in (False, True):
            gloo, sennit = (run(backend, ranks, moved, arguments.jobs) for backend in ("gloo", "sennit"))
            both = sum(gloo[name]["outcome"] == sennit[name]["outcome"] == "passed" for name in gloo)
            counts = [
                " / ".join(str(sum(each["outcome"] == outcome for each in found.values())) for found in (gloo, sennit))
                for outcome in OUTCOMES
            ]
            told = ", ".join(f"{outcome} {count}" for outcome, count in zip(OUTCOMES, counts, strict=True))
            print(
                f"{ranks} ranks{', moved' if moved else ''}: {len(gloo)} tests; {told}; passed on both {both}",
                flush=True,
            )
            for line, is_unknown in differences(gloo, sennit):
                unknown += is_unknown
                print(line, flush=True)
    return 1 if unknown else 0


if __name__ == "__main__":
    sys.exit(main())
