"""Exchanges, takes and collectives over several lanes, run: threads and gloo processes against the numpy interpreter."""

from __future__ import annotations

import torch
from exchange_programs import chain, chain_state, interlaced, interlaced_state, run_on_our_backend
from hypothesis import given, settings
from hypothesis import strategies as st

from sennit.cluster import load
from sennit.cluster.ranks_torch import GlooRanks
from sennit.ir.program import Program
from sennit.ir.program_check import check_program
from sennit.ir.program_numpy import run_program
from sennit.run import LocalRanks, emit_lane, run_in_process
from sennit.sim import simulate


@settings(derandomize=True, deadline=None, max_examples=60)
@given(st.integers(0, 10_000))
def test_chains_of_exchanges_in_threads(seed: int) -> None:
    program, state = chain(seed), chain_state(seed)
    check_program(program)
    expected = run_program(program, {"x": state["x"].numpy()})["y"]
    assert (expected == state["x"].numpy() * 2.0**6).all()
    assert torch.equal(run_in_process(program, state, timeout=30)["y"], torch.from_numpy(expected))


def test_an_interlaced_pipeline_in_threads() -> None:
    program, state = interlaced(), interlaced_state()
    check_program(program)
    expected = run_program(program, {name: value.numpy() for name, value in state.items()})["y"]
    torch.testing.assert_close(run_in_process(program, state, timeout=30)["y"], torch.from_numpy(expected))


def test_exchanges_on_processes() -> None:
    with LocalRanks(4) as ranks:
        for seed in range(8):
            state = chain_state(seed)
            result = ranks.run(chain(seed), state, repeats=2)
            assert torch.equal(result.outputs["y"], state["x"] * 2.0**6)
        state = interlaced_state()
        expected = run_in_process(interlaced(), state, timeout=30)["y"]
        assert torch.equal(ranks.run(interlaced(), state, repeats=3).outputs["y"], expected)


def test_exchanges_on_our_backend(tmp_path) -> None:
    with GlooRanks(4, timeout=120.0, preload=("exchange_programs",)) as ranks:
        assert ranks.call(run_on_our_backend, str(tmp_path), [1, 2, 3]) == [[True] * 6] * 4


def test_the_source_is_readable() -> None:
    program = interlaced()
    source = emit_lane(program, program.lane("second"))
    assert "exchange among first, second" in source  # the preface counts them
    assert "m0 = rank.on(0)  # pp=2,dp=2" in source
    assert "h0 = m0.all_reduce(p0, axis='pp', op='sum')" in source
    assert "u0 = rank.exchange('u at mb=0')  # f64[8{mb,dp},4], 64 B" in source
    assert "y0 = rank.exchange('y at mb=0', v0)  # [8{mb,dp},4] -> f64[8{mb,dp},4{pp}], 32 B" in source
    first = emit_lane(program, program.lane("first"))
    assert "t0 = rank.take(h0, 't0')" in first
    assert "rank.exchange('u at mb=1', u1)" in first
    # what is taken is waited for where it is first read, not where it is started
    assert first.index("y0 = rank.exchange('y at mb=0')") < first.index("u1 = aten.mm") < first.index("y0 = y0.wait()")


def test_exchanges_between_other_devices_may_overtake_each_other() -> None:
    """One lane comes to `a` first and the other to `b`: they go between different devices, so nothing waits and nothing
    is mixed up.
    """
    text = """
    program "overtaking" {
      mesh one = @0
      mesh two = @1
      mesh both = d=2
      mesh turned = d=2@1,0
      lane l0 on 0 {
        input %x : f64[4] of %x on one "x"
        input %y : f64[4{d}] of %y on both "y"
        exchange "a" %x among l0, l1
        exchange "b" %z : f64[4{d}] of %y on turned = %y among l0, l1
        result "y" %z }
      lane l1 on 1 {
        input %y : f64[4{d}] of %y on both "y"
        exchange "b" %z : f64[4{d}] of %y on turned = %y among l0, l1
        forward %w : f64[4{d}] of %w on turned = aten.mul.Scalar(%z, 2)
        exchange "a" %v : f64[4] of %x on two = nothing among l0, l1
        result "x" %v
        result "y" %z } }"""
    program = Program.parse(text)
    check_program(program)
    state = {"x": torch.arange(4.0, dtype=torch.float64), "y": torch.arange(4.0, 8.0, dtype=torch.float64)}
    expected = run_program(program, {name: value.numpy() for name, value in state.items()})
    found = run_in_process(program, state, timeout=30)
    assert all(torch.equal(found[key], torch.from_numpy(expected[key])) for key in ("x", "y"))
    assert torch.equal(found["x"], state["x"])
    assert simulate(program, load("dgx-a100")).span > 0


def test_a_lane_may_hold_two_pieces_of_one_input() -> None:
    """Two stages on the same devices in opposite order, as in Chimera: device 0 has the first half of the batch of one
    and the second half of that of the other.
    """
    text = """
    program "both ways" {
      mesh s0 = dp=2@0-1
      mesh s1 = dp=2@1,0
      lane both on 0-1 {
        input %x0 : f64[4{dp},3] of %x on s0 "x"
        input %x1 : f64[4{dp},3] of %x on s1 "x"
        exchange "there" %y0 : f64[4{dp},3] of %x on s1 = %x0 among both
        forward %z : f64[4{dp},3] of %z on s1 = aten.add.Tensor(%x1, %y0)
        result "z" %z
      }
    }"""
    program = Program.parse(text)
    check_program(program)
    assert "x1 = inputs['x as x1']" in emit_lane(program, program.lanes[0])
    x = torch.arange(12.0, dtype=torch.float64).reshape(4, 3)
    assert torch.equal(run_in_process(program, {"x": x}, timeout=30)["z"], 2 * x)
