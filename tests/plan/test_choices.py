"""Whatever the search chooses is lowered: the plan verifies and equals the serial step, and its simulated step and peak
are near the estimate.
"""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from plan_subjects import TWO_BLOCKS, check, subject

from sennit.cluster import load
from sennit.errors import PlanError
from sennit.ir.graph import Graph
from sennit.plan import Plan, lower, propagate, zoo
from sennit.plan.search import Choice, Keep, Kind, Space, mesh_of, planner_of, search
from sennit.sim import optimizer, simulate_fully

Pins = Mapping[str, Mapping[str, object]]
SMALL = Space(fused_attention=False, tps=(1,), sequence=(False,), sizes=(2,), chunks=(2,), keeps=(Keep.ALL,))


def chosen(graph: Graph, pins: Pins, devices: int) -> Choice:
    return search(graph, load(f"laptop:{devices}"), space=SMALL, optimizer="adam", pins=pins).choice


def planned(choice: Choice, graph: Graph) -> Plan:
    return planner_of(choice)(graph, mesh_of(choice))


CASES: dict[str, tuple[str, int, Pins]] = {
    "pipeline, ZeRO-1": ("gpt2", 4, {"*": {"tp": 1, "pp": 2, "dp": 2, "zero": 1, "schedule": "1f1b"}}),
    "pipeline of tensor parallel stages, ZeRO-3": (
        "gpt2",
        8,
        {"*": {"tp": 2, "pp": 2, "dp": 2, "size": 1, "zero": 3, "schedule": "1f1b"}},
    ),
    "zero bubble, ZeRO-2": ("gpt2", 4, {"*": {"pp": 2, "dp": 2, "size": 1, "zero": 2, "schedule": "zero-bubble-h1"}}),
    "zero bubble H2": ("gpt2", 2, {"*": {"pp": 2, "dp": 1, "size": 1, "schedule": "zero-bubble-h2"}}),
    "dual pipe V, an embedding alone": ("gpt2", 2, {"*": {"pp": 2, "dp": 1, "size": 1, "schedule": "dual-pipe-v"}}),
    "interleaved": ("gpt2", 2, {"*": {"pp": 2, "dp": 1, "size": 1, "schedule": "interleaved"}}),
    "co-shard, two factors, ZeRO-1": (
        "gpt2",
        4,
        {"*": {"tp": 1, "pp": 1, "dp": 4, "size": 1, "zero": 1}, "*.h.0*": {"co": 2}, "*.h.1*": {"co": 4}},
    ),
    "co-shard in a pipeline of tensor parallel stages": (
        "gpt2",
        4,
        {"*": {"tp": 2, "pp": 2, "dp": 1, "size": 2, "schedule": "1f1b"}, "*.h.*": {"co": 2}},
    ),
    "co-shard of one stage's blocks": ("swin", 2, {"*": {"tp": 1, "pp": 1, "dp": 2}, "*layers.0.*": {"co": 2}}),
    "keep by unit": (
        "t5",
        2,
        {"*": {"pp": 2, "dp": 1, "schedule": "1f1b"}, "encoder*": {"keep": "none"}, "decoder*": {"keep": "products"}},
    ),
    "interlaced": ("t5", 4, {"*": {"tp": 1, "pp": 4, "dp": 1, "size": 1, "schedule": "interlaced"}}),
    "interlaced, tensor parallel, ZeRO-1, co-shard": (
        "gpt2",
        8,
        {"*": {"tp": 2, "pp": 2, "dp": 2, "size": 1, "zero": 1, "schedule": "interlaced"}, "*.h.*": {"co": 2}},
    ),
    "passes one after another": (
        TWO_BLOCKS,
        2,
        {"*": {"pp": 2, "dp": 1, "size": 1, "schedule": "1f1b"}},
    ),
    "tensor parallel, ZeRO-3": ("swin", 4, {"*": {"tp": 2, "pp": 1, "dp": 2, "zero": 3}}),
}


@pytest.mark.filterwarnings("default")  # those of the libraries
@pytest.mark.usefixtures("single_core")
@pytest.mark.parametrize("case", CASES)
def test_a_choice_equals_the_serial_step(case: str) -> None:
    family, devices, pins = CASES[case]
    given = subject(family)
    choice = chosen(given.graph, pins, devices)
    assert Choice.parse(str(choice)) == choice
    words = pins["*"]
    assert choice.pp == words["pp"]
    assert choice.zero == words.get("zero", choice.zero)
    assert choice.pp == 1 or choice.kind is Kind(words["schedule"])
    check(planned(choice, given.graph), given)


def test_units_that_run_several_times() -> None:
    """Three passes, of which the last is trained: a pipeline has the stages of each pass in turn.

    Passes of different micro-batches run beside each other, or one after another.
    """
    graph, cluster = subject(TWO_BLOCKS).graph, load("laptop:2")
    choice = chosen(graph, {"*": {"pp": 2, "size": 1, "schedule": "several-forward"}}, 2)
    assert choice.kind is Kind.SEVERAL_FORWARD
    plan = planned(choice, graph)
    by_hand = zoo.recycled(graph, mesh_of(choice), layers=("blocks.0", "blocks.1"))
    assert (plan.parts, plan.places, plan.pattern) == (by_hand.parts, by_hand.places, by_hand.pattern)
    simulated = simulate_fully(lower(propagate(plan)), cluster, optimizer=optimizer("adam")).timeline
    assert choice.step == pytest.approx(simulated.span, rel=0.25)
    later = chosen(graph, {"*": {"pp": 2, "size": 1, "schedule": "1f1b"}}, 2)
    both = chosen(graph, {"*": {"pp": 2, "size": 1}}, 2)
    assert both.bound == choice.bound == later.bound <= both.step == min(choice.step, later.step)
    with pytest.raises(
        PlanError, match=r"schedule = interleaved does not suit graph 'AlphaFoldTrunk', whose units run 3 times"
    ):
        chosen(graph, {"*": {"pp": 2, "schedule": "interleaved"}}, 2)


def test_units_that_run_once() -> None:
    with pytest.raises(PlanError, match=r"schedule = several-forward does not suit graph .*, whose units run once"):
        chosen(subject("gpt2").graph, {"*": {"pp": 2, "schedule": "several-forward"}}, 2)
