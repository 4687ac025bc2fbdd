"""What a collective call returns, and the queue that brings calls to their end in order.

A group runs its collectives one after another, in the order of the calls: on a thread of the group; or, where the
caller waits anyway and nothing is under way, on the caller's own thread at once; or, where it waits for a call that was
made before and has not begun, on its thread then, with those before it. A change of thread costs more than a small
all-reduce.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
from torch import Tensor

from sennit.collective.runtime.p2p_ticket import Ticket
from sennit.collective.runtime.private_torch import WorkBase, untraced
from sennit.collective.runtime.shm_shortcut import new_turn

__all__ = ["CallQueue", "NothingLeft", "SennitWork"]

Job = Callable[[], None]

_DROPPED = 16  # works, with their tensors, that are kept though nobody in Python holds them: `SennitWork.__del__`


@untraced
class SennitWork(WorkBase):
    """Tickets in the words of c10d: done when all are.

    `outputs` is what its future gives. With a `timeout`, who waits waits no longer.
    """

    def __init__(
        self,
        tickets: Sequence[Ticket],
        outputs: list[Tensor],
        timeout: float | None,
        queue: CallQueue | None = None,
    ) -> None:
        super().__init__()
        self.tickets, self.outputs, self.queue = tickets, outputs, queue  # of calls: where they wait for their turn
        self.limit = timeout
        self.deadline = None if timeout is None else time.monotonic() + timeout
        self.future: torch.futures.Future[list[Tensor]] | None = None
        self.awaited = False

    def is_completed(self) -> bool:
        return all(ticket.done for ticket in self.tickets)

    def is_success(self) -> bool:
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        return next((ticket.error for ticket in self.tickets if ticket.error is not None), None)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the end, and raise what went wrong.

        Without a timeout the one that it was made with counts, from the call on.
        """
        self.awaited = True
        deadline, limit = self.deadline, self.limit
        if timeout is not None and timeout > timedelta(0):
            limit = timeout.total_seconds()
            deadline = time.monotonic() + limit
        if self.queue is not None and deadline is None:
            self.queue.help(self.tickets)
        for ticket in self.tickets:
            ticket.wait(None if deadline is None else deadline - time.monotonic(), limit)
        return True

    def synchronize(self) -> None:
        self.wait()

    def result(self) -> list[Tensor]:
        return self.outputs

    def source_rank(self) -> int:
        return next((ticket.source for ticket in self.tickets if ticket.source is not None), -1)

    def _source_rank(self) -> int:
        return self.source_rank()

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        self.awaited = True
        if self.future is None:
            future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
            self.future = future
            if not self.tickets:
                future.set_result(self.outputs)
            left = [len(self.tickets)]
            lock = threading.Lock()

            def ended() -> None:
                with lock:
                    left[0] -= 1
                    last = left[0] == 0
                if last:
                    if self.queue is not None:
                        self.queue.leave_to_another()
                    error = self.exception()
                    if error is None:
                        future.set_result(self.outputs)
                    else:
                        future.set_exception(error)  # type: ignore[arg-type]  # torch's annotation is wrong

            for ticket in self.tickets:
                ticket.then(ended)
        return self.future

    def __del__(self) -> None:
        """Of calls that nobody has waited for, the last ones stay.

        C++ may go on holding its half of this object alone, as DDP does with an all-reduce of `Join`
        (`divide_by_initial_world_size=False`). What it then calls is not `wait` above but torch's own, which does not end.
        """
        if self.queue is not None and not self.awaited:
            self.queue.dropped.append(self)


@untraced
class NothingLeft(SennitWork):
    """Of a call that is done when it returns."""

    def __init__(self) -> None:
        super().__init__((), [], None)

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True


class CallQueue:
    """The collective calls of a group, in order.

    Its thread starts with the first call that does not wait. None is under way while nobody holds `running` and as many
    were submitted as have ended; which is when `jobs` is empty, since a job is taken from there with `running` held.

    What a call sets off when it ends, the callbacks of its future, runs on the thread that brought it to its end, and
    may wait there for calls that come later. So nobody goes into callbacks unless another thread is there for those:
    `leave_to_another`.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.running = new_turn()  # held while a call runs
        self._counting = threading.Lock()
        self.submitted = self.ended = 0
        self.jobs: deque[tuple[Job, Ticket]] = deque()
        self._calls: queue.SimpleQueue[bool] = queue.SimpleQueue()  # wakes a thread, for a job or for the end of all
        self._threads: list[threading.Thread] = []
        self.dropped: deque[object] = deque(maxlen=_DROPPED)
        self._idle = 0  # threads that wait to be woken

    def run_here(self, job: Job) -> bool:
        """Run a call on this thread if none is under way."""
        if not self.running.acquire(blocking=False):
            return False
        try:
            if self.submitted != self.ended:
                return False
            job()
            return True
        finally:
            self.running.release()

    def submit(self, job: Job, ticket: Ticket) -> None:
        with self._counting:
            self.submitted += 1
            if not self._threads:
                self._start_thread()
            self.jobs.append((job, ticket))
            self._calls.put(True)

    def help(self, tickets: Sequence[Ticket]) -> None:
        """Run calls on this thread, in order, until these have ended or somebody else runs one."""
        while not all(ticket.done for ticket in tickets) and self.running.acquire(blocking=False):
            if not self._run_next():
                return

    def leave_to_another(self) -> None:
        """See that a thread other than this one can run what comes: this one is about to do what may wait for it."""
        with self._counting:
            if self._threads and not self._idle:
                self._start_thread()

    def close(self) -> None:
        """End the threads, after the calls that were made."""
        self._calls.put(False)
        self.dropped.clear()
        here = threading.current_thread()
        for thread in self._threads:  # grows where callbacks still run
            if thread is not here:
                thread.join()

    def _start_thread(self) -> None:
        thread = threading.Thread(target=self._run, name=self.name, daemon=True)
        self._threads.append(thread)
        self._idle += 1
        thread.start()

    def _run(self) -> None:
        while self._calls.get():
            with self._counting:
                self._idle -= 1
            self.running.acquire()
            self._run_next()  # unless who waits for it has run it
            with self._counting:
                self._idle += 1
        self._calls.put(False)  # for the next thread

    def _run_next(self) -> bool:
        """The first call that waits; whether there was one.

        `running` is held, and released before its ticket ends: what that sets off may make calls.
        """
        error: BaseException | None = None
        try:
            if not self.jobs:
                return False
            job, ticket = self.jobs.popleft()
            try:
                job()
            except BaseException as raised:  # carried to whoever waits
                error = raised
            self.ended += 1
        finally:
            self.running.release()
        del job
        ticket.finish(error)
        return True
