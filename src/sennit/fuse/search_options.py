"""What the search may do, and for how long."""

from __future__ import annotations

from dataclasses import dataclass, field

from sennit.fuse.kernel_set import Limits

__all__ = ["SearchOptions"]


@dataclass(frozen=True, slots=True)
class SearchOptions:
    """`alpha`, `beta` and `patience` are the paper's: a candidate is kept up to alpha times the best, gets up to beta
    moves at a time, and so many without gain end the search.

    Switches, for ablation and for what cannot be enforced: `operators` (fusing operators), `repeats` (computing some
    again), `tensors` (gradients share buckets), `splits` (a gradient is cut over several), `across_steps` (waits in the
    next step), `reduce_scatter` (buckets reduced to shares and gathered), `algorithms` (each bucket names the fastest
    for its size; off, since torch's process groups choose by themselves and `DataParallel` refuses what it cannot
    enforce). `sizes` are bytes of a bucket to start from; None takes parts of all there is. `keep` is how many of the
    best are reported.
    """

    alpha: float = 1.05
    beta: int = 10
    patience: int = 400
    seconds: float = 60.0
    seed: int = 0
    operators: bool = True
    repeats: bool = True
    tensors: bool = True
    splits: bool = True
    across_steps: bool = True
    reduce_scatter: bool = True
    algorithms: bool = False
    sizes: tuple[int, ...] | None = None
    limits: Limits = field(default_factory=Limits)
    keep: int = 1
