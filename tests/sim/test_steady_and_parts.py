"""Several iterations, what time went to, and the optimizer's share."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from sim_programs import programs

from sennit.cluster import Basis, load
from sennit.cost import Transfer
from sennit.errors import PlanError
from sennit.ir.event import Category, MemoryKind
from sennit.ir.program import CollectiveKind, Program
from sennit.sim import critical_parts, exposed_parts, optimizer, peak_by_kind, simulate, simulate_fully

Maker = Callable[[int, int], Program]

TRAINING = """
program "training" {
  mesh m0 = dp=2
  lane all on 0-1 {
    param %w : bf16[1024,1024] of %w on m0 "w"
    input %x : bf16[2048{dp},1024] of %x on m0 "x"
    forward %y : bf16[2048{dp},1024] of %y on m0 = aten.mm.default(%x, %w) for %y "up"
    backward %g : bf16[1024,1024]{sum:dp} of %g on m0 = aten.mm.default(%w, %w) for %g "up"
    all_reduce %r : bf16[1024,1024] of %g on m0 = %g over dp
    free %g
    gradient "w" %r
  }
}
"""


def test_one_lane_has_no_overlap_between_iterations(tensor_parallel: Maker) -> None:
    steady = simulate_fully(tensor_parallel(8, 1024), load("dgx-h100"), iterations=5).steady
    assert steady is not None
    assert steady.period == pytest.approx(steady.first)
    assert (steady.iterations, steady.settled) == (5, 1)


def test_a_pipeline_hides_its_filling_behind_the_next_iteration(pipeline: Maker) -> None:
    result = simulate_fully(pipeline(4, 1024), load("dgx-h100"), iterations=8)
    assert result.steady is not None
    # the first stage starts again while the second still works; what is left is one stage's own work and sending
    assert result.steady.period < 0.95 * result.steady.first
    assert result.steady.period >= max(result.timeline.busy(device, *Category) for device in (0, 1)) * 0.5
    assert result.steady.first == pytest.approx(result.timeline.span)


@settings(derandomize=True, deadline=None, max_examples=40)
@given(programs())
def test_an_iteration_more_takes_at_least_its_work_and_at_most_a_whole_step(program: Program) -> None:
    result = simulate_fully(program, load("dgx-a100"), iterations=3)
    assert result.steady is not None
    assert result.steady.first == result.timeline.span
    most = max(result.timeline.busy(device, Category.COMPUTE) for device in result.timeline.devices)
    assert most * (1 - 1e-9) <= result.steady.period <= result.timeline.span * (1 + 1e-9)


@settings(derandomize=True, deadline=None, max_examples=60)
@given(programs())
def test_parts_sum_to_the_whole(program: Program) -> None:
    timeline = simulate(program, load("dgx-a100"))
    for device in timeline.devices:
        parts = exposed_parts(timeline, device)
        assert sum(part.seconds for part in parts) == pytest.approx(timeline.exposed(device), abs=1e-12)
        assert sum(peak_by_kind(timeline, device).values()) == timeline.peak_memory(device)
    assert sum(part.seconds for part in critical_parts(timeline)) == pytest.approx(timeline.span)


def test_the_optimizer_comes_last_and_keeps_its_state() -> None:
    program, cluster = Program.parse(TRAINING), load("dgx-h100")
    plain = simulate(program, cluster)
    full = simulate_fully(program, cluster, optimizer=optimizer("adamw-master")).timeline
    last = full.events[-1]
    assert last.name == "optimizer adamw-master"
    assert full.events[last.after or 0].name == "all_reduce g"
    elements = 1024 * 1024
    assert peak_by_kind(full, 0)[MemoryKind.OPTIMIZER] == elements * 12
    assert full.peak_memory(0) == plain.peak_memory(0) + elements * 12
    moved = elements * (3 * 2 + 2 * 12)
    rate = cluster.device.bandwidth.value * cluster.device.bandwidth_efficiency.value
    assert last.stop - last.start == pytest.approx(moved / rate + cluster.device.launch.value)
    assert full.span == pytest.approx(plain.span + last.stop - last.start)


def test_an_unknown_optimizer_is_named() -> None:
    with pytest.raises(PlanError, match="did you mean 'adam'"):
        optimizer("adamx")


def test_where_costs_come_from_is_told_by_lane() -> None:
    result = simulate_fully(Program.parse(TRAINING), load("dgx-a100"), optimizer=optimizer("sgd"))
    ((lane, lines),) = result.costs
    assert lane == "all"
    assert {line.basis for line in lines} <= set(Basis)
    assert sum(line.steps for line in lines) == 3
    assert sum(line.seconds for line in lines) == pytest.approx(result.timeline.busy(0, Category.COMPUTE))


def test_collectives_may_come_with_times_of_their_own(tensor_parallel: Maker) -> None:
    asked: list[tuple[CollectiveKind, tuple[int, ...], int]] = []

    def times(kind: CollectiveKind, group: tuple[int, ...], size: int) -> Transfer | None:
        asked.append((kind, group, size))
        return Transfer(1.0, ((0, 1.0),), "mine", size) if kind is CollectiveKind.ALL_REDUCE else None

    timeline = simulate_fully(tensor_parallel(8, 256), load("dgx-h100"), collectives=times).timeline
    assert timeline.span > 1.0
    assert asked == [(CollectiveKind.ALL_REDUCE, tuple(range(8)), 4 * 256**2)]


def test_sizes_are_rounded_as_the_device_allocates_them() -> None:
    text = """
    program "small" {
      mesh m0 = x=1
      lane a on 0 {
        input %x : f32[3] of %x on m0 "x"
        forward %y : f32[3] of %y on m0 = aten.gelu.default(%x) for %y "m"
      }
    }
    """
    timeline = simulate(Program.parse(text), load("h200x8"))
    assert timeline.peak_memory(0) == 2 * 512
