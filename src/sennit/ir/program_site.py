"""Places in a program and words for them: what the error messages of the checkers are made of.

A user knows tensors, modules, micro-batches and devices. A message about a program therefore names the lane with its
devices, the step with its number and what it does, and the buffer with its layout and times.
"""

from __future__ import annotations

from dataclasses import dataclass

from sennit.errors import ProgramError
from sennit.ir.layout import Entry, Pending, Split
from sennit.ir.mesh import print_ranges
from sennit.ir.program import Buffer, Collective, Compute, Exchange, Free, Lane, Program, Receive, Send, Step

__all__ = ["Site", "describe_entry", "describe_lane", "describe_step", "describe_times"]


@dataclass(frozen=True, slots=True)
class Site:
    """A lane, or one step of it (counted from 0); `step` is None for what concerns the lane as a whole."""

    program: Program
    lane: Lane
    step: int | None = None

    def __str__(self) -> str:
        text = f"program {self.program.name!r}, {describe_lane(self.lane)}"
        return text if self.step is None else f"{text}, step {self.step}: {describe_step(self.lane.steps[self.step])}"

    def error(self, what: str, *, fix: str) -> ProgramError:
        return ProgramError(what, where=str(self), fix=fix)


def describe_lane(lane: Lane) -> str:
    return f"lane {lane.name!r} ({'device' if len(lane.devices) == 1 else 'devices'} {print_ranges(lane.devices)})"


def describe_step(step: Step) -> str:
    """One line for messages: what the step does, to which buffer, at which micro-batch, in which module."""
    match step:
        case Compute(kind=kind, results=results, phase=phase, module=module, op=op):
            names = ", ".join(map(_name, results))
            origin = [f"op %{op}"] if op else []
            origin += [f"module {module!r}"] if module else []
            return f"{phase.value} {names} = {kind}" + (f" ({', '.join(origin)})" if origin else "")
        case Collective(kind=collective, source=source, result=result, axes=axes):
            return f"{collective.value} {_name(result)} = %{source} over {', '.join(axes)}"
        case Send(source, to):
            return f"send %{source} to {to}"
        case Receive(result, origin_lane):
            return f"receive {_name(result)} from {origin_lane}"
        case Exchange(label, given, taken, _):
            words = [f"gives %{given}"] if given is not None else []
            words += [f"takes {_name(taken)}"] if taken is not None else []
            return f"exchange {label!r}" + (f" ({' and '.join(words)})" if words else "")
        case Free(source):
            return f"free %{source}"


def describe_times(buffer: Buffer) -> str:
    """`at mb=0+1`, or "at no time" for a buffer that no time axis divides."""
    return ", ".join(f"at {axis}={'+'.join(map(str, covered))}" for axis, covered in buffer.times) or "at no time"


def describe_entry(entry: Entry | None) -> str:
    match entry:
        case None:
            return "replicated"
        case Split(dim, stride):
            return f"split on dim {dim} with stride {stride}"
        case Pending(op):
            return f"a pending {op.value}"


def _name(buffer: Buffer) -> str:
    return f"%{buffer.name} {describe_times(buffer)}" if buffer.times else f"%{buffer.name}"
