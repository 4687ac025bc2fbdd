"""What a call is, in 32 bits that travel with each of its messages: two ranks that call different things find out, and
can say so.

    note := collective (8 bits) reduction (4 bits) root (20 bits: root + 1, or 0 for none)

Sizes need no bits: a message of another size is found by its length.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Note"]

_COLLECTIVES = (
    "message",
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "barrier",
)
_REDUCTIONS = ("", "sum", "prod", "min", "max", "band", "bor", "bxor")


@dataclass(frozen=True, slots=True)
class Note:
    collective: str
    reduction: str = ""
    root: int | None = None

    def __int__(self) -> int:
        root = 0 if self.root is None else self.root + 1
        return _COLLECTIVES.index(self.collective) << 24 | _REDUCTIONS.index(self.reduction) << 20 | root

    @classmethod
    def read(cls, note: int) -> Note:
        root = (note & 0xFFFFF) - 1
        return cls(_COLLECTIVES[note >> 24], _REDUCTIONS[note >> 20 & 0xF], None if root < 0 else root)

    def __str__(self) -> str:
        details = [self.reduction] * bool(self.reduction) + [f"root {self.root}"] * (self.root is not None)
        return self.collective + (f" ({', '.join(details)})" if details else "")
