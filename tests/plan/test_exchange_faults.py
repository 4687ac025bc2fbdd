"""Exchanges with one thing changed (left out, swapped, another label, side, mesh, region or lane) are refused before
they run, or change nothing that matters.
"""

from __future__ import annotations

import random

import pytest

from sennit.errors import PlanError, SennitError
from sennit.ir.mesh import Mesh
from sennit.ir.program import Exchange, Program
from sennit.plan import lower, propagate, zoo
from sennit.plan.verify import verify
from sennit.run import run_in_process
from sennit.testing.faults import Fault, random_fault

LAYERS = ("blocks.0", "blocks.1")


@pytest.fixture(scope="module")
def interlaced(small_gpt) -> tuple[Program, object]:
    plan = zoo.interlaced(small_gpt.graph, Mesh.parse("pp=2,dp=2;mb=2"), layers=LAYERS)
    program = lower(propagate(plan))
    verify(program, plan.graph)
    return program, plan.graph


def concerns_exchanges(fault: Fault, program: Program) -> bool:
    def exchanges(of: Program) -> list[tuple[int, Exchange]]:
        """A collective that changes places with an exchange moves it; whatever is dropped before it does not count."""
        found = [(at, step) for lane in of.lanes for at, step in enumerate(lane.steps) if isinstance(step, Exchange)]
        return found if fault.kind == "swap" else [(0, step) for _, step in found]

    return exchanges(fault.program) != exchanges(program)


@pytest.mark.usefixtures("single_core")
def test_faults_on_exchanges_are_refused_or_change_nothing(interlaced, small_gpt) -> None:
    program, graph = interlaced
    made, refused, kinds = 0, 0, set()
    for seed in range(3000):
        fault = random_fault(program, random.Random(seed))
        if fault is None or fault.kind in ("order", "free") or not concerns_exchanges(fault, program):
            continue
        made += 1
        kinds.add(fault.kind)
        try:
            verify(fault.program, graph)
        except SennitError:
            refused += 1
        else:
            differences = small_gpt.differences(run_in_process(fault.program, small_gpt.state))
            assert max(differences.values()) <= 1e-12, fault.what
        if made == 60:
            break
    assert made == 60
    assert refused >= 55
    assert {"drop", "swap", "label", "side", "peer"} <= kinds


def test_an_operator_on_two_meshes_is_refused(interlaced) -> None:
    """Axes of one name on two meshes have nothing to do with each other: what was not taken is not read."""
    program, graph = interlaced
    text = str(program)
    line = next(line for line in text.splitlines() if "sennit.take(" in line)
    taken, source = line.split("%")[1].split(" ")[0], line.rsplit("(%", 1)[1].split(")")[0]
    changed = text.replace(f"{line}\n", "", 1).replace(f"%{taken},", f"%{source},").replace(f"%{taken})", f"%{source})")
    frees = [row for row in changed.splitlines() if row.strip() in (f"free %{taken}", f"free %{source}")]
    for row in frees:
        changed = changed.replace(f"{row}\n", "")
    with pytest.raises(PlanError, match=r"on mesh [\s\S]* and %\S+ on mesh [\s\S]*sennit.take or an exchange"):
        verify(Program.parse(changed), graph)
