"""The short way from Python into the core, where it was built: `_shm_call`, from `shm_call.c`, which says what it does.

    shortcut_of    one for a group, or None
    new_turn       a lock for it, which is taken in C
    facts_of       what it should know of a plan that the long way has run: the next call like that is short

Python's part of a call is what is left of a small all-reduce: the core takes about a microsecond between two ranks, and
the long way takes three from numpy. Everything here may be left out; results are the same.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sized
from importlib import import_module
from threading import Lock
from types import TracebackType
from typing import Protocol

from sennit.collective.runtime.shm_machine import CompiledMachine, Machine
from sennit.collective.runtime.shm_plan import Plan

__all__ = [
    "FROM_ROOT",
    "PLAIN",
    "ROWS",
    "SUMS",
    "OptionsExample",
    "PlanFacts",
    "Rest",
    "Shortcut",
    "Turn",
    "facts_of",
    "new_turn",
    "shortcut_of",
]

Rest = Callable[[Plan, int, object], None]  # a plan under way, its status, what the call was made with
# address of its record, what is staged, bytes of input and output, whether they may be one array
PlanFacts = tuple[Plan, int, int, int, int, bool]
# options, and of them as numbers: asyncOp, reduceOp, rootRank
OptionsExample = tuple[object, int, int | None, int | None]

PLAIN, SUMS, FROM_ROOT, ROWS = 0, 1, 2, 4  # what a call through torch is, as shm_call.c numbers it


class Turn(Protocol):
    """What a lock must do that is held while a call of a group runs."""

    def acquire(self, blocking: bool = True) -> bool: ...

    def release(self) -> None: ...

    def __enter__(self) -> bool: ...

    def __exit__(
        self, type: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None, /
    ) -> None: ...


class Shortcut(Protocol):
    """Of `_shm_call`. Calls return True when they are done, and None when they are for the long way."""

    def arrays(
        self,
        kind: str,
        array: object,
        out: object,
        dtype: object,
        reduction: object,
        root: int | None,
        context: object,
        /,
    ) -> bool | None: ...

    def now(self, kind: str, what: int, output: object, input: object, root: int, /) -> bool | None: ...

    def method(
        self, kind: str, what: int, long_way: Callable[..., object], done: object, /
    ) -> Callable[..., object]: ...

    def learn_arrays(
        self,
        facts: PlanFacts,
        kind: str,
        array: object,
        out: object,
        dtype: object,
        reduction: object,
        root: int | None,
        /,
    ) -> None: ...

    def learn_tensors(
        self, facts: PlanFacts, kind: str, what: int, output: object, input: object, root: int, /
    ) -> None: ...

    def give_way(self, words: dict[str, object], word: str, /) -> None: ...

    def know_options(self, examples: tuple[OptionsExample, ...], /) -> bool: ...

    def forget(self) -> None: ...

    def close(self) -> None: ...


def shortcut_of(
    machine: Machine,
    group: int,
    lock: Turn,
    rest: Rest,
    *,
    calls: Sized | None = None,
    torch: tuple[type, object, object] | None = None,
) -> Shortcut | None:
    """None where the core or the short way to it is not built.

    `calls` are those that come first; `torch` is its type of tensors, its sum, and how tensors describe themselves in
    C.
    """
    if not isinstance(machine, CompiledMachine):
        return None
    try:
        built = import_module("sennit.collective.runtime._shm_call")
    except ImportError:
        return None
    library = machine.library
    starts = tuple(
        ctypes.cast(entry, ctypes.c_void_p).value
        for entry in (library.sennit_start, library.sennit_start_briefly, library.sennit_run)
    )
    made: Shortcut = built.Shortcut(lock, calls, rest, group, starts, torch)
    return made


def new_turn() -> Turn:
    """A lock that the short way takes without a call of Python, where that was built."""
    try:
        made: Turn = import_module("sennit.collective.runtime._shm_call").Turn()
    except ImportError:
        return Lock()
    return made


def facts_of(plan: Plan) -> PlanFacts | None:
    """What `learn_arrays` and `learn_tensors` ask for.

    None of a plan for the long way: peers touch more than staging, or there is no input or no output here.
    """
    if plan.staged is None or not plan.sizes[0] or not plan.sizes[1]:
        return None
    return plan, plan.address, plan.staged, *plan.sizes, plan.one_array
