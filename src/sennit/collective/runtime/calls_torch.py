"""How a group of the c10d backend runs calls: now or in their turn, until one fails or the group is closed.

`CallingGroup` is what torch holds. It knows nothing of particular collectives: `backend_torch.py` gives it jobs.

| state | a call |
|---|---|
| good | runs on the caller's thread if it waits for it and nothing is under way; else in its turn on the group's thread |
| broken, since a call failed | raises, with the first failure |
| closed, or in a forked child | raises |
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from sennit.collective.runtime.communicator_torch import Communicator
from sennit.collective.runtime.express_torch import Express
from sennit.collective.runtime.p2p_links import Links
from sennit.collective.runtime.p2p_ticket import Ticket
from sennit.collective.runtime.private_torch import GroupBase, Store, is_asynchronous, time_limit, untraced
from sennit.collective.runtime.shared_torch import Shared
from sennit.collective.runtime.shm_plan import Plan
from sennit.collective.runtime.shm_shortcut import Shortcut
from sennit.collective.runtime.tensors_torch import writable
from sennit.collective.runtime.work_torch import CallQueue, NothingLeft, SennitWork
from sennit.errors import PeerError, RunError

__all__ = ["CallingGroup"]

_logger = logging.getLogger(__name__)


@untraced
class CallingGroup(GroupBase):  # type: ignore[misc]  # what it derives from depends on the torch
    """One rank's end of a group. `members` are the ranks of the world, by rank of the group."""

    def __init__(
        self,
        store: Store,
        communicator: Communicator,
        links: Links | None,
        members: Sequence[int],
        *,
        name: str,
        timeout: float,
    ) -> None:
        super().__init__(communicator.rank, communicator.size)
        self._store = store
        self._group_name, self._group_description = name, "undefined"
        self._rank, self._size = communicator.rank, communicator.size
        self._communicator, self._links = communicator, links
        self._members = tuple(members)
        self._timeout = timeout
        self._calls = CallQueue(f"sennit-{name}")
        self._failure: BaseException | None = None
        self._closed = self._used_up = False
        self._coalesced: list[Ticket] | None = None
        self._pid = os.getpid()
        self._nothing_left = NothingLeft()
        self._express = Express.of(communicator, self._calls, self._rest_of_call, self._break)
        self._short = None if self._express is None else self._express.short

    def getBackendName(self) -> str:  # noqa: N802
        return "sennit"

    def name(self) -> str:
        return "sennit"

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    # torch's own keeps these in the backends that it holds, and has none here
    def _get_backend(self, device: torch.device | str) -> Any:
        if torch.device(device).type != "cpu":
            raise RuntimeError(f"the backend sennit has tensors of a CPU, and none of {device}")
        return self

    def _set_group_name(self, name: str) -> None:
        self._group_name = name

    @property
    def group_name(self) -> str:
        return self._group_name

    def _set_group_desc(self, description: str) -> None:
        self._group_description = description

    @property
    def group_desc(self) -> str:
        return self._group_description

    def get_group_store(self) -> Store:
        return self._store

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout.total_seconds()

    @property
    def short(self) -> Shortcut | None:
        """The short way in C, where the ranks share memory and it was built."""
        return self._short

    # ---- running calls -----------------------------------------------------------------------------------------------

    def _call(self, job: Callable[[], None], outputs: list[Tensor], opts: Any) -> SennitWork:
        """Run a collective, now or in its turn."""
        self._check_usable()

        if not is_asynchronous(opts) and self._calls.run_here(lambda: self._guarded(job)):
            return self._nothing_left
        ticket = Ticket("a collective")
        if self._coalesced is not None:
            self._coalesced.append(ticket)
        self._calls.submit(lambda: self._guarded(job), ticket)
        return SennitWork((ticket,), outputs, None, self._calls)  # the call itself has a time limit

    def _guarded(self, job: Callable[[], None]) -> None:
        self._check_usable()
        try:
            with writable():  # of the caller's tensors, on whichever thread
                job()
        except PeerError as error:
            told = self._in_words_of_the_world(error)
            self._break(told)
            raise told from error
        except BaseException as error:  # whatever it is, the other ranks wait for this one in vain
            self._break(error)
            raise

    def _rest_of_call(self, plan: Plan, status: int, opts: Any) -> None:
        """Of one that `Express` began."""
        communicator = self._communicator
        assert isinstance(communicator, Shared)
        self._guarded(lambda: communicator.finish(plan, status, self._limit(opts)))

    def _break(self, error: BaseException) -> None:
        if self._failure is None:
            self._failure = error
            self._communicator.abort(getattr(error, "what", str(error)))

    def _in_words_of_the_world(self, error: PeerError) -> PeerError:
        """Messages number the ranks of the group; say which these are."""
        if self._members == tuple(range(self._size)):
            return error
        listed = ", ".join(map(str, self._members))
        where = f"{error.where or f'rank {self._rank}'}; ranks 0 to {self._size - 1} of this group are {listed} of the world"
        return PeerError(error.what, where=where, fix=error.fix)

    def _check_usable(self) -> None:
        if self._failure is not None:
            raise PeerError(
                f"the group is broken since an earlier call failed: {self._failure}",
                where=f"rank {self._rank} of {self._size}",
                fix="destroy the group, and make a new one of the ranks that are left",
            )
        if self._closed:
            raise PeerError("the group is closed", where=f"rank {self._rank} of {self._size}")
        if os.getpid() != self._pid:
            raise PeerError(
                "this process was forked from a rank and is not one",
                where=f"rank {self._rank} of {self._size}",
                fix="make a new group in the child, or start it with spawn",
            )

    def _limit(self, opts: Any) -> float:
        return time_limit(opts, self._timeout)

    def _start_coalescing(self, device: torch.device) -> None:
        self._coalesced = []

    def _end_coalescing(self, device: torch.device) -> SennitWork:
        tickets, self._coalesced = self._coalesced or [], None
        return SennitWork(tickets, [], None)

    # ---- memory ------------------------------------------------------------------------------------------------------

    def supports_tensor_alloc(self, device: torch.device | str) -> bool:
        """As c10d asks it, for FSDP2."""
        return torch.device(device).type == "cpu"

    def allocate_tensor(self, size: int, *, dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
        """So many elements that the other ranks of the host read where they are: a collective of them copies less.

        Ordinary memory where ranks share none, or all of it is in use, which is said once.
        """
        self._check_usable()
        nbytes, found = size * dtype.itemsize, None
        if nbytes and self.supports_tensor_alloc(device):
            try:
                found = self._communicator.allocate(nbytes)
            except RunError as error:
                if not self._used_up:
                    _logger.warning("%s: tensors that find no room lie in ordinary memory", error)
                self._used_up = True
        return torch.empty(size, dtype=dtype, device=device) if found is None else found.view(dtype)

    # ---- the end -----------------------------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """Called by `destroy_process_group`: after what is under way, give everything back."""
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        self._calls.close()
        if self._express is not None:
            self._express.close()
        self._communicator.close()
        if self._links is not None:
            self._links.close()

    def abort(self) -> None:
        """Called by a watchdog: end what is under way with an error, on this rank and on all that wait for it."""
        self._break(PeerError(f"rank {self._rank} aborted the group"))
