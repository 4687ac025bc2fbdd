from __future__ import annotations

import pytest

from sennit.cluster import Basis, load
from sennit.cost.measured_torch import MeasuredOperators
from sennit.ir.program import Program
from sennit.sim import simulate_fully

TEXT = """
program "small" {
  mesh m0 = x=2
  lane all on 0-1 {
    input %x : f32[64{x},32] of %x on m0 "x"
    input %i : i64[64{x}] of %i on m0 "i"
    param %w : f32[32,32] of %w on m0 "w"
    param %e : f32[16,32] of %e on m0 "e"
    forward %y : f32[64{x},32] of %y on m0 = aten.mm.default(%x, %w) for %y "first"
    forward %v : f32[64{x},32] of %v on m0 = aten.view.default(%y, [32, 32]) for %v "first"
    forward %p : f32[64{x},32] of %p on m0 = aten.embedding.default(%e, %i) for %p "first"
    forward %z : f32[64{x},32] of %z on m0 = aten.mm.default(%v, %w) for %z "second"
    forward %s : f32[64{x},32] of %s on m0 = aten.no_such_operator.default(%z) for %s "third"
  }
}
"""


def test_each_distinct_operator_is_timed_once() -> None:
    said: list[str] = []
    times = MeasuredOperators.of(Program.parse(TEXT), repeats=2, say=said.append)
    # the products are one, the view is free, and torch has no such operator as the last
    assert said == ["timing 3 operators on this machine"]
    assert sorted(key[0] for key in times.seconds) == ["aten.embedding.default", "aten.mm.default"]
    assert min(times.seconds.values()) > 0


def test_a_simulation_takes_them_before_the_roofline() -> None:
    program = Program.parse(TEXT)
    times = MeasuredOperators.of(program, repeats=2)
    ((_, lines),) = simulate_fully(program, load("laptop"), operators=times).costs
    found = {line.source: (line.basis, line.steps) for line in lines}
    assert found["operators timed on this machine"] == (Basis.MEASURED, 3)
    assert found["the roofline of the device"][1] == 1
    measured = sum(line.seconds for line in lines if line.source == "operators timed on this machine")
    product, embedding = (
        times.seconds[key] for key in sorted(times.seconds, key=lambda key: str(key[0]), reverse=True)
    )
    assert measured == pytest.approx(2 * product + embedding)
