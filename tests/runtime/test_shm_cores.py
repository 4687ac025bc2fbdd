"""Who may spin: a matching of ranks with cores, against trying all of them."""

from __future__ import annotations

from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sennit.collective.runtime.shm_cores import Waiting, has_own_core


def by_trying(rank: int, cores: list[set[int]]) -> bool:
    together = {rank}
    for _ in cores:
        together |= {a for a, own in enumerate(cores) for b in together if own & cores[b]}
    return any(
        all(core in cores[member] for member, core in zip(sorted(together), chosen, strict=True))
        for chosen in permutations(range(5), len(together))
    )


@settings(derandomize=True, deadline=None, max_examples=200)
@given(st.lists(st.sets(st.integers(0, 4), min_size=1), min_size=1, max_size=5))
def test_a_rank_has_a_core_if_all_that_share_cores_can_run_at_once(cores: list[set[int]]) -> None:
    for rank in range(len(cores)):
        assert has_own_core(rank, cores) == by_trying(rank, cores)


@pytest.mark.parametrize(
    ("cores", "wanted"),
    [
        ([{0, 1}] * 2, [True, True]),
        ([{0, 1}] * 3, [False] * 3),
        ([{0}, {1}, {2}, {3}], [True] * 4),  # one each
        ([{0}, {0}, {0}, set(range(1, 16))], [False, False, False, True]),  # three share one core of sixteen
        ([{0}, {0, 1}, {1, 2}], [True] * 3),  # they give way to each other
    ],
)
def test_cases(cores: list[set[int]], wanted: list[bool]) -> None:
    assert [has_own_core(rank, cores) for rank in range(len(cores))] == wanted


def test_ranks_that_take_turns_stay_awake_for_a_round_of_turns() -> None:
    alone, four, eight = (Waiting.of(0, [{0, 1}] * ranks) for ranks in (2, 4, 8))
    assert alone.spins > 0
    assert four.spins == eight.spins == 0
    assert 0 < four.linger < eight.linger
    assert Waiting.of(0, [{0}, {0}, {1, 2, 3}]).linger == 0  # bound so, with cores enough
