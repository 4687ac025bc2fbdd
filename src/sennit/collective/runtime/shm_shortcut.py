"""The short way from Python into the core, where it was built: `_shm_call`, from `shm_call.c`, which says what it does.

    shortcut_of    one for a group, or None
    facts_of       what it should know of a plan that the long way has run: the next call like that is short

Python's part of a call is what is left of a small all-reduce: the core takes about a microsecond between two ranks, and the long way takes three from numpy. Everything here may be left out;
results are the same.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sized
from threading import Lock
from typing import TYPE_CHECKING

from sennit.collective.runtime.shm_machine import CompiledMachine, Machine
from sennit.collective.runtime.shm_plan import Plan

if TYPE_CHECKING:
    from sennit.collective.runtime._shm_call import Shortcut

__all__ = ["FROM_ROOT", "PLAIN", "ROWS", "SUMS", "Rest", "facts_of", "shortcut_of"]

Rest = Callable[[Plan, int, object], None]  # a plan under way, its status, what the call was made with

PLAIN, SUMS, FROM_ROOT, ROWS = 0, 1, 2, 4  # what a call through torch is, as shm_call.c numbers it


def shortcut_of(
    machine: Machine,
    group: int,
    own_memory: tuple[int, int],
    lock: Lock,
    rest: Rest,
    *,
    calls: Sized | None = None,
    torch: tuple[type, object, object] | None = None,
) -> Shortcut | None:
    """None where the core or the short way to it is not built. `calls` are those that come first; `torch` is its type of tensors, its sum, and how tensors describe themselves in C."""
    if not isinstance(machine, CompiledMachine):
        return None
    try:
        from sennit.collective.runtime._shm_call import Shortcut
    except ImportError:
        return None
    start = ctypes.cast(machine.library.sennit_start, ctypes.c_void_p).value
    assert start is not None
    return Shortcut(lock, calls, rest, group, start, *own_memory, torch)


def facts_of(plan: Plan) -> tuple[Plan, int, int, int, int, bool] | None:
    """What `learn_arrays` and `learn_tensors` ask for. None of a plan for the long way: peers touch more than staging, or there is no input or no output here."""
    if plan.staged is None or not plan.sizes[0] or not plan.sizes[1]:
        return None
    return plan, plan.address, plan.staged, *plan.sizes, plan.one_array
