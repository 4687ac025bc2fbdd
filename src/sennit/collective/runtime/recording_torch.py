"""Calls in traces of `torch.profiler`: `sennit:all_reduce` and the like, as torch's own backends record theirs.

A record begins when the call is made and ends when the call has ended, on whichever thread that is. Calls that are made
in C leave no record, so `shm_call.c` makes none while a profiler runs: it looks at the word of torch that says so.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

from torch.autograd import profiler

from sennit.collective.runtime.work_torch import NothingLeft, SennitWork

__all__ = ["PROFILER_RUNS", "recorded"]

PROFILER_RUNS = "_is_profiler_enabled"  # in the module of torch's profiler

_Given = ParamSpec("_Given")
_Group = TypeVar("_Group")
_Method = Callable[Concatenate[_Group, _Given], SennitWork]


def recorded(name: str) -> Callable[[_Method[_Group, _Given]], _Method[_Group, _Given]]:
    """Of a method of a group that begins a call."""

    def make(method: _Method[_Group, _Given]) -> _Method[_Group, _Given]:
        @wraps(method)
        def call(self: _Group, /, *given: _Given.args, **named: _Given.kwargs) -> SennitWork:
            if not getattr(profiler, PROFILER_RUNS, False):
                return method(self, *given, **named)
            with profiler.record_function(f"sennit:{name}") as record:
                work = method(self, *given, **named)
                if not isinstance(work, NothingLeft):
                    record._call_end_callbacks_on_future(work.get_future())
                return work

        return call

    return make
