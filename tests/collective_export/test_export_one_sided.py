"""One-sided programs as mscclpp plans, run on an interpreter of the executor's operations."""

from __future__ import annotations

import json
from collections.abc import Callable

import numpy as np
import pytest
from plan_machine import PlanMachine

from sennit.collective.compile_one_sided import compile_one_sided
from sennit.collective.export_json import MscclppLimits, PlanOptions
from sennit.collective.export_one_sided_json import one_sided_mscclpp_json
from sennit.collective.library import (
    all_pairs_all_gather,
    all_pairs_all_reduce,
    halving_doubling_all_reduce,
    nvls_all_gather,
    nvls_all_reduce,
    nvls_reduce_scatter,
    ring_all_reduce,
    two_step_all_to_all,
)
from sennit.errors import CollectiveError
from sennit.ir.collective import Algorithm

WIDE = PlanOptions(limits=MscclppLimits(operations=500, channels=64, semaphores=64))
MAKERS: list[Callable[[], Algorithm]] = [
    lambda: ring_all_reduce(4),
    lambda: ring_all_reduce(3, in_place=True),
    lambda: all_pairs_all_reduce(4),
    lambda: all_pairs_all_gather(5, instances=2),
    lambda: halving_doubling_all_reduce(8, in_place=True),
    lambda: two_step_all_to_all(2, 2),
    lambda: nvls_all_reduce(4),
    lambda: nvls_all_reduce(5, in_place=True),
    lambda: nvls_all_gather(4, instances=2),
]


@pytest.mark.parametrize("make", MAKERS)
def test_a_plan_does_what_its_collective_asks(make: Callable[[], Algorithm]) -> None:
    algorithm = make()
    text, spec = one_sided_mscclpp_json(compile_one_sided(algorithm), WIDE), algorithm.collective
    for seed in range(4):
        rng = np.random.default_rng(seed)
        inputs = [rng.integers(0, 1000, (spec.input_chunks(rank), 3)) for rank in range(spec.ranks)]
        outputs = PlanMachine(text, inputs, seed).run()
        for rank in range(spec.ranks):
            for index in range(spec.output_chunks(rank)):
                wanted = spec.after(rank, index)
                if wanted is not None:
                    total = sum(inputs[r][i] for i, bits in wanted for r in range(spec.ranks) if bits >> r & 1)
                    assert (outputs[rank][index] == total).all()


def test_an_all_reduce_in_the_switch_is_one_operation() -> None:
    plan = json.loads(one_sided_mscclpp_json(compile_one_sided(nvls_all_reduce(8, in_place=True))))
    gpu = plan["gpus"][3]
    moving = [op for block in gpu["threadblocks"] for op in block["ops"] if "src_buff" in op]
    assert [op["name"] for op in moving] == ["glres"]
    assert moving[0]["src_buff"] == [{"switch_channel_id": 0, "index": 3, "size": 1}]
    switches = [channel for channel in gpu["channels"] if channel["channel_type"] == "switch"]
    assert switches == [
        {"channel_type": "switch", "buffer_type": kind, "rank_groups": [{"size": 8, "ranks": list(range(8))}]}
        for kind in ("i", "o")
    ]


@pytest.mark.parametrize(
    ("make", "fault"),
    [
        (lambda: nvls_reduce_scatter(4), "adds up in the switch only to store the sum"),
        (lambda: nvls_all_reduce(4, pieces=2), "adds up in the switch only to store the sum"),
        (lambda: ring_all_reduce(16), "the executor holds 64"),
    ],
)
def test_what_the_executor_cannot_do_is_refused(make: Callable[[], Algorithm], fault: str) -> None:
    with pytest.raises(CollectiveError, match=fault):
        one_sided_mscclpp_json(compile_one_sided(make()))


def test_without_the_switch_it_is_exported() -> None:
    text = one_sided_mscclpp_json(compile_one_sided(nvls_reduce_scatter(4), switch=False))
    assert '"rre"' in text
    assert "switch" not in text
