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


@pytest.mark.parametrize("depth", [1, 3])
def test_what_a_call_sets_off_may_wait_for_later_calls(depth: int) -> None:
    """PowerSGD's hook waits in a callback for the future of an all-reduce that it makes there."""
    queue, ran = CallQueue("own thread"), list[tuple[int, str]]()

    def calls_and_waits(number: int) -> None:
        if number <= depth:
            future = submitted(queue, ran, number).get_future()
            future.then(lambda _: calls_and_waits(number + 1)).wait()

    first = submitted(queue, ran, 0).get_future().then(lambda _: calls_and_waits(1))
    waiter = threading.Thread(target=first.wait, daemon=True)  # of the future alone: it runs no calls
    waiter.start()
    waiter.join(10.0)
    assert not waiter.is_alive()
    queue.close()
    assert [number for number, _ in ran] == list(range(depth + 1))
    assert not [thread for thread in threading.enumerate() if thread.name == queue.name]


def test_what_a_call_sets_off_may_wait_for_calls_that_were_made_before_it_ended() -> None:
    queue, ran = CallQueue("own thread"), list[tuple[int, str]]()
    queue.running.acquire()  # both are made before the first begins
    first, second = (submitted(queue, ran, number).get_future() for number in range(2))
    first = first.then(lambda _: second.wait())
    queue.running.release()
    waiter = threading.Thread(target=first.wait, daemon=True)
    waiter.start()
    waiter.join(10.0)
    assert not waiter.is_alive()
    queue.close()
