"""Where the source writes a result into memory that is there, and where it leaves a copy out. The program stays as it was checked.

**In place.** A program writes each buffer once, so `c = a * b` makes new memory although nobody reads `a` again. The source may then say `a *= b`
under the name of c: less memory, and none that the system must first clear. Buffers that share memory are one *storage*: what an operator of torch
makes anew is a storage of its own, and views of it are members. A step may write into an operand if, with S the storage of that operand,

- all members of S are made and read by operators of torch alone: nothing of it was given, is communicated (a message may still be under way),
  goes through a move of sennit's own, or is returned;
- no member of S is read later, and no other argument of the step is a member;
- operand and result have one element type and one shape, and the operand is no expansion (whose elements are one in memory).

Only operators whose every element depends on the same element of that operand are there (`WRITES`), and writing into a row by index.

**Copies.** `view(clone(x))` is how torch says that elements must be put in order first. The source calls `reshape`, which does that where it must, so
a copy that views alone read is left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from sennit.ir.graph import Arg, Ref
from sennit.ir.operators import is_view
from sennit.ir.program import Buffer, Compute, Free, Lane, defines, reads

__all__ = ["InPlace", "Write", "in_place"]

COPY, ALIAS = "aten.clone.default", "aten.alias.default"
RESHAPED = ("aten.view.default", "aten._unsafe_view.default")


@dataclass(frozen=True, slots=True)
class Write:
    """The operator that writes into one of its first two arguments: `into` is its number. An `out` is a keyword that takes it once more."""

    kind: str
    into: int = 0
    out: str | None = None


WRITES: Mapping[str, tuple[Write, ...]] = {
    "aten.add.Tensor": (Write("aten.add_.Tensor"), Write("aten.add_.Tensor", into=1)),
    "aten.mul.Tensor": (Write("aten.mul_.Tensor"), Write("aten.mul_.Tensor", into=1)),
    "aten.sub.Tensor": (Write("aten.sub_.Tensor"),),
    "aten.mul.Scalar": (Write("aten.mul_.Scalar"),),
    "aten.scatter.value": (Write("aten.scatter_.value"),),
    "aten.gelu_backward.default": (Write("aten.gelu_backward.grad_input", out="grad_input"),),
}


@dataclass(frozen=True, slots=True)
class InPlace:
    """`writes` by the result of the step; `spared`: copies that are not made, by their result."""

    writes: Mapping[str, Write]
    spared: frozenset[str]


def in_place(lane: Lane) -> InPlace:
    last: dict[str, int] = {}
    readers: dict[str, list[str]] = {}
    for position, step in enumerate(lane.steps):
        if not isinstance(step, Free):
            for name in reads(step):
                last[name] = position
                readers.setdefault(name, []).append(step.kind if isinstance(step, Compute) else "")
    outputs = frozenset(output.name for output in lane.outputs)
    spared = frozenset(
        step.results[0].name
        for step in lane.steps
        if isinstance(step, Compute)
        and (step.kind == ALIAS or (step.kind == COPY and not step.kwargs))
        and step.results[0].name not in outputs
        and all(kind in RESHAPED for kind in readers.get(step.results[0].name, ()))
    )
    storages = _Storages(last, outputs)
    for item in lane.inputs:
        storages.expose(item.buffer.name)
    buffers, device, writes = lane.buffers(), lane.devices[0], dict[str, Write]()
    for position, step in enumerate(lane.steps):
        if isinstance(step, Free):
            continue
        if not isinstance(step, Compute) or not _is_torch(step.kind):
            for name in (*reads(step), *(buffer.name for buffer in defines(step))):
                storages.expose(name)
            continue
        if step.results[0].name in spared or _aliases(step.kind):
            storages.view(step)
            continue
        write = _write(step, position, storages, buffers, device)
        storages.make(step)
        if write is not None:
            writes[step.results[0].name] = write
            storages.join(step.results[0].name, _operand(step, write))
    return InPlace(writes, spared)


def _write(
    step: Compute, position: int, storages: _Storages, buffers: Mapping[str, Buffer], device: int
) -> Write | None:
    for write in WRITES.get(step.kind, ()):
        arg = step.args[write.into]
        if not isinstance(arg, Ref) or (write.into and step.kwargs):  # a factor of the second term
            continue
        given, made = buffers[arg.name], step.results[0]
        is_same = given.dtype is made.dtype and given.local_shape(device) == made.local_shape(device)
        even = given.layout.is_even and made.layout.is_even
        others = [name for name in reads(step) if name != arg.name]
        alone = sum(other == arg for other in _flat(step.args)) == 1
        if is_same and even and alone and storages.may_write(arg.name, position, others):
            return write
    return None


def _operand(step: Compute, write: Write) -> str:
    arg = step.args[write.into]
    assert isinstance(arg, Ref)
    return arg.name


def _flat(args: tuple[Arg, ...]) -> list[Arg]:
    return [part for arg in args for part in (arg if isinstance(arg, tuple) else (arg,))]


@dataclass(slots=True)
class _Storage:
    members: list[str] = field(default_factory=list)
    exposed: bool = False


class _Storages:
    """Which buffers share memory, as far as the steps so far tell."""

    def __init__(self, last: Mapping[str, int], outputs: frozenset[str]) -> None:
        self.last, self.outputs = last, outputs
        self.of: dict[str, _Storage] = {}
        self.expanded: set[str] = set()

    def expose(self, name: str) -> None:
        self.of.setdefault(name, _Storage([name])).exposed = True

    def make(self, step: Compute) -> None:
        for buffer in step.results:
            self.of[buffer.name] = _Storage([buffer.name], buffer.name in self.outputs)

    def join(self, name: str, other: str) -> None:
        """`name` lies in the memory of `other`."""
        storage = self.of[other]
        storage.members.append(name)
        storage.exposed |= name in self.outputs
        self.of[name] = storage

    def view(self, step: Compute) -> None:
        source, *further = reads(step)
        for name in further:
            self.expose(name)  # which of its arguments it looks at is not known
        for buffer in step.results:
            self.join(buffer.name, source)
            if step.kind == "aten.expand.default" or source in self.expanded:
                self.expanded.add(buffer.name)
        if further:
            self.expose(source)

    def may_write(self, name: str, position: int, others: list[str]) -> bool:
        storage = self.of[name]
        if storage.exposed or name in self.expanded or any(self.of[other] is storage for other in others):
            return False
        return all(self.last.get(member, -1) <= position for member in storage.members)


def _is_torch(kind: str) -> bool:
    return kind.startswith("aten.") and _overload(kind) is not None


def _aliases(kind: str) -> bool:
    """Whether torch says that a result may share memory with an argument, or the source calls something that may."""
    overload = _overload(kind)
    assert overload is not None
    return is_view(kind) or kind in RESHAPED or any(item.alias_info is not None for item in overload._schema.returns)


def _overload(kind: str) -> torch._ops.OpOverload | None:
    _, name, overload = kind.split(".")
    packet = getattr(torch.ops.aten, name, None)
    return getattr(packet, overload, None) if packet is not None else None
