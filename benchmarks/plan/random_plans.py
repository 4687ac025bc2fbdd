"""Random plans against the serial run, and random faults against the proof.

    python benchmarks/plan/random_plans.py --count 2000                 # in one process, one thread a device
    python benchmarks/plan/random_plans.py --count 0 --processes 100    # on real gloo ranks
    python benchmarks/plan/random_plans.py --count 0 --faults 10000     # one thing changed: refused, or equal when run
    python benchmarks/plan/random_plans.py --stages                     # stages that share devices, reordered, of unequal meshes

A plan is drawn from its seed for a family in turn (`sennit.testing.families_torch`), completed, lowered, proved with
every rule certified, and run in float64 with dropout on. Every gradient, loss and buffer is compared with the graph run
whole: bitwise if no axis is larger than one, else to 1e-12 of the largest value. A fault that the proof accepts is run;
it must be equal to the serial run. The last lines are what the documents state.
"""

from __future__ import annotations

import argparse
import copy
import random
import sys
import time
import warnings
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from sennit.capture import capture_call
from sennit.capture.rules.certify import Certifier
from sennit.environment import current_environment
from sennit.errors import SennitError
from sennit.ir.graph import Graph
from sennit.ir.program import Program
from sennit.plan import lower
from sennit.plan.verify import verify
from sennit.run import LocalRanks, run_in_process
from sennit.testing.eager_torch import Float64
from sennit.testing.families_torch import families
from sennit.testing.faults import random_fault
from sennit.testing.graph_torch import run_graph_torch
from sennit.testing.parity_torch import state_of
from sennit.testing.random_plans import random_decisions, trained

TOLERANCE = 1e-12


@dataclass(frozen=True, slots=True)
class Subject:
    """A family's graph, what it is fed, and what it computes whole; whether its stages are to lie anywhere."""

    name: str
    graph: Graph
    state: Mapping[str, Tensor]
    reference: Mapping[str, Tensor]
    anywhere: bool


def subjects(names: list[str], anywhere: bool) -> list[Subject]:
    found = []
    for name in names:
        family = families()[name]
        sample = family.build(family.layers)
        model = copy.deepcopy(sample.model).train()
        with Float64():
            captured = capture_call(model, (), sample.kwargs, training=True)
        graph = trained(captured.graph)
        state = state_of(captured, model, sample.kwargs, 5, 9)
        found.append(Subject(name, graph, state, run_graph_torch(graph, state), anywhere))
        print(f"captured {name}: {len(graph.ops)} operators", flush=True)
    return found


def difference(subject: Subject, outputs: Mapping[str, Tensor]) -> float:
    """The largest, relative to the largest value of each output."""
    worst = 0.0
    for key, whole in subject.reference.items():
        scale = max(1.0, float(whole.double().abs().max())) if whole.numel() else 1.0
        found = float((outputs[key].double() - whole.double()).abs().max()) / scale if whole.numel() else 0.0
        worst = max(worst, found if found == found else float("inf"))
    return worst


def program_of(subject: Subject, seed: int, certifier: Certifier, devices: int) -> Program:
    program = lower(
        random_decisions(
            subject.graph, random.Random(seed), devices=devices, anywhere=True if subject.anywhere else None
        )
    )
    verify(program, subject.graph, certifier=certifier)
    return program


def run_plans(chosen: list[Subject], count: int, first: int, certifier: Certifier) -> int:
    failed, worst, devices, bitwise = 0, 0.0, Counter[int](), 0
    started = time.perf_counter()
    for number in range(count):
        subject, seed = chosen[number % len(chosen)], first + number
        try:
            program = program_of(subject, seed, certifier, 8)
            found = difference(subject, run_in_process(program, subject.state))
        except SennitError as error:
            failed += 1
            print(f"seed {seed} {subject.name}: {type(error).__name__}: {error}", flush=True)
            continue
        devices[len(program.devices)] += 1
        bitwise += found == 0.0
        worst = max(worst, found)
        if found > TOLERANCE:
            failed += 1
            print(f"seed {seed} {subject.name}: differs by {found:.3g}", flush=True)
        if (number + 1) % 100 == 0:
            print(
                f"{number + 1} plans, {failed} failed, worst {worst:.3g}, {time.perf_counter() - started:.0f} s",
                flush=True,
            )
    print(
        f"{count} random plans of {len(chosen)} families in one process: {failed} failed, largest difference {worst:.3g}, "
        f"{bitwise} bitwise equal, devices {dict(sorted(devices.items()))}, {certifier.tried} ways certified now"
    )
    return failed


def run_processes(chosen: list[Subject], count: int, first: int, certifier: Certifier) -> int:
    failed, worst, done, number = 0, 0.0, 0, 0
    with LocalRanks(4) as ranks:
        while done < count:
            subject, seed = chosen[number % len(chosen)], first + number
            number += 1
            program = program_of(subject, seed, certifier, 4)
            if len(program.devices) != 4:
                continue  # the ranks that are there are all to take part
            found = difference(subject, ranks.run(program, dict(subject.state)).outputs)
            worst, done = max(worst, found), done + 1
            if found > TOLERANCE:
                failed += 1
                print(f"seed {seed} {subject.name}: differs by {found:.3g} on processes", flush=True)
    print(f"{count} random plans on 4 gloo processes: {failed} failed, largest difference {worst:.3g}")
    return failed


def run_faults(chosen: list[Subject], count: int, first: int) -> int:
    """Refused, or equal when run: anything else is a hole in the proof."""
    kinds, same, wrong, made, seed = Counter[str](), Counter[str](), 0, 0, first
    certifier = Certifier(current_environment().cache_dir)
    programs: list[tuple[Subject, Program]] = []
    while made < count:
        if made % 50 == 0 or not programs:
            subject = chosen[(made // 50) % len(chosen)]
            programs = [(subject, program_of(subject, seed, certifier, 8))]
        subject, program = programs[0]
        seed += 1
        fault = random_fault(program, random.Random(seed))
        if fault is None:
            continue
        made += 1
        kinds[fault.kind] += 1
        if made % 100 == 0:
            print(f"{made} faults, {sum(same.values())} accepted, {wrong} of them wrong", flush=True)
        try:
            verify(fault.program, subject.graph)
        except SennitError:
            continue
        same[fault.kind] += 1
        found = difference(subject, run_in_process(fault.program, subject.state, timeout=30.0))
        if found > TOLERANCE:
            wrong += 1
            print(f"seed {seed} {subject.name}: accepted, and differs by {found:.3g}: {fault.what}", flush=True)
    print(
        f"{count} faults: {count - sum(same.values())} refused, {sum(same.values())} accepted and equal when run but for {wrong}"
    )
    print(f"  made {dict(sorted(kinds.items()))}")
    print(f"  accepted {dict(sorted(same.items()))}")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--count", type=int, default=200, help="plans in one process")
    parser.add_argument("--processes", type=int, default=0, help="plans on real gloo ranks")
    parser.add_argument("--faults", type=int, default=0, help="programs with one thing changed")
    parser.add_argument(
        "--stages", action="store_true", help="only plans whose stages share devices and have any meshes"
    )
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--families", default="", help="names, separated by commas; all without")
    options = parser.parse_args()
    warnings.simplefilter("ignore")  # those of the libraries that the models come from
    torch.set_num_threads(1)
    names = options.families.split(",") if options.families else list(families())
    chosen = subjects(names, options.stages)
    certifier = Certifier(current_environment().cache_dir)
    failed = 0
    if options.count:
        failed += run_plans(chosen, options.count, options.seed, certifier)
    if options.processes:
        failed += run_processes(chosen, options.processes, options.seed, certifier)
    if options.faults:
        failed += run_faults(chosen, options.faults, options.seed)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
