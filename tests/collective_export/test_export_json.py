"""mscclpp plans, run on an interpreter of the executor's operations, and the executor's limits."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hand_made import all_pairs_all_reduce, ring_all_gather, ring_all_reduce
from plan_machine import PlanDeadlockError, PlanMachine

from sennit.collective.compile import compile_algorithm
from sennit.collective.export_json import MscclppLimits, PlanOptions, mscclpp_json
from sennit.collective.library import Options, recipe, recipes
from sennit.errors import CollectiveError
from sennit.ir.schedule import Schedule

MAKERS: list[Callable[[], Schedule]] = [
    lambda: ring_all_reduce(4),
    lambda: ring_all_reduce(3, channels=2),
    lambda: all_pairs_all_reduce(4, width=2),
    lambda: ring_all_gather(5, chunks=2),
]


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("slots", [None, 2, 3])
@pytest.mark.parametrize("ranks_per_node", [None, 2])
def test_a_plan_does_what_its_collective_asks(
    make: Callable[[], Schedule], slots: int | None, ranks_per_node: int | None
) -> None:
    check(make(), PlanOptions(ranks_per_node, slots, limits=MscclppLimits(operations=200)))


@pytest.mark.parametrize("name", [known.name for known in recipes()])
def test_a_plan_of_the_library_does_what_its_collective_asks(name: str) -> None:
    schedule = compile_algorithm(recipe(name).build(2, 2, Options(instances=2, pieces=2)))
    check(schedule, PlanOptions(2, schedule.slots, limits=MscclppLimits(operations=500, semaphores=100)))


def check(schedule: Schedule, options: PlanOptions) -> None:
    text, spec = mscclpp_json(schedule, options), schedule.collective
    for seed in range(3):
        rng = np.random.default_rng(seed)
        inputs = [rng.integers(0, 1000, (spec.input_chunks(rank), 3)) for rank in range(spec.ranks)]
        outputs = PlanMachine(text, inputs, seed).run()
        for rank in range(spec.ranks):
            for index in range(spec.output_chunks(rank)):
                wanted = spec.after(rank, index)
                if wanted is not None:
                    total = sum(inputs[r][i] for i, bits in wanted for r in range(spec.ranks) if bits >> r & 1)
                    assert (outputs[rank][index] == total).all()


def test_the_plan_names_what_the_parser_reads() -> None:
    plan = json.loads(mscclpp_json(all_pairs_all_reduce(3)))
    assert {"name", "collective", "protocol", "inplace", "gpus", "min_message_size", "max_message_size"} <= plan.keys()
    assert plan["collective"] == "allreduce"
    gpu = plan["gpus"][1]
    assert (gpu["id"], gpu["input_chunks"], gpu["output_chunks"]) == (1, 3, 3)
    assert gpu["channels"] == [{"channel_type": "memory", "connected_to": [0, 0, 2, 2]}]
    put = next(op for op in gpu["threadblocks"][0]["ops"] if op["name"] == "put")
    assert put["src_buff"] == [{"type": "i", "index": 0, "size": 1}]
    assert put["dst_buff"][0].keys() == {"buffer_id", "index", "size"}


def test_too_many_operations_are_refused() -> None:
    with pytest.raises(CollectiveError, match=r"15 instructions become \d+ operations, the executor holds 64") as error:
        mscclpp_json(ring_all_reduce(8))
    assert error.value.where == "schedule 'ring 8', rank 0, block 0"


def test_too_many_semaphores_are_refused() -> None:
    with pytest.raises(CollectiveError, match="22 pairs of thread blocks wait for each other"):
        mscclpp_json(all_pairs_all_reduce(12))


def test_fewer_slots_than_proved_are_refused_and_would_deadlock() -> None:
    schedule = ring_all_reduce(4)
    with pytest.raises(CollectiveError, match="it could deadlock"):
        mscclpp_json(schedule, PlanOptions(slots=1))
    text = mscclpp_json(replace(schedule, slots=1), PlanOptions(slots=1))
    with pytest.raises(PlanDeadlockError):
        PlanMachine(text, [np.zeros((4, 1), dtype=np.int64)] * 4, 0).run()
