"""What a timeline is made of: events, and samples of live memory."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

__all__ = ["Category", "Event", "Memory", "MemoryKind"]


class Category(Enum):
    COMPUTE = "compute"
    COLLECTIVE = "collective"
    SEND = "send"
    RECEIVE = "receive"


class MemoryKind(Enum):
    PARAMETERS = "parameters"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer"
    ACTIVATIONS = "activations"
    INPUTS = "inputs"
    STAGING = "staging"


@dataclass(frozen=True, slots=True)
class Event:
    device: int
    stream: str
    category: Category
    name: str
    start: float
    stop: float
    bytes: int = 0
    after: int | None = None


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes live on a device from `time` on, by kind."""

    device: int
    time: float
    live: tuple[tuple[MemoryKind, int], ...]

    @property
    def total(self) -> int:
        return sum(size for _, size in self.live)
