"""Memory that ranks own and others read, with all ranks in this process: what is taken is what was posted, whatever the
order.
"""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sennit.collective.runtime.shm_abi import load_core
from sennit.collective.runtime.shm_posts import HostMemory
from sennit.errors import RunError

pytestmark = pytest.mark.skipif(load_core() is None, reason="the compiled core is missing: no C compiler at install")

RANKS, STAGING = 3, 4096


def three() -> list[HostMemory]:
    made = [HostMemory(rank, RANKS, STAGING) for rank in range(RANKS)]
    for one in made:
        for peer, other in enumerate(made):
            if other is not one:
                assert one.meet(peer, other.greeting()) is None
    return made


sends = st.tuples(
    st.integers(0, RANKS - 1), st.sets(st.integers(0, RANKS - 1), min_size=1), st.integers(1, 1500), st.booleans()
)
takes = st.tuples(st.integers(0, RANKS - 1), st.integers(0, RANKS - 1))


@settings(derandomize=True, deadline=None, max_examples=60)
@given(st.lists(st.one_of(sends, takes), max_size=80))
def test_what_is_taken_is_what_was_posted_and_staging_is_bounded(moves: list[tuple[object, ...]]) -> None:
    ranks = three()
    under_way: dict[tuple[int, int], deque[bytes]] = {}
    for number, move in enumerate(moves):
        match move:
            case (int(sender), set(to), int(size), bool(small)):
                peers = sorted(peer for peer in to if peer != sender)
                most = 2000 if small else STAGING
                if not peers or not ranks[sender].may_post(peers):
                    continue
                place = ranks[sender].reserve(size, most)
                if place is None:
                    continue
                data = bytes((number + k) % 251 for k in range(size))
                ranks[sender].memory(sender)[place : place + size] = data
                ranks[sender].post(peers, place, size)
                for peer in peers:
                    under_way.setdefault((sender, peer), deque()).append(data)
                assert ranks[sender]._used <= max(most, 16 * -(-size // 16))
            case (int(sender), int(receiver)) if sender != receiver:
                waiting = under_way.get((sender, receiver))
                arrived = ranks[receiver].arrival(sender)
                assert (arrived is not None) == bool(waiting)
                if arrived is not None and waiting:
                    place, size = arrived
                    assert ranks[receiver].memory(sender)[place : place + size] == waiting.popleft()
                    ranks[receiver].take(sender)
    for (sender, receiver), waiting in under_way.items():  # the rest, in order
        for data in waiting:
            place, size = ranks[receiver].arrival(sender) or (0, 0)
            assert ranks[receiver].memory(sender)[place : place + size] == data
            ranks[receiver].take(sender)
    for one in ranks:
        assert one.reserve(STAGING, STAGING) is not None  # all of it is free again


def test_a_wait_ends_when_something_comes_and_after_a_while_when_nothing_does() -> None:
    left, right, _ = three()
    assert not left.wait([1], [])
    place = right.reserve(8, STAGING)
    assert place is not None
    right.post([0], place, 8)
    assert left.wait([1], [])
    assert left.gone([1]) == {}
    right.leave()
    assert left.gone([1]) == {1: "it failed"}


def test_what_is_not_the_memory_of_a_peer_is_not_opened() -> None:
    left, right, _ = three()
    greeting = right.greeting()
    assert "another host" in (left.meet(1, greeting.replace(b'["', b'["other ')) or "")
    assert "is not the memory of rank 1" in (left.meet(1, greeting.replace(right._token.encode(), b"0" * 32)) or "")


def test_a_message_larger_than_the_area_is_refused_with_the_numbers() -> None:
    with pytest.raises(RunError, match="a message of 8192 bytes, and 4096 bytes of staging"):
        three()[0].reserve(8192, STAGING)
