"""The clock: a program on a cluster, timed."""

from sennit.sim.simulate import simulate

__all__ = ["simulate"]
