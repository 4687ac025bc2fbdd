"""Who interprets: the compiled core, or the interpreter in Python where there is none."""

from __future__ import annotations

import ctypes
import logging
from ctypes import CDLL, Array
from functools import cache
from typing import Protocol

from sennit.collective.runtime.shm_abi import GroupRecord, TransferRecord, load_core
from sennit.collective.runtime.shm_plan import Plan

__all__ = ["CompiledMachine", "Machine", "choose_machine"]

_logger = logging.getLogger(__name__)


class Machine(Protocol):
    """`run` and `exchange` go on where they stood. All return a `Status`. Addresses are those of the records."""

    @property
    def name(self) -> str: ...

    def start(
        self, group: GroupRecord, group_address: int, plan: Plan, source: int, target: int, staged: int
    ) -> int: ...

    def run(self, group: GroupRecord, group_address: int, plan: Plan) -> int: ...

    def exchange(
        self, group: GroupRecord, group_address: int, rings: int, transfers: Array[TransferRecord], count: int
    ) -> int: ...


class CompiledMachine:
    __slots__ = ("_exchange", "_run", "_start", "library")

    def __init__(self, library: CDLL) -> None:
        self.library = library
        self._start, self._run, self._exchange = library.sennit_start, library.sennit_run, library.sennit_exchange

    @property
    def name(self) -> str:
        return "compiled"

    def start(self, group: GroupRecord, group_address: int, plan: Plan, source: int, target: int, staged: int) -> int:
        status: int = self._start(group_address, plan.address, source, target, staged)
        return status

    def run(self, group: GroupRecord, group_address: int, plan: Plan) -> int:
        status: int = self._run(group_address, plan.address)
        return status

    def exchange(
        self, group: GroupRecord, group_address: int, rings: int, transfers: Array[TransferRecord], count: int
    ) -> int:
        return int(self._exchange(group_address, rings, ctypes.addressof(transfers), count))


def choose_machine(compiled: bool) -> Machine:
    library = load_core() if compiled else None
    if library is not None:
        return CompiledMachine(library)
    if compiled:
        warn_once()
    from sennit.collective.runtime.shm_machine_numpy import NumpyMachine

    return NumpyMachine()


@cache
def warn_once() -> None:
    _logger.warning(
        "the compiled core of the shared-memory runtime is missing: collectives run in Python, right but slow. "
        "Install sennit where a C compiler is present to build it."
    )
