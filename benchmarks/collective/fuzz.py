"""Random legal programs through both lowerings, their verifiers and interpreters, and mutants through the verifiers.

    python benchmarks/collective/fuzz.py --count 100000 --jobs 16

Program number i is made from seed `--seed` + i, so a failure can be repeated alone with `--seed THAT --count 1`. The
programs are those of `tests/collective_verify/random_programs.py`: 2 to 8 ranks, up to 60 moves; every fourth is of
`random_switch_programs.py`, for a multicast switch. A failing program is shrunk and printed in its text form, and
written to `--keep` if given. Ends with status 1 if any program fails or a mutant is missed.
"""

from __future__ import annotations

import argparse
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "collective_verify"))

from fuzz_round import Findings, fault_of, fuzz_round, program_of, shrink
from mutants import KINDS as SCHEDULE_KINDS
from one_sided_mutants import ONE_SIDED_KINDS

KINDS = (*SCHEDULE_KINDS, *ONE_SIDED_KINDS)
BATCH = 50  # programs that a worker does at a time


def run_batch(first: int, count: int, mutants: int) -> Findings:
    found = Findings()
    for seed in range(first, first + count):
        found.add(fuzz_round(seed, mutants))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description="Fuzz the collective compiler and its verifier.")
    parser.add_argument("--count", type=int, default=2000, help="programs")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first program")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--mutants", type=int, default=1, help="mutants tried for each program")
    parser.add_argument("--keep", type=Path, help="folder for failing programs")
    options = parser.parse_args()
    started = time.perf_counter()
    total = Findings()
    starts = range(options.seed, options.seed + options.count, BATCH)
    sizes = [min(BATCH, options.seed + options.count - first) for first in starts]
    with ProcessPoolExecutor(options.jobs) as pool:
        for found in pool.map(run_batch, starts, sizes, [options.mutants] * len(sizes)):
            total.add(found)
            if sys.stderr.isatty():
                print(f"\r{total.programs} of {options.count} programs", end="", file=sys.stderr)
    report(total, time.perf_counter() - started)
    for seed, fault in total.failures[:5]:
        report_failure(seed, fault, options.keep)
    return 1 if total.failures else 0


def report(total: Findings, seconds: float) -> None:
    moves = total.moves / max(1, total.programs)
    print(f"{total.programs} programs of {moves:.1f} moves on average, {len(total.failures)} failures, {seconds:.1f} s")
    print(f"{'mutants':<26}{'caught':>10}{'equivalent':>12}{'missed':>8}")
    outcomes = ("caught", "equivalent", "missed")
    for kind in KINDS:
        counts = [total.mutants[kind, outcome] for outcome in outcomes]
        print(f"{kind:<26}{counts[0]:>10}{counts[1]:>12}{counts[2]:>8}")
    sums = [sum(total.mutants[kind, outcome] for kind in KINDS) for outcome in outcomes]
    print(f"{'all':<26}{sums[0]:>10}{sums[1]:>12}{sums[2]:>8}")


def report_failure(seed: int, fault: str, keep: Path | None) -> None:
    print(f"\nprogram {seed}: {fault}")
    algorithm = program_of(seed)
    if fault_of(algorithm):
        algorithm = shrink(algorithm)
        print(f"shrunk to {len(algorithm.moves)} moves: {fault_of(algorithm)}\n{algorithm}")
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        (keep / f"program{seed}.txt").write_text(str(algorithm), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
