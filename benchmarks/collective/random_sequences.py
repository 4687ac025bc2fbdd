"""Random sequences of collective calls on gloo and on sennit, in the same processes: are the results equal?

    python benchmarks/collective/random_sequences.py --count 5000 --ranks 4 [--hosts 2]

Sequence i is made from seed `--seed` + i, alike on all ranks (`tests/runtime/random_calls.py` says how, and what counts
as equal), so one that differs can be repeated alone with `--seed THAT --count 1`. Ends with status 1 if any differs.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "runtime"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

import random_calls

import sennit.backend
from sennit.cluster.ranks_torch import GlooRanks
from sennit.collective.runtime import group_torch

BATCH = 250  # sequences between two lines of output; each batch has new groups


def compare(rank: int, first: int, count: int, hosts: int) -> tuple[int, list[str]]:
    if hosts > 1:
        group_torch.host_identity = lambda: f"host {rank % hosts}"
    warnings.simplefilter("ignore", FutureWarning)  # all_reduce_coalesced is deprecated, and still called by programs
    sennit.backend.register()
    return random_calls.compare_many(rank, first, count, groups_every=50)


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare the sennit backend with gloo on random sequences of calls.")
    parser.add_argument("--count", type=int, default=5000, help="sequences")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first one")
    parser.add_argument("--ranks", type=int, default=4, help="processes")
    parser.add_argument(
        "--hosts", type=int, default=1, help="let ranks believe to be on so many hosts: sockets between them"
    )
    arguments = parser.parse_args()
    start, calls, wrong = time.monotonic(), 0, 0
    with GlooRanks(arguments.ranks, timeout=3600.0, preload=("sennit.collective.runtime.group_torch",)) as ranks:
        for first in range(arguments.seed, arguments.seed + arguments.count, BATCH):
            count = min(BATCH, arguments.seed + arguments.count - first)
            answers = ranks.call(compare, first, count, arguments.hosts)
            calls += sum(made for made, _ in answers)
            for line in (line for _, found in answers for line in found):
                wrong += 1
                print(line)
            done = first + count - arguments.seed
            print(
                f"{done} sequences, {calls} calls by ranks, {wrong} differ, {time.monotonic() - start:.0f} s",
                flush=True,
            )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
