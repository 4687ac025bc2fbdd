"""One GPU: kernels chosen by the search against those of Inductor's default, for the same graphs, measured.

    python benchmarks/fuse/gpu_fusion.py --graphs FOLDER --weights estimator_h200.pt --only "llama bfloat16" "gpt2 bfloat16" --seconds 230

For each captured training step (forward and backward, no optimizer):

    no fusion              every operator by itself, as torch runs it
    Inductor, phases       the forward pass handed to Inductor as one graph, and the backward pass: as `torch.compile` has to, since other code runs between them
    Inductor               the whole step handed to Inductor as one graph: its default fusion, across the passes too

and on the graph in which cheap forward operators are computed again in the backward pass (`fuse/recompute.py`):

    greedy                 every operator with what it reads, wherever that is legal, each group compiled by itself
    as compiled            the same, with products left to their library
    across                 the same, where a group may reach from the forward into the backward pass (`fuse/one_phase.py`)
    Inductor's groups      the groups that Inductor's scheduler forms, read from it, each compiled by itself
    search                 what the search finds, across the passes too: first by the estimator; then the groups that it chose are compiled and timed, and it searches again with what was measured. The others are seeds
    phases                 a group for each pass

All run as one CUDA graph each, so that the host does not count, and are replayed in turns; the table has the median of
a replay and the quartiles of its ratio to Inductor in the same turn. `chosen` marks the best of ours over replays that
the table does not use. Results are compared with those of "no fusion". With `--kernels` the launches of each are
counted by sort. Random numbers are inputs here: torch draws them in a kernel of their own in all variants. Workers
compile and time groups in parallel, one at a time on the GPU; what they compiled comes from Inductor's cache after
that. With `--device cpu` the same runs on a CPU, without CUDA graphs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

from device_lock import DeviceLock, tune_alone
from gpu_kernels import launched, table
from gpu_subject import Chain, Player, Subject, replayed, without_draws
from gpu_workers import Job, Pool
from workloads import stored_graphs

from sennit.fuse.compare import group_numbers
from sennit.fuse.kernel_cost import Estimate
from sennit.fuse.known_cost import ManyKernels, Question
from sennit.fuse.model import Grouping
from sennit.fuse.moves import AS_COMPILED, Limits, fused_greedily
from sennit.fuse.one_phase import as_one_phase
from sennit.fuse.recompute import recomputed
from sennit.fuse.search import Found, SearchOptions, search
from sennit.ir.graph import Graph, Phase
from sennit.ir.strategy import Strategy
from sennit.ir.strategy_check import Kernel

OURS = ("greedy", "as compiled", "across", "Inductor's groups", "search", "phases")


def phases(graph: Graph) -> Grouping:
    """A group for each phase."""
    found = [
        frozenset(place for place, op in enumerate(graph.ops) if op.phase is each)
        for each in (Phase.FORWARD, Phase.BACKWARD)
    ]
    return Grouping(frozenset(group for group in found if len(group) > 1))


class Scaled:
    """An estimator times a factor: groups in a step take longer than those that it was trained on, whose inputs were in
    the cache.
    """

    def __init__(self, estimator: Any, factor: float) -> None:
        self.estimator, self.factor = estimator, factor

    def estimate(self, kernel: Kernel, written: frozenset[str]) -> Estimate:
        found = self.estimator.estimate(kernel, written)
        return Estimate(self.factor * found.seconds, found.deviation)

    def estimate_all(self, questions: Sequence[Question]) -> list[Estimate]:
        if isinstance(self.estimator, ManyKernels):
            found = self.estimator.estimate_all(questions)
            return [Estimate(self.factor * item.seconds, item.deviation) for item in found]
        return [self.estimate(*question) for question in questions]


class Searched:
    """The search and its measurements on one subject."""

    def __init__(self, subject: Subject, pool: Pool, arguments: Any, deadline: float) -> None:
        self.subject, self.pool, self.arguments, self.deadline = subject, pool, arguments, deadline
        self.asked: set[str] = set()
        self.estimator = subject.cost.estimator
        self.measured: dict[str, float] = {}
        self.ratios: list[float] = []
        self.options = SearchOptions(
            seconds=arguments.search_seconds, tensors=False, across_steps=False, patience=100_000, keep=arguments.keep
        )

    def run(self, seeds: dict[str, Grouping]) -> Grouping:
        """The grouping with the least sum of its groups' times, all of them measured."""
        model = self.subject.model
        found = search(model, self.options, name="search", start=list(seeds.values()))
        print(f"  by the estimator: {1e3 * found.seconds:.3f} ms, {found.tried} candidates", flush=True)
        tried = {name: seed for name, seed in seeds.items() if seed.groups}
        for turn in range(self.arguments.rounds):
            tried |= self.found(found, turn)
            summary = self.measure(tried)
            start = [*seeds.values(), min(tried.values(), key=self.seconds)]
            found = search(model, replace(self.options, seed=turn + 1), name="search", start=start)
            print(f"  {summary}; now {1e3 * found.seconds:.3f} ms, {found.tried} candidates", flush=True)
        tried |= self.found(found, self.arguments.rounds)
        print(f"  {self.measure(tried)}", flush=True)
        for name, grouping in tried.items():
            print(f"    {name:18s} {1e3 * self.seconds(grouping):.3f} ms by its groups' times", flush=True)
        return min(tried.values(), key=self.seconds)

    def found(self, found: Found, turn: int) -> dict[str, Grouping]:
        strategies = [found.strategy, *(strategy for strategy, _ in found.others)]
        model = self.subject.model
        return {f"search {turn}.{place}": group_numbers(model, item) for place, item in enumerate(strategies)}

    def seconds(self, grouping: Grouping) -> float:
        return self.subject.model.step_time(grouping, ()).seconds

    def measure(self, groupings: dict[str, Grouping]) -> str:
        """Time the groups that were not timed yet, and scale the estimates of all others by what that says."""
        start = time.monotonic()
        wanted: dict[str, Job] = {}
        for name, grouping in groupings.items():
            for question in self.subject.questions(self.subject.model.strategy(name, grouping, ())):
                job = self.subject.job(*question)
                if job.key not in self.asked:
                    wanted[job.key] = job
        allowed = min(self.deadline, start + self.arguments.measure_seconds)
        new = self.pool.run(list(wanted.values()), allowed)
        self.asked.update(wanted)
        errors = []
        for key, seconds in new.items():
            guess = self.estimator.estimate(wanted[key].kernel, wanted[key].written).seconds
            if seconds > 0 and guess > 0:
                errors.append(abs(guess - seconds) / seconds)
                self.ratios.append(seconds / guess)
        self.measured.update(new)
        factor = statistics.median(self.ratios) if self.ratios else 1.0
        cost = self.subject.cost
        cost.estimator = Scaled(self.estimator, factor)
        cost.answers = {key: Estimate(seconds) for key, seconds in self.measured.items()}
        self.subject.model.forget()
        off = f", estimates off by {100 * statistics.median(errors):.1f} % in the median" if errors else ""
        return f"measured {len(new)} groups in {time.monotonic() - start:.0f} s{off}, times {factor:.2f}"


def study(name: str, graph: Graph, pool: Pool, arguments: Any, deadline: float) -> None:
    from sennit.fuse.inductor_groups_torch import inductor_groups

    made = (arguments.device, arguments.weights, arguments.cluster)
    plain = Subject(name, graph, *made)
    again = recomputed(graph)
    ours = Subject(name, as_one_phase(again), *made)
    of_phases = Subject(name, again, *made)
    ours.reference = of_phases.reference = plain.reference
    model = ours.model
    print(f"{name}: {len(graph.ops)} operators, {len(model.ops)} with those that are computed again", flush=True)
    apart = plain.model.strategy("phases", phases(graph), ())
    halves = of_phases.model.strategy("phases", phases(again), ())
    for subject, strategy in ((plain, apart), (of_phases, halves)):
        for question in subject.questions(strategy):
            pool.jobs.put(subject.job(*question, timed=False))  # into the cache, while the search goes on
    pool.jobs.put(plain.whole())
    groupings = {
        "greedy": fused_greedily(of_phases.model, Limits()),
        "as compiled": fused_greedily(of_phases.model, AS_COMPILED),
        "across": fused_greedily(model, AS_COMPILED),
    }
    start = time.monotonic()
    if arguments.inductor_groups:
        groupings["Inductor's groups"] = inductor_groups(of_phases.model, ours.values)
        print(f"  Inductor's groups read in {time.monotonic() - start:.0f} s", flush=True)
    seeds = {**groupings, "no fusion": Grouping()}
    best = Searched(ours, pool, arguments, deadline).run(seeds)
    start = time.monotonic()
    chains: dict[str, Chain] = {"no fusion": plain.chain(Strategy("none"), compiled=False)}
    for title, grouping in groupings.items():
        chains[title] = ours.chain(model.strategy(title, grouping, ()), compiled=True)
    chains["search"] = ours.chain(model.strategy("search", best, ()), compiled=True)
    chains["phases"] = of_phases.chain(halves, compiled=True)
    chains["Inductor, phases"] = plain.chain(apart, compiled=True)
    chains["Inductor"] = plain.whole_chain()
    print(f"  compiled in {time.monotonic() - start:.0f} s", flush=True)
    report(plain, chains, arguments)


def report(subject: Subject, chains: dict[str, Chain], arguments: Any) -> None:
    players = {name: Player(subject, chain) for name, chain in chains.items()}
    first = {name: statistics.median(times) for name, times in replayed(players, arguments.replays).items()}
    chosen = min((name for name in first if name in OURS), key=lambda name: first[name])
    times = replayed(players, arguments.replays)
    best = statistics.median(times["Inductor"])
    rows = []
    for name, player in players.items():
        seconds = statistics.median(times[name])
        ratios = [its / own for its, own in zip(times["Inductor"], times[name], strict=True)]
        low, _, high = statistics.quantiles(ratios, n=4)
        mark = "  <- chosen" if name == chosen else ""
        print(
            f"  {name:18s} {1e3 * seconds:9.3f} ms   {best / seconds:6.3f} x Inductor ({low:.3f} to {high:.3f})   {player.kernels:5d} calls   results differ by {player.off:.1e}{mark}",
            flush=True,
        )
        rows.append({"name": name, "seconds": seconds, "ratios": [low, high], "chosen": name == chosen})
    if arguments.kernels is not None:
        shown = {name: launched(chain, subject.inputs) for name, chain in chains.items() if name != "no fusion"}
        print(table(shown), flush=True)
        with arguments.kernels.open("a") as out:
            out.write(json.dumps({"graph": subject.name, "rows": rows, "kernels": shown}) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graphs", type=Path, required=True)
    parser.add_argument("--weights", type=Path)
    parser.add_argument("--only", nargs="+", default=["llama bfloat16", "gpt2 bfloat16", "vit bfloat16"])
    parser.add_argument("--seconds", type=float, default=230.0, help="no further graph is begun after this")
    parser.add_argument("--search-seconds", type=float, default=6.0)
    parser.add_argument("--measure-seconds", type=float, default=30.0)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--keep", type=int, default=4, help="strategies of a search whose groups are measured")
    parser.add_argument("--inductor-groups", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--replays", type=int, default=30)
    parser.add_argument("--workers", type=int, default=12)
    parser.add_argument("--kernels", type=Path, help="a file for every kernel that each variant launches")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--cluster", default="h200x8", help="the cluster description whose device this is")
    arguments = parser.parse_args()
    deadline = time.monotonic() + arguments.seconds
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{folder}/inductor"  # shared with the workers
        lock = f"{folder}/lock"
        pool = Pool(arguments.workers, arguments.device, lock)
        tune_alone(DeviceLock(lock))  # what is compiled here, Inductor's default too
        try:
            graphs = {name: graph for name, graph in stored_graphs(arguments.graphs) if name in arguments.only}
            for name in arguments.only:
                if time.monotonic() > deadline:
                    print(f"{name}: no time left", flush=True)
                    continue
                study(name, without_draws(graphs[name]), pool, arguments, deadline + 60)
        finally:
            pool.stop()


if __name__ == "__main__":
    main()
