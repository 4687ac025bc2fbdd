"""What a step costs in time: latency per message, bytes over the link, bytes copied in memory.

    seconds(step) = alpha * messages + beta * bytes of the busiest device + gamma * bytes packed and unpacked

One class of links, the slowest that connects the devices: every step waits for it.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["LinkCost"]


@dataclass(frozen=True, slots=True)
class LinkCost:
    """Seconds per message, per byte on the link, per byte copied. The defaults are round figures for devices in one machine
    (20 us, 10 GB/s, 40 GB/s): they order the candidates sensibly where no cluster is given, and predict nothing."""

    alpha: float = 20e-6
    beta: float = 1 / 10e9
    gamma: float = 1 / 40e9

    def seconds(self, messages: int, sent_or_received: float, copied: float) -> float:
        return self.alpha * messages + self.beta * sent_or_received + self.gamma * copied
