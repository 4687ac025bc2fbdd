"""The proof: right programs pass, and a program with any one thing changed is refused, in words."""

from __future__ import annotations

import random
import re

import pytest

from sennit.errors import PlanError, ProgramError, SennitError
from sennit.ir.mesh import Mesh
from sennit.ir.program import Program
from sennit.plan import data_parallel, lower, pipeline, propagate, tensor_parallel
from sennit.plan.verify import verify


@pytest.fixture(scope="module")
def programs(small_gpt) -> dict[str, Program]:
    graph = small_gpt.graph
    plans = {
        "data": data_parallel(graph, Mesh.parse("dp=2;mb=2")),
        "tensor": tensor_parallel(graph, Mesh.parse("dp=2,tp=2"), qkv="*.qkv", column="*.up", row="*.proj|*.down"),
        "pipeline": pipeline(graph, Mesh.parse("pp=2,dp=2;mb=4"), layers=("blocks.0", "blocks.1")),
    }
    return {name: lower(propagate(plan)) for name, plan in plans.items()}


def test_lowered_plans_pass(programs, small_gpt) -> None:
    for program in programs.values():
        verify(program, small_gpt.graph)
        verify(Program.parse(str(program)), small_gpt.graph)


def without_step(text: str, pattern: str) -> tuple[str, str]:
    """Drop the first collective that matches: what it made is replaced by what it read."""
    match = re.search(rf"    {pattern}.*\n", text)
    assert match is not None
    line = match[0]
    made, read = re.search(r"%(\S+) :", line), re.search(r"= %(\S+) over", line)
    assert made is not None
    assert read is not None
    text = text.replace(line, "").replace(f"    free %{read[1]}\n", "", 1)
    return re.sub(rf"%{re.escape(made[1])}(?=[\s,)])", f"%{read[1]}", text), read[1]


def test_a_missing_reduction_is_refused(programs, small_gpt) -> None:
    text, tensor = without_step(str(programs["tensor"]), "all_reduce %addmm_1.all_reduce.tp")
    assert tensor == "addmm_1"
    with pytest.raises(PlanError) as caught:
        verify(Program.parse(text), small_gpt.graph)
    message = str(caught.value)
    assert "%addmm_1, which is still a pending sum over 'tp'" in message  # the tensor
    assert " in module 'blocks.0.attention.proj' (gpt.py:" in message  # the operator, a view of some kind
    assert "devices [0, 1, 2, 3]" in message
    assert "fix: all_reduce it over 'tp' first" in message


def test_a_gradient_that_is_not_reduced_is_refused(programs, small_gpt) -> None:
    text, _ = without_step(str(programs["tensor"]), r"all_reduce %\S+ : f64\[32\] of %getitem_34 ")
    with pytest.raises(ProgramError, match=r"'blocks.0.norm1.weight'[\s\S]*pending sum over dp"):
        verify(Program.parse(text), small_gpt.graph)


def test_a_bias_on_every_rank_is_refused(programs, small_gpt) -> None:
    text = str(programs["tensor"])
    match = re.search(r"    forward %(\S+) : \S+ of %\S+ on m0 = sennit.partial\(%(\S+)\).*\n", text)
    assert match is not None
    text = text.replace(match[0], "").replace(f"    free %{match[1]}\n", "").replace(f"%{match[1]},", f"%{match[2]},")
    with pytest.raises(PlanError, match=r"aten.addmm.default [\s\S]*no strategy of its rule does that over 'tp'"):
        verify(Program.parse(text), small_gpt.graph)


def test_a_global_size_is_refused(programs, small_gpt) -> None:
    text = str(programs["tensor"])
    changed = re.sub(r"(aten\.expand\.default\(%\S+, )\[4, 2, 12, 8\]", r"\1[8, 4, 12, 8]", text, count=1)
    assert changed != text
    with pytest.raises(PlanError, match=r"not those of its local pieces[\s\S]*fix: use"):
        verify(Program.parse(changed), small_gpt.graph)


def test_a_gradient_in_another_layout_is_refused(programs, small_gpt) -> None:
    text = str(programs["tensor"]).replace(
        "param %blocks.0.norm1.weight : f64[32] ", "param %blocks.0.norm1.weight : f64[32{tp}] "
    )
    with pytest.raises(SennitError, match=r"blocks.0.norm1.weight"):
        verify(Program.parse(text), small_gpt.graph)


def test_random_single_faults_are_refused(programs, small_gpt) -> None:
    """Drop, swap or repeat one line of a program: what is still accepted must be the same program in another order."""
    rng = random.Random(0)
    refused = 0
    for program in programs.values():
        lines = str(program).splitlines()
        steps = [i for i, line in enumerate(lines) if line.startswith("    ") and "free" not in line]
        for _ in range(40):
            mutant = list(lines)
            position = rng.choice(steps)
            if rng.random() < 0.5:
                del mutant[position]
            else:
                mutant.insert(rng.choice(steps), lines[position])
            try:
                verify(Program.parse("\n".join(mutant)), small_gpt.graph)
            except SennitError:
                refused += 1
            else:
                pytest.fail(f"accepted after changing {lines[position]!r}")
    assert refused == 120
