"""A cost: seconds, and what they rest on."""

from __future__ import annotations

from dataclasses import dataclass

from sennit.cluster import Basis

__all__ = ["Cost", "weakest"]


@dataclass(frozen=True, slots=True)
class Cost:
    """`source` says how the seconds of this very step came about, `model` by what: what many steps have in common."""

    seconds: float
    basis: Basis
    source: str
    model: str = "the roofline of the device"

    def __str__(self) -> str:
        return f"{self.seconds:.3g} s ({self.basis.value}: {self.source})"


def weakest(*bases: Basis) -> Basis:
    """What a cost made of several figures rests on: an estimate among them makes it one."""
    order = (Basis.ESTIMATED, Basis.DATA_SHEET, Basis.MEASURED)
    return min(bases, key=order.index)
