"""One direction of a link, with one capacity."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Speed", "Wire"]


@dataclass(frozen=True, slots=True)
class Speed:
    """A protocol on a wire: seconds to start, and the part of the wire's bandwidth it carries."""

    name: str
    latency: float
    efficiency: float


@dataclass(frozen=True, slots=True)
class Wire:
    """`bandwidth` is what large transfers reach, in bytes a second. `ends` are what it joins inside `node`: `device 3`,
    `nic 0`; of a network's wires, its NIC or its leaf. `burst` bytes pass at once when it was idle."""

    name: str
    link: str
    bandwidth: float
    latency: float
    speeds: tuple[Speed, ...] = ()
    multicast: float | None = None
    node: int | None = None
    ends: tuple[str, ...] = ()
    burst: float = 0.0

    def speed(self, protocol: str | None) -> Speed:
        for speed in self.speeds:
            if speed.name == protocol:
                return speed
        return Speed("", self.latency, 1.0)
