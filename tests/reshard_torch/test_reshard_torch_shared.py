"""Redistributions through shared memory on real processes: the bits of messages, every failure named, nothing left
behind.
"""

from __future__ import annotations

import os

import pytest
import reshard_shared_work as work

from sennit.cluster.ranks_torch import GlooRanks
from sennit.collective.runtime.shm_abi import load_core
from sennit.errors import RunError
from sennit.ir.layout import Layout
from sennit.ir.mesh import Mesh
from sennit.reshard.planner import Mode, plan
from sennit.reshard.timing import LinkCost, SharedCost

pytestmark = pytest.mark.skipif(load_core() is None, reason="the compiled core is missing: no C compiler at install")

ROUNDS = [
    ("even", Mode.COLLECTIVE, 8 << 20),
    ("even", Mode.DIRECT, 512),
    ("strided", Mode.COLLECTIVE, 4096),
    ("uneven", Mode.AUTO, 512),
    ("partial", Mode.COLLECTIVE, 2048),
    ("partial", Mode.AUTO, 8 << 20),
    ("cross", Mode.AUTO, 1024),
]


@pytest.mark.parametrize(("kind", "mode", "staging"), ROUNDS)
def test_random_problems_equal_the_definition_and_the_bits_of_messages(
    ranks: GlooRanks, kind: str, mode: Mode, staging: int
) -> None:
    assert ranks.call(work.same_bits, ranks.count, kind, range(16), mode, staging) == [[]] * ranks.count


@pytest.mark.parametrize("staging", [512, 8 << 20])
def test_many_under_way_in_any_order_of_waiting(ranks: GlooRanks, staging: int) -> None:
    assert ranks.call(work.many_under_way, ranks.count, staging) == [[]] * ranks.count


def test_staging_is_bounded_and_nothing_stays_open(ranks: GlooRanks) -> None:
    assert ranks.call(work.staged_at_most, ranks.count) == [[]] * ranks.count


def test_the_public_function_shares_memory(ranks: GlooRanks) -> None:
    assert ranks.call(work.public_face, ranks.count) == [[]] * ranks.count


def test_the_one_line_uses_are_calibrated_together(ranks: GlooRanks) -> None:
    found = ranks.call(work.calibrated_for_all)
    assert len({timing for timing, _, _ in found}) == 1
    assert all(used and right for _, used, right in found)


def test_both_transports_are_calibrated_alike_on_all_ranks(ranks: GlooRanks) -> None:
    found = ranks.call(work.calibrated)
    assert len(set(found)) == 1
    shared, messages = found[0]
    assert isinstance(shared, SharedCost)
    assert isinstance(messages, LinkCost)
    assert min(shared.alpha, shared.gamma, messages.alpha, messages.beta, messages.gamma) > 0
    assert len({cost.kind for cost in messages.collectives}) == 4


def test_in_shared_memory_small_runs_cost_more_and_a_part_for_all_is_packed_once() -> None:
    mesh = Mesh.make({"x": 4})
    cost = SharedCost(alpha=0.0, gamma=1.0, delta=0.0)
    texts = ["[64{x},64]", "[64,64]", "[64,64{x}]"]
    rows, whole, columns = (Layout.parse(text, mesh) for text in texts)
    seconds = {
        name: plan(a, b, itemsize=1, mode=Mode.COLLECTIVE, timing=cost).certificate.seconds
        for name, a, b in (("gather", rows, whole), ("exchange", rows, columns), ("slice", whole, rows))
    }
    # a quarter is packed and the whole placed; three quarters of a quarter packed and a quarter placed; a quarter
    # placed
    assert seconds == {"gather": 1024 + 4096, "exchange": 768 + 1024, "slice": 1024}
    runs = SharedCost(alpha=0.0, gamma=0.0, delta=1.0)
    by_rows, by_columns = (plan(whole, to, itemsize=1, timing=runs).certificate.seconds for to in (rows, columns))
    assert (by_rows, by_columns) == (1, 64)


def test_a_step_goes_through_a_group_or_as_messages_as_is_cheaper(ranks: GlooRanks) -> None:
    assert ranks.call(work.through_the_cheaper, ranks.count) == [[]] * ranks.count


def test_without_shared_memory_on_one_rank_all_use_messages_and_say_so_once(ranks: GlooRanks) -> None:
    said = ranks.call(work.falls_back, ranks.count)
    assert [wrong for _, wrong in said] == [0] * ranks.count
    assert [len(lines) for lines, _ in said] == [1] * ranks.count
    assert said[1][0][0].endswith("go by messages, not shared memory: none today")
    assert "rank 1 has none" in said[0][0][0]


def test_a_rank_that_never_comes_or_is_killed_is_named_and_leaves_nothing() -> None:
    before = set(os.listdir("/dev/shm"))
    with GlooRanks(3, timeout=60.0) as three:
        text, _, _ = three.call(work.never_comes)
        with pytest.raises(RunError) as raised:
            three.call(work.dies)
    assert "rank 0 waited up to 0.5 s to receive from rank 1: it did not come" in text
    assert "[6{x}] -> [6]" in text
    assert "rank 0 cannot use its shared memory any more" in text
    text = str(raised.value)
    assert "died with exit status -9" in text
    assert "receive from rank 1: it died" in text
    assert {name for name in set(os.listdir("/dev/shm")) - before if "sennit" in name} == set()
