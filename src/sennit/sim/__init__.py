"""The clock: a program on a cluster, timed."""

from sennit.kernels import fuse_attention
from sennit.sim.attribution import Part, critical_parts, exposed_parts, peak_by_kind
from sennit.sim.optimizer import Optimizer, optimizer
from sennit.sim.simulate import CostLine, Simulation, simulate, simulate_fully
from sennit.sim.steady import Steady
from sennit.sim.what_if import Straggler, WhatIf, parse_what_if

__all__ = [
    "CostLine",
    "Optimizer",
    "Part",
    "Simulation",
    "Steady",
    "Straggler",
    "WhatIf",
    "critical_parts",
    "exposed_parts",
    "fuse_attention",
    "optimizer",
    "parse_what_if",
    "peak_by_kind",
    "simulate",
    "simulate_fully",
]
