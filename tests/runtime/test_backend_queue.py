"""Calls of a group run one at a time and in order, whichever threads run them."""

from __future__ import annotations

import random
import threading

import pytest

from sennit.collective.runtime.p2p_ticket import Ticket
from sennit.collective.runtime.work_torch import CallQueue, SennitWork


def submitted(queue: CallQueue, ran: list[tuple[int, str]], number: int) -> SennitWork:
    ticket = Ticket(f"call {number}")
    queue.submit(lambda: ran.append((number, threading.current_thread().name)), ticket)
    return SennitWork((ticket,), [], None, queue)


@pytest.mark.parametrize("seed", range(20))
def test_order_is_kept_whoever_runs_them(seed: int) -> None:
    draw = random.Random(seed)
    queue, ran = CallQueue("own thread"), list[tuple[int, str]]()
    waiting: list[SennitWork] = []
    for number in range(200):
        waiting.append(submitted(queue, ran, number))
        if draw.random() < 0.3:
            waiting.pop(draw.randrange(len(waiting))).wait()
    for work in draw.sample(waiting, len(waiting)):
        work.wait()
        assert work.is_success()
    queue.close()
    assert [number for number, _ in ran] == list(range(200))
    assert queue.submitted == queue.ended == 200


def test_who_waits_runs_what_has_not_begun() -> None:
    queue, ran = CallQueue("own thread"), list[tuple[int, str]]()
    queue.running.acquire()  # as if a call were under way: nothing begins
    works = [submitted(queue, ran, number) for number in range(3)]
    queue.running.release()
    works[1].wait()
    assert [number for number, _ in ran][:2] == [0, 1]
    works[2].wait()
    queue.close()
    assert len(ran) == 3


def test_an_error_goes_to_its_own_call() -> None:
    queue, ran = CallQueue("own thread"), list[tuple[int, str]]()

    def fails() -> None:
        raise ValueError("as told")

    ticket = Ticket("a call that fails")
    queue.submit(fails, ticket)
    bad, good = SennitWork((ticket,), [], None, queue), submitted(queue, ran, 1)
    good.wait()
    with pytest.raises(ValueError, match="as told"):
        bad.wait()
    queue.close()
    assert len(ran) == 1


def test_what_a_call_sets_off_may_make_calls() -> None:
    """A future's callback runs where the call ended, and issues another call."""
    queue, ran = CallQueue("own thread"), list[tuple[int, str]]()
    first = submitted(queue, ran, 0)
    later: list[SennitWork] = []
    first.get_future().then(lambda _: later.append(submitted(queue, ran, 1)))
    first.wait()
    first.get_future().wait()
    while not later:
        pass
    later[0].wait()
    queue.close()
    assert [number for number, _ in ran] == [0, 1]
