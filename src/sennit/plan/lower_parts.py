"""What lanes are built with (`plan/lower.py`): keys of buffers, sums in the making, letters between lanes and their
mail; names, arguments, steps of moves.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from sennit.ir.dtype import DType
from sennit.ir.graph import Arg, Phase, Ref
from sennit.ir.layout import Entry, Layout
from sennit.ir.program import Buffer, Collective, CollectiveKind, Compute, Step, Times
from sennit.reshard.moves import MoveKind

__all__ = ["Key", "Letter", "Mail", "Sums", "label_of", "rename", "step_of"]


@dataclass(frozen=True, slots=True)
class Key:
    """What a buffer holds: a tensor, on a site, laid out so, for this micro-batch (None: all of the batch)."""

    tensor: str
    site: int
    entries: tuple[tuple[str, Entry], ...]
    microbatch: int | None


@dataclass(slots=True)
class Sums:
    """A sum over micro-batches in the making: its buffer so far."""

    buffer: Buffer
    covered: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Letter:
    """A value that lanes gave and another has still to take: as a plain transfer, or as the exchange `label`."""

    label: str
    givers: tuple[int, ...]
    tensor: str
    microbatch: int | None
    site: int
    landed: Layout
    dtype: DType
    times: Times
    is_plain: bool


@dataclass(slots=True)
class Mail:
    """What was given to a lane and not taken yet, by the lane that gave.

    All takers take in the order in which givers gave.
    """

    queues: dict[int, deque[Letter]] = field(default_factory=dict)

    def put(self, giver: int, letter: Letter) -> None:
        self.queues.setdefault(giver, deque()).append(letter)

    def take(self, lanes: Iterable[int]) -> Letter | None:
        """The first letter of these lanes that all its givers have sent, and before which they have sent nothing that
        is still here.
        """
        for lane in lanes:
            queue = self.queues.get(lane)
            if not queue:
                continue
            letter = queue[0]
            waiting = [self.queues.get(giver) for giver in letter.givers]
            if all(other and other[0] == letter for other in waiting):
                for giver in letter.givers:
                    self.queues[giver].popleft()
                return letter
        return None


def label_of(tensor: str, suffix: str, times: Times) -> str:
    label = f"{tensor}.{suffix}" if suffix else tensor
    return label + "".join(f"~{covered[0]}" for _, covered in times)


def rename(arg: Arg, names: Iterator[str]) -> Arg:
    """The same argument with its references replaced, in order."""
    if isinstance(arg, Ref):
        return Ref(next(names))
    if isinstance(arg, tuple):
        return tuple(rename(part, names) for part in arg)
    return arg


def step_of(kind: MoveKind, axis: str, source: Buffer, result: Buffer, phase: Phase) -> Step:
    if kind.communicates:
        return Collective(CollectiveKind(kind.value), source.name, result, (axis,))
    return Compute(f"sennit.{kind.value}", (Ref(source.name),), (), (result,), phase, "", source.tensor)
