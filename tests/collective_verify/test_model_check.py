"""The verifier's word on deadlock and races against all interleavings, in both directions."""

from __future__ import annotations

from collections import Counter

import pytest
from model_check import explore
from tiny_schedules import random_schedule

from sennit.collective import verify_races
from sennit.collective.step_graph import StepGraph, least_slots, order_steps
from sennit.collective.verify_races import check_races
from sennit.errors import CollectiveError
from sennit.ir.schedule import Schedule
from sennit.ir.schedule_check import check_schedule

SCHEDULES = 600


def verdict(schedule: Schedule) -> str:
    try:
        cells = check_schedule(schedule)
        graph = StepGraph.of(schedule)
    except CollectiveError:
        return "malformed"
    try:
        check_races(graph, order_steps(graph), cells)
    except CollectiveError as error:
        return "race" if error.what.startswith("race on") else "deadlock"
    return "clean"


def test_the_verifier_agrees_with_all_interleavings() -> None:
    seen: Counter[str] = Counter()
    for seed in range(SCHEDULES):
        schedule = random_schedule(seed)
        said = verdict(schedule)
        seen[said] += 1
        if said == "malformed":
            continue
        assert explore(schedule, schedule.slots).deadlock == (said == "deadlock"), str(schedule)
        if said != "deadlock":
            assert bool(explore(schedule, None).races) == (said == "race"), str(schedule)
    assert min(seen["deadlock"], seen["race"], seen["clean"]) > SCHEDULES // 10, seen


def test_the_least_number_of_slots_is_the_least() -> None:
    found = 0
    for seed in range(SCHEDULES // 2):
        schedule = random_schedule(seed)
        if verdict(schedule) == "malformed":
            continue
        least = least_slots(StepGraph.of(schedule))
        assert explore(schedule, None).deadlock == (least is None), str(schedule)
        if least is not None:
            found += least > 1
            assert not explore(schedule, least).deadlock, str(schedule)
            assert least == 1 or explore(schedule, least - 1).deadlock, str(schedule)
    assert found > 0


def test_clocks_in_many_batches_say_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    schedules = [random_schedule(seed) for seed in range(200)]
    whole = [verdict(schedule) for schedule in schedules]
    monkeypatch.setattr(verify_races, "BATCH_ENTRIES", 1)
    assert [verdict(schedule) for schedule in schedules] == whole
